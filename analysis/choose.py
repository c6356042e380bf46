"""Select the rows of a table or figure: filters, and the rules for model, training, device and L1 value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis import paper, schema, stats

# The paper's figures show its 1.5B model; the nearest scale that has rows replaces it.
MODEL_PREFERENCE: tuple[str, ...] = ("1.5b", "2b", "1b", "0.5b", "21m", "11m", "4m", "demo", "smoke")
RECOMMENDED_L1 = 2e-5
QUALITY_TOLERANCE = 0.02  # "cross-entropy within 2%"
FEWER_NEURONS = re.compile(r"-ffn\d+$")  # ends the names of models that have fewer neurons in each block
MODIFICATIONS = schema.MODIFICATIONS
FEWEST_SIZES = 3  # of models, for a trend
ALIKE = 1.5  # sizes are compared whose training tokens per parameter differ by at most this factor
RUN = ["study", "item"]
# These columns describe the training in the rows of everything that was measured on its checkpoint.
TRAINED = ["model", "text", "tokens_trained"]


def where(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows whose columns equal `wanted`; None, NaN or NA means an empty cell, a tuple any of its values."""
    keep = np.ones(len(frame), dtype=bool)
    for name, value in wanted.items():
        column = frame[name]
        if value is None or value is pd.NA or value != value:  # NaN differs from itself
            chosen = column.isna()
        elif isinstance(value, tuple):
            chosen = column.isin(value)
        else:
            chosen = column == value
        keep &= chosen.to_numpy(dtype=bool, na_value=False)
    return frame[keep]


def cells(rows: pd.DataFrame, names: list[str]) -> list[tuple]:
    """These cells of each row, None for empty ones, to be compared or looked up."""
    known = rows[names].astype(object)
    return list(known.where(known.notna(), None).itertuples(index=False, name=None))


def model_order(models: Iterable[str]) -> list[str]:
    """Model names in order: those of MODEL_PREFERENCE, then the others alphabetically."""
    names = set(models)
    known = [name for name in MODEL_PREFERENCE if name in names]
    return known + sorted(names - set(known) - {""})


def by_size(models: Iterable[str]) -> list[str]:
    """Models from small to large, by the number of parameters in their names (1.5b, 21m); other names first."""

    def size(model: str) -> tuple[float, str]:
        named = re.match(r"([\d.]+)([mb])", model)
        return float(named[1]) * (1000 if named[2] == "b" else 1) if named else 0.0, model

    return sorted(set(models), key=size)


def main_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the model with the most L1 values; ties go to the first in `model_order`."""
    values = frame.groupby("model")["l1"].nunique()
    return frame[frame["model"] == max(model_order(frame["model"]), key=lambda name: values[name], default=None)]


def main_device(frame: pd.DataFrame, by: Iterable[str] = ()) -> pd.DataFrame:
    """The rows of the device with the most rows; ties go to the first by name. With `by`, of each group that these
    columns make, the rows of the first device in this order that measured it."""
    counts = frame["device"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
    place = frame["device"].map({name: position for position, name in enumerate(counts.index)})
    groups = [frame[name] for name in by]
    first = place.groupby(groups, dropna=False).transform("min") if groups else place.min()
    return frame[place == first]


def equally_trained(rows: pd.DataFrame) -> pd.DataFrame:
    """For each model, the rows of runs trained on the same number of tokens of the same text: the group with the most
    L1 values, then the most runs, then the most tokens."""
    keys = [rows[name].fillna("" if name == "text" else 0) for name in TRAINED]
    if all(key.nunique() <= 1 for key in keys):
        return rows
    groups = rows.assign(_run=rows["study"] + "/" + rows["item"]).groupby(keys)
    known = pd.DataFrame({"values": groups["l1"].nunique(), "runs": groups["_run"].nunique()}).reset_index()
    best = known.sort_values(["values", "runs", "tokens_trained"]).drop_duplicates("model", keep="last")
    chosen = pd.MultiIndex.from_frame(best[TRAINED])
    return rows[pd.MultiIndex.from_arrays(keys).isin(chosen)]


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each finished training: model, length, seed and device."""
    names = [
        *RUN, "model", "layers", "hidden", "intermediate", "activation", "gated", "modification", "l1", "seed", "text",
        "step", "tokens_trained", "tokens_per_parameter", "tokens", "device", "gpus",
    ]  # fmt: skip
    rows = where(rows, op="train", layer=None)
    return rows.sort_values("date", kind="stable").drop_duplicates(RUN, keep="last")[names].reset_index(drop=True)


def relu_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or curves) of the L1 study proper: gated, ReLU, no mitigation, all neurons of the scale."""
    return at_full_width(where(frame, activation="relu", gated=True, modification="none"))


def sparse_models(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows without the models that are here at L1 = 0 alone, if there are others."""
    strongest = frame.groupby("model")["l1"].transform("max")
    return frame[strongest != 0] if (strongest != 0).any() else frame


def sweep(rows: pd.DataFrame, *also: str) -> pd.DataFrame:
    """The trainings of the L1 study proper and what was counted of them, with the rows of the operations `also`: of the
    model with the most L1 values, trained alike."""
    rows = relu_runs(where(rows, op=("train", "nonzeros", *also)))
    return main_model(equally_trained(rows)) if len(rows) else rows


def trained_alike(rows: pd.DataFrame, main: pd.DataFrame) -> pd.DataFrame:
    """Rows of models that were trained like those of `main`: on as many tokens of the same text."""

    def training(frame: pd.DataFrame) -> pd.MultiIndex:
        return pd.MultiIndex.from_arrays([frame["text"].fillna(""), frame["tokens_trained"].fillna(0)])

    return rows[training(rows).isin(training(main))]


def longest_trained(rows: pd.DataFrame) -> pd.DataFrame:
    """Measurements of one checkpoint for each operation, model, variant and L1 value: of the one trained longest."""
    by = ["op", "model", "activation", "gated", "modification", "l1"]
    steps = rows["step"].astype("float64").fillna(0)
    return rows[steps == steps.groupby([rows[name] for name in by], dropna=False).transform("max")]


def comparable_sizes(rows: pd.DataFrame, main: str, l1: float | None) -> pd.Series:
    """Millions of parameters of the models that were trained like `main`: without L1 and with this coefficient, on the
    same text, and on about as many tokens per parameter. By name, from small to large."""
    if l1 is None or math.isnan(l1):
        return pd.Series(dtype="float64")
    trained = trainings(where(rows, l1=(0.0, l1)))
    trained = trained[trained["text"].isin(set(where(trained, model=main)["text"]))]
    tokens, per = (trained[name].astype("float64") for name in ("tokens_trained", "tokens_per_parameter"))
    each = trained.assign(size=tokens / per / 1e6, per=per).groupby("model")
    ratio = each["per"].median() / each["per"].median().get(main, math.nan)
    alike = (each["l1"].nunique() == 2) & ratio.between(1 / ALIKE, ALIKE)
    return each["size"].median()[alike].dropna().sort_values()


def made_for_speed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the devices on which a sparse backend other than the reference ran, without the reference's rows, and
    without those of FP8 products.

    The reference backend defines results and is not made for speed: its times say nothing about sparsity. FP8 products
    are neither exact nor sparse.
    """
    rows = rows[rows["backend"].str.removesuffix(schema.COMPILED).ne(schema.REFERENCE) & rows["plan"].ne(schema.FP8)]
    sparse = rows[~rows["plan"].isin(("dense", schema.LIVE_PLANS["dense"], ""))]
    return rows[rows["device"].isin(set(sparse["device"]))]


def of_one_micro_batch(rows: pd.DataFrame) -> pd.DataFrame:
    """Without training steps with more tokens than the dense ones of their run. Sparse steps need less memory, so the
    largest that fit are timed too; what is compared has the same tokens."""
    steps = rows["op"].eq("model_training")
    dense = rows["tokens"].where(steps & rows["plan"].eq("dense") & rows["value"].notna())
    most = dense.groupby([rows[name] for name in ("study", "item", "pattern", "device")]).transform("max")
    return rows[~(steps & rows["tokens"].gt(most).fillna(False))]


def against_the_fastest(rows: pd.DataFrame) -> pd.DataFrame:
    """Without comparisons that have eager dense products only, of models that were also compared with compiled ones:
    what has nothing compiled may fit with fewer tokens only, and is then timed apart."""
    eager = rows["baseline"].eq(schema.EAGER)
    compiled = rows["baseline"].fillna("").ne("") & ~eager
    alike = [rows[name] for name in ("op", "device", "model", "l1")]
    return rows[~(eager & compiled.groupby(alike, dropna=False).transform("any"))]


def whole_function(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of plans that leave silent neurons out: they compute the same on the tokens measured only."""
    return rows[~rows["plan"].isin(schema.LIVE_PLANS.values())]


def papers_method(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the paper's method in every layer: in inference, or in training with its share of backup."""
    in_training = rows["plan"].eq(paper.TRAINING_PLAN) & rows["backup"].eq(paper.BACKUP)
    return rows[rows["plan"].eq(paper.PLAN) | in_training]


def series_of(rows: pd.DataFrame) -> pd.Series:
    """Plan and backend of each row in words: "sorted (hopper)", "backup (hopper, 0.125)"."""
    labels = [
        f"{schema.WORDS.get(plan, plan)} ({backend}{'' if pd.isna(backup) else f', {backup:g}'})"
        for plan, backend, backup in zip(rows["plan"], rows["backend"], rows["backup"], strict=True)
    ]
    return pd.Series(labels, index=rows.index, dtype=object)


def recommended_l1(rows: pd.DataFrame, model: str) -> float | None:
    """The recommended L1 value for `model`: the first of the following that exists, or None.

    1. The paper's 2e-5, if measured.
    2. The value at which the study also trained with dead-neuron reinitialisation (small models need larger values).
    3. The largest value whose held-out cross-entropy, averaged over seeds, is within 2% of that at L1 = 0 (the paper's
       criterion).

    NaN for a model that was not trained here: its L1 value is unknown, and all of its rows have that one value.
    """
    of_model = where(rows, model=model)
    runs = relu_runs(of_model)
    values = set(runs["l1"].dropna())
    if len(runs) and not values:
        return math.nan
    if RECOMMENDED_L1 in values:
        return RECOMMENDED_L1
    chosen = values & set(where(of_model, modification="dead_neuron_reinit")["l1"].dropna())
    return min(chosen) if chosen else largest_within_tolerance(runs)


def largest_within_tolerance(runs: pd.DataFrame) -> float | None:
    """The largest L1 value whose held-out cross-entropy is within 2% of that at L1 = 0; None if there is none."""
    change = stats.over_seeds(loss_change(runs), ["l1"]).set_index("l1")["value"]
    within = change[(change.index > 0) & (change <= QUALITY_TOLERANCE * 100)]
    return float(within.index.max()) if len(within) else None


def loss_change(rows: pd.DataFrame) -> pd.DataFrame:
    """The held-out cross-entropy at the end of each training, in percent above that without L1 (see
    `above_unregularised`)."""
    losses = equally_trained(where(rows, op="train", metric="validation_cross_entropy"))
    return above_unregularised(losses, where(losses, l1=0.0))


def above_unregularised(losses: pd.DataFrame, base: pd.DataFrame, *also: str) -> pd.DataFrame:
    """Losses with `value` in percent above that of a training without L1, of which `base` has the losses: the one of
    the same seed (and of the same `also`, such as the step), or their mean for an L1 value without a seed in common.
    Seeds that only one of both has are left out. Without base, the values are NaN."""
    by = ["seed", *also]
    known = base[base["value"].notna()]
    paired = losses.merge(known.groupby(by, dropna=False)["value"].mean().rename("base").reset_index(), on=by)
    alone = losses[~losses["l1"].isin(set(paired["l1"]))]
    if also:
        alone = alone.merge(known.groupby(list(also))["value"].mean().rename("base").reset_index(), on=list(also))
    else:
        alone = alone.assign(base=known["value"].mean())
    both = pd.concat([paired, alone], ignore_index=True) if len(alone) else paired
    return both.assign(value=(both["value"] / both["base"] - 1) * 100)


def telling_l1(rows: pd.DataFrame, model: str) -> list[float]:
    """The L1 values of a model that figures 6, 7, 10 and 11 show: 0, the recommended and the largest."""
    values = set(equally_trained(relu_runs(where(rows, model=model, op="nonzeros")))["l1"].dropna())
    recommended = recommended_l1(rows, model)
    if recommended is not None and math.isnan(recommended):
        return [recommended]
    return sorted(values & {0.0, recommended, max(values, default=None)})


def first_seed(frame: pd.DataFrame) -> pd.DataFrame:
    """For each model and L1 value, the rows of the run with the lowest seed."""
    runs = frame[[*RUN, "model", "l1", "seed"]].drop_duplicates().sort_values(["seed", *RUN], kind="stable")
    first = runs.drop_duplicates(["model", "l1"])[RUN]
    return frame.merge(first, on=RUN)


def l1_label(value: float) -> str:
    """The value as the paper writes it (0, 2e-5, 1.5e-5); "unknown" for NaN."""
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def scale(model: str) -> str:
    """The scale of a model configuration without its variant: "1.5b" for "1.5b-nongated", "21m" for "21m-ffn384"."""
    return FEWER_NEURONS.sub("", model.removesuffix("-nongated"))


def at_full_width(rows: pd.DataFrame) -> pd.DataFrame:
    """Without the rows of models with fewer neurons than their scale has, such as "21m-ffn384"."""
    return rows[~rows["model"].str.contains(FEWER_NEURONS)]
