"""Claims on layers: which are the most active, and how much faster they are."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.claims.evidence import FAILS, HOLDS, LISTED, PARTLY, Check, Claim, Evidence, Finding, Untested
from analysis.figures.layers import FEWEST_FOR_R
from analysis.gains import gains
from analysis.render import significant

FEWEST_LAYERS = 4  # a profile needs at least so many


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
    for layer, most in (evidence.width / _layers(evidence, "nonzeros", l1))[ratios.index].items():
        if most <= 10:
            ours += f" (all neurons of layer {int(layer)} would be {most:.1f} times)"
    verdict = HOLDS if (ratios > 10).mean() > 0.5 else FAILS
    seeds = evidence.seeds(l1, op="nonzeros")
    return Finding(ours + _most_active_elsewhere(evidence), evidence.trained, verdict, seeds)


def _most_active_elsewhere(evidence: Evidence) -> str:
    """The same of other models, trained longest, at the L1 value nearest to the one recommended for them and at the
    largest, which decide nothing."""
    rows = choose.relu_runs(where(evidence.results.rows, op="nonzeros", metric=("nonzeros", "nonzeros_max")))
    rows = rows[rows["layer"].notna() & (rows["model"] != evidence.sweep["model"].iloc[0]) & (rows["l1"] > 0)]
    rows = rows[rows["layers"] >= FEWEST_LAYERS]
    texts = []
    for model in choose.model_order(rows["model"]):
        own = where(rows, model=model)
        wanted = choose.recommended_l1(evidence.results.rows, model) or choose.RECOMMENDED_L1
        for l1 in sorted({min(set(own["l1"]), key=lambda value: abs(value - wanted)), own["l1"].max()}):
            of_l1 = where(own, l1=l1)
            longest = of_l1[of_l1["step"].fillna(0).eq(of_l1["step"].fillna(0).max())]
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
    return choose.main_device(gains(rows[rows["layer"].notna() & (rows["model"] != "")], "time"), ["model", "l1"])


def _layer_times(evidence: Evidence) -> pd.DataFrame:
    """With the paper's own plan, which the claims are about."""
    data = _timed_layers(evidence, paper.PLAN)
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
        r, layers = _over_layers(own)
        if layers >= FEWEST_FOR_R and not math.isnan(r):
            found.append((r, *stats.pearson_interval(r, layers), f"{model} at {l1_label(l1)}, {series}"))
    if not found:
        raise Untested(f"no model with at least {FEWEST_FOR_R} timed layers")
    if len(found) <= LISTED:
        ours = "; ".join(f"{_r(r)} (95%: {_r(low)} to {_r(high)}; {text})" for r, low, high, text in found)
    else:
        ours = f"{_r(min(found)[0])} to {_r(max(found)[0])} over {len(found)} combinations of model, L1 value and plan"
    least, most = min(low for _, low, _, _ in found), max(high for _, _, high, _ in found)
    verdict = HOLDS if most < -0.9 else PARTLY if least < bound else FAILS
    return Finding(ours + _r_where_sparse(data), describe.devices(data["device"]), verdict)


def _over_layers(timed: pd.DataFrame) -> tuple[float, int]:
    """Pearson's r of non-zeros and speed over layers, each a mean over seeds, and how many layers there are."""
    layers = timed.groupby("layer")[["mean_nnz", "ratio"]].mean()
    return stats.pearson(layers["mean_nnz"], layers["ratio"]), len(layers)


def _r_where_sparse(data: pd.DataFrame) -> str:
    """The correlation over the layers that are as sparse as the paper's are on average: speed is the reciprocal of a
    time that grows with the non-zeros, which is nearly linear over a small range only. It decides nothing."""
    mean = paper.fact(3, r"(\d+) at 2e-5")
    parts = []
    for (model, l1, _), own in data[(data["l1"] > 0) & (data["mean_nnz"] <= mean)].groupby(["model", "l1", "series"]):
        r, layers = _over_layers(own)
        if layers >= FEWEST_FOR_R and not math.isnan(r):
            parts.append(f"{_r(r)} ({layers} layers of {model} at {l1_label(l1)})")
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
    hot = where(_timed_layers(evidence, schema.HOT_PLANS[paper.PLAN]), l1=0.0)
    parts, slower = [], []
    for (model, backend), own in data.groupby(["model", "backend"]):
        slower += list(own["ratio"] < 1)
        trainings = choose.equally_trained(where(evidence.results.rows, op="train", model=model))
        per = where(trainings, l1=0.0)["tokens_per_parameter"].median()
        trained = "" if pd.isna(per) else f", {significant(per, 2)} tokens per parameter"
        part = (
            f"{_slower(own)} ({model}, {significant(own['mean_nnz'].mean())} non-zeros{trained}, {backend}); most "
            f"active layer, {significant(own['mean_nnz'].max())} non-zeros: {_at_most(own)}"
        )
        with_hot = where(hot, model=model, backend=backend)
        if len(with_hot):
            part += f"; with hot neurons computed densely, {_slower(with_hot)}, most active layer {_at_most(with_hot)}"
        parts.append(part)
    return Finding("; ".join(parts), describe.devices(data["device"]), HOLDS if np.mean(slower) > 0.5 else FAILS)


def _slower(layers: pd.DataFrame) -> str:
    return f"slower in {(layers['ratio'] < 1).sum()} of {len(layers)} layers, together {_together(layers)} times dense"


def _at_most(layers: pd.DataFrame) -> str:
    return f"{layers.loc[layers['mean_nnz'].idxmax(), 'ratio']:.2f}"


def _together(data: pd.DataFrame) -> str:
    """Dense time over sparse time of all these layers, one after the other."""
    return f"{(data['value'] * data['ratio']).sum() / data['value'].sum():.2f}"
