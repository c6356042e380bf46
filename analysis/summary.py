"""Our trainings at a glance: quality, sparsity and speed of each in one line."""

from __future__ import annotations

import math

import pandas as pd

from analysis import choose
from analysis.choose import where
from analysis.load import Results
from analysis.measures import Variant, measure

COLUMNS = (
    "model", "activation", "modification", "l1", "cross_entropy", "cross_entropy_change_pct", "nonzeros", "active_pct",
    "dead_pct", "forward_ratio", "training_ratio",
)  # fmt: skip


def summary(results: Results) -> pd.DataFrame:
    """One line for each training: held-out cross-entropy and its change against the ReLU model without L1, mean
    non-zeros, dead neurons, and the speed of the fastest sparse plan over dense (device with the most rows)."""
    trained = where(results.rows, op="train")
    keys = ["model", "activation", "gated", "modification", "l1"]
    runs = trained[keys].drop_duplicates()
    lines = []
    for model in choose.model_order(runs["model"]):
        rows = where(results.rows, model=model)
        order = where(runs, model=model).sort_values(["activation", "modification", "l1"], key=_position)
        lines += [_line(rows, model, line) for line in order.itertuples()]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _position(column: pd.Series) -> pd.Series:
    """SiLU first as the usual baseline, runs without mitigation before those with one."""
    ranks = {"silu": 0, "relu": 1} | {name: i for i, name in enumerate(choose.MODIFICATIONS)}
    return column if column.name == "l1" else column.map(ranks)


def _line(rows: pd.DataFrame, model: str, run) -> dict:
    variant = Variant(run.l1, run.activation == "relu", run.activation, run.gated, run.modification)
    own = variant.of(rows)
    loss = measure(own, "cross_entropy", variant).value
    base = measure(Variant(0.0, False, gated=run.gated).of(rows), "cross_entropy", variant).value
    nonzeros = measure(own, "nonzeros", variant).value
    return {
        "model": model,
        "activation": run.activation,
        "modification": run.modification,
        "l1": run.l1,
        "cross_entropy": loss,
        "cross_entropy_change_pct": (loss / base - 1) * 100,
        "nonzeros": nonzeros,
        "active_pct": nonzeros / float(own["intermediate"].dropna().max()) * 100,
        "dead_pct": measure(own, "dead_fraction", variant).value * 100,
        "forward_ratio": _best_ratio(own, "model_forward"),
        "training_ratio": _best_ratio(own, "model_training"),
    }


def _best_ratio(rows: pd.DataFrame, op: str) -> float:
    sparse = choose.main_device(where(rows, op=op, metric="throughput"))
    ratios = sparse[sparse["plan"] != "dense"]["ratio"].dropna()
    return float(ratios.max()) if len(ratios) else math.nan
