"""Figures 6, 10 and 11: non-zeros by layer and what each layer adds to the speedup; and figure A."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import device, significant

GATHER = "python -m experiments.gather_nonzeros"


@figure("6", "figure06_layers_recommended", "non-zeros and share of the speedup by layer, recommended L1")
def recommended(results: Results) -> Sketch:
    """Mean and maximum non-zeros by layer, and each layer's part in the speedup, at the recommended L1 value."""
    rows = _rows(results)
    model = rows["model"].iloc[0]
    l1 = choose.recommended_l1(results.rows, model)
    if l1 is None:
        raise NotMeasured(f"a recommended L1 value: no held-out cross-entropy of {model} models with and without L1")
    return _by_layer(rows, l1)


@figure("10", "figure10_layers_unregularised", "non-zeros and share of the speedup by layer, without L1")
def unregularised(results: Results) -> Sketch:
    """As figure 6 for the model trained without L1."""
    return _by_layer(_rows(results), 0.0)


@figure("11", "figure11_layers_strongest", "non-zeros and share of the speedup by layer, largest L1")
def strongest(results: Results) -> Sketch:
    """As figure 6 for the largest L1 value."""
    rows = _rows(results)
    return _by_layer(rows, rows["l1"].max())


@figure("A", "figureA_unions", "neurons active anywhere in a group of consecutive tokens, by layer")
def unions(results: Results) -> Sketch:
    """Share of the neurons that any token of a group of 16 to 256 consecutive tokens activates, by layer."""
    data = described(results, "unions")
    l1 = None if data.empty else choose.recommended_l1(results.rows, data["model"].iloc[0])
    data = where(data, l1=l1) if l1 is not None else data.iloc[:0]
    if data.empty:
        raise NotMeasured("nonzeros_unions.parquet at the recommended L1 value", GATHER)
    groups = sorted(set(data["group"]))
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    for group, colour in zip(groups, style.sequence(len(groups)), strict=True):
        line = where(data, group=group).groupby("layer")["fraction"].mean()
        left.plot(line.index, line * 100, color=colour, marker="o", markersize=3, label=f"{group}")
    style.layer_axis(left, int(data["layer"].max()) + 1)
    left.set(title="(a) union of a group", ylabel="active neurons (% of N)", ylim=(0, None))
    sharing = _sharing(data, results)
    _sharing_panel(right, sharing, groups)
    handles, labels = left.get_legend_handles_labels()
    picture.legend(handles, labels, title="tokens per group", loc="outside right center")
    widest = where(sharing, group=groups[-1])
    caption = (
        f"{data['model'].iloc[0]} model at L1 {l1_label(l1)}. A group of {groups[-1]} tokens activates "
        f"{widest['fraction'].min():.0%} to {widest['fraction'].max():.0%} of a layer's neurons, each shared by "
        f"{widest['tokens_per_neuron'].min():.1f} to {widest['tokens_per_neuron'].max():.1f} of its tokens: "
        "what a kernel can win that reads a weight row once for a block of tokens."
    )
    return Sketch(picture, sharing, caption)


def _rows(results: Results) -> pd.DataFrame:
    rows = choose.main_model(choose.relu_runs(where(results.rows, op=("nonzeros", "train", "ffn_forward"))))
    if where(rows, op="nonzeros", metric="nonzeros").empty:
        raise NotMeasured("non-zeros by layer of gated ReLU models", GATHER)
    return rows


def _by_layer(rows: pd.DataFrame, l1: float) -> Sketch:
    counts = _counts(where(rows, l1=l1))
    if counts.empty:
        raise NotMeasured(f"non-zeros by layer at L1 {l1_label(l1)}", GATHER)
    parts = _contributions(where(rows, l1=l1))
    picture, ((left, right),) = style.panels(1, 2, 2.7)
    _counts_panel(left, counts)
    data = counts.assign(l1=l1)
    caption = _counts_caption(counts, rows["model"].iloc[0], l1)
    lacks = ""
    if parts.empty:
        lacks = "time of each layer's feed-forward block (ffn_forward rows with layer and ratio)"
        style.note(right, "time by layer: not measured yet")
    else:
        data = data.merge(parts, on="layer", how="left")
        caption += _contribution_panel(right, data)
    return Sketch(picture, data, caption, lacks)


def _counts(rows: pd.DataFrame) -> pd.DataFrame:
    chosen = where(rows, op="nonzeros", metric=("nonzeros", "nonzeros_max"))
    table = chosen[chosen["layer"].notna()].pivot_table(index="layer", columns="metric", values="value", aggfunc="mean")
    return table.rename(columns={"nonzeros": "mean", "nonzeros_max": "maximum"}).rename_axis(columns=None).reset_index()


def _contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """Per layer: time with the fastest sparse plan measured in all layers, its ratio, and what it adds."""
    timed = choose.main_device(where(rows, op="ffn_forward", metric="time"))
    timed = timed[timed["layer"].notna() & timed["ratio"].notna() & (timed["plan"] != "dense")]
    if timed.empty:
        return timed
    repeated = ["plan", "backend", "device", "layer"]
    means = timed.groupby(repeated, as_index=False).agg(time_ms=("value", "mean"), ratio=("ratio", "mean"))
    totals = means.groupby(["plan", "backend"])["time_ms"].agg(["sum", "count"])
    complete = totals[totals["count"] == totals["count"].max()]
    plan, backend = complete["sum"].idxmin()
    best = where(means, plan=plan, backend=backend).reset_index(drop=True)
    return pd.concat([best, stats.layer_contributions(best["time_ms"], best["ratio"])], axis=1)


def _counts_panel(axes: Axes, counts: pd.DataFrame) -> None:
    axes.plot(counts["layer"], counts["mean"], label="mean", **style.category(0))
    if "maximum" in counts:
        axes.plot(counts["layer"], counts["maximum"], label="maximum of any token", **style.category(1))
    style.layer_axis(axes, int(counts["layer"].max()) + 1)
    axes.set(title="(a) non-zeros", ylabel="non-zeros (neurons/token)")
    style.log_axis(axes.yaxis)
    style.legend_below(axes)


def _contribution_panel(axes: Axes, data: pd.DataFrame) -> str:
    """Bars of what each layer adds; returns the sentence about it."""
    slower = data["contribution_pct"] < 0
    for chosen, label, colour, hatch in (
        (~slower, "sparse is faster", style.CATEGORIES[0], ""),
        (slower, "sparse is slower", style.CATEGORIES[1], "////"),
    ):
        if chosen.any():
            axes.bar(
                data.loc[chosen, "layer"], data.loc[chosen, "contribution_pct"], color=colour, hatch=hatch,
                edgecolor="white", linewidth=0.3, label=label,
            )  # fmt: skip
    axes.axhline(0, color=style.INK, linewidth=0.8)
    style.layer_axis(axes, int(data["layer"].max()) + 1)
    axes.set(title="(b) part in the speedup", ylabel="time saved (% of the dense time)")
    style.percent_axis(axes.yaxis)
    style.legend_below(axes)
    r = stats.pearson(data["mean"], data["ratio"])
    plan, where_timed = data["plan"].iloc[0], device(data["device"].iloc[0])
    times = data["time_ms"].sum() / (data["time_ms"] * data["ratio"]).sum()
    r_text = "" if pd.isna(r) else f" Pearson's r between a layer's mean non-zeros and its speedup is {r:.3f}."
    return f" All layers together take {times:.3g} times the dense time ({plan} plan on {where_timed}).{r_text}"


def _counts_caption(counts: pd.DataFrame, model: str, l1: float) -> str:
    least, most = counts.loc[counts["mean"].idxmin()], counts.loc[counts["mean"].idxmax()]
    text = (
        f"{model} model at L1 {l1_label(l1)}: layer {least['layer']:.0f} is the sparsest "
        f"({significant(least['mean'])} non-zeros), layer {most['layer']:.0f} the densest "
        f"({significant(most['mean'])})."
    )
    if "maximum" in counts:
        text += (
            f" The maximum is {(counts['maximum'] / counts['mean']).median():.0f} times the mean in the median layer."
        )
    return text


def described(results: Results, name: str) -> pd.DataFrame:
    """A table of gather_nonzeros for the main model's gated ReLU runs without mitigation."""
    if name not in results.nonzeros:
        return pd.DataFrame(columns=["study", "item", "model", "l1"])
    runs = choose.relu_runs(where(results.rows, op="nonzeros"))[["study", "item"]].drop_duplicates()
    return choose.main_model(results.nonzeros[name].merge(runs, on=["study", "item"]))


def _sharing(data: pd.DataFrame, results: Results) -> pd.DataFrame:
    """Unions with tokens_per_neuron: non-zeros of all tokens of the group over the neurons of its union."""
    rows = where(results.rows, op="nonzeros", metric="nonzeros")
    means = rows[rows["layer"].notna()][["study", "item", "layer", "value"]].rename(columns={"value": "mean_nonzeros"})
    merged = data.merge(means.astype({"layer": "int64"}), on=["study", "item", "layer"])
    return merged.assign(tokens_per_neuron=merged["group"] * merged["mean_nonzeros"] / merged["mean"])


def _sharing_panel(axes: Axes, sharing: pd.DataFrame, groups: list) -> None:
    for group, colour in zip(groups, style.sequence(len(groups)), strict=True):
        line = where(sharing, group=group).groupby("layer")["tokens_per_neuron"].mean()
        axes.plot(line.index, line, color=colour, marker="o", markersize=3)
    style.layer_axis(axes, int(sharing["layer"].max()) + 1)
    axes.set(title="(b) tokens sharing an active neuron", ylabel="tokens per active neuron")
    style.log_axis(axes.yaxis)
