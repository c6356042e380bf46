"""From an item to the program that makes it: its main function, its configuration, and what differs from the one that
earlier results were made with."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

from experiments.run.config import load_config, parse, to_dict
from experiments.run.errors import ConfigError
from experiments.run.train_config import WITHOUT_EFFECT
from experiments.study.graph import Item

# Options of these sections decide where results go and how work is laid out, not what comes out.
NO_EFFECT_SECTIONS = ("run.", "execution.")


def entry_point(item: Item) -> tuple[Callable[..., Any], type | None]:
    """The item's main function, and the class that its first parameter is annotated with: its configuration's. None for
    a main that takes the arguments as they are and returns an exit code (those of `analysis`)."""
    main = importlib.import_module(item.module).main
    annotation = typing.get_type_hints(main)[next(iter(inspect.signature(main).parameters))]
    return main, annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


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


def check_arguments(items: Iterable[Item]) -> None:
    """Parse every item's arguments as its program will, so that a mistake shows before anything waits in a queue.

    Raises:
        ConfigError: naming the item.
    """
    for item in items:
        config_of(item)


def total_steps(item: Item) -> int | None:
    """Optimizer steps of a training, None for any other item."""
    return config_of(item).training.steps if item.kind == "train" else None


def config_difference(item: Item) -> str | None:
    """What differs between the configuration that the item was made with and the one asked for now; None if nothing.

    Options without an effect on results do not count.
    """
    path = item.folder / "config.yaml"
    if not path.is_file():
        return f"no {path}"
    wanted = config_of(item)
    try:
        saved, asked = to_dict(load_config(type(wanted), path)), to_dict(wanted)
    except ConfigError as error:
        return f"made by another version: {error}"
    changed = [key for key in asked if saved[key] != asked[key] and not _without_effect(key)]
    return f"{changed[0]} was {saved[changed[0]]!r}, now {asked[changed[0]]!r}" if changed else None


def _without_effect(key: str) -> bool:
    return key.startswith(NO_EFFECT_SECTIONS) or key in WITHOUT_EFFECT
