"""Hostile values and damage, drawn from a `random.Random`."""

from __future__ import annotations

import math
import typing
from pathlib import Path
from random import Random
from typing import Any

from experiments.run import config
from experiments.run.values import Range

# fmt: off
TEXTS = (
    "", " ", "null", "~", "yes", "no", "12:30", "3.10", "1e400", "nan", "-inf", ".inf", "0x10", "1_000", "\u0663", "-0",
    "${oc.env:HOME}", "${", "???", "$(id)", "`id`", "; rm -rf ~", "../..", "..", ".", "/", "a/b", "%j", "a #2", "a: b",
    "[", "]", "[]", "[[]]", "[a", "{}", "{a", "{a: b}", "[null]", "[1, a]", "&a [*a]", "!!python/name:os.system", "'",
    "é", "\U0001f600", "\u202e", "\ufeff", "\n", "a\nb", "\t", "\x00", "\x7f", "\ud800", "a" * 300, "a" * 5000, '"',
    "-1", "0", "1", "9" * 30, "9" * 5000, "1e18", "true", "path:", "hf:", "path:/nowhere", "path:*", "cpu", "meta",
    "mps", "[" * 3000,
)
# fmt: on
INTEGERS = (-(2**64), -(2**63), -1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**32 - 2, 2**32 - 1, 2**63 - 1, 2**63, 10**18, 10**30)
NUMBERS = (-math.inf, -1e308, -1.0, -1e-300, -0.0, 0.0, 1e-300, 1e-5, 0.5, 1.0, 2.0, 1e18, 1e308, math.inf, math.nan)


def options(cls: type) -> list[tuple[str, Any, Range | None]]:
    """(key, type, range) of every single option of a configuration."""
    return [(key, kind, metadata["range"]) for key, kind, metadata in config.options(cls) if "range" in metadata]


def hostile_text(random: Random, kind: Any, allowed: Range | None) -> str:
    """Text for an option of this type: at or just beyond the borders of its range, or nothing that belongs there."""
    if random.random() < 0.3:
        return random.choice(TEXTS)
    if typing.get_origin(kind) is list:
        (item,) = typing.get_args(kind)
        items = [hostile_text(random, item, allowed) for _ in range(random.randint(0, 3))]
        return f"[{','.join(items + items[: random.random() < 0.3])}]"
    kinds = [one for one in (typing.get_args(kind) or (kind,)) if one is not type(None)]
    if typing.get_origin(kind) is typing.Literal or isinstance(kinds[0], str):
        return str(random.choice(kinds))
    borders = [b for b in (allowed and (allowed.minimum, allowed.maximum, allowed.above, allowed.below)) or () if b]
    if kinds[0] is int:
        return str(random.choice([*INTEGERS, *(int(b) + random.choice((-1, 0, 1)) for b in borders)]))
    if kinds[0] is float:
        return str(random.choice([*NUMBERS, *(b + random.choice((-1e-9, 0, 1e-9)) for b in borders)]))
    if kinds[0] is bool:
        return random.choice(("true", "false", "TRUE", "1", "maybe"))
    return random.choice([*TEXTS, *(allowed.choices if allowed else ())])


def damage(random: Random, path: Path) -> None:
    """Harm a file as disks, copies and editors do."""
    how = random.choice(("flip", "flip", "flip", "cut", "cut", "delete", "empty", "folder", "insert", "zeros"))
    content = bytearray(path.read_bytes())
    place = random.randrange(len(content)) if content else 0
    if how == "delete":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "cut":
        path.write_bytes(content[:place])
    elif how == "empty" or not content:
        path.write_bytes(b"")
    elif how == "insert":
        path.write_bytes(content[:place] + random.randbytes(random.randint(1, 20)) + content[place:])
    elif how == "zeros":
        path.write_bytes(content[:place] + b"\x00" * len(content[place : place + 64]) + content[place + 64 :])
    else:
        for _ in range(random.choice((1, 1, 1, 5))):
            # Structure is at the beginning of most files.
            place = random.randrange(min(len(content), 2000) if random.random() < 0.5 else len(content))
            content[place] = random.choice((content[place] ^ (1 << random.randrange(8)), random.randrange(256)))
        path.write_bytes(content)
