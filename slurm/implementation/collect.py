"""The implementation of `slurm.collect`."""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import read, tables
from analysis.implementation.build import write_data
from analysis.load import CURVE_COLUMNS, SETTING_COLUMNS, Results
from experiments.run.errors import RunError
from experiments.run.files import write_atomic
from experiments.run.results import write_rows
from experiments.study.graph import Graph, Item, State
from experiments.training.metrics import METRICS
from slurm.records import read_submission
from slurm.states import same_arguments

MISSING = "missing.csv"
# So many numbers are turned into columns at a time: as Python objects they take ten times the memory.
POINTS_AT_A_TIME = 1_000_000


def collect(folder: Path, out: Path) -> dict[str, str]:
    """Write rows.csv, settings.csv, curves.parquet, nonzeros_*.parquet and missing.csv into `out`; returns the items
    whose results are missing or damaged, with the reason.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: there is no result at all.
    """
    with _no_garbage_collection():
        return _collect(folder, out)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of small objects are alive at once and none is garbage: looking for it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _collect(folder: Path, out: Path) -> dict[str, str]:
    graph = Graph(read_submission(folder).items, same_arguments)
    with graph.reading_once():
        states = graph.states()
        measured = [item for item in graph.items.values() if item.expected]
        missing = {item.name: states[item.name][1] for item in measured if states[item.name][0] is not State.DONE}
        rows = {item.name: graph.rows(item) for item in measured if item.name not in missing}
    parts = {name: _read_part(graph.items[name], missing) for name in rows}
    rows = {name: found for name, found in rows.items() if name not in missing}
    if not rows:
        raise RunError(f"{folder} has no results yet: {some(missing)}")
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_rows(out / "rows.csv", (row for found in rows.values() for row in found))
    write_data(_results(graph, out / "rows.csv", list(rows), parts), out)
    write_atomic(out / MISSING, _csv([("item", "reason"), *missing.items()]))
    return missing


@dataclass(frozen=True)
class _Part:
    """What an item has beside its rows: points of its curves, settings, and tables of non-zeros."""

    points: list[tuple]
    settings: dict[str, str]
    nonzeros: dict[str, pd.DataFrame]


def _read_part(item: Item, missing: dict[str, str]) -> _Part:
    """Damaged files make the item one of those that are missing."""
    folder, training = item.folder, item.kind == "train"
    try:
        points = read.metric_points(folder / METRICS) if training else []
        settings = read.read_config(folder / "config.yaml") if training else {}
        # Tables that an item must have are among its files; which others it has depends on its options.
        found = {name: folder / f"nonzeros_{name}.parquet" for name in read.NONZEROS}
        nonzeros = {
            name: read.read_table(path, ("study", "item", *read.NONZEROS[name][0]), read.RUN_COLUMNS)
            for name, path in found.items()
            if path.exists()
        }
    except (ValueError, OSError) as error:  # a ResultsError is a ValueError
        missing[item.name] = f"damaged: {error}"
        return _Part([], {}, {})
    return _Part(points, {key: settings[key] for key in tables.SETTINGS.values() if key in settings}, nonzeros)


def _results(graph: Graph, rows_path: Path, names: Sequence[str], parts: dict[str, _Part]) -> Results:
    rows = read.read_rows(rows_path)
    runs = rows.loc[rows["op"] == "train", list(CURVE_COLUMNS)].drop_duplicates("item").set_index("item", drop=False)
    trainings = [name for name in names if graph.items[name].kind == "train"]
    studies = runs["study"].to_dict()
    settings = [(studies[name], name, key, value) for name in trainings for key, value in parts[name].settings.items()]
    return Results(
        rows=rows,
        curves=_curves(runs, ((name, parts[name].points) for name in trainings)),
        settings=pd.DataFrame(settings, columns=list(SETTING_COLUMNS)),
        nonzeros={
            table: pd.concat([parts[name].nonzeros[table] for name in names if table in parts[name].nonzeros])
            for table in read.NONZEROS
            if any(table in parts[name].nonzeros for name in names)
        },
    )


def _curves(runs: pd.DataFrame, points_of: Iterable[tuple[str, list[tuple]]]) -> pd.DataFrame:
    """The points of all runs, beside each of them what identifies its run."""
    frames: list[pd.DataFrame] = []
    names: list[str] = []
    points: list[tuple] = []
    for name, own in points_of:
        names += [name] * len(own)
        points += own
        if len(points) >= POINTS_AT_A_TIME:
            frames.append(_frame(runs, names, points))
            names, points = [], []
    return pd.concat([*frames, _frame(runs, names, points)], ignore_index=True)


def _frame(runs: pd.DataFrame, names: list[str], points: list[tuple]) -> pd.DataFrame:
    return pd.concat([runs.loc[names].reset_index(drop=True), read.points_frame(points)], axis=1)


def _csv(lines: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def some(missing: dict[str, str]) -> str:
    first = [f"{name}: {reason}" for name, reason in list(missing.items())[:10]]
    more = [f"and {len(missing) - 10} more"] if len(missing) > 10 else []
    return "\n    ".join(["", *first, *more]).rstrip()
