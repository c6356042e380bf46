"""The graph of a study: its items, the program of each, what each of them needs, and whether it is done.

An item is done when its results exist and are valid; there are no marker files. Its rows must have finite values (or
the reason why this device cannot measure them), must come from the requested configuration, and must have been made
from the present results of the items it needs. Token files must be there, and be those of the text as it is now. The
launcher records a digest of each needed item (`needs.json` beside the results), so this does not depend on clocks. Only
results without such a record, made by hand, are compared by the dates in their rows.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import functools
import hashlib
import importlib
import inspect
import json
import math
import shlex
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from experiments.run.config import load_config, parse
from experiments.run.errors import ConfigError
from experiments.run.files import sha256_file, write_json
from experiments.run.results import read_rows
from experiments.run.train_config import science, science_differences

MADE_FROM = "needs.json"
PREPARE = "prepare_data"  # the kind of items that make token files
Row = Mapping[str, Any]


class State(Enum):
    """The state of an item. DONE, TODO and WAITS follow from the results alone; a launcher knows the others."""

    DONE = "done"
    RUNNING = "running"
    QUEUED = "queued"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TODO = "to do"
    WAITS = "waits"


@dataclass(frozen=True)
class Expected:
    """A requirement on rows: at least one row must have these columns, and a value.

    `may_miss`: a row with a reason instead of a value also counts (the device cannot measure it).
    """

    columns: tuple[tuple[str, Any], ...]
    may_miss: bool = True

    def problem(self, rows: Sequence[Row]) -> str | None:
        """What is wrong with `rows`, or None."""
        what = ", ".join(f"{name}={value}" for name, value in self.columns)
        matching = [row for row in rows if all(row[name] == value for name, value in self.columns)]
        if not matching:
            return f"no row with {what}"
        if not self.may_miss and all(row["value"] is None for row in matching):
            return f"no value in the row with {what}: {matching[0]['missing']}"
        return None


@dataclass(frozen=True)
class Item:
    """One step of a study: `module.main(config)` with the configuration from `arguments`, exactly as when run by hand.

    `expected`: the rows that it must write to `<folder>/rows.csv`. `files`: other files that it must write (figures, a
    page). `transient`: its results may be missing once the items that need them are done.
    """

    name: str
    kind: str
    module: str
    arguments: tuple[str, ...]
    folder: Path
    needs: tuple[str, ...] = ()
    expected: tuple[Expected, ...] = ()
    files: tuple[Path, ...] = ()
    transient: bool = False

    @property
    def rows_path(self) -> Path:
        return self.folder / "rows.csv"

    def rows(self) -> list[dict[str, Any]]:
        """Result rows; empty if there is no file yet."""
        return read_rows(self.rows_path) if self.rows_path.is_file() else []

    def digest(self) -> str:
        """A digest of its results: SHA-256 of its rows, or of its files if it has no rows; empty without results."""
        content = hashlib.sha256()
        try:
            for path in (self.rows_path,) if self.expected else self.files:
                content.update(f"{path.name}\0{sha256_file(path)}\0".encode())
        except OSError:
            return ""
        return content.hexdigest()

    def command(self) -> str:
        """The command that runs it by hand."""
        return f"python -m {shlex.join((self.module, *self.arguments))}"


def write_made_from(folder: Path, digests: Mapping[str, str]) -> None:
    """Record what the results in `folder` were made from: the digest of each need, by its name."""
    write_json(folder / MADE_FROM, digests, "record of what it was made from")


def read_made_from(folder: Path) -> dict[str, str]:
    """The record of `write_made_from`; empty if there is none or it cannot be read."""
    try:
        digests = json.loads((folder / MADE_FROM).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return digests if isinstance(digests, dict) else {}


# --- programs and their configurations --------------------------------------------------------------------------------


def entry_point(item: Item) -> tuple[Callable[..., Any], type | None]:
    """The item's main function, and the class that its first parameter is annotated with: its configuration's. None for
    a main that takes the arguments as they are and returns an exit code (those of `analysis`)."""
    main = importlib.import_module(item.module).main
    annotation = typing.get_type_hints(main)[next(iter(inspect.signature(main).parameters))]
    return main, annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


def modules_of(item: Item) -> list[str]:
    """The modules that the item's program imports when it runs: itself, and those that its functions import."""
    nodes = ast.walk(ast.parse(inspect.getsource(importlib.import_module(item.module))))
    return [item.module, *(node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module)]


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
    asked = config_of(item)
    try:
        saved = load_config(type(asked), path)
    except (ConfigError, UnicodeDecodeError, OSError) as error:
        return f"made by another version: {error}"
    return science_differences(science(saved), science(asked)) or None


# --- what is done -----------------------------------------------------------------------------------------------------


class Graph:
    """Items in an order in which each comes after what it needs.

    Args:
        items: the items; a need must be the name of an earlier item.
        same_config: whether an item's results were made with what is asked for now (its configuration; of token files,
            the text); returns what differs, or None. Asked only about results that are complete.
    """

    def __init__(self, items: Iterable[Item], same_config: Callable[[Item], str | None] = lambda item: None):
        self.items: dict[str, Item] = {}
        self._same_config = same_config
        self._read: Callable[[Callable[[Item], Any], Item], Any] = lambda read, item: read(item)
        for item in items:
            unknown = [name for name in item.needs if name not in self.items]
            if item.name in self.items or unknown:
                what = f"needs {', '.join(unknown)}, which does not come before it" if unknown else "is there twice"
                raise ConfigError(f"item {item.name} {what}")
            self.items[item.name] = item

    def select(self, names: Sequence[str]) -> Graph:
        """The subgraph of the named items and everything that they need, in the same order.

        Raises:
            ConfigError: for a name that is not in the graph.
        """
        unknown = [name for name in names if name not in self.items]
        if unknown:
            raise ConfigError(f"no item {', '.join(unknown)}; there are {', '.join(self.items)}")
        chosen = set(names)
        for item in reversed(self.items.values()):
            if item.name in chosen:
                chosen.update(item.needs)
        return Graph((item for item in self.items.values() if item.name in chosen), self._same_config)

    def problem(self, item: Item) -> str | None:
        """Why the item is not done, or None if it is. Checks the item alone, not the items that it needs."""
        if item.expected:
            try:
                rows = self.rows(item)
            except (ValueError, OSError, csv.Error) as error:
                return f"damaged: {error}"
            if not rows:
                return "interrupted, no results yet" if item.folder.is_dir() else "not started"
            for row in rows:
                if not (row["missing"] if row["value"] is None else math.isfinite(row["value"])):
                    return f"a row of {row['op']} {row['metric']} has neither a finite value nor a reason"
            for expected in item.expected:
                if problem := expected.problem(rows):
                    return problem
        for path in item.files:
            if not path.exists():
                return f"no {path}"
        return self._same_config(item)

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """Inside the block, each file of results is read only once."""
        before = self._read
        self._read = functools.cache(before)
        try:
            yield
        finally:
            self._read = before

    def rows(self, item: Item) -> list[dict[str, Any]]:
        """The item's rows. Raises `ValueError` if the file is damaged, `OSError` if it cannot be read."""
        return self._read(Item.rows, item)

    def digest(self, item: Item) -> str:
        return self._read(Item.digest, item)

    def states(self) -> dict[str, tuple[State, str]]:
        """Every item's state and the reason for it."""
        states: dict[str, tuple[State, str]] = {}
        done: set[str] = set()
        with self.reading_once():
            for item in self.items.values():
                states[item.name] = self.state(item, done)
                if states[item.name][0] is State.DONE:
                    done.add(item.name)
        needed = {name for item in self.items.values() if item.name not in done for name in item.needs}
        of_use = {name for item in self.items.values() for name in item.needs}
        for name in of_use - needed - done:
            if self.items[name].transient:
                states[name] = State.DONE, ""
        return states

    def state(self, item: Item, done: Collection[str]) -> tuple[State, str]:
        """The item's state and the reason for it, when the items named in `done` are done."""
        waits = [name for name in item.needs if name not in done]
        if all(self.items[name].transient for name in waits):
            reason = self.problem(item) or self._outdated(item)
            if not reason:
                return State.DONE, ""
            if not waits:
                return State.TODO, reason
        return State.WAITS, f"for {', '.join(waits)}"

    def _outdated(self, item: Item) -> str | None:
        """The need that has changed since the item was made from it, or None."""
        made_from = read_made_from(item.folder) if item.needs else {}
        for name in item.needs:
            need = self.items[name]
            if name in made_from:
                now = self.digest(need)
                if made_from[name] != now and not (need.transient and not now):
                    return f"made from another version of {name}"
            elif item.expected and need.expected and max(self._dates(need)) > min(self._dates(item)):
                return f"older than {name}"
        return None

    def _dates(self, item: Item) -> list[str]:
        """The dates (UTC) of the item's rows. They are in the rows, so they survive copying a folder."""
        return [row["date"] or "" for row in self.rows(item)]
