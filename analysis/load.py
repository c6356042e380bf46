"""Load run folders, or a folder that analysis.build wrote, as tidy frames.

A folder of results holds `rows.csv` and, where applicable, `metrics.jsonl` (run folder) or `curves.parquet` (built
folder), `nonzeros_*.parquet`, and `config.yaml` (run folder) or `settings.csv` (built folder). Sources are searched
for such folders at any depth, so that one study, several studies and a built folder load in the same way.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analysis.choose import cells
from analysis.read import (
    KEY,
    NONZEROS,
    RUN_COLUMNS,
    ResultsError,
    identity,
    read_config,
    read_metrics,
    read_rows,
    read_table,
)

log = logging.getLogger(__name__)

# What pandas, numpy and matplotlib raise on data that a computation does not expect.
DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
CURVE_COLUMNS: tuple[str, ...] = (*RUN_COLUMNS, "activation", "gated", "modification")
CURVE_KEY: tuple[str, ...] = ("study", "item", "step", "metric", "layer")
# What tells one training from another of the same name.
TRAINING = [*CURVE_COLUMNS[2:], "seed", "text"]
# Trainings that are equal in these columns are seeds of one training. Of their options, these decide the result.
SEEDS_OF_ONE = ["model", "activation", "gated", "modification", "l1", "text", "tokens_trained"]
DECISIVE = ("model", "training", "optimizer", "sparsity")
NOT_DECISIVE = ("training.seed", "model.name")
SETTING_COLUMNS: tuple[str, ...] = ("study", "item", "key", "value")
ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "paper_figures"
# The committed results in order of preference: a figure is drawn from the first source that has its data.
COMMITTED: tuple[str, ...] = ("h200", "demo")
OF_MODELS = ("train", "nonzeros", "evaluate", "model_forward", "model_training", "generate")  # on a whole model
SKIPPED_FOLDERS = {"checkpoints", "__pycache__"}


class NotMade(UserWarning):
    """A table, figure or claim met data that it cannot be made of: a defect of this package. The others are made, its
    place holds the reason, and `analysis.build` ends with 1."""


def not_made(what: str, error: Exception) -> str:
    """Warn that `what` could not be made; returns the reason in one line."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    warnings.warn(f"{what} could not be made: {reason}", NotMade, stacklevel=3)
    log.error("%s could not be made", what, exc_info=error)
    return reason


@dataclass(frozen=True, eq=False)  # what is computed of the same results is kept
class Results:
    """Everything that tables and figures are built from.

    rows: one measurement per row, with the typed columns of `analysis.schema`.
    curves: study, item, model, l1, activation, gated, modification, step, tokens, layer, metric, value.
    nonzeros: by_layer, by_neuron, histogram, by_position, by_token, unions and masks, as gather_nonzeros wrote them,
        and in_training, as train wrote it; tables that nothing wrote are absent.
    settings: study, item, key (dotted), value (text): the resolved configs of the training runs.
    notes: decisions of the loader: unfinished runs left out, older measurements replaced.
    name: the source's name.
    sources: for several sources loaded side by side, the results of each, in order of preference.
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    nonzeros: dict[str, pd.DataFrame]
    settings: pd.DataFrame
    notes: tuple[str, ...] = ()
    name: str = ""
    sources: tuple[Results, ...] = ()


def load(*sources: Path | str) -> Results:
    """Load every folder of results beneath `sources`.

    If several files have the same measurement (equal in every column that identifies it), the latest one is used and a
    note says so.

    Raises:
        FileNotFoundError: a source does not exist or holds no results.
        ResultsError: a file is damaged, see `analysis.read`, two different trainings have one name, or trainings that
            would count as seeds of one differ in another option.
    """
    return _combined([part for source in sources for part in _read_source(Path(source))])


def _combined(parts: Sequence[_Part]) -> Results:
    """The results of several folders as one."""
    name = " and ".join(dict.fromkeys(part.source for part in parts))
    parts = list({part.folder: part for part in parts}.values())
    _check_names(parts)
    rows, replaced = _latest_rows(parts)
    notes = [note for part in parts for note in part.notes] + replaced
    # Curves and non-zeros of a run are those of the folder with its latest row.
    dates = pd.concat([part.rows[["study", "item", "date"]].assign(folder=part.folder) for part in parts])
    newest = dates.sort_values("date", kind="stable").drop_duplicates(["study", "item"], keep="last")
    names = sorted({name for part in parts for name in part.tables})
    tables = {name: _merge(name, parts, newest) for name in names}
    if "settings" in tables:
        _check_settings(tables["settings"], rows)
    for note in notes:
        log.warning(note)
    columns = {"curves": (*CURVE_COLUMNS, "step", "tokens", "layer", "metric", "value"), "settings": SETTING_COLUMNS}
    curves, settings = (tables.pop(name, pd.DataFrame(columns=list(empty))) for name, empty in columns.items())
    return Results(rows, curves, tables, settings, tuple(notes), name)


def side_by_side(*sources: Path | str) -> Results:
    """All sources together, as from `load`, for tables, and each one by itself, for figures (`Results.sources`).

    Raises:
        As `load` does.
    """
    read = [_read_source(Path(source)) for source in sources]
    return replace(_combined([part for parts in read for part in parts]), sources=tuple(map(_combined, read)))


def committed(folder: Path = FIGURES) -> Results:
    """The committed results, side by side; the preferred source first."""
    return side_by_side(*(folder / name for name in COMMITTED))


def default_results() -> Results:
    """The results that the notebooks read: the folder in TWELL_RESULTS (relative to the repository) if it is set, else
    all committed folders."""
    named = os.environ.get("TWELL_RESULTS")
    return load(ROOT / named) if named else committed()


@dataclass(frozen=True)
class _Part:
    """One folder of results; `source`: the name of the source that it lies in."""

    source: str
    folder: Path
    rows: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    notes: list[str]


def _read_source(source: Path) -> list[_Part]:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder; wanted a run folder, a study or a built folder")
    folders = _folders_with(source, "rows.csv")
    if not folders:
        raise FileNotFoundError(f"{source} holds no rows.csv; has a run finished there?")
    unfinished = [folder for folder in _folders_with(source, "metrics.jsonl") if not (folder / "rows.csv").exists()]
    parts = [_read_folder(source.name, folder) for folder in folders]
    parts[0].notes.extend(f"{folder}: no rows.csv yet: the run is unfinished and is left out" for folder in unfinished)
    return parts


def _folders_with(source: Path, name: str) -> list[Path]:
    """The folders beneath `source` that hold a file of this name, without checkpoints and hidden folders."""
    folders = sorted(path.parent for path in source.rglob(name))
    return [
        folder
        for folder in folders
        if not any(part in SKIPPED_FOLDERS or part.startswith(".") for part in folder.relative_to(source).parts)
    ]


def _read_folder(source: str, folder: Path) -> _Part:
    rows, unnamed = _named(read_rows(folder / "rows.csv"))
    tables: dict[str, pd.DataFrame] = {}
    if (folder / "metrics.jsonl").exists():
        tables["curves"] = _run_of(folder, rows).merge(read_metrics(folder / "metrics.jsonl"), how="cross")
    elif (folder / "curves.parquet").exists():
        tables["curves"] = read_table(folder / "curves.parquet", CURVE_KEY, (*CURVE_COLUMNS, "tokens", "value"))
    if (folder / "config.yaml").exists() and (rows["op"] == "train").any():
        config = pd.DataFrame(read_config(folder / "config.yaml").items(), columns=["key", "value"])
        tables["settings"] = _run_of(folder, rows)[["study", "item"]].merge(config, how="cross")
    elif (folder / "settings.csv").exists():
        path = folder / "settings.csv"
        try:
            tables["settings"] = pd.read_csv(path, dtype=str, keep_default_na=False)
        except ValueError as error:
            raise ResultsError(f"{path}: not a table: {' '.join(str(error).split())}") from None
        if (header := list(tables["settings"].columns)) != list(SETTING_COLUMNS):
            raise ResultsError(f"{path}: wanted the columns {list(SETTING_COLUMNS)}, got {header}")
    for name, (key, values) in NONZEROS.items():
        path = folder / f"nonzeros_{name}.parquet"
        if path.exists():
            table = read_table(path, ("study", "item", *key), (*RUN_COLUMNS, *values))
            tables[name] = table.assign(model=table["model"].where(table["model"] != "", table["item"]))
            # The rows say how and when it was measured.
            if unknown := set(table["item"].unique()) - set(rows["item"]):
                raise ResultsError(f"{path}: items {sorted(unknown)} have no rows in {folder / 'rows.csv'}")
    notes = [f"{folder / 'rows.csv'}: the model of {item} has no name: the item's is used" for item in unnamed]
    return _Part(source, folder, rows, tables, notes)


def _named(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Fills in what a model from elsewhere lacks: the item's name as the model's name, and "none" as the mitigation of
    dead neurons. Returns the rows, and the items whose model had no name."""
    of_model = rows["op"].isin(OF_MODELS) | rows["layer"].notna()
    unnamed = of_model & (rows["model"] == "")
    named = rows.assign(
        model=rows["model"].mask(unnamed, rows["item"]),
        modification=rows["modification"].mask(of_model & (rows["modification"] == ""), "none"),
    )
    return named, sorted(set(rows.loc[unnamed, "item"]))


def _run_of(folder: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """One line, the training run whose rows the folder holds: study, item, model, l1, activation, gated,
    modification."""
    runs = rows.loc[rows["op"] == "train", list(CURVE_COLUMNS)].drop_duplicates()
    if len(runs) != 1:
        raise ResultsError(f"{folder / 'rows.csv'}: beside metrics.jsonl, wanted rows of one training, got {len(runs)}")
    return runs


def _check_names(parts: list[_Part]) -> None:
    """Curves, settings and non-zeros of a training are found by study and item, so different trainings must differ in
    them. (The same training in several folders is measured again: the newest counts.)"""
    known: dict[tuple[str, str], tuple[Path, list[object]]] = {}
    for part in parts:
        trained = part.rows[(part.rows["op"] == "train") & part.rows["layer"].isna()]
        for study, item, *own in dict.fromkeys(cells(trained, ["study", "item", *TRAINING])):
            folder, first = known.setdefault((study, item), (part.folder, own))
            pairs = zip(TRAINING, first, own, strict=True)
            if what := ", ".join(f"{name} {one} and {other}" for name, one, other in pairs if one != other):
                raise ResultsError(
                    f"{folder} and {part.folder} hold different trainings ({what}) of the same name, "
                    f"{study}/{item}: train with another run.item, or change the column item in one rows.csv"
                )


def _check_settings(settings: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Trainings whose rows differ in nothing but the seed are averaged as seeds of one training, so their settings must
    not differ in anything else."""
    settings = settings[settings["key"].str.split(".").str[0].isin(DECISIVE) & ~settings["key"].isin(NOT_DECISIVE)]
    runs = rows.loc[(rows["op"] == "train") & rows["layer"].isna(), ["study", "item", *SEEDS_OF_ONE]].drop_duplicates()
    named = settings.merge(runs, on=["study", "item"]).sort_values(["study", "item"], kind="stable")
    alike = [*SEEDS_OF_ONE, "key"]
    values = named.drop_duplicates([*alike, "value"])
    different = values[values.duplicated(alike, keep=False)]
    if len(different):
        one, other, *_ = different.merge(different[alike].head(1)).to_dict("records")
        raise ResultsError(
            f"{one['study']}/{one['item']} and {other['study']}/{other['item']} differ in {one['key']} "
            f"({one['value']} and {other['value']}), but not in model name, L1 value, text and tokens: tables and "
            "figures would take them for seeds of one training. Give one of these models another name (the option "
            "model.name, or the column model of its rows), or build from a folder that has only one of them"
        )


def _latest_rows(parts: list[_Part]) -> tuple[pd.DataFrame, list[str]]:
    """All rows in a fixed order. If several files have the same key, the latest is used; there is a note for each file
    with superseded rows."""
    stacked = pd.concat([part.rows.assign(file=str(part.folder / "rows.csv")) for part in parts], ignore_index=True)
    stacked = stacked.drop_duplicates([name for name in stacked.columns if name != "file"])
    tied = stacked[identity(stacked).assign(date=stacked["date"]).duplicated(keep=False)]
    if len(tied):
        row, files = tied.iloc[0], sorted(set(tied["file"]))
        raise ResultsError(f"{files}: different values of {row['item']} {row['op']} {row['metric']}, same date")
    ordered = stacked.sort_values("date", kind="stable")
    lost = ordered[identity(ordered).duplicated(keep="last")]
    notes = [
        f"{file}: {len(group)} rows have a later measurement elsewhere, which is used instead"
        for file, group in lost.groupby("file")
    ]
    kept = ordered.drop(lost.index).drop(columns="file")
    return kept.sort_values(KEY, kind="stable", na_position="first").reset_index(drop=True), notes


def _merge(name: str, parts: list[_Part], newest: pd.DataFrame) -> pd.DataFrame:
    """A table of all parts, of each item from its newest folder."""
    kept = [
        part.tables[name].merge(newest.loc[newest["folder"] == part.folder, ["study", "item"]])
        for part in parts
        if name in part.tables
    ]
    return pd.concat(kept, ignore_index=True)
