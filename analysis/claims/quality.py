"""Claims on the quality of models and on what L1 does to their neurons: trainings, non-zeros and task accuracies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.claims.evidence import CONSISTENT, FAILS, HOLDS, Evidence, Finding, Untested, graded
from analysis.measures import accuracy_half_width, chance, task_accuracies, tasks_above_chance
from analysis.render import signed, significant

ACCURACY_LOSS = 0.5  # points: more than the paper's models lose
SETTLED = 0.1  # non-zeros have settled once they stay within 10% of their last value
PAPERS_WIDTH = 5632


def _percent(share: float) -> str:
    return f"{significant(share * 100, 2)}%"


def sparsity(evidence: Evidence) -> Finding:
    l1 = choose.largest_within_tolerance(evidence.sweep)
    if l1 is None:
        raise Untested("no L1 value raises cross-entropy by at most 2%")
    active, before = (evidence.measured("nonzeros", value) for value in (l1, 0.0))
    width, losses = evidence.width, where(choose.loss_change(evidence.sweep), l1=l1)
    met = {
        f"{_percent(active.value / width)} is more than 1%": active.value <= 0.01 * width,
        "more than a quarter of those without L1": active.value <= max(0.01 * width, before.value / 4),
    }
    ours = (
        f"{significant(active.value)} of {width:,.0f} active at L1 {l1_label(l1)} ({significant(before.value)} "
        f"without), cross-entropy {signed(losses['value'].mean(), 1)}"
    )
    return Finding(ours, *graded(met), min(active.seeds, before.seeds, losses["seed"].nunique()))


def unregularised(evidence: Evidence) -> Finding:
    active, width = evidence.measured("nonzeros", 0.0), evidence.width
    ratio = active.value / width / (paper.fact(3, r"(\d+) non-zeros at L1=0") / PAPERS_WIDTH)
    met = {f"{significant(ratio, 2)} times the paper's share": 1 / 1.5 <= ratio <= 1.5}
    ours = f"{significant(active.value)} of {width:,.0f} ({_percent(active.value / width)})"
    return Finding(ours, *graded(met), active.seeds)


class _Accuracy(NamedTuple):
    """A mean accuracy in percent, half its 95% interval (`accuracy_half_width`), and the number of seeds."""

    mean: float
    error: float
    seeds: int

    def exceeds(self, other: _Accuracy, by: float = 0.0) -> bool:
        """Whether it is higher by more than this and the 95% interval of the difference."""
        return self.mean - other.mean - by > math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}%"


def _accuracies(rows: pd.DataFrame, tasks: tuple[str, ...], values: tuple[float, float]) -> tuple[_Accuracy, _Accuracy]:
    """The mean accuracy over these tasks at both L1 values; NaN where not all were scored."""
    scored = task_accuracies(rows, tasks)
    without, regularised = (
        _Accuracy(runs["value"].mean(), accuracy_half_width(runs), runs["seed"].nunique())
        for runs in (where(scored, l1=l1) for l1 in values)
    )
    return without, regularised


def _compared(tasks: tuple[str, ...]) -> tuple[str, str]:
    """Why fewer than all tasks are compared (empty if all are), and their names."""
    few = "" if len(tasks) == len(schema.TASKS) else f"only {len(tasks)} of {len(schema.TASKS)} tasks are above chance"
    titles = ", ".join(schema.TASKS[task].title for task in tasks)
    return few, f"Tasks above chance: {titles} (a guess: {chance(tasks):.1f}%)."


def accuracy(evidence: Evidence) -> Finding:
    both = (0.0, evidence.recommended)
    seven = _accuracies(evidence.sweep, tuple(schema.TASKS), both)
    if any(math.isnan(value.mean) for value in seven):
        raise Untested(f"the seven tasks were not scored at both L1 = 0 and {l1_label(both[1])}")
    over_seven = f"{seven[0].mean:.1f}% without L1, {seven[1].mean:.1f}% with (a guess: {schema.MEAN_CHANCE:.1f}%)"
    tasks = tasks_above_chance(where(evidence.sweep, l1=0.0))
    if not tasks:
        raise Untested(f"without L1 no task is above chance; over all seven {over_seven}")
    dense, sparse = _accuracies(evidence.sweep, tasks, both)
    few, names = _compared(tasks)
    if sparse.exceeds(dense, by=-ACCURACY_LOSS):
        verdict, reasons = CONSISTENT if few else HOLDS, [few]
    elif dense.exceeds(sparse):
        verdict, reasons = FAILS, ["the loss exceeds its interval"]
    else:
        verdict, reasons = CONSISTENT, [f"a loss of {ACCURACY_LOSS:g} points is within the interval", few]
    change, error = signed(sparse.mean - dense.mean, 1).removesuffix("%"), math.hypot(dense.error, sparse.error)
    ours = (
        f"{dense.mean:.1f}% without L1, {sparse.mean:.1f}% with {l1_label(both[1])}; difference {change} ± {error:.1f} "
        "points"
    )
    details = (names, f"Over these: {dense} without L1, {sparse} with.", f"Over all seven: {over_seven}.")
    return Finding(ours, verdict, reasons, min(dense.seeds, sparse.seeds), details)


def sizes(evidence: Evidence) -> Finding:
    rows = choose.equally_trained(choose.relu_runs(where(evidence.results.rows, op=("train", "evaluate"))))
    both = (0.0, evidence.recommended)
    candidates = choose.comparable_sizes(rows, evidence.model, both[1]).index
    seven = {name: _accuracies(where(rows, model=name), tuple(schema.TASKS), both) for name in candidates}
    models = [name for name, of_model in seven.items() if not any(math.isnan(value.mean) for value in of_model)]
    if len(models) < choose.FEWEST_SIZES:
        raise Untested(
            f"{len(models)} sizes were trained alike and scored without L1 and with {l1_label(both[1])}; "
            f"{choose.FEWEST_SIZES} are needed"
        )
    tasks = tasks_above_chance(where(rows, model=models[-1], l1=0.0))
    if not tasks:
        raise Untested(f"accuracies of {models[-1]} without L1 are at chance")
    accuracies = {name: _accuracies(where(rows, model=name), tasks, both) for name in models}
    pairs = list(zip(("without L1", "with L1"), accuracies[models[0]], accuracies[models[-1]], strict=True))
    verdict, reasons = graded({f"within the interval {kind}": large.exceeds(small) for kind, small, large in pairs})
    few, names = _compared(tasks)
    parts = ", ".join(f"{small.mean:.1f} to {large.mean:.1f}% {kind}" for kind, small, large in pairs)
    details = [names]
    for name, (dense, sparse) in accuracies.items():
        details.append(f"{name}: {dense} without L1, {sparse} with; over all seven {seven[name][0].mean:.1f}% without.")
    ours = f"{models[0]} to {models[-1]}: {parts}"
    verdict = CONSISTENT if verdict == HOLDS and few else verdict
    trained = choose.trainings(where(rows, model=tuple(models), l1=both))
    place = f"{', '.join(models)}, {describe.devices(trained['device'])}"
    seeds = min(value.seeds for of_model in accuracies.values() for value in of_model)
    return Finding(ours, verdict, [*reasons, few], seeds, details, place)


def silu(evidence: Evidence) -> Finding:
    runs, others = (evidence.trainings(activation=name, l1=0.0, gated=True) for name in ("silu", "relu"))
    common = evidence.paired("SiLU", runs, others)
    relu, other = (common.measured("cross_entropy", 0.0, activation=name) for name in ("relu", "silu"))
    ratio = relu.value / other.value
    met = {f"{signed((ratio - 1) * 100, 1)} is more than 1%": ratio <= 1.01}
    return Finding(f"cross-entropy {relu.value:.3f}, with SiLU {other.value:.3f}", *graded(met), other.seeds)


def gating(evidence: Evidence) -> Finding:
    kinds, relu = {"gated": True, "non-gated": False}, {"activation": "relu", "modification": "none"}
    gated, other = (set(evidence.trainings(gated=kind, **relu)["l1"]) for kind in kinds.values())
    values = sorted(gated & other - {0.0})
    if not values:
        raise Untested("no L1 value has both a gated and a non-gated training")
    l1 = evidence.recommended if evidence.recommended in values else values[0]
    parts, seeds, met = [], [], {}
    for name, kind in kinds.items():
        runs, without = (evidence.trainings(gated=kind, l1=value, **relu) for value in (l1, 0.0))
        common = evidence.paired(name, runs, without)
        before, after = (common.measured("nonzeros", value, gated=kind) for value in (0.0, l1))
        losses = [common.measured("cross_entropy", value, gated=kind) for value in (0.0, l1)]
        ratio = losses[1].value / losses[0].value
        change = f"{significant(before.value)} to {significant(after.value)} non-zeros"
        parts.append(f"{name}: {change}, cross-entropy {signed((ratio - 1) * 100, 1)}")
        seeds += [before.seeds, after.seeds, losses[1].seeds]
        met[f"not met by {name} blocks"] = ratio <= 1.02 and after.value <= before.value / 2
    return Finding(f"{'; '.join(parts)}, at L1 {l1_label(l1)}", *graded(met), min(seeds))


def mitigation(modification: str, evidence: Evidence) -> Finding:
    """Dead neurons, cross-entropy and non-zeros with a mitigation, against none."""
    name, plain_l1 = choose.MODIFICATIONS[modification], evidence.recommended
    runs = evidence.trainings(modification=modification, gated=True)
    if runs.empty:
        raise Untested(f"no training with {name}")
    l1 = float(runs.groupby("l1")["seed"].nunique().idxmax())  # of those with the most seeds the smallest
    others = evidence.trainings(modification="none", activation="relu", gated=True, l1=plain_l1)
    common = evidence.paired(name, where(runs, l1=l1), others)
    # The non-zeros in training: on held-out text, those of some seeds may not have been counted.
    in_training = where(common.results.rows, op="train")
    common = replace(common, results=replace(common.results, rows=in_training))
    (dead_before, dead_after), (loss_before, loss_after), (before, after) = (
        (common.measured(number, plain_l1).value, common.measured(number, l1, modification=modification).value)
        for number in ("dead_fraction", "cross_entropy", "nonzeros")
    )
    met = {
        "not fewer dead neurons": dead_after < dead_before,
        f"cross-entropy {signed((loss_after / loss_before - 1) * 100, 1)}": loss_after <= 1.01 * loss_before,
    }
    ours = (
        f"dead {dead_before:.1%} to {dead_after:.1%}, cross-entropy {loss_before:.3f} to {loss_after:.3f}, non-zeros "
        f"{significant(before)} to {significant(after)}"
    )
    details = (
        f"At L1 {l1_label(plain_l1)} without and {l1_label(l1)} with {name}; non-zeros in the last steps of training.",
    )
    return Finding(ours, *graded(met), common.seeds(plain_l1), details)


def dead(evidence: Evidence) -> Finding:
    l1, bound = evidence.recommended, paper.fact(9, r"more than (\d+)% dead") / 100
    rows = where(evidence.sweep, l1=l1, metric="dead_fraction", layer=None)
    rows = rows[rows["value"].notna() & rows["tokens"].notna()]
    gathered = where(rows, op="nonzeros")
    windows = stats.over_seeds(where(rows, op="train") if gathered.empty else gathered, ["tokens"])
    if windows.empty:
        raise Untested("dead neurons were not counted, or the tokens of a step are not in the rows")
    texts = [
        f"{line.value * 100:.0f}{'' if math.isnan(line.high) else f' ± {(line.high - line.value) * 100:.0f}'}% among "
        f"{int(line.tokens):,} tokens"
        for line in windows.itertuples()
    ]
    share, low, seeds = (float(windows[name].iloc[-1]) for name in ("value", "low", "seeds"))
    verdict, reasons = graded({f"not more than {bound:.0%}": share > bound})
    if verdict == HOLDS and seeds == 2:
        verdict, reasons = CONSISTENT, ["two seeds have no interval"]
    elif verdict == HOLDS and low <= bound:
        verdict, reasons = CONSISTENT, [f"the 95% interval reaches {bound:.0%}"]
    details = [f"Dead: {text}." for text in texts]
    return Finding(f"{texts[-1]}, at L1 {l1_label(l1)}", verdict, reasons, int(seeds), details)


def settling(evidence: Evidence) -> Finding:
    l1 = evidence.recommended
    runs = choose.trainings(where(evidence.sweep, l1=l1))[choose.RUN]
    curves = where(evidence.results.curves, metric="nonzeros").merge(runs, on=choose.RUN)
    if curves.empty:
        raise Untested("no curves of non-zeros")
    mean = curves.groupby("step")["value"].mean()
    last = mean.tail(max(1, len(mean) // 10)).mean()
    unsettled = mean.index[(mean / last - 1).abs() > SETTLED]
    share = (unsettled.max() if len(unsettled) else 0) / mean.index.max()
    met = {"later than a tenth of the training": share <= 0.1, "later than half of it": share <= 0.5}
    return Finding(f"after {share:.0%} of the training, at L1 {l1_label(l1)}", *graded(met), evidence.seeds(l1))
