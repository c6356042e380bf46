"""Claims on layers: which are the most active, and how much faster they are."""

from __future__ import annotations

import math

import pandas as pd

from analysis import choose, describe, paper, stats
from analysis.choose import l1_label, where
from analysis.claims.evidence import Evidence, Finding, Untested, barely_trained, graded
from analysis.figures.layers import FEWEST_FOR_R
from analysis.gains import gains
from analysis.render import significant, span

FEWEST_LAYERS = 4  # a profile needs at least so many


def _layers(evidence: Evidence, metric: str, l1: float) -> pd.Series:
    rows = where(evidence.sweep, op="nonzeros", metric=metric, l1=l1)
    means = rows[rows["layer"].notna()].groupby("layer")["value"].mean().dropna()
    if means.empty:
        raise Untested("non-zeros by layer were not gathered")
    return means


def profile(evidence: Evidence) -> Finding:
    l1 = evidence.recommended
    means = _layers(evidence, "nonzeros", l1)
    if len(means) < FEWEST_LAYERS:
        raise Untested(f"non-zeros of {len(means)} layers only; {FEWEST_LAYERS} are needed")
    sparsest, busiest = sorted(int(layer) for layer in means.nsmallest(2).index), int(means.idxmax())
    met = {
        "layers 0 and 1 are not the least active": sparsest == [0, 1],
        "no hump in the first half": 1 < busiest < len(means) / 2,
    }
    ours = f"least active: layers {sparsest[0]} and {sparsest[1]}; most active: layer {busiest} of {len(means)}"
    details = [f"Layer {int(layer)}: {significant(mean)} non-zeros." for layer, mean in means.items()]
    return Finding(ours, *graded(met), evidence.seeds(l1, op="nonzeros"), details)


def maximum(evidence: Evidence) -> Finding:
    l1 = evidence.recommended
    means = _layers(evidence, "nonzeros", l1)
    ratios = (_layers(evidence, "nonzeros_max", l1) / means).dropna()
    if ratios.empty:
        raise Untested("of no layer, both the mean and the largest non-zeros were gathered")
    over = int((ratios > 10).sum())
    met = {f"over 10 times in {over} of {len(ratios)} layers": over > len(ratios) / 2}
    ours = f"{ratios.min():.1f} to {ratios.max():.1f} times, by layer (median {ratios.median():.1f})"
    details = [
        f"Layer {int(layer)}: {ratio:.1f} times (all its neurons: {evidence.width / means[layer]:.1f} times)."
        for layer, ratio in ratios.items()
    ]
    return Finding(ours, *graded(met), evidence.seeds(l1, op="nonzeros"), details + _maximum_of_others(evidence))


def _maximum_of_others(evidence: Evidence) -> list[str]:
    """The same ratio in the median layer of other models, trained longest; they decide nothing."""
    rows = choose.relu_runs(where(evidence.results.rows, op="nonzeros"))
    rows = rows[
        rows["layer"].notna() & (rows["model"] != evidence.model) & (rows["layers"] >= FEWEST_LAYERS) & (rows["l1"] > 0)
    ]
    means = choose.longest_trained(rows).pivot_table(index=["model", "l1", "layer"], columns="metric", values="value")
    if not {"nonzeros", "nonzeros_max"} <= set(means):
        return []
    ratios = (means["nonzeros_max"] / means["nonzeros"]).groupby(level=["model", "l1"]).median().dropna()
    return [
        f"{model} at L1 {l1_label(l1)}: {ratio:.0f} times in the median layer." for (model, l1), ratio in ratios.items()
    ]


def positions(evidence: Evidence) -> Finding:
    table, l1 = evidence.results.nonzeros.get("by_position"), evidence.recommended
    if table is None:
        raise Untested("non-zeros by position were not gathered")
    runs = choose.relu_runs(where(evidence.sweep, op="nonzeros"))[choose.RUN].drop_duplicates()
    counted = where(table, l1=l1).merge(runs, on=choose.RUN)
    mean = counted.groupby("position")["mean"].mean().dropna()
    if mean.empty:
        raise Untested("non-zeros by position were not gathered")
    ratio = mean.iloc[0] / mean.iloc[len(mean) // 2 :].mean()
    trainings = len(counted[choose.RUN].drop_duplicates())
    ours = f"the first has {ratio:.1f} times the non-zeros of the second half, at L1 {l1_label(l1)}"
    met = {"not more than 1.5 times": ratio > 1.5}
    return Finding(ours, *graded(met), trainings)


def timed_layers(evidence: Evidence) -> pd.DataFrame:
    """Gains of the paper's own plan in the layers that were timed in place (bench_forward)."""
    rows = choose.relu_runs(where(evidence.results.rows, op="ffn_forward", plan=("dense", paper.PLAN)))
    data = choose.main_device(gains(rows[rows["layer"].notna() & (rows["model"] != "")], "time"), ["model", "l1"])
    if data.empty:
        raise Untested("the layers of no trained model were timed in place (bench_forward) with a GPU backend")
    return data


def correlation(evidence: Evidence) -> Finding:
    return linearity(timed_layers(evidence))


def linearity(timed: pd.DataFrame) -> Finding:
    """Pearson's r of non-zeros and speed over the layers of each model, L1 value and plan.

    Speed is the reciprocal of a time that grows with the non-zeros, which is nearly linear over a small range only.
    Layers as sparse as the paper's are on average stand beside all layers; they decide nothing."""
    bound, mean = paper.fact(6, r"Pearson r below (-[\d.]+)"), paper.fact(3, r"(\d+) at 2e-5")
    timed = timed[timed["l1"] > 0]
    whole, sparse = _correlations(timed), _correlations(timed[timed["mean_nnz"] <= mean])
    if whole.empty:
        raise Untested(f"no model with at least {FEWEST_FOR_R} timed layers")
    least, most = whole["low"].min(), whole["high"].max()
    met = {
        "over all layers, the interval reaches above −0.9": most < -0.9,
        "it excludes the paper's r": most < -0.9 or least < bound,
    }
    verdict, reasons = graded(met)
    if reasons and len(sparse):
        reasons.append(f"over layers with at most {mean:g} active, r is {span(sparse['r'], _r)}")
    details = [
        f"{line.Index}, {line.layers} {kind}: {_r(line.r)} (95%: {_r(line.low)} to {_r(line.high)})."
        for kind, lines in (("layers", whole), (f"layers with at most {mean:g} non-zeros", sparse))
        for line in lines.itertuples()
    ]
    ours = f"{span(whole['r'], _r)}, by model and L1"
    return Finding(ours, verdict, reasons, None, details, describe.devices(timed["device"]))


def _correlations(timed: pd.DataFrame) -> pd.DataFrame:
    """r with its 95% interval for each model, L1 value and plan with enough layers, each a mean over seeds."""
    lines = {}
    for (model, l1, series), group in timed.groupby(["model", "l1", "series"]):
        layers = group.groupby("layer")[["mean_nnz", "ratio"]].mean()
        r = stats.pearson(layers["mean_nnz"], layers["ratio"])
        if len(layers) >= FEWEST_FOR_R and not math.isnan(r):
            lines[f"{model} at L1 {l1_label(l1)}, {series}"] = (r, *stats.pearson_interval(r, len(layers)), len(layers))
    return pd.DataFrame.from_dict(lines, orient="index", columns=["r", "low", "high", "layers"])


def _r(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def slower_without(evidence: Evidence) -> Finding:
    data = where(timed_layers(evidence), l1=0.0)
    if data.empty:
        raise Untested("no layers of a model without L1 were timed")
    slower, details = data["ratio"] < 1, []
    for (model, backend), group in data.groupby(["model", "backend"]):
        busiest = group.loc[group["mean_nnz"].idxmax()]
        details.append(
            f"{model}, {backend}: slower in {(group['ratio'] < 1).sum()} of {len(group)} layers, together "
            f"{_together(group):.2f} times dense, {significant(group['mean_nnz'].mean())} non-zeros; most active layer "
            f"{busiest['ratio']:.2f} times, {significant(busiest['mean_nnz'])} non-zeros."
        )
    ours = f"slower in {slower.sum()} of {len(data)} layers of {' and '.join(data['model'].unique())}"
    verdict, reasons = graded({"not slower in most layers": slower.mean() > 0.5})
    rows = where(evidence.results.rows, op="ffn_forward", plan=paper.PLAN, l1=0.0)
    reasons.append(barely_trained(choose.longest_trained(rows[rows["layer"].notna()])))
    place = describe.devices(data["device"])
    return Finding(f"{ours}, together {_together(data):.2f} times dense", verdict, reasons, None, details, place)


def _together(data: pd.DataFrame) -> float:
    """Dense time over sparse time of all these layers, one after the other."""
    return (data["value"] * data["ratio"]).sum() / data["value"].sum()
