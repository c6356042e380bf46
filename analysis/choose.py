"""Which rows a table or figure is about: filters, and the rules for model, training, device and L1 value."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from analysis import schema, stats

# The paper's figures are of its 1.5B model; the nearest scale that has rows stands in for it.
MODEL_PREFERENCE: tuple[str, ...] = ("1.5b", "2b", "1b", "0.5b", "42m", "21m", "11m", "demo", "smoke")
RECOMMENDED_L1 = 2e-5
QUALITY_TOLERANCE = 0.02  # "cross-entropy within 2%"
MODIFICATIONS = schema.MODIFICATIONS
RUN = ["study", "item"]
# Of a training, in the rows of everything that was measured on its checkpoint.
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


def model_order(models: Iterable[str]) -> list[str]:
    """Names of models, nearest to the paper's first: MODEL_PREFERENCE, then the others by name."""
    names = set(models)
    known = [name for name in MODEL_PREFERENCE if name in names]
    return known + sorted(names - set(known) - {""})


def main_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the model with the most L1 values; among equals, the first of `model_order`."""
    order = model_order(frame["model"])
    if not order:
        return frame.iloc[:0]
    values = frame.groupby("model")["l1"].nunique()
    return frame[frame["model"] == max(order, key=lambda name: values[name])]


def main_device(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the device that has the most of them, by name among equals."""
    if frame.empty:
        return frame
    counts = frame["device"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
    return frame[frame["device"] == counts.index[0]]


def equally_trained(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each model, the rows of runs that were trained on the same number of tokens of the same text: those of the
    most L1 values, then of the most runs, then of the most tokens."""
    keys = [rows[name].fillna("" if name == "text" else 0) for name in TRAINED]
    groups = rows.assign(_run=rows["study"] + "/" + rows["item"]).groupby(keys)
    known = pd.DataFrame({"values": groups["l1"].nunique(), "runs": groups["_run"].nunique()}).reset_index()
    best = known.sort_values(["values", "runs", "tokens_trained"]).drop_duplicates("model", keep="last")
    chosen = pd.MultiIndex.from_frame(best[TRAINED])
    return rows[pd.MultiIndex.from_arrays(keys).isin(chosen)]


def trainings(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each finished training: what it trained, for how long, with which seed, where."""
    names = [
        *RUN, "model", "layers", "hidden", "intermediate", "activation", "gated", "modification", "l1", "seed", "text",
        "tokens_trained", "tokens_per_parameter", "tokens", "device", "gpus",
    ]  # fmt: skip
    rows = where(rows, op="train", layer=None)
    return rows.sort_values("date", kind="stable").drop_duplicates(RUN, keep="last")[names].reset_index(drop=True)


def relu_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or curves) of the L1 study proper: gated, ReLU, no mitigation."""
    return where(frame, activation="relu", gated=True, modification="none")


def made_for_speed(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the devices on which a sparse backend other than the reference ran; the reference's rows are left out.

    The reference backend defines results and is not made for speed: what it takes says nothing about sparsity.
    """
    rows = rows[rows["backend"] != schema.REFERENCE]
    sparse = rows[~rows["plan"].isin(("dense", ""))]
    return rows[rows["device"].isin(set(sparse["device"]))]


def series_label(plan: str, backend: str, backup: float) -> str:
    """The name of a plan with its backend, for legends: "csr (hopper)", "hybrid (hopper, backup 0.125)"."""
    return f"{plan} ({backend})" if pd.isna(backup) else f"{plan} ({backend}, backup {backup:g})"


def series_of(rows: pd.DataFrame) -> pd.Series:
    """`series_label` of each row."""
    labels = [series_label(*cells) for cells in zip(rows["plan"], rows["backend"], rows["backup"], strict=True)]
    return pd.Series(labels, index=rows.index, dtype=object)


def recommended_l1(rows: pd.DataFrame, model: str) -> float | None:
    """The L1 value to recommend for `model`: the first of these that can be said, or None. NaN for a model of which
    no L1 value is known, since it was not trained here: then its rows are those of the only value there is.

    The paper's 2e-5 where measured; the value at which the study also trained with dead-neuron reinitialisation, since
    a small model needs another one; the largest value whose validation cross-entropy, averaged over seeds, is within 2%
    of the one at L1 = 0 (the paper's criterion).
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
    """The largest L1 value whose held-out cross-entropy is within 2% of that at L1 = 0; None where it is not known."""
    losses = stats.over_seeds(equally_trained(where(runs, op="train", metric="validation_cross_entropy")), ["l1"])
    losses = losses.set_index("l1")["value"]
    if 0.0 not in losses.index:
        return None
    within = losses[(losses.index > 0) & (losses <= losses[0.0] * (1 + QUALITY_TOLERANCE))]
    return float(within.index.max()) if len(within) else None


def telling_l1(rows: pd.DataFrame, model: str) -> list[float]:
    """The L1 values of a model that figures 6, 7, 10 and 11 are about: none, the recommended one, the strongest."""
    values = set(relu_runs(where(rows, model=model, op="nonzeros"))["l1"].dropna())
    recommended = recommended_l1(rows, model)
    if recommended is not None and math.isnan(recommended):
        return [recommended]
    return sorted(values & {0.0, recommended, max(values, default=None)})


def first_seed(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each model and L1 value, the rows of the run with the lowest seed."""
    runs = frame[[*RUN, "model", "l1", "seed"]].drop_duplicates().sort_values(["seed", *RUN], kind="stable")
    first = runs.drop_duplicates(["model", "l1"])[RUN]
    return frame.merge(first, on=RUN)


def l1_label(value: float) -> str:
    """0, 2e-5, 1.5e-5: as the paper writes them; "unknown" for NaN."""
    if math.isnan(value):
        return "unknown"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def scale(model: str) -> str:
    """The scale of a model configuration, without its variant: "1.5b-nongated" is of scale "1.5b"."""
    return model.removesuffix("-nongated")
