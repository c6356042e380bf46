"""Gather the results of a study into the few files that `analysis` reads, and name what is missing.

    python -m slurm.collect study=l1_sweep                        # into runs/l1_sweep.collected
    python -m analysis.build source=runs/l1_sweep.collected out=paper_figures/l1_sweep

Thousands of run folders are slow to walk through, and their checkpoints are large: what this writes is all that tables,
figures and notebooks need. A run counts when its results are whole and were made from the configuration asked for;
any other is named with the reason, in missing.csv too, and makes the exit code 1. Nothing is filled in.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


class Incomplete(RunError):
    """Some results are missing or damaged."""


@dataclass
class CollectConfig(SubmittedStudy):
    """Gather the results of a study into one folder for analysis, and name those that are missing."""

    out: str = option("", "where to write; empty: <runs>/<study>.collected")

    @property
    def output(self) -> Path:
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
    with graph.reading_once():
        states = graph.states()
        measured = {item.name: item for item in graph.items.values() if item.expected}
        missing = {name: states[name][1] for name in measured if states[name][0] is not State.DONE}
        parts = {}
        for name in [name for name in measured if name not in missing]:
            try:
                parts[name] = _read_part(measured[name])
            except (ValueError, OSError) as error:  # a ResultsError is a ValueError
                missing[name] = f"damaged: {error}"
        if not parts:
            raise RunError(f"{folder} has no results yet: {some(missing)}")
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_rows(out / "rows.csv", (row for name in parts for row in graph.rows(measured[name])))
    rows = read.read_rows(out / "rows.csv")
    runs = rows.loc[rows["op"] == "train", list(CURVE_COLUMNS)].drop_duplicates("item").set_index("item", drop=False)
    points = [point for name in runs.index for point in parts[name].points]
    of_points = runs.loc[runs.index.repeat([len(parts[name].points) for name in runs.index])].reset_index(drop=True)
    settings = [(study, name, *each) for name, study in runs["study"].items() for each in parts[name].settings]
    nonzeros = {
        table: [each.nonzeros[table] for each in parts.values() if table in each.nonzeros] for table in read.NONZEROS
    }
    results = Results(
        rows=rows,
        curves=pd.concat([of_points, read.points_frame(points)], axis=1),
        settings=pd.DataFrame(settings, columns=list(SETTING_COLUMNS)),
        nonzeros={table: pd.concat(frames) for table, frames in nonzeros.items() if frames},
    )
    write_data(results, out)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("item", "reason"), *missing.items()])
    write_atomic(out / MISSING, text.getvalue())
    return missing


class _Part(NamedTuple):
    """What an item has beside its rows: points of its curves, settings (key, value), and tables of non-zeros."""

    points: list[tuple]
    settings: list[tuple[str, str]]
    nonzeros: dict[str, pd.DataFrame]


def _read_part(item: Item) -> _Part:
    """Raises `ValueError` or `OSError` for a damaged file."""
    from analysis import read, tables
    from experiments.training.metrics import METRICS

    # Tables that an item must have are among its files; which others it has depends on its options.
    paths = {name: item.folder / f"nonzeros_{name}.parquet" for name in read.NONZEROS}
    nonzeros = {
        name: read.read_table(path, ("study", "item", *read.NONZEROS[name][0]), read.RUN_COLUMNS)
        for name, path in paths.items()
        if path.exists()
    }
    if item.kind != "train":
        return _Part([], [], nonzeros)
    settings = read.read_config(item.folder / CONFIG)
    known = [(key, settings[key]) for key in tables.SETTINGS.values() if key in settings]
    return _Part(read.metric_points(item.folder / METRICS), known, nonzeros)


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
