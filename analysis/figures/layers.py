"""Figures 6, 10 and 11: non-zeros by layer and each layer's contribution to the speedup; and figure A."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.layer_speed import FORWARD
from analysis.load import Results
from analysis.render import device, signed, significant

GATHER = "python -m experiments.gather_nonzeros"
# Plans some of whose layers stay dense, in titles.
OR_DENSE = {schema.HOT_PLANS["twell"]: "hot by index or dense", schema.ORDERED_PLANS["twell"]: "sorted or dense"}
FEWEST_FOR_R = 8  # layers: a correlation of fewer points means little


@figure("6", "figure06_layers_recommended", "non-zeros and time saved by layer, recommended L1")
def recommended(results: Results) -> Sketch:
    """Mean and maximum non-zeros by layer, and each layer's contribution to the speedup, at the recommended L1."""
    return _by_layer(results, "the recommended L1 value", lambda model, _: choose.recommended_l1(results.rows, model))


@figure("10", "figure10_layers_unregularised", "non-zeros and time saved by layer, without L1")
def unregularised(results: Results) -> Sketch:
    """The same as figure 6 for the model trained without L1."""
    return _by_layer(results, "L1 = 0", lambda _, values: 0.0 if 0.0 in values else None)


@figure("11", "figure11_layers_strongest", "non-zeros and time saved by layer, largest L1")
def strongest(results: Results) -> Sketch:
    """The same as figure 6 for the largest L1 value."""

    def largest(model: str, values: set[float]) -> float | None:
        """Of a model that was only gathered at its recommended L1 value, figure 6 has shown the layers."""
        above, gathered = values - {0.0}, where(choose.relu_runs(results.rows), op="nonzeros", metric="nonzeros")
        swept = choose.main_model(gathered)["model"].iloc[0]
        shown = model != swept and above == {choose.recommended_l1(results.rows, model)}
        return None if shown else max(above, default=None)

    return _by_layer(results, "an L1 value above 0", largest)


@figure("A", "figureA_unions", "neurons active for any token of a group of consecutive tokens, by layer")
def unions(results: Results) -> Sketch:
    """Share of the neurons that any token of a group of 16 to 256 consecutive tokens activates, by layer."""
    data = described(results, "unions")
    l1 = None if data.empty else choose.recommended_l1(results.rows, data["model"].iloc[0])
    data = data.iloc[:0] if l1 is None else where(data, l1=l1)
    if l1 is None or data.empty:
        raise NotMeasured("nonzeros_unions.parquet at the recommended L1 value", GATHER)
    sharing = _sharing(data, results)
    if sharing.empty:
        raise NotMeasured("non-zeros by layer, to compare the unions with", GATHER)
    groups = sorted(set(data["group"]))
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    for group, colour in zip(groups, style.sequence(len(groups)), strict=True):
        line = where(data, group=group).groupby("layer")["fraction"].mean()
        left.plot(line.index, line * 100, color=colour, marker="o", markersize=3, label=f"{group}")
    style.layer_axis(left, int(data["layer"].max()) + 1)
    left.set(title="(a) active for any token of a group", ylabel="active neurons (% of N)", ylim=(0, None))
    _sharing_panel(right, sharing, groups)
    handles, labels = left.get_legend_handles_labels()
    picture.legend(handles, labels, title="tokens per group", loc="outside right center")
    trained = choose.relu_runs(where(results.rows, op="train", l1=l1, model=data["model"].iloc[0]))
    widest = where(sharing, group=groups[-1]).groupby("layer")[["fraction", "tokens_per_neuron"]].mean()
    caption = (
        f"At L1 {l1_label(l1)}, a group of {groups[-1]} tokens activates "
        f"{widest['fraction'].min():.0%} to {widest['fraction'].max():.0%} of a layer's neurons, each shared by "
        f"{widest['tokens_per_neuron'].min():.1f} to {widest['tokens_per_neuron'].max():.1f} of its tokens: a kernel "
        "that reads each weight row once per group would save at most that factor in reads. Means over seeds. "
        f"{describe.runs(choose.trainings(choose.equally_trained(trained)))}"
    )
    return Sketch(picture, sharing, caption)


@dataclass(frozen=True)
class _Model:
    """One model at one L1 value: its layers' non-zeros, and their contributions to the speedup with the fastest plan,
    `parts` (dense layers, where those are faster, as a tuned model has them), and with the paper's in every layer,
    `papers_parts` (may be empty; the latter also where the paper's plan is fastest)."""

    name: str
    l1: float
    counts: pd.DataFrame
    parts: pd.DataFrame
    papers_parts: pd.DataFrame
    rows: pd.DataFrame


def _by_layer(results: Results, which: str, l1_of: Callable[[str, set[float]], float | None]) -> Sketch:
    """The figure for the model with the most L1 values, and for the timed model nearest to the paper's of those that
    have such an L1 value."""
    rows = choose.relu_runs(where(results.rows, op=("nonzeros", "train", "ffn_forward")))
    gathered = where(rows, op="nonzeros", metric="nonzeros")
    if gathered.empty:
        raise NotMeasured("non-zeros by layer of gated ReLU models", GATHER)
    timed = choose.made_for_speed(where(rows, op="ffn_forward"))
    swept = choose.main_model(gathered)["model"].iloc[0]
    others = [name for name in choose.model_order(timed["model"]) if name in set(gathered["model"]) - {swept}]
    first, *rest = (_model(where(rows, model=name), name, l1_of) for name in (swept, *others))
    found = [model for model in (first, next(filter(None, rest), None)) if model is not None]
    if not found:
        raise NotMeasured(f"non-zeros by layer at {which}", GATHER)
    picture = _picture(found)
    lacks = "" if any(len(model.parts) for model in found) else "time of each layer's block with a GPU backend"
    data = pd.concat([_data(model) for model in found], ignore_index=True)
    return Sketch(picture, data, " ".join(map(_caption, found)), lacks)


def _picture(models: list[_Model]) -> Figure:
    """Non-zeros of one or two models; beside or below, the speedup of the models whose layers were timed, with the
    fastest plan and with the paper's."""
    several = len(models) > 1
    panels = [partial(_counts_panel, model=model, named=several) for model in models]
    for model in models:
        for parts in (model.parts, model.papers_parts):
            if len(parts):
                panels.append(partial(_parts_panel, model=model, parts=parts, named=several))
    letters = "abcdef"[: len(panels)]
    shape = [letters[at : at + 2] for at in range(0, len(letters), 2)]
    if len(letters) > 1 and len(shape[-1]) == 1:
        shape[-1] *= 2
    picture, axes = style.mosaic(shape, 2.6)
    for letter, panel in zip(letters, panels, strict=True):
        panel(axes[letter], letter=f"({letter}) " if len(panels) > 1 else "")
    return picture


def _model(rows: pd.DataFrame, name: str, l1_of: Callable[[str, set[float]], float | None]) -> _Model | None:
    values = set(where(rows, op="nonzeros")["l1"].dropna())
    l1 = l1_of(name, values)
    if l1 is None:
        return None
    rows = where(rows, l1=l1)
    counts = _counts(rows)
    if counts.empty:
        return None
    parts = _contributions(rows)
    if set(parts["plan"]) <= {paper.PLAN}:
        return _Model(name, l1, counts, parts, parts.iloc[:0], rows)
    return _Model(name, l1, counts, _or_dense(parts), _contributions(where(rows, plan=paper.PLAN)), rows)


def _counts(rows: pd.DataFrame) -> pd.DataFrame:
    """For each layer: the mean over seeds with its interval, and the maximum over tokens, mean over seeds."""
    rows = choose.equally_trained(where(rows, op="nonzeros", metric=("nonzeros", "nonzeros_max")))
    rows = rows[rows["layer"].notna()]
    table = stats.over_seeds(where(rows, metric="nonzeros"), ["layer"]).rename(columns={"value": "mean"})
    highest = where(rows, metric="nonzeros_max").groupby("layer")["value"].mean()
    return table.assign(maximum=table["layer"].map(highest).astype("float64"))


def _contributions(rows: pd.DataFrame) -> pd.DataFrame:
    """For each layer: time, ratio and contribution of one sparse plan, of those measured in all layers the fastest if
    layers that are slower than dense ones stay dense (`left_dense`, which here none does)."""
    timed = choose.whole_function(where(rows, op="ffn_forward", metric="time"))
    timed = choose.equally_trained(choose.main_device(choose.made_for_speed(timed)))
    timed = timed[timed["layer"].notna() & timed["ratio"].notna() & timed["plan"].isin(FORWARD.series)]
    if timed.empty:
        return pd.DataFrame(columns=["layer", "plan"])
    repeated = ["plan", "backend", "device", "layer"]
    means = timed.groupby(repeated, as_index=False).agg(time_ms=("value", "mean"), ratio=("ratio", "mean"))
    used = means.assign(time_ms=means["time_ms"] * means["ratio"].clip(upper=1.0))
    totals = used.groupby(["plan", "backend"])["time_ms"].agg(["sum", "count"])
    complete = totals[totals["count"] == totals["count"].max()]
    plan, backend = complete["sum"].idxmin()
    best = where(means, plan=plan, backend=backend).reset_index(drop=True)
    each = stats.layer_contributions(best["time_ms"], best["ratio"])
    return pd.concat([best, each], axis=1).assign(left_dense=False)


def _or_dense(parts: pd.DataFrame) -> pd.DataFrame:
    """The contributions, where layers that are slower than dense ones stay dense; time and ratio remain as measured."""
    used, ratio = parts["time_ms"] * parts["ratio"].clip(upper=1.0), parts["ratio"].clip(lower=1.0)
    return parts.assign(**stats.layer_contributions(used, ratio), left_dense=parts["ratio"] < 1)


def _data(model: _Model) -> pd.DataFrame:
    data = model.counts.assign(model=model.name, l1=model.l1)
    data = data.merge(model.parts, on="layer", how="left") if len(model.parts) else data
    if model.papers_parts.empty:
        return data
    names = {"time_ms": "papers_plan_ms", "ratio": "papers_plan_ratio", "contribution_pct": "papers_plan_pct"}
    return data.merge(model.papers_parts[["layer", *names]].rename(columns=names), on="layer", how="left")


def _counts_panel(axes: Axes, letter: str, model: _Model, named: bool) -> None:
    counts = model.counts
    style.line_with_spread(
        axes, counts["layer"], counts["mean"], counts["low"], counts["high"], label="mean", **style.category(0)
    )
    axes.plot(counts["layer"], counts["maximum"], label="maximum over tokens", **style.category(1))
    style.layer_axis(axes, int(counts["layer"].max()) + 1)
    axes.set(title=f"{letter}non-zeros{_named(model) if named else ''}", ylabel="non-zeros (neurons/token)")
    style.log_axis(axes.yaxis)
    style.legend_below(axes)


def _named(model: _Model) -> str:
    return f", {model.name}, L1 {l1_label(model.l1)}"


def _parts_panel(axes: Axes, letter: str, model: _Model, parts: pd.DataFrame, named: bool) -> None:
    """Bars of the layers' contributions with one plan."""
    data, plan = parts, parts["plan"].iloc[0]
    named_plan = OR_DENSE[plan] if data["left_dense"].any() else FORWARD.series[plan]
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
    axes.set(
        title=f"{letter}time saved{f', {model.name}' if named else ''}: {named_plan}",
        ylabel="% of all layers' dense time",
    )
    style.percent_axis(axes.yaxis)
    if slower.any():
        style.legend_below(axes)


def _caption(model: _Model) -> str:
    counts = model.counts
    least, most = counts.loc[counts["mean"].idxmin()], counts.loc[counts["mean"].idxmax()]
    spread = (counts["maximum"] / counts["mean"]).median()
    return (
        f"{model.name} at L1 {l1_label(model.l1)}: layer {least['layer']:.0f} is the least active "
        f"({significant(least['mean'])} non-zeros), layer {most['layer']:.0f} the most active "
        f"({significant(most['mean'])}); in the median layer, the maximum is {spread:.0f} times the mean. "
        f"{_about_time(model)} {describe.interval(counts['seeds'])} "
        + ("Error bars that are cut off reach 0. " if (counts["low"] <= 0).any() else "")
        + describe.runs(_trained(model))
    )


def _trained(model: _Model) -> pd.DataFrame:
    """The trainings whose non-zeros are shown: of several, those that ended at a step with a seed that was measured."""
    counted = choose.equally_trained(where(model.rows, op="nonzeros"))
    trained = choose.trainings(where(model.rows, op="train"))
    shown = trained[trained["step"].isin(set(counted["step"])) & trained["seed"].isin(set(counted["seed"]))]
    return choose.trainings(choose.equally_trained(where(model.rows, op="train"))) if shown.empty else shown


def _about_time(model: _Model) -> str:
    """The sentence about the speedup, or about its absence."""
    timed = where(model.rows, op="ffn_forward")
    if model.parts.empty and len(timed):
        return "Layers were timed with the reference backend only, which defines results and is not made for speed."
    if model.parts.empty:
        return "Its layers were not timed."
    text = _about_plan(model, model.parts, "")
    return text if model.papers_parts.empty else f"{text} {_about_plan(model, model.papers_parts, ' (the paper)')}"


def _about_plan(model: _Model, parts: pd.DataFrame, whose: str) -> str:
    """All layers together with one plan, those that are slower than dense, and Pearson's r."""
    data = parts.merge(model.counts[["layer", "mean"]], on="layer")
    ratio, left, saved = data["ratio"], data["left_dense"], data["contribution_pct"].sum()
    plan = choose.series_label(data["plan"].iloc[0], data["backend"].iloc[0], float("nan"))
    slower = f"slower than dense: {(ratio < 1).sum()} of {len(data)}"
    if left.any():
        layers = [
            f"{layer:.0f} ({value:.2f} times)" for layer, value in zip(data["layer"][left], ratio[left], strict=True)
        ]
        slower = f"left dense, since sparse they are slower: layers {', '.join(layers)}"
    text = (
        f"With {plan}{whose} on {device(data['device'].iloc[0])}, all layers together take {1 - saved / 100:.3g} times "
        f"as long as the dense form of the same run (the bars add up to {signed(saved)}); {slower}."
    )
    sparse = data[~left]
    r = {name: stats.pearson(sparse["mean"], sparse[name]) for name in ("ratio", "time_ms")}
    if len(sparse) < FEWEST_FOR_R or pd.isna(r["ratio"]):
        return text
    of = "a sparse layer's" if left.any() else "a layer's"
    pearson = f"Pearson's r between {of} mean non-zeros and its speedup is {r['ratio']:.3f}, its time "
    return f"{text} {pearson}{r['time_ms']:+.3f}.".replace("-0.", "−0.")


def described(results: Results, name: str) -> pd.DataFrame:
    """A table of gather_nonzeros with seeds: the gated ReLU runs without mitigation of the model that was measured at
    the most L1 values. The table may hold only some of those values, see `build.compact`."""
    if name not in results.nonzeros:
        return pd.DataFrame(columns=["study", "item", "model", "l1", "seed"])
    rows = choose.equally_trained(choose.relu_runs(where(results.rows, op="nonzeros")))
    runs = rows[[*choose.RUN, "seed"]].drop_duplicates(choose.RUN)
    table = results.nonzeros[name].merge(runs, on=choose.RUN)
    of_table = choose.main_model(rows[rows["model"].isin(set(table["model"]))])
    return table[table["model"].isin(set(of_table["model"]))]


def _sharing(data: pd.DataFrame, results: Results) -> pd.DataFrame:
    """The unions with tokens_per_neuron: the non-zeros of all tokens of a group over the neurons in its union."""
    rows = where(results.rows, op="nonzeros", metric="nonzeros")
    means = rows[rows["layer"].notna() & rows["value"].notna()][["study", "item", "layer", "value"]].rename(
        columns={"value": "mean_nonzeros"}
    )
    merged = data.merge(means.astype({"layer": "int64"}), on=["study", "item", "layer"])
    return merged.assign(tokens_per_neuron=merged["group"] * merged["mean_nonzeros"] / merged["mean"])


def _sharing_panel(axes: Axes, sharing: pd.DataFrame, groups: list) -> None:
    for group, colour in zip(groups, style.sequence(len(groups)), strict=True):
        line = where(sharing, group=group).groupby("layer")["tokens_per_neuron"].mean()
        axes.plot(line.index, line, color=colour, marker="o", markersize=3)
    style.layer_axis(axes, int(sharing["layer"].max()) + 1)
    axes.set(title="(b) tokens sharing an active neuron", ylabel="tokens per active neuron")
    style.log_axis(axes.yaxis)
