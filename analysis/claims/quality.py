"""Claims on the quality of models and on what L1 does to their neurons: trainings, non-zeros and task accuracies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.claims.evidence import (
    CONSISTENT,
    ENOUGH,
    FAILS,
    HOLDS,
    INCONSISTENT,
    PARTLY,
    UNTESTABLE,
    Evidence,
    Finding,
    Untested,
    graded,
)
from analysis.measures import accuracy_half_width, chance, nonzeros_rows, task_accuracies, tasks_above_chance
from analysis.render import NOTHING, signed, significant, span

ACCURACY_LOSS = 0.5  # points: more than the paper's models lose
KEEPS_NONZEROS = "dead_neuron_reinit"  # the mitigation that leaves the paper's non-zeros as they are
SETTLED = 0.1  # non-zeros have settled once they stay within 10% of their last value


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
    """The share of active neurons without L1, of every model that was trained long enough."""
    rows = where(evidence.results.rows, op=("train", "nonzeros"), l1=0.0)
    rows = _trained_enough(choose.relu_runs(rows), evidence)
    shares = {}
    for model in choose.by_size(rows["model"]):
        counted = nonzeros_rows(choose.equally_trained(where(rows, model=model))).dropna(subset="intermediate")
        share = counted["value"] / counted["intermediate"].astype("float64")
        shares[model] = stats.of_seeds(counted.assign(value=share))
    known = {model: of_seeds.mean() for model, of_seeds in shares.items() if len(of_seeds)}
    if not known:
        raise Untested("non-zeros without L1, or the number of neurons, are not in the rows")
    theirs = paper.fact(3, r"(\d+) non-zeros at L1=0") / paper.WIDTH
    off = {model: share / theirs for model, share in known.items() if not 1 / 1.5 <= share / theirs <= 1.5}
    reasons = [f"{significant(times, 2)} times the paper's share at {model}" for model, times in off.items()]
    ours = ", ".join(f"{_percent(share)} ({model})" for model, share in known.items())
    seeds = min(len(shares[model]) for model in known)
    return Finding(ours, *_by_model(reasons, len(known)), seeds, place=_place(rows, known))


def _trained_enough(rows: pd.DataFrame, evidence: Evidence) -> pd.DataFrame:
    """The rows of the sweep's model, and of others that were trained on its text for long enough to decide a claim."""
    enough = (rows["tokens_per_parameter"] >= ENOUGH).fillna(False) & rows["text"].isin(set(evidence.sweep["text"]))
    return rows[rows["model"].eq(evidence.model) | enough]


def _place(rows: pd.DataFrame, models: Iterable[str]) -> str:
    """These models, how long they were trained, and on what."""
    trained = choose.trainings(rows[rows["model"].isin(set(models))])
    per = span(trained["tokens_per_parameter"].dropna(), lambda value: significant(value, 2))
    return f"{', '.join(models)}, {per} tokens per parameter, {describe.devices(trained['device'])}"


def _by_model(short: list[str], models: int) -> tuple[str, list[str]]:
    """The verdict on a criterion that each of so many models should meet, and its reasons; `short`: of each that does
    not, how."""
    sizes_only = "one size only" if models == 1 else f"{models} sizes only"
    few = "" if models >= choose.FEWEST_SIZES else sizes_only
    verdict = FAILS if len(short) == models else PARTLY if short else CONSISTENT if few else HOLDS
    return verdict, [*short, few]


class _Accuracy(NamedTuple):
    """A mean accuracy in percent, half its 95% interval (`accuracy_half_width`), and the number of seeds."""

    mean: float
    error: float
    seeds: int

    def exceeds(self, other: _Accuracy, by: float = 0.0) -> bool:
        """Whether it is higher by more than this and the 95% interval of the difference."""
        return self.mean - other.mean - by > math.hypot(self.error, other.error)

    def difference(self, other: _Accuracy) -> str:
        """The difference to `other` with its 95% interval."""
        change = signed(self.mean - other.mean, 1).removesuffix("%")
        return f"{change} ± {math.hypot(self.error, other.error):.1f}"

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
    unseen, none_of_note = _unseen_loss(evidence.sweep, tasks), sparse.exceeds(dense, by=-ACCURACY_LOSS)
    if dense.exceeds(sparse) and not none_of_note:
        verdict, reasons = FAILS, ["the loss exceeds its interval"]
    elif unseen:
        verdict, reasons = UNTESTABLE, [unseen, few]
    elif none_of_note:
        verdict, reasons = CONSISTENT if few else HOLDS, [few]
    else:
        verdict, reasons = CONSISTENT, [f"a loss of {ACCURACY_LOSS:g} points is within the interval", few]
    ours = (
        f"{dense.mean:.1f}% without L1, {sparse.mean:.1f}% with {l1_label(both[1])}; difference "
        f"{sparse.difference(dense)} points"
    )
    details = (names, f"Over these: {dense} without L1, {sparse} with.", f"Over all seven: {over_seven}.")
    return Finding(ours, verdict, reasons, min(dense.seeds, sparse.seeds), details)


def table4() -> pd.DataFrame:
    """The accuracies of the paper's table 4 `without` L1 and `with` the largest value that its text calls free of loss,
    of gated and non-gated models."""
    table, l1 = paper.table("table4_gating"), paper.fact(3, r"no accuracy loss up to about .* to ([\d.e-]+)")
    table = table.assign(gated=table["gated"].map({"yes": "gated", "no": "non-gated"}))
    columns = {"without": where(table, l1=0.0), "with": where(table, l1=l1)}
    return pd.DataFrame({name: of.set_index("gated")["mean_task_accuracy_pct"] for name, of in columns.items()})


def no_loss(_: Evidence) -> Finding:
    """The paper's text against its own table 4; our rows decide nothing."""
    loss = table4()["without"] - table4()["with"]
    if loss.max() <= ACCURACY_LOSS:
        return Finding(NOTHING, HOLDS)
    points = " and ".join(f"{lost:.1f} points ({kind})" for kind, lost in loss.items())
    return Finding(NOTHING, INCONSISTENT, [f"at the upper end its table 4 loses {points}"])


def _unseen_loss(sweep: pd.DataFrame, tasks: tuple[str, ...]) -> str:
    """A remark that the model at the largest L1, whose cross-entropy is too high for the paper, scores no worse than
    the one without L1 beyond the interval: such scores can show no loss. Empty if they can, or without such a model."""
    losses = stats.over_seeds(choose.loss_change(sweep), ["l1"]).set_index("l1")["value"]
    worse = losses[losses > choose.QUALITY_TOLERANCE * 100]
    scored = set(task_accuracies(sweep, tasks)["l1"])
    l1 = max((value for value in worse.index if value in scored), default=None)
    if l1 is None:
        return ""
    dense, sparse = _accuracies(sweep, tasks, (0.0, l1))
    if dense.exceeds(sparse):
        return ""
    return (
        f"at L1 {l1_label(l1)}, cross-entropy {signed(losses[l1], 1)}, the difference is {sparse.difference(dense)} "
        "points: within the noise, too"
    )


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
    """The loss of ReLU against SiLU without L1, paired by seed, of every model that was trained long enough."""
    rows = where(evidence.results.rows, op="train", metric="validation_cross_entropy", layer=None)
    rows = choose.at_full_width(where(rows, gated=True, l1=0.0, modification="none"))
    rows = _trained_enough(rows, evidence)
    training = ["model", "text", "tokens_trained", "seed"]
    losses = rows.pivot_table(index=training, columns="activation", values="value", dropna=False)
    losses = losses.reindex(columns=["relu", "silu"]).dropna()
    if losses.empty:
        raise Untested("no SiLU training with a seed of a ReLU training that is like it")
    means, seeds = losses.groupby("model").mean(), losses.groupby("model").size()
    means = means.loc[choose.by_size(means.index)]
    change = (means["relu"] / means["silu"] - 1) * 100
    over = [f"{signed(value, 1)} at {model}" for model, value in change.items() if value > 1]
    ours = "; ".join(
        f"{model}: {line['relu']:.3f}, with SiLU {line['silu']:.3f} ({signed(change[model], 1)})"
        for model, line in means.iterrows()
    )
    place = _place(rows, list(means.index))
    return Finding(f"cross-entropy of {ours}", *_by_model(over, len(means)), int(seeds.min()), place=place)


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
    counted = where(in_training, metric="nonzeros", layer=None)
    without, with_it = (
        counted.merge(group[choose.RUN]).groupby("seed")["value"].mean() for group in (others, where(runs, l1=l1))
    )
    differences = (with_it - without).dropna()
    change, error = float(differences.mean()), stats.half_width_95(differences.tolist())
    moved = f"non-zeros {f'{change:+.1f}'.replace('-', '−')}{'' if math.isnan(error) else f' ± {error:.1f}'}"
    if modification == KEEPS_NONZEROS:
        met[moved] = change - (0 if math.isnan(error) else error) <= 0
    verdict, reasons = graded(met)
    if modification != KEEPS_NONZEROS and change < 0:
        reasons.append(f"the paper's trade-off is reversed here: {moved}")
    ours = (
        f"dead {dead_before:.1%} to {dead_after:.1%}, cross-entropy {loss_before:.3f} to {loss_after:.3f}, non-zeros "
        f"{significant(before)} to {significant(after)}, L1 {span(pd.Series([plain_l1, l1]), l1_label)}"
    )
    details = (
        f"Without and with {name}; non-zeros in the last steps of training.",
        f"Paired by seed: {moved} (95%).",
    )
    return Finding(ours, verdict, reasons, common.seeds(plain_l1), details)


def dead(evidence: Evidence) -> Finding:
    l1, bound = evidence.recommended, paper.fact(9, r"more than (\d+)% dead") / 100
    rows = where(evidence.sweep, l1=l1, metric="dead_fraction", layer=None).dropna(subset=["value", "tokens"])
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
    met = {"later than a tenth of the training": share <= 0.1}
    return Finding(f"after {share:.0%} of the training, at L1 {l1_label(l1)}", *graded(met), evidence.seeds(l1))
