"""The runs that a chart can show, each with a unique label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from analysis import choose
from analysis.choose import l1_label
from analysis.figures.layers import GATHER
from analysis.load import Results

RUN = choose.RUN
DESCRIPTION = ["model", "l1", "modification", "seed"]
ALL_LAYERS = "all layers"
FEW_COUNTS = 3  # numbers of tokens are listed if there are fewer


class NothingGathered(LookupError):
    """No run has the data of a chart: the message names what is missing, `command` would gather it."""

    def __init__(self, missing: str, command: str = GATHER):
        super().__init__(missing)
        self.command = command


def gathered(results: Results, *tables: str) -> pd.DataFrame:
    """study, item, model, l1, modification, seed, label: one line for each run that is in all of these tables, in order
    of the sources' preference.

    Raises:
        NothingGathered: there is no such run.
    """
    items = _described(results)
    for name in tables:
        there = results.nonzeros[name][RUN].drop_duplicates() if name in results.nonzeros else items[RUN].iloc[:0]
        items = items.merge(there, on=RUN)
    if items.empty:
        command = "python -m experiments.train" if tables == ("in_training",) else GATHER
        raise NothingGathered(" and ".join(f"nonzeros_{name}.parquet" for name in tables), command)
    items = items.iloc[_order(results, items)].reset_index(drop=True)
    return items.assign(label=_labels(items))


def of_run(results: Results, table: str, runs: pd.DataFrame) -> pd.DataFrame:
    """The table restricted to these runs, with their labels, in their order."""
    return runs[[*RUN, "label"]].merge(results.nonzeros[table], on=RUN)


def initial(results: Results, runs: pd.DataFrame) -> str:
    """The label to show first: the recommended L1 value of the study and model with the most L1 values (the first of
    several), else the first run of that model."""
    of_model = swept(runs)
    study, model = of_model[["study", "model"]].iloc[0]
    recommended = choose.recommended_l1(results.rows[results.rows["study"] == study], model)
    wanted = of_model[of_model["l1"] == recommended]
    return (wanted if len(wanted) else of_model)["label"].iloc[0]


def swept(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the study and model with the most L1 values without mitigation; ties go to the first."""
    plain = runs["l1"].where(runs["modification"].isin(("", "none")))
    values = plain.groupby([runs["study"], runs["model"]], sort=False, dropna=False).nunique()
    study, model = values.idxmax()
    return runs[(runs["study"] == study) & (runs["model"] == model)]


def layer_names(layers: Sequence[int]) -> list[str]:
    """The options of a drop-down list of layers."""
    return [ALL_LAYERS, *(layer_name(layer) for layer in sorted(set(layers)))]


def layer_name(layer: int) -> str:
    return f"layer {layer}"


def _described(results: Results) -> pd.DataFrame:
    columns = [*RUN, *DESCRIPTION]
    rows = results.rows[results.rows["op"].isin(("nonzeros", "train"))]
    return rows[columns].drop_duplicates(RUN)


def _order(results: Results, items: pd.DataFrame) -> list[int]:
    studies = [study for source in results.sources for study in dict.fromkeys(source.rows["study"])]
    models, kinds = choose.model_order(items["model"]), list(choose.MODIFICATIONS)

    def key(position: int) -> tuple:
        run = items.iloc[position]
        return (
            _rank(studies, run["study"]), run["study"], _rank(models, run["model"]), run["model"],
            _rank(kinds, run["modification"]), -1.0 if pd.isna(run["l1"]) else run["l1"],
            -1 if pd.isna(run["seed"]) else run["seed"], run["item"],
        )  # fmt: skip

    return sorted(range(len(items)), key=key)


def _rank(known: Sequence[str], name: str) -> int:
    return known.index(name) if name in known else len(known)


def _labels(items: pd.DataFrame) -> list[str]:
    """Make labels unique: add the seed, and if necessary the item, to equal ones."""
    runs = [run for _, run in items.iterrows()]
    labels = [_label(run, items["study"].nunique() > 1) for run in runs]
    for name, form in (("seed", "seed {:.0f}"), ("item", "{}")):
        counts = Counter(labels)
        more = [counts[label] > 1 and not pd.isna(run[name]) for label, run in zip(labels, runs, strict=True)]
        labels = [
            f"{label}, {form.format(run[name])}" if add else label
            for label, run, add in zip(labels, runs, more, strict=True)
        ]
    return labels


def _label(run: pd.Series, with_study: bool) -> str:
    parts = [run["model"] or run["item"]]
    parts += [] if pd.isna(run["l1"]) else [f"L1 {l1_label(float(run['l1']))}"]
    parts += [] if run["modification"] in ("", "none") else [choose.MODIFICATIONS[run["modification"]]]
    return f"{run['study']}: {', '.join(parts)}" if with_study else ", ".join(parts)


def about(results: Results, runs: pd.DataFrame) -> str:
    """For captions: the number of held-out tokens, and the text, on which the runs were counted."""
    rows = results.rows[(results.rows["op"] == "nonzeros") & (results.rows["metric"] == "nonzeros")]
    rows = runs[RUN].merge(rows, on=RUN)
    counts = [f"{count:,}" for count in sorted(set(rows["tokens"].dropna()))]
    if not counts:
        return ""
    tokens = " or ".join(counts) if len(counts) < FEW_COUNTS else f"{counts[0]} to {counts[-1]}"
    trained = " or ".join(sorted(set(rows["text"]) - {""}))
    return f"Counted on {tokens} held-out tokens per run{f'; trained on {trained}' if trained else ''}."
