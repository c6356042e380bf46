"""Gather the results of a study into the few files that `analysis` reads, and name what is missing.

    python -m slurm.collect study=l1_sweep                        # into runs/l1_sweep.collected
    python -m analysis.build source=runs/l1_sweep.collected out=paper_figures/l1_sweep

Thousands of run folders are slow to walk through, and their checkpoints are large: what this writes is all that tables,
figures and notebooks need. A run counts when its results are whole and were made from the configuration asked for;
any other is named with the reason, in missing.csv too, and makes the exit code 1. Nothing is filled in.
"""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run.config import entry, option
from experiments.run.errors import RunError
from experiments.run.files import write_atomic
from experiments.study.graph import Graph, Item, State
from slurm.manage import SubmittedStudy
from slurm.records import CONFIG, read_submission
from slurm.states import same_arguments

if TYPE_CHECKING:
    import pandas as pd

MISSING = "missing.csv"
# So many numbers are turned into columns at a time: as Python objects they take ten times the memory.
POINTS_AT_A_TIME = 1_000_000


class Incomplete(RunError):
    """Some results are missing or damaged."""


@dataclass
class CollectConfig(SubmittedStudy):
    """Gather the results of a study into one folder for analysis, and name those that are missing."""

    out: str = option("", "where to write; empty: <runs>/<study>.collected")

    @property
    def output(self) -> Path:
        """Where to write."""
        return Path(self.out or f"{self.folder}.collected")


def collect(folder: Path, out: Path) -> dict[str, str]:
    """Write rows.csv, settings.csv, curves.parquet, nonzeros_*.parquet and missing.csv into `out`; returns the items
    whose results are missing or damaged, with the reason.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: there is no result at all.
    """
    # A program reads its options before it imports pandas.
    import pandas as pd

    from analysis import read
    from analysis.load import CURVE_COLUMNS, SETTING_COLUMNS, Results
    from analysis.publish import write_data
    from experiments.run.results import write_rows

    graph = Graph(read_submission(folder).items, same_arguments)
    with _no_garbage_collection(), graph.reading_once():
        states = graph.states()
        measured = {item.name: item for item in graph.items.values() if item.expected}
        missing = {name: states[name][1] for name in measured if states[name][0] is not State.DONE}
        parts = {}
        for name in [name for name in measured if name not in missing]:
            try:
                parts[name] = _read_part(measured[name])
            except (ValueError, OSError) as error:  # a ResultsError is a ValueError
                missing[name] = f"damaged: {error}"
        names = [name for name in measured if name in parts]
        if not names:
            raise RunError(f"{folder} has no results yet: {some(missing)}")
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_rows(out / "rows.csv", (row for name in names for row in graph.rows(measured[name])))
        rows = read.read_rows(out / "rows.csv")
        runs = rows.loc[rows["op"] == "train", list(CURVE_COLUMNS)].drop_duplicates("item")
        runs = runs.set_index("item", drop=False)
        settings = [
            (runs.loc[name, "study"], name, *setting) for name in runs.index for setting in parts[name].settings.items()
        ]
        nonzeros = {table: [parts[name].nonzeros.get(table) for name in names] for table in read.NONZEROS}
        results = Results(
            rows=rows,
            curves=_curves(runs, {name: parts[name].points for name in runs.index}),
            settings=pd.DataFrame(settings, columns=list(SETTING_COLUMNS)),
            nonzeros={
                table: pd.concat(frames_of)
                for table, frames_of in nonzeros.items()
                if any(frame is not None for frame in frames_of)
            },
        )
        write_data(results, out)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("item", "reason"), *missing.items()])
        write_atomic(out / MISSING, text.getvalue())
    return missing


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


@dataclass(frozen=True)
class _Part:
    """What an item has beside its rows: points of its curves, settings, and tables of non-zeros."""

    points: list[tuple]
    settings: dict[str, str]
    nonzeros: dict[str, pd.DataFrame]


def _read_part(item: Item) -> _Part:
    """Raises `ValueError` or `OSError` for a damaged file."""
    from analysis import read, tables
    from experiments.training.metrics import METRICS

    training = item.kind == "train"
    settings: dict[str, Any] = read.read_config(item.folder / CONFIG) if training else {}
    # Tables that an item must have are among its files; which others it has depends on its options.
    paths = {name: item.folder / f"nonzeros_{name}.parquet" for name in read.NONZEROS}
    return _Part(
        points=read.metric_points(item.folder / METRICS) if training else [],
        settings={key: settings[key] for key in tables.SETTINGS.values() if key in settings},
        nonzeros={
            name: read.read_table(path, ("study", "item", *read.NONZEROS[name][0]), read.RUN_COLUMNS)
            for name, path in paths.items()
            if path.exists()
        },
    )


def _curves(runs: pd.DataFrame, points_of: dict[str, list[tuple]]) -> pd.DataFrame:
    """The points of all runs, beside each of them what identifies its run."""
    import pandas as pd

    from analysis import read

    frames: list[pd.DataFrame] = []
    names: list[str] = []
    points: list[tuple] = []

    def flush() -> None:
        frames.append(pd.concat([runs.loc[names].reset_index(drop=True), read.points_frame(points)], axis=1))
        names.clear()
        points.clear()

    for name, own in points_of.items():
        names += [name] * len(own)
        points += own
        if len(points) >= POINTS_AT_A_TIME:
            flush()
    flush()
    return pd.concat(frames, ignore_index=True)


def some(missing: dict[str, str]) -> str:
    """The first of them, a line each."""
    first = [f"{name}: {reason}" for name, reason in list(missing.items())[:10]]
    more = [f"and {len(missing) - 10} more"] if len(missing) > 10 else []
    return "\n    ".join(["", *first, *more]).rstrip()


def main(config: CollectConfig) -> None:
    """Collect, and name what is missing.

    Raises:
        Incomplete: something is; what is there was collected.
    """
    missing = collect(config.folder, config.output)
    print(f"results are in {config.output}")
    if missing:
        raise Incomplete(f"{len(missing)} results are missing (all are in {config.output / MISSING}):{some(missing)}")


if __name__ == "__main__":
    entry(main, CollectConfig)
