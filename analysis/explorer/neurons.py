"""Firing of neurons: how often each one fires, which fire together, how rates change in training, and which die."""

from __future__ import annotations

import math
from collections.abc import Iterator

import altair as alt
import numpy as np
import pandas as pd

from analysis.choose import where
from analysis.explorer import masks
from analysis.explorer.chart import Sketch, choice, layer_choice, nested, records, short, view, zoom
from analysis.explorer.runs import about, initial, layer_name, of_run
from analysis.figures.drawn import NotMeasured
from analysis.figures.layers import GATHER
from analysis.load import Results

RANKS = 96  # points of a line over the neurons of a layer
TOGETHER = 36  # neurons of the map of those that fire together
DISTANCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens
FOLLOWED = 48  # neurons of a layer whose rates in training are shown
MOST_RUNS = 3  # of charts with data for pairs of neurons, or for neurons and steps: a notebook holds all of it


@view("explorer-rates", "Non-zeros of the most active neurons", "by_neuron")
def firing_rates(results: Results, runs: pd.DataFrame) -> Sketch:
    parts = []
    for (label, layer), of_layer in of_run(results, "by_neuron", runs).groupby(["label", "layer"], sort=False):
        rate = of_layer["rate"].sort_values(ascending=False, kind="stable").to_numpy()
        at = np.unique(np.linspace(1, len(rate), RANKS).round().astype(int)) - 1
        share = 100 * rate.cumsum()[at] / (rate.sum() or 1)
        points = {"rank": 100 * (at + 1) / len(rate), "rate": rate[at] * 100, "share": share}
        parts.append(pd.DataFrame(points).assign(run=label, layer=layer))
    data = pd.concat(parts, ignore_index=True)
    chart = (
        alt.Chart(nested(data, "run", "layer"), width=560, height=300)
        .transform_filter("datum.run === run")
        .transform_flatten(["rank", "rate", "share"])
        .mark_line(point={"size": 12})
        .encode(
            x=alt.X("rank:Q", title="neurons, the most active first (% of N)"),
            y=alt.Y("share:Q", title="share of the non-zeros (%)"),
            color=alt.Color("layer:O", scale=alt.Scale(scheme="viridis")),
            tooltip=["layer:O", "rank:Q", "share:Q", alt.Tooltip("rate:Q", title="fires for (% of the tokens)")],
        )
        .add_params(choice("run", runs["label"], initial(results, runs)), zoom("rate_zoom"))
    )
    return Sketch(chart, about(results, runs), ("run",))


# --- which fire together ----------------------------------------------------------------------------------------------


@view("explorer-together", "Which neurons fire together", "masks", "by_neuron")
def coactivation(results: Results, runs: pd.DataFrame) -> Sketch:
    runs, left_out = _first(runs)
    rows = []
    for label, layer, mask_TN, _ in _masks(results, runs):
        index_n, phi_nn = masks.correlation(mask_TN)
        chosen = masks.strongest(phi_nn, TOGETHER)
        names, rate = index_n[chosen].tolist(), mask_TN[:, index_n[chosen]].mean(0)
        r = [[round(float(value), 2) for value in phi_nn[neuron, chosen]] for neuron in chosen]
        lists = {"neurons": names, "rates": [short(value * 100) for value in rate], "places": list(range(len(names)))}
        rows.append({"run": label, "layer": layer_name(layer), "number": layer, "rows": r} | lists)
    if not rows:
        raise NotMeasured("a layer with neurons that fire for some of the tokens", GATHER)
    data, first = pd.DataFrame(rows), initial(results, runs)
    chart = (
        alt.Chart(records(data), width=460, height=460)
        .transform_filter("datum.run === run && datum.layer === layer")
        .transform_flatten(["rows", "neurons", "rates", "places"], as_=["row", "neuron", "rate", "place"])
        .transform_flatten(["row", "neurons", "places"], as_=["r", "other", "column"])
        .mark_rect()
        .encode(
            x=alt.X("column:O", title="neuron", axis=alt.Axis(labels=False, ticks=False)),
            y=alt.Y("place:O", title="neuron", axis=alt.Axis(labels=False, ticks=False)),
            color=alt.Color(
                "r:Q", scale=alt.Scale(scheme="blueorange", domain=[-1, 1], domainMid=0), title="correlation"
            ),
            tooltip=[
                alt.Tooltip("neuron:Q", format="d"),
                alt.Tooltip("other:Q", title="with neuron", format="d"),
                alt.Tooltip("r:Q", title="correlation"),
                alt.Tooltip("rate:Q", title="first fires for (% of the tokens)"),
            ],
        )
        .add_params(choice("run", runs["label"], first), layer_choice(data["number"], where(data, run=first)["number"]))
    )
    caption = (
        f"The {TOGETHER} neurons of the layer with the strongest partners, ordered so that neurons that fire together "
        f"are neighbours. Colour: correlation of firing (phi) over {_tokens(results, runs)} tokens. Neurons that fire "
        f"for less than {masks.RAREST:.0%} or more than {masks.MOST_FREQUENT:.0%} of them are left out.{left_out}"
    )
    return Sketch(chart, caption)


@view("pairs", "Strongest pairs", "masks", "by_neuron")
def pairs(results: Results, runs: pd.DataFrame) -> pd.DataFrame:
    """For the run that charts show first: each layer's number of neurons with a partner, and its strongest pair."""
    first = runs[runs["label"] == initial(results, runs)]
    rows = []
    for label, layer, mask_TN, _ in _masks(results, first):
        index_n, phi_nn = masks.correlation(mask_TN)
        row = {"run": label, "layer": layer, "neurons": mask_TN.shape[1], "compared": len(index_n)}
        for bound in (0.3, 0.6, 0.9):
            row[f"with a partner above {bound}"] = int((phi_nn > bound).any(1).sum()) if len(index_n) else 0
        if len(index_n) > 1:
            a, b = np.unravel_index(int(phi_nn.argmax()), phi_nn.shape)
            row["strongest pair"] = f"{index_n[a]} and {index_n[b]} ({phi_nn[a, b]:.2f})"
        rows.append(row)
    return pd.DataFrame(rows)


@view("explorer-overlap", "How many active neurons two tokens share", "masks", "by_neuron")
def overlap(results: Results, runs: pd.DataFrame) -> Sketch:
    rows = []
    for label, layer, mask_TN, position_T in _masks(results, runs):
        found = masks.overlap(mask_TN, position_T, DISTANCES)
        far = found.pop(0, math.nan)
        for distance, near in found.items():
            rows.append({"run": label, "layer": layer, "distance": distance, "near": near * 100, "far": far * 100})
    if not rows:
        raise NotMeasured("masks of two tokens of one sequence", GATHER)
    base = (
        alt.Chart(records(pd.DataFrame(rows)), width=560, height=300)
        .transform_filter("datum.run === run")
        .encode(
            x=alt.X("distance:Q", scale=alt.Scale(type="log", base=2), title="distance (tokens, log)"),
            color=alt.Color("layer:O", scale=alt.Scale(scheme="viridis")),
            tooltip=[
                "layer:O",
                "distance:Q",
                alt.Tooltip("near:Q", title="shared (%)"),
                alt.Tooltip("far:Q", title="by chance (%)"),
            ],
        )
    )
    near = base.mark_line(point=True).encode(y=alt.Y("near:Q", title="shared of the neurons active in either (%)"))
    far = base.mark_line(strokeDash=[4, 3]).encode(y="far:Q")
    chart = near.add_params(zoom("overlap_zoom")) + far
    chart = chart.add_params(choice("run", runs["label"], initial(results, runs)))
    caption = (
        f"Jaccard overlap, mean over pairs of {_tokens(results, runs)} tokens; dashed: two tokens from distant parts "
        "of the text (chance). The excess over a layer's dashed line is what neighbouring tokens share."
    )
    return Sketch(chart, caption, ("run",))


def _masks(results: Results, runs: pd.DataFrame) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """For every run and layer: label, layer, bool [tokens, neurons], and the tokens' positions."""
    neurons = of_run(results, "by_neuron", runs).groupby(["label", "layer"]).size()
    for label, table in of_run(results, "masks", runs).groupby("label", sort=False):
        table = table.sort_values("index", kind="stable")
        for layer in masks.layers_of(table):
            mask_TN = masks.unpack_masks(table, layer, neurons[label, layer])
            yield str(label), layer, mask_TN, table["position"].to_numpy()


def _first(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The runs that a chart with much data shows, and a sentence if these are not all."""
    said = f" The first {MOST_RUNS} of {len(runs)} runs." if len(runs) > MOST_RUNS else ""
    return runs.head(MOST_RUNS), said


def _tokens(results: Results, runs: pd.DataFrame) -> str:
    counts = of_run(results, "masks", runs).groupby("label").size()
    return " or ".join(f"{count:,}" for count in sorted(set(counts)))


# --- in training ------------------------------------------------------------------------------------------------------


@view("explorer-drift", "Firing rates in training", "in_training")
def drift(results: Results, runs: pd.DataFrame) -> Sketch:
    runs, left_out = _first(runs)
    table = of_run(results, "in_training", runs)
    followed, alike = [], []
    for (label, layer), of_layer in table.groupby(["label", "layer"], sort=False):
        rates = of_layer.pivot(index="neuron", columns="step", values="rate")
        by_last = rates.loc[rates.iloc[:, -1].sort_values(ascending=False, kind="stable").index]
        at = np.unique(np.linspace(0, len(by_last) - 1, FOLLOWED).astype(int))
        steps = [int(step) for step in rates.columns]
        for place in at:
            values = [short(rate * 100) for rate in by_last.iloc[place]]
            one = {"rank": round(100 * place / len(rates), 1), "neuron": int(by_last.index[place])}
            followed.append({"run": label, "layer": layer_name(layer)} | one | {"step": steps, "rate": values})
        order = rates.rank()
        for step in steps:
            r = order[step].corr(order[steps[-1]])
            alike.append({"run": label, "layer": layer, "step": step, "r": r})
    scale = alt.Scale(type="log", scheme="viridis", domain=[0.01, 100], clamp=True)
    legend = alt.Legend(orient="bottom", gradientLength=240, values=[0.01, 0.1, 1, 10, 100])
    colour = alt.Color("rate:Q", scale=scale, title="fires for (% of the tokens)", legend=legend)
    left = (
        alt.Chart(records(pd.DataFrame(followed)), width=300, height=340, title="rate of single neurons")
        .transform_filter("datum.run === run && datum.layer === layer")
        .transform_flatten(["step", "rate"])
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step"),
            y=alt.Y("rank:O", title="neurons by their last rate, the most active on top",
                    axis=alt.Axis(labels=False, ticks=False)),
            color=alt.condition("datum.rate > 0", colour, alt.value("black")),
            tooltip=[alt.Tooltip("neuron:Q", format="d"), "step:O", alt.Tooltip("rate:Q", title="fires for (%)")],
        )
    )  # fmt: skip
    right = (
        alt.Chart(records(pd.DataFrame(alike)), width=300, height=340, title="all neurons: similarity to the last step")
        .transform_filter("datum.run === run")
        .mark_line(point=True)
        .encode(
            x=_step_axis(table),
            y=alt.Y("r:Q", title="rank correlation with the last step"),
            color=alt.Color("layer:O", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(orient="bottom")),
            tooltip=["layer:O", "step:Q", alt.Tooltip("r:Q", title="rank correlation")],
        )
        .add_params(zoom("drift_zoom"))
    )
    first = initial(results, runs)
    layers = layer_choice(table["layer"], where(table, label=first)["layer"])
    chart = alt.hconcat(left, right).resolve_scale(color="independent")
    chart = chart.add_params(choice("run", runs["label"], first), layers)
    shown = f"Left: up to {FOLLOWED} neurons of a layer, evenly spaced by rank; black: fires for none of the tokens."
    return Sketch(chart, f"{shown} {_about_training(table)}{left_out}")


@view("explorer-deaths", "Which neurons die, and when", "in_training")
def deaths(results: Results, runs: pd.DataFrame) -> Sketch:
    table = of_run(results, "in_training", runs)
    rows = []
    for (label, layer), of_layer in table.groupby(["label", "layer"], sort=False):
        silent = of_layer.pivot(index="neuron", columns="step", values="rate") == 0
        for place, step in enumerate(silent.columns):
            later = (~silent.iloc[:, place + 1 :]).any(axis=1)
            now = silent.iloc[:, place]
            back = None if place == len(silent.columns) - 1 or not now.any() else 100 * float(later[now].mean())
            rows.append({"run": label, "layer": layer, "step": step, "silent": 100 * float(now.mean()), "back": back})
    base = alt.Chart(records(pd.DataFrame(rows)), width=330, height=280).transform_filter("datum.run === run")
    colour = alt.Color("layer:O", scale=alt.Scale(scheme="viridis"))
    tooltip = [
        "layer:O",
        "step:Q",
        alt.Tooltip("silent:Q", title="silent (% of N)"),
        alt.Tooltip("back:Q", title="of these come back (%)"),
    ]
    lines = base.mark_line(point=True).encode(x=_step_axis(table), color=colour, tooltip=tooltip)
    left = lines.encode(y=alt.Y("silent:Q", title="silent (% of N)")).properties(title="silent neurons")
    right = lines.transform_filter("datum.back != null").properties(title="of these, come back")
    right = right.encode(y=alt.Y("back:Q", title="fire again at a later step (%)"))
    chart = left.add_params(zoom("silent_zoom")) | right.add_params(zoom("back_zoom"))
    chart = chart.add_params(choice("run", runs["label"], initial(results, runs)))
    return Sketch(chart, f"Silent: fires for none of the tokens. {_about_training(table)}", ("run",))


@view("fates", "What becomes of neurons", "in_training")
def fates(results: Results, runs: pd.DataFrame) -> pd.DataFrame:
    """For the run that charts show first: the neurons of each layer that are silent at the end, and from which step on;
    and those that were silent at some step but fire at the end."""
    rows = []
    first = runs[runs["label"] == initial(results, runs)]
    for (label, layer), of_layer in of_run(results, "in_training", first).groupby(["label", "layer"], sort=False):
        fires = of_layer.pivot(index="neuron", columns="step", values="rate") > 0
        silent = ~fires.iloc[:, -1]
        # Of each silent neuron, the number of steps up to the last one at which it fires.
        before = fires[silent].iloc[:, ::-1].cummax(axis=1).sum(axis=1)
        back = ~silent & ~fires.all(axis=1)
        rows.append(
            {
                "run": label,
                "layer": layer,
                "neurons": len(fires),
                "silent at the end": int(silent.sum()),
                "from step (median)": f"{np.median(fires.columns[before]):,.0f}" if silent.any() else "",
                "silent once, fire at the end": int(back.sum()),
            }
        )
    return pd.DataFrame(rows)


def _step_axis(table: pd.DataFrame) -> alt.X:
    """Axis from the first to the last step of the run that is shown, with ticks at powers of two."""
    steps = sorted({int(step) for step in table["step"]})
    axis = alt.Axis(values=[step for step in steps if step & (step - 1) == 0], labelOverlap=True)
    scale = alt.Scale(type="log", base=2, nice=False)
    if len(steps) == 1:
        scale["domain"] = [steps[0], steps[0] + 1]
    return alt.X("step:Q", scale=scale, axis=axis, title="step (log)")


def _about_training(table: pd.DataFrame) -> str:
    tokens = " or ".join(f"{int(count):,}" for count in sorted(set(table["tokens"])))
    return f"Counted on the same {tokens} held-out tokens at every step shown: the powers of two and the last one."
