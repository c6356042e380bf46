"""Claims on the quality of models and on what L1 does to their neurons: trainings, non-zeros and task accuracies."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pandas as pd

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.claims.evidence import (
    CONSISTENT,
    ENOUGH,
    FAILS,
    HOLDS,
    PARTLY,
    SHORT,
    Check,
    Claim,
    Evidence,
    Finding,
    Untested,
)
from analysis.measures import accuracy_half_width, chance, task_accuracies, tasks_above_chance
from analysis.render import device, signed, significant

ACCURACY_LOSS = 0.5  # points: more than the paper's models lose
SETTLED = 0.1  # non-zeros have settled once they stay within 10% of their last value


def _pct(share: float) -> str:
    return f"{significant(share * 100, 2)}%"


def sparsity(evidence: Evidence) -> Check:
    table = paper.table("table3_activations").set_index(["activation", "l1"])
    dense, sparse = table.loc[("relu", 0.0)], table.loc[("relu", 2e-5)]
    silu = table.loc[("silu", 0.0), "nonzeros"]
    yield Claim(
        "Over 99% of the activations become zero while cross-entropy rises by at most 2%",
        f"{sparse['nonzeros']:.0f} of {silu:,.0f} ({_pct(sparse['nonzeros'] / silu)}) active at L1 2e-5, cross-entropy "
        f"{signed((sparse['cross_entropy'] / dense['cross_entropy'] - 1) * 100, 1)}",
        "at the largest L1 that raises cross-entropy by at most 2%, at most 1% of the neurons are active; partly: at "
        "most a quarter as many as without L1",
    )
    l1 = choose.largest_within_tolerance(evidence.sweep)
    if l1 is None:
        raise Untested("no L1 value raises cross-entropy by at most 2%")
    active, before = (evidence.value("nonzeros", value) for value in (l1, 0.0))
    change, width = where(choose.loss_change(evidence.sweep), l1=l1)["value"].mean(), evidence.width
    verdict = HOLDS if active <= 0.01 * width else PARTLY if active <= before / 4 else FAILS
    ours = (
        f"{significant(active)} of {width:,.0f} ({_pct(active / width)}) active at L1 {l1_label(l1)} "
        f"({significant(before)} without L1), cross-entropy {signed(change, 1)}"
    )
    return Finding(ours, evidence.trained, verdict, min(evidence.seeds(0.0, l1), evidence.counted(0.0, l1)))


def unregularised(evidence: Evidence) -> Check:
    count = paper.fact(3, r"(\d+) non-zeros at L1=0")
    yield Claim(
        "ReLU alone, without L1, leaves a sixth of the neurons active",
        f"{count:.0f} of 5,632 ({_pct(count / 5632)})",
        "the share of active neurons differs by at most a factor of 1.5",
    )
    count_of_ours = evidence.value("nonzeros", 0.0)
    share = count_of_ours / evidence.width
    near = max(share / (count / 5632), count / 5632 / share) <= 1.5
    ours = f"{_pct(share)} of {evidence.width:,.0f}"
    return Finding(ours, evidence.trained, HOLDS if near else FAILS, evidence.counted(0.0))


def accuracy(evidence: Evidence) -> Check:
    table = paper.table("table1_scales")
    pairs = table.pivot(index="scale", columns="sparse", values="mean_task_accuracy_pct")
    changes = pairs["yes"] - pairs["no"]
    yield Claim(
        "The recommended L1 costs no accuracy on the seven tasks",
        f"{changes.min():+.1f} to {changes.max():+.1f} points, by scale".replace("-", "−"),
        f"over the tasks on which the model without L1 is above chance, the 95% interval of the difference is above "
        f"−{ACCURACY_LOSS:g} points (reproduced only if these are all seven); consistent: it includes 0",
    )
    scored, recommended = task_accuracies(evidence.sweep), evidence.recommended
    if any(where(scored, l1=l1).empty for l1 in (0.0, recommended)):
        raise Untested(f"the seven tasks were not scored at both L1 = 0 and {l1_label(recommended)}")
    seven = " and ".join(f"{where(scored, l1=l1)['value'].mean():.1f}%" for l1 in (0.0, recommended))
    of_all = f"over all seven, of which the others are not above chance, {seven}; chance {schema.MEAN_CHANCE:.1f}%"
    tasks = tasks_above_chance(where(evidence.sweep, l1=0.0))
    if not tasks:
        raise Untested(f"without L1 no task is above chance ({seven} over all seven; chance {schema.MEAN_CHANCE:.1f}%)")
    runs = task_accuracies(evidence.sweep, tasks)
    dense, sparse = (_mean_accuracy(where(runs, l1=l1)) for l1 in (0.0, recommended))
    ours = f"{dense} without L1, {sparse} with {l1_label(recommended)}"
    if len(tasks) < len(schema.TASKS):
        ours += f", over {', '.join(schema.TASKS[task].title for task in tasks)} ({of_all})"
    change, error = signed(sparse.mean - dense.mean, 1).removesuffix("%"), math.hypot(sparse.error, dense.error)
    ours += f"; difference {change} ± {error:.1f} points"
    surely = _Accuracy(sparse.mean + ACCURACY_LOSS, sparse.error).exceeds(dense)
    best = HOLDS if len(tasks) == len(schema.TASKS) else CONSISTENT
    verdict = best if surely else FAILS if dense.exceeds(sparse) else CONSISTENT
    return Finding(ours, evidence.trained, verdict, evidence.seeds(0.0, recommended, op="evaluate"))


class _Accuracy(NamedTuple):
    """A mean accuracy in percent, and half its 95% interval (`accuracy_half_width`)."""

    mean: float
    error: float

    def exceeds(self, other: _Accuracy) -> bool:
        """Whether it is higher by more than the 95% interval of the difference."""
        return self.mean - other.mean > math.hypot(self.error, other.error)

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.error:.1f}%"


def _mean_accuracy(runs: pd.DataFrame) -> _Accuracy:
    """Of `task_accuracies`."""
    return _Accuracy(runs["value"].mean(), accuracy_half_width(runs))


def sizes(evidence: Evidence) -> Check:
    printed = where(paper.table("table1_scales"), sparse="no")["mean_task_accuracy_pct"]
    yield Claim(
        "Accuracy grows with the model, with and without L1",
        f"{printed.iloc[0]} to {printed.iloc[-1]}% from 0.5B to 2B",
        "of three sizes or more, the largest is better than the smallest by more than the 95% interval of the "
        "difference, without and with the same L1, over the tasks on which the largest without L1 is above chance "
        "(reproduced only if these are all seven); partly: one of the two",
    )
    rows = choose.equally_trained(choose.relu_runs(where(evidence.results.rows, op=("train", "evaluate"))))
    both = (0.0, evidence.recommended)
    comparable = choose.comparable_sizes(rows, evidence.model, evidence.recommended)
    rows = where(rows, model=tuple(comparable.index), l1=both)
    scored = task_accuracies(rows)
    names = [name for name in comparable.index if where(scored, model=name)["l1"].nunique() == len(both)]
    if len(names) < choose.FEWEST_SIZES:
        raise Untested(
            f"needs {choose.FEWEST_SIZES} sizes, trained alike and scored on the seven tasks without L1 and with "
            f"{l1_label(evidence.recommended)}; there are {len(names)}"
        )
    tasks = tasks_above_chance(where(rows, model=names[-1], l1=0.0))
    if not tasks:
        raise Untested(f"accuracies of {names[-1]} without L1 are at chance")
    runs = task_accuracies(rows, tasks)
    found = {name: [_mean_accuracy(where(runs, model=name, l1=l1)) for l1 in both] for name in names}
    ours = "; ".join(f"{name}: {dense} without, {sparse} with" for name, (dense, sparse) in found.items())
    ours += f" (over {', '.join(schema.TASKS[task].title for task in tasks)}; chance {chance(tasks):.1f}%)"
    if len(tasks) < len(schema.TASKS):
        seven = [where(scored, model=name, l1=0.0)["value"].mean() for name in (names[0], names[-1])]
        ours += f"; over all seven {seven[0]:.1f} to {seven[1]:.1f}% without (chance {schema.MEAN_CHANCE:.1f}%)"
    grows = [large.exceeds(small) for small, large in zip(found[names[0]], found[names[-1]], strict=True)]
    trained = choose.trainings(where(rows, model=tuple(names)))
    tokens = significant(trained["tokens_per_parameter"].median(), 2)
    place = (
        f"{', '.join(names)}, with L1 {l1_label(both[1])}, {tokens} tokens per parameter, "
        f"{describe.seeds(trained['seed'])}, {' and '.join(map(device, sorted(set(trained['device']))))}"
    )
    if trained["tokens_per_parameter"].median() < ENOUGH:
        return Finding(ours, place, SHORT)
    seeds = int(trained.groupby(["model", "l1"])["seed"].nunique().min())
    both_grow = HOLDS if len(tasks) == len(schema.TASKS) else CONSISTENT
    return Finding(ours, place, (FAILS, PARTLY, both_grow)[sum(grows)], seeds)


def silu(evidence: Evidence) -> Check:
    table = paper.table("table3_activations").set_index(["activation", "l1"])["cross_entropy"]
    yield Claim(
        "ReLU costs little against SiLU",
        f"{table[('relu', 0.0)] - table[('silu', 0.0)]:+.3f} nats/token without L1",
        "cross-entropy is at most 1% higher",
    )
    runs, own = (evidence.has(activation=name, l1=0.0, gated=True) for name in ("silu", "relu"))
    evidence, place, seeds = evidence.paired("SiLU", runs, own)
    relu, other = evidence.value("cross_entropy", 0.0), evidence.value("cross_entropy", 0.0, activation="silu")
    ours = f"{relu - other:+.3f} nats/token ({relu:.3f} and {other:.3f})".replace("-", "−")
    return Finding(ours, place, HOLDS if relu <= 1.01 * other else FAILS, seeds)


def gating(evidence: Evidence) -> Check:
    table = paper.table("table4_gating").pivot(index="gated", columns="l1", values="mean_task_accuracy_pct")
    change = table[2e-5] - table[0.0]
    yield Claim(
        "Non-gated blocks become sparse, just like gated ones",
        f"accuracy {change['yes']:+.2f} points gated, {change['no']:+.2f} non-gated, at 2e-5".replace("-0", "−0"),
        "with L1, cross-entropy of both rises by at most 2% and non-zeros fall to at most half",
    )
    values = sorted(set(evidence.has(gated=False)["l1"]) & set(evidence.has(gated=True)["l1"]) - {0.0})
    if not values:
        raise Untested("no L1 value has both a gated and a non-gated training")
    l1 = evidence.recommended if evidence.recommended in values else values[0]
    parts, held, seeds = [], [], []
    for gated, name in ((True, "gated"), (False, "non-gated")):
        runs, without = (
            evidence.has(gated=gated, activation="relu", modification="none", l1=value) for value in (l1, 0.0)
        )
        common, _, own = evidence.paired(name, runs, without)
        seeds.append(own)
        loss = [common.value("cross_entropy", value, gated=gated) for value in (0.0, l1)]
        count = [common.value("nonzeros", value, gated=gated) for value in (0.0, l1)]
        parts.append(
            f"{name}: {significant(count[0])} to {significant(count[1])} non-zeros, cross-entropy "
            f"{signed((loss[1] / loss[0] - 1) * 100, 1)}"
        )
        held.append(loss[1] <= 1.02 * loss[0] and count[1] <= count[0] / 2)
    verdict = HOLDS if all(held) else PARTLY if any(held) else FAILS
    place, own, gated = evidence.trained, *(evidence.has(gated=kind, l1=l1)["seed"] for kind in (False, True))
    if set(own) != set(gated):
        place += f"; non-gated: {describe.seeds(own)}"
    return Finding(f"{'; '.join(parts)}, at {l1_label(l1)}", place, verdict, min(seeds))


def settling(evidence: Evidence) -> Check:
    steps = paper.fact(9, r"after about (\d+) steps")
    of = float(paper.table("table2_hyperparameters").set_index("name").loc["steps", "gated"].split("/")[2])
    yield Claim(
        "Non-zeros settle early in training",
        f"after about {steps:,.0f} of {of:,.0f} steps ({steps / of:.0%}), 1.5B",
        "within 10% of their last value after a tenth of the training; partly: after half of it",
    )
    l1 = evidence.recommended
    runs = choose.trainings(where(evidence.sweep, l1=l1))[choose.RUN]
    curves = where(evidence.results.curves, metric="nonzeros").merge(runs, on=choose.RUN)
    if curves.empty:
        raise Untested("no curves of non-zeros")
    mean = curves.groupby("step")["value"].mean()
    last = mean.tail(max(1, len(mean) // 10)).mean()
    unsettled = mean.index[(mean / last - 1).abs() > SETTLED]
    share = (unsettled.max() if len(unsettled) else 0) / mean.index.max()
    verdict = HOLDS if share <= 0.1 else PARTLY if share <= 0.5 else FAILS
    ours = f"after {share:.0%} of the training, at {l1_label(l1)}"
    return Finding(ours, evidence.trained, verdict, evidence.seeds(l1))


def dead(evidence: Evidence) -> Check:
    percent = paper.fact(9, r"more than (\d+)% dead")
    yield Claim(
        "The recommended L1 leaves a large share of the neurons dead",
        f"more than {percent:.0f}%, among the 1,048,576 tokens of a step",
        f"more than {percent:.0f}%, among the largest number of tokens measured",
    )
    l1 = evidence.recommended
    windows = stats.over_seeds(
        where(evidence.sweep, l1=l1, op="nonzeros", metric="dead_fraction", layer=None), ["tokens"]
    )
    if len(windows):
        width = (windows["high"] - windows["value"]).map(
            lambda half: "" if math.isnan(half) else f" ± {half * 100:.0f}"
        )
        parts = [
            f"{line.value * 100:.0f}{own}% among {int(line.tokens):,} tokens"
            for line, own in zip(windows.itertuples(), width, strict=True)
        ]
        share, least = (float(windows[name].iloc[-1]) for name in ("value", "low"))
        seeds = int(windows["seeds"].iloc[-1])
        ours = ", ".join(parts)
    else:
        share = least = evidence.value("dead_fraction", l1)
        seeds = evidence.seeds(l1)
        tokens = where(evidence.sweep, op="train")["tokens"].dropna()
        if tokens.empty:
            raise Untested("how many tokens a step of our trainings has is not in the rows")
        ours = f"{share:.0%} among the {int(tokens.iloc[0]):,} tokens of a step"
    bound = percent / 100
    sure = least > bound and seeds > 2  # the range of two seeds is no interval
    verdict = FAILS if share <= bound else HOLDS if sure or seeds == 1 else CONSISTENT  # one seed: see claims.check
    return Finding(f"{ours}, at {l1_label(l1)}", evidence.trained, verdict, seeds)


def _mitigation(modification: str, statement: str, evidence: Evidence) -> Check:
    """A mitigation against none: dead neurons and cross-entropy."""
    table = paper.table("table5_dead_neurons").set_index(["modification", "sparse"])
    printed, mitigated = table.loc[("none", "yes")], table.loc[(modification, "yes")]
    yield Claim(
        statement,
        f"cross-entropy {printed['cross_entropy']} to {mitigated['cross_entropy']}, non-zeros "
        f"{printed['nonzeros']:.0f} to {mitigated['nonzeros']:.0f}, at L1 {l1_label(mitigated['l1'])}",
        "fewer dead neurons, and cross-entropy at most 1% higher; partly: one of the two",
    )
    runs = evidence.has(modification=modification, gated=True)
    if runs.empty:
        raise Untested(f"no training with {choose.MODIFICATIONS[modification]}")
    l1 = float(runs.groupby("l1")["seed"].nunique().idxmax())  # of those with the most seeds the smallest
    names, own = ("dead_fraction", "cross_entropy", "nonzeros"), evidence.recommended
    without = evidence.has(modification="none", activation="relu", gated=True, l1=own)
    evidence, place, seeds = evidence.paired(choose.MODIFICATIONS[modification], where(runs, l1=l1), without)
    rows, counted = evidence.results.rows, ""
    gathered = [
        set(where(rows, op="nonzeros", model=evidence.model, gated=True, modification=kind, l1=value)["seed"])
        for kind, value in ((modification, l1), ("none", own))
    ]
    if gathered[0] != gathered[1]:  # the same seeds on both sides: those of training, where all were counted
        rows, counted = rows[rows["op"] != "nonzeros"], " in the last steps of training"
        evidence = replace(evidence, results=replace(evidence.results, rows=rows))
    plain = [evidence.value(name, own) for name in names]
    changed = [evidence.value(name, l1, modification=modification) for name in names]
    held = (changed[0] < plain[0]) + (changed[1] <= 1.01 * plain[1])
    ours = (
        f"dead {plain[0]:.1%} to {changed[0]:.1%}, cross-entropy {plain[1]:.3f} to {changed[1]:.3f}, non-zeros "
        f"{significant(plain[2])} to {significant(changed[2])}{counted} (L1 {l1_label(own)} to {l1_label(l1)})"
    )
    return Finding(ours, place, (FAILS, PARTLY, HOLDS)[held], seeds)


reinitialisation = partial(
    _mitigation, "dead_neuron_reinit", "Reinitialising dead neurons revives them at no cost in cross-entropy"
)

warm_up = partial(_mitigation, "l1_warmup", "L1 warm-up avoids dead neurons at no cost in cross-entropy")
