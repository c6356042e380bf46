"""One number of one model variant, out of the rows: the value, or the reason why there is none."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from analysis.choose import where

TASKS = ("hellaswag", "commonsense_qa", "piqa", "winogrande", "arc_easy", "arc_challenge", "openbookqa")


@dataclass(frozen=True)
class Variant:
    """A model of some scale as a table names it: how it was trained, and whether it is run sparse or dense."""

    l1: float
    sparse: bool
    activation: str = "relu"
    gated: bool = True
    modification: str = "none"

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Its rows, dense and sparse."""
        return where(rows, l1=self.l1, activation=self.activation, gated=self.gated, modification=self.modification)

    def columns(self) -> dict[str, object]:
        """The columns that tables show of it."""
        return {
            "l1": self.l1,
            "sparse": "yes" if self.sparse else "no",
            "activation": self.activation,
            "gated": "yes" if self.gated else "no",
            "modification": self.modification,
        }


@dataclass(frozen=True)
class Measured:
    """A value (NaN where there is none) and why it is missing."""

    value: float
    missing: str = ""


@dataclass(frozen=True)
class Measure:
    """Where a number of the tables comes from. `benchmark`: depends on the device and on dense or sparse."""

    title: str
    op: str
    metric: str
    benchmark: bool = False


MEASURES: dict[str, Measure] = {
    "accuracy": Measure("accuracy", "evaluate", "accuracy"),
    "cross_entropy": Measure("cross-entropy", "train", "validation_cross_entropy"),
    "nonzeros": Measure("non-zeros", "nonzeros", "nonzeros"),
    "dead_fraction": Measure("dead neurons", "train", "dead_fraction"),
    "forward_throughput": Measure("forward", "model_forward", "throughput", benchmark=True),
    "forward_energy": Measure("energy", "model_forward", "energy", benchmark=True),
    "training_throughput": Measure("training", "model_training", "throughput", benchmark=True),
    "training_memory": Measure("memory", "model_training", "peak_memory", benchmark=True),
}


def measure(rows: pd.DataFrame, name: str, variant: Variant, device: str = "") -> Measured:
    """The number `name` (of MEASURES; "accuracy:piqa" for one task) from the rows of a variant.

    Repeated measurements (seeds) are averaged. Non-zeros are averaged over layers.
    """
    kind, _, task = name.partition(":")
    if kind == "accuracy":
        return _accuracy(rows, task)
    if kind == "nonzeros":
        return _nonzeros(rows)
    wanted = MEASURES[kind]
    chosen = where(rows, op=wanted.op)
    if wanted.benchmark:
        return _benchmark(where(chosen, device=device), wanted.metric, sparse=variant.sparse)
    return _mean(where(chosen, metric=wanted.metric, layer=None))


def _accuracy(rows: pd.DataFrame, task: str) -> Measured:
    chosen = where(rows, op="evaluate", metric="accuracy", task=TASKS)
    if task:
        return _mean(where(chosen, task=task))
    measured = chosen[chosen["value"].notna()].groupby("task")["value"].mean()
    if len(measured) < len(TASKS):
        return Measured(math.nan, f"{len(measured)} of {len(TASKS)} tasks" if len(measured) else _reason(chosen))
    return Measured(float(measured.mean()))


def _nonzeros(rows: pd.DataFrame) -> Measured:
    """From real text where gathered, else from the end of training."""
    gathered = where(rows, op="nonzeros", metric="nonzeros")
    return _mean(gathered if len(gathered) else where(rows, op="train", metric="nonzeros", layer=None))


def _benchmark(rows: pd.DataFrame, metric: str, *, sparse: bool) -> Measured:
    """What the fastest of the dense backends, or of the sparse plans, has for `metric`."""
    plans = rows[(rows["plan"] != "dense") if sparse else (rows["plan"] == "dense")]
    speed = where(plans, metric="throughput").groupby(["plan", "backend"])["value"].mean().dropna()
    if speed.empty:
        return _mean(where(plans, metric=metric))
    plan, backend = speed.idxmax()
    return _mean(where(plans, metric=metric, plan=plan, backend=backend))


def _mean(rows: pd.DataFrame) -> Measured:
    values = rows["value"].dropna()
    return Measured(float(values.mean())) if len(values) else Measured(math.nan, _reason(rows))


def _reason(rows: pd.DataFrame) -> str:
    reasons = list(dict.fromkeys(reason for reason in rows["missing"] if reason))
    return ", ".join(reasons) if reasons else "no rows yet"
