"""Which of the rows a table or figure is about: filters, and the rules for model, device and L1 value."""

from __future__ import annotations

import pandas as pd

# The paper's figures are of its 1.5B model; the nearest scale that has rows stands in for it.
MODEL_PREFERENCE: tuple[str, ...] = ("1.5b", "2b", "1b", "0.5b", "demo", "smoke")
RECOMMENDED_L1 = 2e-5
QUALITY_TOLERANCE = 0.02  # "cross-entropy within 2%"
MODIFICATIONS: dict[str, str] = {
    "none": "none",
    "dead_neuron_reinit": "dead-neuron reinitialisation",
    "l1_warmup": "L1 warm-up",
}


def where(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """Rows whose columns equal `wanted`; None means an empty cell, a tuple means any of its values."""
    keep = pd.Series(True, index=frame.index)
    for name, value in wanted.items():
        if value is None:
            keep &= frame[name].isna()
        elif isinstance(value, tuple):
            keep &= frame[name].isin(value).fillna(False)
        else:
            keep &= (frame[name] == value).fillna(False)
    return frame[keep]


def model_order(models) -> list[str]:
    """Names of models, the most telling first: MODEL_PREFERENCE, then the others by name."""
    known = [name for name in MODEL_PREFERENCE if name in set(models)]
    return known + sorted(set(models) - set(known) - {""})


def main_model(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of one model, the first of `model_order`; an empty frame stays empty."""
    order = model_order(frame["model"])
    return frame[frame["model"] == order[0]] if order else frame.iloc[:0]


def main_device(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of one device: the one with the most of them, by name among equals."""
    if frame.empty:
        return frame
    counts = frame["device"].value_counts().sort_index().sort_values(ascending=False, kind="stable")
    return frame[frame["device"] == counts.index[0]]


def relu_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or curves) of the L1 study proper: gated, ReLU, no mitigation."""
    return where(frame, activation="relu", gated=True, modification="none")


def recommended_l1(rows: pd.DataFrame, model: str) -> float | None:
    """The L1 value to recommend for `model`: the first of these that can be said, or None.

    The paper's 2e-5 where measured; the value at which the study also trained with dead-neuron reinitialisation, since
    a small model trained briefly needs another one; the largest value whose validation cross-entropy is within 2% of
    the one at L1 = 0 (the paper's criterion).
    """
    of_model = where(rows, model=model)
    runs = relu_runs(of_model)
    values = set(runs["l1"].dropna())
    if RECOMMENDED_L1 in values:
        return RECOMMENDED_L1
    chosen = values & set(where(of_model, modification="dead_neuron_reinit")["l1"].dropna())
    if chosen:
        return min(chosen)
    losses = where(runs, op="train", metric="validation_cross_entropy").groupby("l1")["value"].mean()
    if 0.0 not in losses.index:
        return None
    within = losses[(losses.index > 0) & (losses <= losses[0.0] * (1 + QUALITY_TOLERANCE))]
    return float(within.index.max()) if len(within) else None


def l1_label(value: float) -> str:
    """0, 2e-5, 1.5e-5: as the paper writes them."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def scale(model: str) -> str:
    """The scale of a model configuration, without its variant: "1.5b-nongated" is of scale "1.5b"."""
    return model.removesuffix("-nongated")
