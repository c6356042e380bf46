"""The paper's claims one by one: its number, ours, where it was measured, and whether it holds by a stated criterion.

Our numbers come from the rows, the paper's from `analysis/reference`. A claim without rows is "not tested", with the
reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis import choose, describe, guard, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.figures.layers import FEWEST_FOR_R
from analysis.gains import gains, published
from analysis.load import Results
from analysis.measures import (
    MEASURES,
    Variant,
    accuracy_half_width,
    chance,
    measure,
    plan_keys,
    task_accuracies,
    tasks_above_chance,
)
from analysis.render import device, signed, significant

HOLDS, CONSISTENT, PARTLY, FAILS, UNTESTED = "reproduced", "consistent", "partly", "not reproduced", "not tested"
SHORT = "training too short"
INCONSISTENT = "inconsistent in the paper"
FASTER, SLOWER = "faster than the public kernels", "slower than the public kernels"
ENOUGH = 5.0  # training tokens per parameter; below, a training is too short to decide a claim (the paper has 20)
VERDICTS: dict[str, str] = {
    HOLDS: "our rows meet the criterion",
    CONSISTENT: "they meet it in one seed only, or over tasks chosen by their scores, or a 95% interval given with the "
    "number reaches beyond it",
    PARTLY: "our rows meet part of it",
    FAILS: "our rows do not meet it",
    SHORT: f"our models saw fewer than {ENOUGH:g} tokens per parameter, too few to decide a claim on quality or "
    "sparsity",
    UNTESTED: "the rows needed for it do not exist, for the reason given",
    INCONSISTENT: "the paper's own numbers contradict each other; our rows decide nothing",
    FASTER: "no claim of the paper: ours against the authors' public kernels, which we measured",
    SLOWER: "likewise",
}
APART = (INCONSISTENT, FASTER, SLOWER)  # verdicts that are not about a claim of the paper
FEWEST_LAYERS = 4  # a profile needs at least so many
WHOLE_MODELS = {"model_forward": "forward passes of whole models", "model_training": "training steps of whole models"}
LISTED = 3  # up to so many numbers of a claim are listed; for more, the range
ACCURACY_LOSS = 0.5  # points: more than the paper's models lose
SETTLED = 0.1  # non-zeros have settled once they stay within 10% of their last value
H100_PCIE_WATTS = 350  # power limit in NVIDIA's data sheet of the card that the paper names


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, its number, and the criterion for "reproduced"."""

    claim: str
    paper: str
    criterion: str


@dataclass(frozen=True)
class Finding:
    """Our result; `place`: model, training, device; `seeds`: of the fewest equal trainings that a number is the mean
    of, 0 where it is about a machine."""

    ours: str
    place: str
    verdict: str
    seeds: int = 0


class Untested(Exception):
    """There are no rows to test a claim with; the message names the missing ones."""


# A check yields its claim, then returns its finding or raises Untested.
Check = Generator[Claim, None, Finding]


@dataclass(frozen=True)
class Evidence:
    """The results, and the rows of the model with the most L1 values, equally trained."""

    results: Results
    sweep: pd.DataFrame

    @classmethod
    def of(cls, results: Results) -> Evidence:
        rows = where(choose.relu_runs(results.rows), op=("train", "nonzeros", "evaluate"))
        return cls(results, choose.main_model(choose.equally_trained(rows)) if len(rows) else rows)

    @property
    def model(self) -> str:
        """Name of the sweep's model."""
        if where(self.sweep, op="train", l1=0.0).empty:
            raise Untested("no training without L1 to compare with")
        return self.sweep["model"].iloc[0]

    @property
    def recommended(self) -> float:
        """The recommended L1 value of the sweep's model."""
        l1 = choose.recommended_l1(self.results.rows, self.model)
        if l1 is None or l1 == 0:
            raise Untested("at no L1 value is the held-out cross-entropy within 2%")
        return l1

    @property
    def is_short(self) -> bool:
        """Whether the sweep's trainings are too short to decide a claim."""
        return bool(self.sweep["tokens_per_parameter"].median() < ENOUGH)

    @property
    def trained(self) -> str:
        """Model, training, seeds and device of the sweep."""
        trained = choose.trainings(self.sweep)
        if trained.empty:
            return ""
        return f"{self.model_and_tokens}, {describe.seeds(trained['seed'])}, {describe.devices(trained['device'])}"

    def seeds(self, *values: float, op: str = "train") -> int:
        """How many seeds the trainings of the sweep at these L1 values have, or what `op` made of them; where they
        differ, the fewest."""
        return min(where(self.sweep, op=op, l1=l1)["seed"].nunique() for l1 in values)

    @property
    def model_and_tokens(self) -> str:
        """The sweep's model and how long it was trained."""
        tokens = self.sweep["tokens_per_parameter"].dropna()
        per = f", {significant(tokens.median(), 2)} tokens per parameter" if len(tokens) else ""
        return f"{self.sweep['model'].iloc[0]}{per}"

    def paired(self, variant: str, runs: pd.DataFrame, others: pd.DataFrame) -> tuple[Evidence, str, int]:
        """This evidence, of those seeds only that both the trainings of a variant and those it is compared with have,
        what was trained, and the number of seeds; of all seeds if they have none in common."""
        common = set(runs["seed"]) & set(others["seed"])
        if common:
            own, sweep = (rows[rows["seed"].isin(common)] for rows in (self.results.rows, self.sweep))
            evidence = replace(self, results=replace(self.results, rows=own), sweep=sweep)
            return evidence, evidence.trained, len(common)
        place = f"{self.trained}; {variant}: {describe.seeds(runs['seed'])}"
        return self, place, min(runs["seed"].nunique(), others["seed"].nunique())

    def value(
        self, name: str, l1: float, *, activation: str = "relu", gated: bool = True, modification: str = "none"
    ) -> float:
        """A number of `measures.MEASURES` for one variant of the sweep's model (or its non-gated counterpart)."""
        wanted = Variant(l1, sparse=False, activation=activation, gated=gated, modification=modification)
        names = (self.model, f"{self.model}-nongated")
        value = measure(wanted.of(where(self.results.rows, model=names)), name, wanted).value
        if math.isnan(value):
            raise Untested(f"no {MEASURES[name].title} of {describe_variant(wanted)}")
        return value

    def has(self, **wanted: object) -> pd.DataFrame:
        """Trainings of the sweep's model (or its non-gated counterpart) with these values."""
        names = (self.model, f"{self.model}-nongated")
        return where(choose.trainings(self.results.rows), model=names, **wanted)


def describe_variant(variant: Variant) -> str:
    """For instance "a gated SiLU training without L1"."""
    kind = "gated" if variant.gated else "non-gated"
    activation = {"silu": "SiLU", "relu": "ReLU"}.get(variant.activation, variant.activation)
    at = f"at L1 {l1_label(variant.l1)}" if variant.l1 else "without L1"
    mitigation = "" if variant.modification == "none" else f" with {choose.MODIFICATIONS[variant.modification]}"
    return f"a {kind} {activation} training {at}{mitigation}"


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
    change = where(choose.loss_change(evidence.sweep), l1=l1)["value"].mean()
    width = float(evidence.sweep["intermediate"].dropna().iloc[0])
    verdict = HOLDS if active <= 0.01 * width else PARTLY if active <= before / 4 else FAILS
    ours = (
        f"{significant(active)} of {width:,.0f} ({_pct(active / width)}) active at L1 {l1_label(l1)} "
        f"({significant(before)} without L1), cross-entropy {signed(change, 1)}"
    )
    return Finding(ours, evidence.trained, verdict, evidence.seeds(0.0, l1))


def unregularised(evidence: Evidence) -> Check:
    count = paper.fact(3, r"(\d+) non-zeros at L1=0")
    yield Claim(
        "ReLU alone, without L1, leaves a sixth of the neurons active",
        f"{count:.0f} of 5,632 ({_pct(count / 5632)})",
        "the share of active neurons differs by at most a factor of 1.5",
    )
    count_of_ours = evidence.value("nonzeros", 0.0)
    width = float(evidence.sweep["intermediate"].dropna().iloc[0])
    share = count_of_ours / width
    near = max(share / (count / 5632), count / 5632 / share) <= 1.5
    return Finding(f"{_pct(share)} of {width:,.0f}", evidence.trained, HOLDS if near else FAILS, evidence.seeds(0.0))


def accuracy(evidence: Evidence) -> Check:
    table = paper.table("table1_scales")
    pairs = table.pivot(index="scale", columns="sparse", values="mean_task_accuracy_pct")
    changes = pairs["yes"] - pairs["no"]
    yield Claim(
        "The recommended L1 costs no accuracy on the seven tasks",
        f"{changes.min():+.1f} to {changes.max():+.1f} points, by scale".replace("-", "−"),
        f"over the tasks on which the model without L1 is above chance, the 95% interval of the difference is above "
        f"−{ACCURACY_LOSS:g} points; consistent: it includes 0",
    )
    scored, recommended = task_accuracies(evidence.sweep), evidence.recommended
    if any(where(scored, l1=l1).empty for l1 in (0.0, recommended)):
        raise Untested(f"the seven tasks were not scored at both L1 = 0 and {l1_label(recommended)}")
    seven = " and ".join(f"{where(scored, l1=l1)['value'].mean():.1f}%" for l1 in (0.0, recommended))
    of_all = f"over all seven, of which the others are at chance, {seven}; chance {schema.MEAN_CHANCE:.1f}%"
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
    verdict = FAILS if dense.exceeds(sparse) else HOLDS if surely else CONSISTENT
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
    rows = where(evidence.results.rows, model=evidence.model, l1=l1, op="nonzeros", metric="dead_fraction", layer=None)
    windows = stats.over_seeds(choose.relu_runs(rows), ["tokens"])
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
    verdict = FAILS if share <= bound else CONSISTENT if least <= bound else HOLDS
    return Finding(f"{ours}, at {l1_label(l1)}", evidence.trained, verdict, seeds)


def _layers(evidence: Evidence, metric: str, l1: float) -> pd.Series:
    rows = where(evidence.sweep, op="nonzeros", metric=metric, l1=l1)
    means = rows[rows["layer"].notna()].groupby("layer")["value"].mean().dropna()
    if means.empty:
        raise Untested("non-zeros by layer were not gathered")
    return means


def profile(evidence: Evidence) -> Check:
    yield Claim(
        "The first two layers are the least active, with a hump in the first half",
        "at 2e-5, 28 layers",
        "layers 0 and 1 are the least active and the most active layer is another one of the first half; partly: one "
        "of the two",
    )
    means = _layers(evidence, "nonzeros", evidence.recommended)
    if len(means) < FEWEST_LAYERS:
        raise Untested(f"non-zeros of {len(means)} layers only, wanted {FEWEST_LAYERS} or more")
    sparsest, busiest = sorted(int(layer) for layer in means.nsmallest(2).index), int(means.idxmax())
    found = (sparsest == [0, 1]) + (1 < busiest < len(means) / 2)
    ours = f"least active: layers {sparsest[0]} and {sparsest[1]}; most active: layer {busiest} of {len(means)}"
    return Finding(
        ours, evidence.trained, (FAILS, PARTLY, HOLDS)[found], evidence.seeds(evidence.recommended, op="nonzeros")
    )


def maximum(evidence: Evidence) -> Check:
    yield Claim(
        "The most active token has over ten times the mean non-zeros",
        "more than 10 times",
        "more than 10 times in most layers",
    )
    l1 = evidence.recommended
    ratios = (_layers(evidence, "nonzeros_max", l1) / _layers(evidence, "nonzeros", l1)).dropna()
    if ratios.empty:
        raise Untested("of no layer, both the mean and the largest non-zeros were gathered")
    ours = f"{ratios.min():.1f} to {ratios.max():.1f} times, by layer"
    width = evidence.sweep["intermediate"].dropna().iloc[0]
    for layer, most in (width / _layers(evidence, "nonzeros", l1))[ratios.index].items():
        if most <= 10:
            ours += f" (all neurons of layer {int(layer)} would be {most:.1f} times)"
    verdict = HOLDS if ratios.median() > 10 else FAILS
    seeds = evidence.seeds(l1, op="nonzeros")
    return Finding(ours + _most_active_elsewhere(evidence), evidence.trained, verdict, seeds)


def _most_active_elsewhere(evidence: Evidence) -> str:
    """The same of other models at the L1 value nearest to the one recommended for them, trained longest, which decide
    nothing."""
    rows = choose.relu_runs(where(evidence.results.rows, op="nonzeros", metric=("nonzeros", "nonzeros_max")))
    rows = rows[rows["layer"].notna() & (rows["model"] != evidence.sweep["model"].iloc[0]) & (rows["l1"] > 0)]
    rows = rows[rows["layers"] >= FEWEST_LAYERS]
    texts = []
    for model in choose.model_order(rows["model"]):
        own = where(rows, model=model)
        wanted = choose.recommended_l1(evidence.results.rows, model) or choose.RECOMMENDED_L1
        l1 = min(set(own["l1"]), key=lambda value: abs(value - wanted))
        own = where(own, l1=l1)
        longest = own[own["step"].fillna(0).eq(own["step"].fillna(0).max())]
        means = longest.groupby(["metric", "layer"])["value"].mean().unstack("metric")
        if {"nonzeros", "nonzeros_max"} <= set(means):
            ratio = (means["nonzeros_max"] / means["nonzeros"]).median()
            texts.append(f"{ratio:.0f} times in {model} at {l1_label(l1)}")
    return f"; in the median layer, {', '.join(texts)}" if texts else ""


def positions(evidence: Evidence) -> Check:
    yield Claim(
        "The first positions of a sequence are far more active",
        "far more",
        "more than 1.5 times the non-zeros of the second half",
    )
    table = evidence.results.nonzeros.get("by_position")
    if table is None:
        raise Untested("non-zeros by position were not gathered")
    own = choose.relu_runs(where(evidence.sweep, op="nonzeros"))[choose.RUN].drop_duplicates()
    counted = where(table, l1=evidence.recommended).merge(own, on=choose.RUN)
    mean = counted.groupby("position")["mean"].mean().dropna()
    if mean.empty:
        raise Untested("non-zeros by position were not gathered")
    ratio = mean.iloc[0] / mean.iloc[len(mean) // 2 :].mean()
    ours = f"the first has {ratio:.1f} times the non-zeros of the second half, at L1 {l1_label(evidence.recommended)}"
    runs = counted[choose.RUN].drop_duplicates().shape[0]
    ours += f", in {runs} trainings" if runs != evidence.seeds(evidence.recommended) else ""
    return Finding(ours, evidence.trained, HOLDS if ratio > 1.5 else FAILS, runs)


def _timed_layers(evidence: Evidence, plan: str) -> pd.DataFrame:
    """Gains of layers that were timed in place (bench_forward)."""
    rows = choose.relu_runs(where(evidence.results.rows, op="ffn_forward", plan=("dense", plan)))
    return choose.main_device(gains(rows[rows["layer"].notna() & (rows["model"] != "")], "time"))


def _layer_times(evidence: Evidence) -> pd.DataFrame:
    """With the paper's own plan, which the claims are about."""
    data = _timed_layers(evidence, "twell")
    if data.empty:
        raise Untested("the layers of no trained model were timed in place (bench_forward) with a GPU backend")
    return data


def correlation(evidence: Evidence) -> Check:
    bound = paper.fact(6, r"Pearson r below (-[\d.]+)")
    yield Claim(
        "A layer's speedup is linear in its mean non-zeros",
        f"Pearson's r below {bound:g}".replace("-", "−"),
        f"r is below −0.9 with its 95% interval (Fisher), with {FEWEST_FOR_R} layers or more; partly: the interval "
        "includes the paper's r",
    )
    data = _layer_times(evidence)
    found = []
    for (model, l1, series), own in data[data["l1"] > 0].groupby(["model", "l1", "series"]):
        r = stats.pearson(own["mean_nnz"], own["ratio"])
        if own["layer"].nunique() >= FEWEST_FOR_R and not math.isnan(r):
            found.append((r, *stats.pearson_interval(r, len(own)), f"{model} at {l1_label(l1)}, {series}"))
    if not found:
        raise Untested(f"no model with at least {FEWEST_FOR_R} timed layers")
    if len(found) <= LISTED:
        ours = "; ".join(f"{_r(r)} (95%: {_r(low)} to {_r(high)}; {text})" for r, low, high, text in found)
    else:
        ours = f"{_r(min(found)[0])} to {_r(max(found)[0])} over {len(found)} combinations of model, L1 value and plan"
    least, most = min(low for _, low, _, _ in found), max(high for _, _, high, _ in found)
    verdict = HOLDS if most < -0.9 else PARTLY if least < bound else FAILS
    return Finding(ours + _r_where_sparse(data), device(data["device"].iloc[0]), verdict)


def _r_where_sparse(data: pd.DataFrame) -> str:
    """The correlation over the layers that are as sparse as the paper's are on average: speed is the reciprocal of a
    time that grows with the non-zeros, which is nearly linear over a small range only. It decides nothing."""
    mean = paper.fact(3, r"(\d+) at 2e-5")
    parts = []
    for (model, l1, _), own in data[(data["l1"] > 0) & (data["mean_nnz"] <= mean)].groupby(["model", "l1", "series"]):
        r = stats.pearson(own["mean_nnz"], own["ratio"])
        if own["layer"].nunique() >= FEWEST_FOR_R and not math.isnan(r):
            parts.append(f"{_r(r)} ({own['layer'].nunique()} layers of {model} at {l1_label(l1)})")
    return f"; where a layer has at most {mean:g} non-zeros, the paper's mean: {', '.join(parts)}" if parts else ""


def _r(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def slower_without(evidence: Evidence) -> Check:
    yield Claim(
        "Without L1 the sparse kernels are slower than dense",
        "negative speedup",
        "with the paper's plan, slower in most layers at L1 = 0",
    )
    data = where(_layer_times(evidence), l1=0.0)
    if data.empty:
        raise Untested("no layers of a model without L1 were timed")
    hot = where(_timed_layers(evidence, schema.HOT_PLANS["twell"]), l1=0.0)
    parts, slower = [], []
    for (model, backend), own in data.groupby(["model", "backend"]):
        slower += list(own["ratio"] < 1)
        per = where(evidence.results.rows, op="train", model=model, l1=0.0)["tokens_per_parameter"].median()
        trained = "" if pd.isna(per) else f", {significant(per, 2)} tokens per parameter"
        part = (
            f"{_slower(own)} ({model}, {significant(own['mean_nnz'].mean())} non-zeros{trained}, {backend}); most "
            f"active layer, {significant(own['mean_nnz'].max())} non-zeros: {_at_most(own)}"
        )
        with_hot = where(hot, model=model, backend=backend)
        if len(with_hot):
            part += f"; with hot neurons computed densely, {_slower(with_hot)}, most active layer {_at_most(with_hot)}"
        parts.append(part)
    return Finding("; ".join(parts), device(data["device"].iloc[0]), HOLDS if np.mean(slower) > 0.5 else FAILS)


def _slower(layers: pd.DataFrame) -> str:
    return f"slower in {(layers['ratio'] < 1).sum()} of {len(layers)} layers, together {_together(layers)} times dense"


def _at_most(layers: pd.DataFrame) -> str:
    return f"{layers.loc[layers['mean_nnz'].idxmax(), 'ratio']:.2f}"


def _together(data: pd.DataFrame) -> str:
    """Dense time over sparse time of all these layers, one after the other."""
    return f"{(data['value'] * data['ratio']).sum() / data['value'].sum():.2f}"


def _speed(op: str, metric: str, statement: str, evidence: Evidence) -> Check:
    """A gain of whole models over dense: larger is better for throughput, smaller for the other metrics."""
    sign = 1 if metric in schema.LARGER_IS_BETTER else -1
    printed = published(op)[["model", "l1", metric]].rename(columns={metric: "published"})
    yield Claim(
        statement,
        f"{signed(printed['published'].min())} to {signed(printed['published'].max())}, by scale and L1",
        "we timed at least half of the paper's pairs of scale and L1, and at each of them our gain (over the fastest "
        "dense form of the same run) is at least the paper's (over eager transformers); partly: a gain beyond its "
        "spread, or over eager transformers one that is at least the paper's",
    )
    rows = choose.relu_runs(where(evidence.results.rows, op=op))
    data = gains(rows, metric)
    if data.empty:
        raise Untested(f"{WHOLE_MODELS[op]} were not timed with a GPU backend")
    # L1 = 0 is the subject of `slower_without`. Of each model and L1 value, the best plan.
    data = data[data["l1"] != 0].assign(gain=lambda rows: sign * rows["percent"])
    if data.empty:
        raise Untested(f"{WHOLE_MODELS[op]} were timed at L1 = 0 only")
    best = data.loc[data.groupby(["model", "l1"], dropna=False)["gain"].idxmax()]
    best = best.assign(uncompiled=_uncompiled(best, data))
    best = best.merge(printed, on=["model", "l1"], how="left").sort_values("gain", ascending=False, kind="stable")
    best = best.assign(trained=_lengths(best, evidence.results.rows))
    same, other = best[best["published"].notna()], best[best["published"].isna()]
    reached = 2 * len(same) >= len(printed) and bool((same["gain"] >= sign * same["published"]).all())
    parts = [_gains(same, f"at {len(same)} of the paper's {len(printed)} pairs of scale and L1")] if len(same) else []
    parts += [_gains(other, "at pairs without a number in the paper")] if len(other) else []
    nearest = best["percent_low"] if sign > 0 else best["percent_high"]  # of the spread, to no change; memory has none
    surely = sign * nearest.fillna(best["percent"]) > 0
    eager = sign * best["eager_percent"] >= sign * best["published"]
    verdict = HOLDS if reached else PARTLY if bool((surely | eager).any()) else FAILS
    return Finding("; ".join(parts), device(best["device"].iloc[0]), verdict)


def _uncompiled(best: pd.DataFrame, data: pd.DataFrame) -> list[float]:
    """Against eager transformers, what each of `best` reached with nothing compiled, in the same run, if it was."""
    eager = dict(zip(plan_keys(data), data["eager_percent"], strict=True))
    plain = best.assign(backend=best["backend"].str.removesuffix(schema.COMPILED))
    return [
        eager.get(key, math.nan) if was.endswith(schema.COMPILED) else math.nan
        for key, was in zip(plan_keys(plain), best["backend"], strict=True)
    ]


def _gains(best: pd.DataFrame, at: str) -> str:
    """Gains in words, the largest first; of many, the range and both ends."""
    if len(best) <= LISTED:
        return f"{at}: {', '.join(_gain(line) for _, line in best.iterrows())}"
    changes = best["percent"]
    return (
        f"{at}: {signed(changes.min())} to {signed(changes.max())}, at best {_gain(best.iloc[0])}, at worst "
        f"{_gain(best.iloc[-1])}"
    )


def _gain(line: pd.Series) -> str:
    eager = "" if pd.isna(line["eager_percent"]) else f", against eager {signed(line['eager_percent'])}"
    if not pd.isna(line["uncompiled"]):
        eager += f" (with nothing compiled {signed(line['uncompiled'])})"
    digits = int(signed(line["percent"]) == signed(line["published"]))
    beside = "" if pd.isna(line["published"]) else f", the paper {signed(line['published'], digits)}"
    at = f"{line['model']} at {l1_label(line['l1'])}, {significant(line['mean_nnz'], 2)} non-zeros{line['trained']}"
    return f"{signed(line['percent'], digits)}{eager}{beside} ({at})"


def _lengths(timed: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """How long each timed model was trained: tokens per parameter if these are fewer than ENOUGH, or the steps of a
    checkpoint whose training has no rows."""
    trained = choose.trainings(rows)
    texts = []
    for line in timed.itertuples():
        per = where(trained, model=line.model, l1=line.l1, step=line.step)["tokens_per_parameter"].dropna()
        if len(per):
            texts.append(f", {significant(per.max(), 2)} tokens per parameter" if per.max() < ENOUGH else "")
        else:
            texts.append("" if pd.isna(line.step) else f", after {int(line.step):,} steps only")
    return texts


forward_speed = partial(_speed, "model_forward", "throughput", "The forward pass is faster")
forward_energy = partial(_speed, "model_forward", "energy", "The forward pass takes less energy")
training_speed = partial(_speed, "model_training", "throughput", "Training is faster")
training_memory = partial(_speed, "model_training", "peak_memory", "Training takes less memory")


def _blocks(op: str, words: str, tokens: int, evidence: Evidence) -> Check:
    known = where(paper.table("published_kernels_h200"), op=op, tokens=tokens, mean_nnz=29).iloc[0]
    yield Claim(
        f"One block, {words}, at 29 non-zeros and {tokens:,} tokens (their public kernels, measured by us on an "
        f"{paper.PUBLISHED_KERNELS_ON})",
        f"{known['ratio']:.2f} times the speed of dense",
        "no claim of the paper: are our kernels at least as fast?",
    )
    rows = evidence.results.rows
    rows = where(rows[rows["pattern"].str.startswith("synthetic")], op=op, tokens=tokens, gated=True)
    rows = choose.whole_function(choose.made_for_speed(rows))
    same = rows[rows["device"].str.contains(paper.PUBLISHED_KERNELS_ON)]
    data = gains(choose.main_device(rows if same.empty else same), "time")
    data = where(data[data["mean_nnz"].round() == 29], hidden=2048, intermediate=5632)
    if data.empty:
        raise Untested("no row of this size")
    best = data.groupby("series")["ratio"].median().sort_values(ascending=False)
    ours = ", ".join(f"{ratio:.2f} with {series}" for series, ratio in best.items())
    return Finding(ours, device(data["device"].iloc[0]), FASTER if best.iloc[0] >= known["ratio"] else SLOWER)


forward_block = partial(_blocks, "ffn_forward", "forward", 131072)
training_block = partial(_blocks, "ffn_training", "forward and backward", 16384)


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
    parts, held = [], []
    for gated, name in ((True, "gated"), (False, "non-gated")):
        loss = [evidence.value("cross_entropy", l1, gated=gated) for l1 in (0.0, values[0])]
        count = [evidence.value("nonzeros", l1, gated=gated) for l1 in (0.0, values[0])]
        parts.append(
            f"{name}: {significant(count[0])} to {significant(count[1])} non-zeros, cross-entropy "
            f"{signed((loss[1] / loss[0] - 1) * 100, 1)}"
        )
        held.append(loss[1] <= 1.02 * loss[0] and count[1] <= count[0] / 2)
    verdict = HOLDS if all(held) else PARTLY if any(held) else FAILS
    place, own, gated = evidence.trained, *(evidence.has(gated=kind, l1=values[0])["seed"] for kind in (False, True))
    if set(own) != set(gated):
        place += f"; non-gated: {describe.seeds(own)}"
    seeds = min(own.nunique(), gated.nunique())
    return Finding(f"{'; '.join(parts)}, at {l1_label(values[0])}", place, verdict, seeds)


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
    l1 = float(runs["l1"].min())
    names, own = ("dead_fraction", "cross_entropy", "nonzeros"), evidence.recommended
    without = evidence.has(modification="none", activation="relu", gated=True, l1=own)
    evidence, place, seeds = evidence.paired(choose.MODIFICATIONS[modification], where(runs, l1=l1), without)
    rows, counted = evidence.results.rows, ""
    if where(rows, op="nonzeros", model=evidence.model, modification=modification).empty and len(
        where(rows, op="nonzeros", model=evidence.model, modification="none", l1=own)
    ):  # like with like: both as counted in training
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


def devices(evidence: Evidence) -> Check:
    yield Claim(
        "The training speedup is larger on an RTX PRO 6000 than on an H100 PCIe", "larger", "larger on a second device"
    )
    timed = choose.made_for_speed(where(evidence.results.rows, op="model_training"))
    names = sorted(set(timed["device"]))
    if not names:
        raise Untested("no GPU rows")
    kinds = ", ".join(map(device, names))
    raise Untested(f"training steps of whole models on one kind of GPU only ({kinds}); figure 12 has one block on two")


def power(evidence: Evidence) -> Check:
    table = paper.table("table1_scales")
    watts = table["forward_tokens_per_ms"] * table["energy_mj_per_token"]
    yield Claim(
        f"The forward pass was measured on an H100 PCIe (a card limited to {H100_PCIE_WATTS} W)",
        f"the power in table 1, tokens/ms times mJ/token, is {watts.min():.0f} to {watts.max():.0f} W",
        f"the power in the paper's table is at most {H100_PCIE_WATTS} W (a check of the paper's own numbers)",
    )
    rows = choose.made_for_speed(where(evidence.results.rows, op=("model_forward", "model_training")))
    of_one = ["study", "item", "pattern", "device", "op", "backend", "plan", "tokens"]
    both = rows.pivot_table(index=of_one, columns="metric", values="value")
    own = (both["throughput"] * both["energy"]).dropna() if {"throughput", "energy"} <= set(both) else pd.Series()
    names = " and ".join(map(device, sorted(set(rows["device"]))))
    ours = f"our forward passes and training steps: {own.min():.0f} to {own.max():.0f} W on {names}" if len(own) else ""
    return Finding(ours or "–", "table 1 of the paper", HOLDS if watts.max() <= H100_PCIE_WATTS else INCONSISTENT)


CHECKS: tuple[Callable[[Evidence], Check], ...] = (
    sparsity, unregularised, accuracy, sizes, silu, gating, dead, reinitialisation, warm_up, settling, profile, maximum,
    positions, correlation, slower_without, forward_speed, forward_energy, training_speed, training_memory, devices,
    power, forward_block, training_block,
)  # fmt: skip


def check(one: Callable[[Evidence], Check], evidence: Evidence) -> tuple[Claim, Finding]:
    """A claim and its finding; for a claim that could not be tested, the reason."""
    steps = one(evidence)
    claim = next(steps)
    try:
        next(steps)
    except StopIteration as end:
        finding: Finding = end.value
    except Untested as absent:
        return claim, Finding(str(absent), "", UNTESTED)
    except guard.DATA_ERRORS as error:
        reason = guard.report(f"claim {claim.claim!r}", error)
        return claim, Finding(f"cannot be computed from these rows ({reason})", "", UNTESTED)
    if evidence.is_short and finding.place.startswith(evidence.model_and_tokens):
        return claim, replace(finding, verdict=SHORT)
    if finding.verdict == HOLDS and finding.seeds == 1:
        return claim, replace(finding, verdict=CONSISTENT)
    return claim, finding


@guard.table
def table(results: Results) -> pd.DataFrame:
    """One line for each claim: claim, paper, ours, where, verdict, criterion."""
    evidence = Evidence.of(results)
    found = [check(one, evidence) for one in CHECKS]
    return pd.DataFrame(
        [
            {
                "claim": claim.claim,
                "paper": claim.paper,
                "ours": finding.ours,
                "where": finding.place,
                "verdict": finding.verdict,
                "reproduced if": claim.criterion,
            }
            for claim, finding in found
        ]
    )
