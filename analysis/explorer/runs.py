"""The runs that a chart can show, each with a unique label."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis import choose, dictionary
from analysis.choose import l1_label
from analysis.figures.drawn import NotMeasured
from analysis.figures.layers import GATHER
from analysis.load import Results

RUN = choose.RUN
DESCRIPTION = ["model", "l1", "modification", "seed"]
ALL_LAYERS = "all layers"
FEW_COUNTS = 3  # numbers of tokens are listed if there are fewer
IN_TRAINING = "in_training"  # the table that trainings wrote; the others are of runs that read their checkpoints


def gathered(results: Results, *tables: str) -> pd.DataFrame:
    """study, item, model, l1, modification, seed, label: one line for each run that is in all of these tables. The
    runs of the model with the most L1 values, over all tables and without mitigation, come first, the others in order
    of the sources' preference. A run has the same label in every table.

    Raises:
        NotMeasured: there is no such run.
    """
    items = _labelled(results)
    for name in tables:
        items = items.merge(_runs_in(results, [name]), on=RUN)
    if items.empty:
        command = "python -m experiments.train" if tables == (IN_TRAINING,) else GATHER
        raise NotMeasured(" and ".join(f"nonzeros_{name}.parquet" for name in tables), command)
    first = of_first_model(items.sort_values("values", ascending=False, kind="stable"))
    return pd.concat([first, items.drop(first.index)], ignore_index=True).drop(columns="values")


def of_run(results: Results, table: str, runs: pd.DataFrame) -> pd.DataFrame:
    """The table restricted to these runs, with their labels, in their order."""
    return runs[[*RUN, "label"]].merge(results.nonzeros[table], on=RUN)


def table(results: Results, name: str) -> pd.DataFrame:
    """A table of non-zeros (`analysis.dictionary` has its columns) with the label of each run in front, as charts name
    it; without rows if nothing was gathered."""
    try:
        runs = gathered(results, name)
    except NotMeasured:
        return pd.DataFrame(columns=["run", *dictionary.TABLES[name].names])
    rows = of_run(results, name, runs)
    rows.insert(0, "run", rows.pop("label"))
    return rows


def first_run(results: Results) -> str:
    """The label of the run that charts show first; empty if nothing was gathered."""
    try:
        return initial(results, gathered(results, "by_layer"))
    except NotMeasured:
        return ""


def initial(results: Results, runs: pd.DataFrame) -> str:
    """The label to show first: of the first model among `gathered` runs, the run with the recommended L1 value, or the
    first run. Of several seeds, the one that is in the most tables."""
    of_model = of_first_model(runs)
    study, model = of_model[["study", "model"]].iloc[0]
    recommended = choose.recommended_l1(results.rows[results.rows["study"] == study], model)
    at_recommended = of_model[of_model["l1"] == recommended]
    return in_most_tables(results, at_recommended) if len(at_recommended) else of_model["label"].iloc[0]


def in_most_tables(results: Results, runs: pd.DataFrame) -> str:
    """The label of the run that is in the most tables; of several, the first."""
    counts = pd.concat([_runs_in(results, [name]) for name in results.nonzeros]).value_counts()
    return max(runs.itertuples(), key=lambda run: counts.get((run.study, run.item), 0)).label


def of_first_model(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of the study and model of the first line."""
    study, model = runs[["study", "model"]].iloc[0]
    return runs[(runs["study"] == study) & (runs["model"] == model)]


def layer_name(layer: int) -> str:
    return f"layer {layer}"


def _labelled(results: Results) -> pd.DataFrame:
    """The runs of all tables in order of the sources' preference: RUN, DESCRIPTION, label, and `values`, the
    number of L1 values that its study has of its model. Equal labels get the seed,
    and where the runs of one table still share one, the item. (A run that read a checkpoint and the training of the
    checkpoint are in different tables, and have the same label.)"""
    rows = results.rows[results.rows["op"].isin(("nonzeros", "train"))]
    items = rows[[*RUN, *DESCRIPTION]].drop_duplicates(RUN).merge(_runs_in(results, list(results.nonzeros)), on=RUN)
    studies = dict.fromkeys(study for source in results.sources for study in source.rows["study"])
    orders = {"study": studies, "model": choose.model_order(items["model"]), "modification": choose.MODIFICATIONS}

    def ranked(column: pd.Series) -> pd.Series | pd.Categorical:
        """Sort key: names in the order of their column, then others by name."""
        known = list(orders.get(str(column.name), ()))
        return pd.Categorical(column, [*known, *sorted(set(column) - set(known))]) if known else column

    by = ["study", "model", "modification", "l1", "seed", "item"]
    items = items.sort_values(by, key=ranked, na_position="first", ignore_index=True)
    plain = items["l1"].where(items["modification"].isin(("", "none")))
    values = plain.groupby([items["study"], items["model"]], dropna=False).transform("nunique")
    with_study = items["study"].nunique() > 1
    label = pd.Series([described(run) for _, run in items.iterrows()], index=items.index, dtype=object)
    label = items["study"] + ": " + label if with_study else label
    several = items["seed"].groupby(label).transform("nunique") > 1
    label = label.mask(several & items["seed"].notna(), label + ", seed " + items["seed"].astype(str))
    for tables in ([IN_TRAINING], [name for name in results.nonzeros if name != IN_TRAINING]):
        inside = pd.MultiIndex.from_frame(items[RUN]).isin(pd.MultiIndex.from_frame(_runs_in(results, tables)))
        label = label.mask(inside & label.where(inside).duplicated(keep=False), label + ", " + items["item"])
    return items.assign(label=label, values=values)


def _runs_in(results: Results, tables: Sequence[str]) -> pd.DataFrame:
    """study and item of the runs that are in any of these tables."""
    known = [results.nonzeros[name][RUN] for name in tables if name in results.nonzeros]
    return pd.concat(known).drop_duplicates() if known else results.rows[RUN].iloc[:0]


def described(run: pd.Series) -> str:
    """Model, L1 and modification: the same for every seed."""
    parts = [run["model"] or run["item"]]
    parts += [] if pd.isna(run["l1"]) else [f"L1 {l1_label(float(run['l1']))}"]
    parts += [] if run["modification"] in ("", "none") else [choose.MODIFICATIONS[run["modification"]]]
    return ", ".join(parts)


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
