"""Sweeps on the command line, `training.seed=0,1,2`: every combination of values becomes a run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from experiments.run.errors import ConfigError

_OPEN, _CLOSE, _QUOTES = "[{(", "]})", "'\""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+=-]+")


def alternatives(text: str) -> list[str]:
    """The comma-separated values of `text`. Commas in brackets or quotes, or after a backslash, are part of a value."""
    found, depth, quote, previous = [""], 0, "", ""
    for character in text:
        if character == "," and not depth and not quote and previous != "\\":
            found.append("")
            previous = ""
            continue
        if character == "," and previous == "\\":
            found[-1] = found[-1][:-1]
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        elif character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        found[-1] += character
        previous = character
    return found if not quote and depth == 0 else [text]


def combinations(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Every combination of the arguments' values, keyed by a name made from the values that differ
    (`0.5b_seed_1_l1_2e-5`). If no argument has several values, a single combination without a name.

    Raises:
        ConfigError: a value is empty or repeated.
    """
    swept: dict[str, list[str]] = {}
    fixed = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = alternatives(text)
        if len(values) == 1:
            fixed.append(key + equals + values[0])
            continue
        if "" in values or len(set(values)) < len(values):
            raise ConfigError(f"{key} must be given values that differ, got {text!r}")
        swept[key] = values
    found: dict[str, list[str]] = {}
    for chosen in itertools.product(*swept.values()):
        pairs = list(zip(swept, chosen, strict=True))
        name = "_".join(value_name(key, value) for key, value in pairs)
        if name in found:
            raise ConfigError(f"two of the runs would be called {name}: give their values in separate commands")
        found[name] = [*fixed, *(f"{key}={value}" for key, value in pairs)]
    return found


def value_name(key: str, value: object) -> str:
    """The part of a run's name for a value: `seed_1`; for the model, its name."""
    plain = _NOT_IN_NAMES.sub("-", str(value)).strip("-") or "none"
    return plain if key == "model" else f"{key.rpartition('.')[2]}_{plain}"
