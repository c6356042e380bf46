"""Numbers of active neurons: by layer, by token and position, and in groups of consecutive tokens."""

from __future__ import annotations

from collections.abc import Callable

import altair as alt
import numpy as np
import pandas as pd

from analysis.choose import where
from analysis.explorer.chart import Sketch, choice, layer_choice, nested, view, zoom
from analysis.explorer.runs import about, described, initial, layer_name, of_run
from analysis.figures import style
from analysis.load import Results

BINS = 48
POSITIONS = 64
NONZEROS = "non-zeros (neurons/token)"
DETAILS = {
    "p50": "median", "p99": "99th percentile", "max": "maximum", "neurons": "of N", "silent_fraction": "never fired",
}  # fmt: skip


@view("explorer-layers", "Non-zeros by layer", "by_layer")
def by_layer(results: Results, runs: pd.DataFrame) -> Sketch:
    table = of_run(results, "by_layer", runs)
    trained = table["label"].map(runs.set_index("label").apply(described, axis=1))
    table = table.assign(model=table["study"] + ", " + table["model"], trained=trained)
    first = ", ".join(runs[["study", "model"]].iloc[0])
    shown = {name: title for name, title in DETAILS.items() if name in table}
    data = table[["model", "label", "trained", "layer", "mean", *shown]]
    picked = alt.selection_point(name="picked", fields=["trained"], bind="legend")
    chart = (
        alt.Chart(nested(data, "model", "label", "trained"), width=520, height=300)
        .transform_filter("datum.model === model")
        .transform_flatten(["layer", "mean", *shown])
        .transform_filter("datum.mean > 0")
        .mark_line(point=True)
        .encode(
            x=alt.X("layer:Q", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y("mean:Q", scale=alt.Scale(type="log"), title="mean non-zeros (log)"),
            color=alt.Color(
                "trained:N", sort=list(dict.fromkeys(data["trained"])), scale=alt.Scale(scheme="viridis"), title="runs"
            ),
            detail="label:N",
            opacity=alt.condition(picked, alt.value(1), alt.value(0.1)),
            tooltip=["label:N", "layer:Q", "mean:Q", *(alt.Tooltip(f"{name}:Q", title=shown[name]) for name in shown)],
        )
        .add_params(choice("model", dict.fromkeys(table["model"]), first), picked, zoom("by_layer_zoom"))
    )
    caption = (
        f"{about(results, runs)} Click the legend to select runs (shift-click: several); zoom with the mouse wheel."
    )
    return Sketch(chart, caption, ("model",))


@view("explorer-distribution", "Non-zeros by token and by position", "histogram", "by_position")
def distribution(results: Results, runs: pd.DataFrame) -> Sketch:
    histogram, position = of_run(results, "histogram", runs), of_run(results, "by_position", runs)
    bars = every_layer(histogram, histogram_of)
    line = every_layer(position, positions_of)
    chosen = "datum.run === run && datum.layer === layer"
    left = (
        alt.Chart(nested(bars, "run", "layer"), width=340, height=260, title="tokens by their non-zeros")
        .transform_filter(chosen)
        .transform_flatten(["low", "high", "share"])
        .mark_bar(color=style.CATEGORIES[0], binSpacing=0.5)
        .encode(
            x=alt.X("low:Q", bin="binned", title=NONZEROS),
            x2="high:Q",
            y=alt.Y("share:Q", title="tokens (%)"),
            tooltip=["low:Q", "high:Q", alt.Tooltip("share:Q", title="tokens (%)")],
        )
        .add_params(zoom("histogram_zoom", "x"))
    )
    right = (
        alt.Chart(nested(line, "run", "layer"), width=340, height=260, title="by position in the sequence")
        .transform_filter(chosen)
        .transform_flatten(["position", "mean"])
        .transform_filter("datum.mean > 0")
        .mark_line(point={"size": 14}, color=style.CATEGORIES[0])
        .encode(
            x=alt.X("position:Q", scale=alt.Scale(type="log", nice=False), title="position (tokens, log)"),
            y=alt.Y("mean:Q", scale=alt.Scale(type="log"), title="mean non-zeros (log)"),
            tooltip=["position:Q", "mean:Q"],
        )
        .add_params(zoom("position_zoom"))
    )
    first = initial(results, runs)
    layers = layer_choice(histogram["layer"], where(histogram, label=first)["layer"])
    chart = (left | right).add_params(choice("run", runs["label"], first), layers)
    return Sketch(chart, about(results, runs))


@view("explorer-unions", "Neurons that a group of consecutive tokens activates", "unions", "by_layer")
def unions(results: Results, runs: pd.DataFrame) -> Sketch:
    means = results.nonzeros["by_layer"][["study", "item", "layer", "mean"]]
    table = of_run(results, "unions", runs)
    table = table.merge(means, on=["study", "item", "layer"], suffixes=("", "_1"))
    sharing = table["group"] * table["mean_1"] / table["mean"].where(table["mean"] > 0)
    data = table.assign(run=table["label"], percent=table["fraction"] * 100, sharing=sharing)
    shown = data[["run", "layer", "group", "percent", "sharing"]]
    base = alt.Chart(nested(shown, "run", "layer"), width=320, height=260).transform_filter("datum.run === run")
    base = base.transform_flatten(["group", "percent", "sharing"]).mark_line(point=True)
    groups = sorted({int(group) for group in data["group"]})
    x = alt.X(
        "group:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=groups), title="tokens in the group (log)"
    )
    colour = alt.Color("layer:O", scale=alt.Scale(scheme="viridis"))
    tooltip = ["layer:O", "group:Q", alt.Tooltip("percent:Q", title="% of N"), "sharing:Q"]
    left = base.encode(x, alt.Y("percent:Q", title="active in the group (% of N)"), colour, tooltip=tooltip)
    right = base.encode(x, alt.Y("sharing:Q", title="tokens that share an active neuron"), colour, tooltip=tooltip)
    panels = left.add_params(zoom("union_zoom")) | right.add_params(zoom("sharing_zoom"))
    chart = panels.add_params(choice("run", runs["label"], initial(results, runs)))
    caption = f"Right: mean number of tokens in the group that activate a neuron of the union. {about(results, runs)}"
    return Sketch(chart, caption, ("run",))


def every_layer(table: pd.DataFrame, make: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """`make` for each run and layer; adds the columns run and layer."""
    groups = table.groupby(["label", "layer"], sort=False)
    parts = [make(frame).assign(run=label, layer=layer_name(layer)) for (label, layer), frame in groups]
    return pd.concat(parts, ignore_index=True)


def histogram_of(histogram: pd.DataFrame) -> pd.DataFrame:
    """Share of the tokens in percent, in at most BINS bins of equal width from 0 to the largest count."""
    largest = int(histogram.loc[histogram["tokens"] > 0, "nonzeros"].max())
    width = max(1, -(-(largest + 1) // BINS))
    bins = (histogram["nonzeros"] // width).clip(upper=largest // width)
    tokens = histogram["tokens"].groupby(bins).sum()
    low = tokens.index.to_numpy() * width
    return pd.DataFrame({"low": low, "high": low + width, "share": tokens.to_numpy() * 100 / tokens.sum()})


def positions_of(by_position: pd.DataFrame) -> pd.DataFrame:
    """Mean at up to POSITIONS positions, starting at 1, evenly spaced on a log axis."""
    means = by_position.groupby("position")["mean"].mean()
    wanted = np.unique(np.geomspace(1, len(means), POSITIONS).astype(int)) - 1
    found = means.iloc[wanted]
    return pd.DataFrame({"position": found.index.to_numpy() + 1, "mean": found.to_numpy()})
