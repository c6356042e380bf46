"""The program of an item: its main function, its configuration, and differences from the configuration of earlier
results."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from experiments.run.config import load_config, parse, to_dict
from experiments.run.environment import REPOSITORY
from experiments.run.errors import ConfigError
from experiments.run.train_config import WITHOUT_EFFECT
from experiments.study.graph import Item

PREPARE = "prepare_data"  # the kind of items that make token files
# Options in these sections determine where results go and how work is distributed, but not the results.
NO_EFFECT_SECTIONS = ("run.", "execution.")


def entry_point(item: Item) -> tuple[Callable[..., Any], type | None]:
    """The item's main function, and the class that its first parameter is annotated with: its configuration's. None for
    a main that takes the arguments as they are and returns an exit code (those of `analysis`)."""
    main = importlib.import_module(item.module).main
    annotation = typing.get_type_hints(main)[next(iter(inspect.signature(main).parameters))]
    return main, annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


def modules_of(item: Item) -> list[str]:
    """The modules that the item's program imports when it runs: itself, and its implementation if that is apart."""
    folder, _, name = item.module.rpartition(".")
    apart = REPOSITORY.joinpath(*folder.split("."), "implementation", f"{name}.py").is_file()
    return [item.module, *([f"{folder}.implementation.{name}"] if apart else [])]


def config_of(item: Item) -> Any:
    """The configuration that the item's arguments give; None for a program without a typed one.

    Raises:
        ConfigError: for arguments that its program does not take; the message names the item.
    """
    _, config_class = entry_point(item)
    if config_class is None:
        return None
    try:
        return parse(config_class, list(item.arguments))
    except ConfigError as error:
        raise ConfigError(f"{item.name}: {error}") from error


def check_arguments(items: Iterable[Item]) -> dict[str, Any]:
    """Parse every item's arguments as its program will, so that a mistake shows before anything waits in a queue.
    Returns the configurations, by the items' names.

    Raises:
        ConfigError: naming the item.
    """
    return {item.name: config_of(item) for item in items}


def config_difference(item: Item) -> str | None:
    """The difference between what the item was made with and what is asked for; None if equal.

    For an item with rows that is its configuration, without the options that have no effect on results; for one that
    makes token files, the text as it is now. Other items have none: they are as their files are.
    """
    if item.kind == PREPARE:
        return importlib.import_module("experiments.prepare_data").problem(config_of(item))
    if not item.expected:
        return None
    path = item.folder / "config.yaml"
    if not path.is_file():
        return f"no {path}"
    wanted = config_of(item)
    try:
        saved = load_config(type(wanted), path)
    except (ConfigError, UnicodeDecodeError, OSError) as error:
        return f"made by another version: {error}"
    change = difference(saved, wanted)
    return None if change is None else str(change)


class Change(NamedTuple):
    """An option that two configurations of one class do not have in common."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, now {self.now!r}"


def difference(saved: Any, asked: Any) -> Change | None:
    """The first option with an effect on results that differs between two configurations of one class."""
    before, now = to_dict(saved), to_dict(asked)
    changed = (Change(key, before[key], now[key]) for key in now if before[key] != now[key])
    return next((change for change in changed if not _without_effect(change.key)), None)


def _without_effect(key: str) -> bool:
    return key.startswith(NO_EFFECT_SECTIONS) or key in WITHOUT_EFFECT
