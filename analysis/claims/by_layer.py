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
MAXIMUM = 10  # times the mean non-zeros, which the most active token exceeds


def profile(evidence: Evidence) -> Finding:
    l1 = evidence.recommended
    rows = where(evidence.sweep, op="nonzeros", metric="nonzeros", l1=l1)
    means = rows[rows["layer"].notna()].groupby("layer")["value"].mean().dropna()
    if len(means) < FEWEST_LAYERS:
        raise Untested(f"non-zeros of {len(means)} layers only; {FEWEST_LAYERS} are needed")
    met = {
        "layers 0 and 1 are not the least active": set(means.nsmallest(2).index) == {0, 1},
        "no hump in the first half": 1 < means.idxmax() < len(means) / 2,
    }
    details = [
        f"{model} at L1 {l1_label(l1)}: {_least_and_most(of.set_index('layer')['mean'])}."
        for (model, l1), of in _over_mean(evidence).groupby(["model", "l1"])
    ]
    return Finding(_least_and_most(means), *graded(met), evidence.seeds(l1, op="nonzeros"), details)


def _least_and_most(means: pd.Series) -> str:
    first, second = sorted(int(layer) for layer in means.nsmallest(2).index)
    return f"least active: layers {first} and {second}; most active: layer {int(means.idxmax())} of {len(means)}"


def maximum(evidence: Evidence) -> Finding:
    """The largest over the mean non-zeros of each layer, of the sweep's model at its recommended L1, and of the paper's
    shapes at the nominal L1 and with as few active neurons as the paper's: how its coefficients act is open
    (`l1_factor`). Other L1 values and models stand in the details and decide nothing."""
    rows, swept = evidence.results.rows, evidence.model
    ratios = _over_mean(evidence)
    shapes = choose.by_size(set(paper.table("table1_scales")["scale"].str.lower()) - {swept})
    layers = {model: where(ratios, model=model, l1=choose.recommended_l1(rows, model)) for model in (swept, *shapes)}
    layers = {model: of_model for model, of_model in layers.items() if len(of_model)}
    if not layers:
        raise Untested("of no layer, both the mean and the largest non-zeros were gathered")
    judged = pd.concat(layers.values())
    active = paper.fact(3, r"(\d+) at 2e-5")
    alike = ratios[ratios["model"].isin(shapes) & (ratios["active"] <= active)]
    few = {f"{model}, few active": of for model, of in alike.groupby("model")}
    met = {name: bool((of["ratio"] > MAXIMUM).mean() > 0.5) for name, of in (layers | few).items()}
    verdict, short = graded(met)
    at_nominal = [name for name in short if name in layers]
    reasons = [
        f"at the recommended L1 not in most layers of {', '.join(at_nominal)}" if at_nominal else "",
        f"with at most {active:g} active, as in the paper, {_over(alike)} layers" if len(alike) else "",
        barely_trained(judged[judged["model"] != swept]),
    ]
    details = [
        f"{model} at L1 {l1_label(l1)}: {_over(of)} layers; {of['ratio'].min():.1f} to {of['ratio'].max():.1f} times, "
        f"median {of['ratio'].median():.1f}."
        for (model, l1), of in ratios.groupby(["model", "l1"])
    ]
    ours = f"layers over {MAXIMUM} times: {', '.join(f'{model} {_over(of)}' for model, of in layers.items())}"
    place = f"{', '.join(layers)}, {describe.devices(judged['device'])}"
    return Finding(ours, verdict, reasons, int(judged["seeds"].min()), details, place)


def _over(layers: pd.DataFrame) -> str:
    return f"{(layers['ratio'] > MAXIMUM).sum()} of {len(layers)}"


def _over_mean(evidence: Evidence) -> pd.DataFrame:
    """`ratio`, the largest over the mean non-zeros, of each layer of the sweep's model and of others, trained longest,
    by model and L1; `active`, the mean over these layers."""
    rows = choose.relu_runs(where(evidence.results.rows, op="nonzeros"))
    others = choose.longest_trained(rows[rows["model"].ne(evidence.model) & (rows["layers"] >= FEWEST_LAYERS)])
    rows = pd.concat([where(evidence.sweep, op="nonzeros"), others])
    rows = rows[rows["layer"].notna() & (rows["l1"] > 0) & rows["value"].notna()]
    layer = ["model", "l1", "layer"]
    values = {name: where(rows, metric=name).groupby(layer)["value"].mean() for name in ("nonzeros", "nonzeros_max")}
    about = rows.groupby(layer).agg(
        seeds=("seed", "nunique"), device=("device", "first"), tokens_per_parameter=("tokens_per_parameter", "first")
    )
    table = about.assign(ratio=values["nonzeros_max"] / values["nonzeros"], mean=values["nonzeros"])
    table = table.dropna(subset="ratio").reset_index()
    return table.assign(active=table.groupby(["model", "l1"])["mean"].transform("mean"))


def positions(evidence: Evidence) -> Finding:
    l1 = evidence.recommended
    table = evidence.results.nonzeros.get("by_position", pd.DataFrame(columns=[*choose.RUN, "l1", "position", "mean"]))
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
    """Gains of the paper's method in the layers that were timed in place (bench_forward)."""
    rows = choose.relu_runs(where(evidence.results.rows, op="ffn_forward", plan=("dense", paper.PLAN)))
    data = choose.main_device(gains(rows[rows["layer"].notna() & (rows["model"] != "")], "time"), ["model", "l1"])
    if data.empty:
        raise Untested("the layers of no trained model were timed in place (bench_forward) with a GPU backend")
    return data


def correlation(evidence: Evidence) -> Finding:
    return linearity(timed_layers(evidence))


def linearity(timed: pd.DataFrame) -> Finding:
    """Pearson's r of non-zeros and the share of time saved, over the layers of each model, L1 value and plan."""
    bound = paper.fact(6, r"Pearson r below (-[\d.]+)")
    intervals = {}  # of each model, L1 value and plan with enough layers, each a mean over seeds
    timed = timed.assign(saved=1 - 1 / timed["ratio"])
    for (model, l1, series), group in timed[timed["l1"] > 0].groupby(["model", "l1", "series"]):
        layers = group.groupby("layer")[["mean_nnz", "saved"]].mean()
        r, count = stats.pearson(layers["mean_nnz"], layers["saved"]), len(layers)
        if count >= FEWEST_FOR_R and not math.isnan(r):
            name = f"{model} at L1 {l1_label(l1)}, {series}"
            intervals[name] = (r, *stats.pearson_interval(r, count), count)
    if not intervals:
        raise Untested(f"no model with at least {FEWEST_FOR_R} timed layers")
    lines = pd.DataFrame.from_dict(intervals, orient="index", columns=["r", "low", "high", "layers"])
    least, most = lines["low"].min(), lines["high"].max()
    met = {
        "the interval reaches above −0.9": most < -0.9,
        "it excludes the paper's r": most < -0.9 or least < bound,
    }
    details = [
        f"{line.Index}, {line.layers} layers: {_r(line.r)} (95%: {_r(line.low)} to {_r(line.high)})."
        for line in lines.itertuples()
    ]
    ours = f"{span(lines['r'], _r)}, by model and L1"
    return Finding(ours, *graded(met), None, details, describe.devices(timed["device"]))


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
