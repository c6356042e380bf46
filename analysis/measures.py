"""One number of one model variant from the rows: the value with its 95% interval, or why it is missing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis import schema, stats
from analysis.choose import RUN, equally_trained, longest_trained, made_for_speed, of_one_micro_batch, where

TASKS: tuple[str, ...] = tuple(schema.TASKS)
NOT_MEASURED = "not measured"
IN_TRAINING = "on held-out text (shown: in the last training steps)"
NOT_FOR_SPEED = "only the reference backend ran, which defines results and is not made for speed"
# A sparse measurement and the dense one of its run are equal in these columns.
SAME_RUN = [
    "study", "item", "op", "metric", "device", "model", "l1", "activation", "gated", "modification", "layer", "step",
    "pattern", "mean_nnz", "tokens", "batch", "prompt_tokens", "hidden", "intermediate", "seed",
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A variant of a model, as tables list it: how it was trained, and whether it runs sparse or dense."""

    l1: float
    sparse: bool
    activation: str = "relu"
    gated: bool = True
    modification: str = "none"

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The variant's rows among `rows`, dense and sparse."""
        return where(rows, l1=self.l1, activation=self.activation, gated=self.gated, modification=self.modification)

    def columns(self) -> dict[str, object]:
        """The columns that tables show."""
        return {
            "l1": self.l1,
            "sparse": "yes" if self.sparse else "no",
            "activation": self.activation,
            "gated": "yes" if self.gated else "no",
            "modification": self.modification,
        }


@dataclass(frozen=True)
class Measured:
    """A value; if it is NaN, `missing` gives the reason.

    half_width: of the 95% interval over seeds, or for one seed over the items of a task; NaN if unknown.
    seeds: the number of seeds.
    ratio: improvement over the fastest dense form of the same run.
    remark: how it differs from the others of its kind.
    """

    value: float
    missing: str = ""
    half_width: float = math.nan
    seeds: int = 0
    ratio: float = math.nan
    remark: str = ""


@dataclass(frozen=True)
class Measure:
    """The source of a number in the tables. `benchmark`: it depends on the device and on running dense or sparse."""

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
    """The number `name` (a key of MEASURES; "accuracy:piqa" for one task) of a variant, as a mean over seeds.

    Non-zeros are averaged over layers.
    """
    kind, _, task = name.partition(":")
    if kind == "accuracy":
        return _accuracy(equally_trained(where(rows, op="evaluate", metric="accuracy", task=TASKS)), task)
    wanted = MEASURES[kind]
    chosen = where(rows, op=wanted.op)
    if wanted.benchmark:
        timed = made_for_speed(chosen)
        if timed.empty and len(chosen):
            return Measured(math.nan, NOT_FOR_SPEED)
        timed = longest_trained(where(of_one_micro_batch(timed), device=device))
        return _benchmark(timed, wanted.metric, sparse=variant.sparse)
    if kind == "nonzeros":
        shown = equally_trained(nonzeros_rows(rows))
        in_training = variant.activation == "relu" and "train" in set(shown["op"])  # with SiLU all are active
        return replace(_mean(shown), remark=IN_TRAINING if in_training else "")
    return _mean(equally_trained(where(chosen, metric=wanted.metric, layer=None)))


def nonzeros_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean non-zeros of whole models: on held-out text if gathered, otherwise from the end of training."""
    gathered = where(rows, op="nonzeros", metric="nonzeros")
    if gathered.empty:
        return where(rows, op="train", metric="nonzeros", layer=None)
    by_layer = gathered[gathered["layer"].notna()]
    return by_layer.assign(value=by_layer.groupby(RUN)["value"].transform("mean"), layer=pd.NA).drop_duplicates(RUN)


def task_accuracies(rows: pd.DataFrame, tasks: tuple[str, ...] = TASKS) -> pd.DataFrame:
    """The mean accuracy over the seven tasks, or some of them, of each run that has all of these: columns of the rows,
    with `value` and `error`, its standard error (tasks taken as independent)."""
    rows = where(rows, op="evaluate", metric="accuracy", task=tasks).dropna(subset="value")
    rows = rows.assign(square=((rows["high"] - rows["low"]) / 2) ** 2)
    runs = rows.groupby(RUN).agg(
        tasks=("task", "nunique"), value=("value", "mean"), square=("square", lambda values: values.sum(skipna=False))
    )
    runs = runs[runs["tasks"] == len(tasks)].assign(error=lambda of: of["square"] ** 0.5 / len(tasks))
    whole = rows.drop_duplicates(RUN).drop(columns=["value", "square"]).assign(task="mean")
    return whole.merge(runs[["value", "error"]], on=RUN)


def chance(tasks: tuple[str, ...]) -> float:
    """Mean accuracy of a guess over these tasks, in percent."""
    return sum(schema.TASKS[task].chance for task in tasks) / len(tasks)


def tasks_above_chance(rows: pd.DataFrame) -> tuple[str, ...]:
    """The tasks on which these runs, taken together, do better than a guess by more than 1.96 standard errors. All runs
    score the same items, so more of them do not make the error smaller."""
    found = []
    for task in TASKS:
        runs = task_accuracies(rows, (task,))
        if len(runs) and (runs["value"] - stats.NORMAL_975 * runs["error"]).mean() > schema.TASKS[task].chance:
            found.append(task)
    return tuple(found)


def _accuracy(rows: pd.DataFrame, task: str) -> Measured:
    if task:
        rows = where(rows, task=task)
        scored = rows[rows["value"].notna()]
        scored = scored.assign(error=(scored["high"] - scored["low"]) / 2)
    else:
        scored = task_accuracies(rows)
    if scored.empty:
        some = rows[rows["value"].notna()]["task"].nunique()
        return Measured(math.nan, f"{some} of {len(TASKS)} tasks" if some and not task else _reason(rows))
    mean = _mean(scored)
    if mean.seeds > 1:
        return mean
    return Measured(mean.value, half_width=stats.NORMAL_975 * float(scored["error"].iloc[0]), seeds=1)


def _benchmark(rows: pd.DataFrame, metric: str, *, sparse: bool) -> Measured:
    """The `metric` of the fastest dense backend, or of the fastest sparse plan."""
    plans = rows[(rows["plan"] != "dense") if sparse else (rows["plan"] == "dense")]
    speed = where(plans, metric="throughput").groupby(["plan", "backend"])["value"].mean().dropna()
    if speed.empty:
        return _mean(where(plans, metric=metric))
    plan, backend = speed.idxmax()
    chosen = where(plans, metric=metric, plan=plan, backend=backend)
    mean = _mean(chosen)
    if not sparse:
        return mean
    return Measured(mean.value, mean.missing, mean.half_width, mean.seeds, float(chosen["ratio"].mean()))


def accuracy_half_width(runs: pd.DataFrame) -> float:
    """Half the 95% interval of the mean accuracy of runs of `task_accuracies` that differ in seed: that of the items,
    which all seeds share, or that of the seeds, whichever is larger."""
    return float(np.fmax(stats.NORMAL_975 * runs["error"].mean(), stats.half_width_95(runs["value"])))


def accuracies_over_seeds(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`stats.over_seeds` of runs of `task_accuracies`, with the interval of `accuracy_half_width`."""
    data = stats.over_seeds(runs, by)
    half = [accuracy_half_width(where(runs, **line)) for line in data[by].to_dict("records")]
    return data.assign(low=data["value"] - half, high=data["value"] + half)


def eager_ratios(sparse: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """The improvement of each of `sparse` over uncompiled dense in the same run; NaN if that was not measured. Dense:
    this package's block; of memory transformers, whose block keeps more for the backward."""
    dense = rows["metric"].eq("peak_memory").map({True: schema.TRANSFORMERS, False: schema.EAGER})
    eager = rows[rows["plan"].eq("dense") & rows["backend"].eq(dense)].dropna(subset="value")
    known = eager.drop_duplicates(SAME_RUN, keep="last")[[*SAME_RUN, "value"]]
    base = sparse[SAME_RUN].merge(known, on=SAME_RUN, how="left")["value"].set_axis(sparse.index)
    larger = sparse["metric"].isin(schema.LARGER_IS_BETTER)
    return (sparse["value"] / base).where(larger, base / sparse["value"])


def _mean(rows: pd.DataFrame) -> Measured:
    values = stats.of_seeds(rows)
    if values.empty:
        return Measured(math.nan, _reason(rows))
    return Measured(float(values.mean()), half_width=stats.half_width_95(values), seeds=len(values))


def _reason(rows: pd.DataFrame) -> str:
    reasons = list(dict.fromkeys(reason for reason in rows["missing"] if reason))
    return ", ".join(reasons) if reasons else NOT_MEASURED
