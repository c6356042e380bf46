"""Figures 6, 10 and 11: non-zeros by layer and each layer's contribution to the speedup; and figure A."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.layer_speed import FORWARD
from analysis.figures.quality import range_over_seeds
from analysis.load import Results
from analysis.render import signed

GATHER = "python -m experiments.gather_nonzeros"
SHARING = "tokens_per_neuron"
FEWEST_FOR_R = 8  # layers: a correlation of fewer points means little
CAPTION = (
    "Non-zeros of each layer (bars: lowest to highest seed), and how much of the dense time of all layers each "
    "layer's block saves. r: Pearson's correlation, over the sparse layers, of mean non-zeros and time saved."
)


@figure("6", "figure06_layers_recommended", "non-zeros and time saved by layer, recommended L1", CAPTION)
def recommended(results: Results) -> Sketch:
    return _by_layer(results, "the recommended L1 value", lambda model, _: choose.recommended_l1(results.rows, model))


@figure("10", "figure10_layers_unregularised", "non-zeros and time saved by layer, without L1", CAPTION)
def unregularised(results: Results) -> Sketch:
    return _by_layer(results, "L1 = 0", lambda _, values: 0.0 if 0.0 in values else None)


@figure("11", "figure11_layers_strongest", "non-zeros and time saved by layer, largest L1", CAPTION)
def strongest(results: Results) -> Sketch:
    def largest(model: str, values: set[float]) -> float | None:
        """Largest L1 value of a model, None where figure 6 shows all that was gathered."""
        above, gathered = values - {0.0}, where(choose.relu_runs(results.rows), op="nonzeros", metric="nonzeros")
        swept = choose.main_model(gathered)["model"].iloc[0]
        shown = model != swept and above == {choose.recommended_l1(results.rows, model)}
        return None if shown else max(above, default=None)

    return _by_layer(results, "an L1 value above 0", largest)


@figure(
    "A",
    "figureA_unions",
    "neurons active for any token of a group of consecutive tokens, by layer",
    "Means over seeds. (a) Neurons that any token of a group of consecutive tokens activates. (b) Tokens of the "
    "group that share such a neuron: reading each weight row once for the group saves at most this factor.",
)
def unions(results: Results) -> Sketch:
    data = at_recommended(results, "unions")
    if data.empty:
        raise NotMeasured("nonzeros_unions.parquet at the recommended L1 value", GATHER)
    rows = where(results.rows, op="nonzeros", metric="nonzeros").dropna(subset=["layer", "value"])
    layer = ["study", "item", "layer"]
    means = rows[[*layer, "value"]].rename(columns={"value": "mean_nonzeros"}).astype({"layer": "int64"})
    sharing = data.merge(means, on=layer)
    # The non-zeros of all tokens of a group over the neurons in its union.
    sharing[SHARING] = sharing["group"] * sharing["mean_nonzeros"] / sharing["mean"]
    if sharing.empty:
        raise NotMeasured("non-zeros by layer, to compare the unions with", GATHER)
    groups = sorted(set(data["group"]))
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    for axes, table, column, factor in ((left, data, "fraction", 100), (right, sharing, SHARING, 1)):
        for group, colour in zip(groups, style.sequence(len(groups)), strict=True):
            line = where(table, group=group).groupby("layer")[column].mean() * factor
            axes.plot(line.index, line, color=colour, marker="o", markersize=3, label=f"{group}")
        style.layer_axis(axes, int(table["layer"].max()) + 1)
    left.set(title="(a) active for any token of a group", ylabel="active neurons (% of N)", ylim=(0, None))
    right.set(title="(b) tokens sharing an active neuron", ylabel="tokens per active neuron")
    style.log_axis(right.yaxis)
    picture.legend(*left.get_legend_handles_labels(), title="tokens per group", loc="outside right center")
    model, l1 = data[["model", "l1"]].iloc[0]
    trained = choose.relu_runs(where(results.rows, op="train", l1=l1, model=model))
    runs = choose.trainings(choose.equally_trained(trained))
    return Sketch(picture, sharing, f"L1 {l1_label(l1)}. {describe.brief(runs)}")


@dataclass(frozen=True)
class _Model:
    """One model at one L1 value: its layers' non-zeros (mean over seeds with its range, and the maximum over tokens,
    mean over seeds), and their contributions to the speedup with the fastest plan, `parts` (dense layers, where those
    are faster, as a tuned model has them), and with the paper's in every layer, `papers_parts` (may be empty; the
    latter also where the paper's method is fastest)."""

    name: str
    l1: float
    counts: pd.DataFrame
    parts: pd.DataFrame
    papers_parts: pd.DataFrame
    trained: pd.DataFrame


def _by_layer(results: Results, which: str, l1_of: Callable[[str, set[float]], float | None]) -> Sketch:
    """The figure for the timed model nearest to the paper's, and for the model with the most L1 values, as far as they
    have such an L1 value."""
    rows = choose.relu_runs(where(results.rows, op=("nonzeros", "train", "ffn_forward")))
    gathered = where(rows, op="nonzeros", metric="nonzeros")
    if gathered.empty:
        raise NotMeasured("non-zeros by layer of gated ReLU models", GATHER)
    timed = choose.made_for_speed(where(rows, op="ffn_forward"))
    swept = choose.main_model(gathered)["model"].iloc[0]
    others = [name for name in choose.model_order(timed["model"]) if name in set(gathered["model"]) - {swept}]
    first, *rest = (_model(where(rows, model=name), name, l1_of) for name in (swept, *others))
    models = [model for model in (first, next(filter(None, rest), None)) if model is not None]
    if not models:
        raise NotMeasured(f"non-zeros by layer at {which}", GATHER)
    models.sort(key=lambda model: model.parts.empty)
    lacks = "time of each layer's block with a GPU backend" if models[0].parts.empty else ""
    data = pd.concat([_data(model) for model in models], ignore_index=True)
    note = describe.brief(pd.concat([model.trained for model in models]))
    if not lacks:
        note += f" Timed on {describe.devices(models[0].parts['device'])}."
    # For each model its non-zeros, and if its layers were timed, the time saved with the fastest plan and the paper's.
    panels: list[Callable[[Axes, str], None]] = []
    for model in models:
        panels.append(partial(_counts_panel, model=model))
        panels += [partial(_parts_panel, model=model, parts=p) for p in (model.parts, model.papers_parts) if len(p)]
    letters = "abcdef"[: len(panels)]
    shape = [letters[at : at + 2] for at in range(0, len(letters), 2)]
    if len(letters) > 1 and len(shape[-1]) == 1:
        shape[-1] *= 2
    picture, axes = style.mosaic(shape, 2.6)
    for letter, panel in zip(letters, panels, strict=True):
        panel(axes[letter], f"({letter}) " if len(panels) > 1 else "")
    return Sketch(picture, data, note, lacks)


def _model(rows: pd.DataFrame, name: str, l1_of: Callable[[str, set[float]], float | None]) -> _Model | None:
    l1 = l1_of(name, set(where(rows, op="nonzeros")["l1"].dropna()))
    if l1 is None:
        return None
    rows = where(rows, l1=l1)
    counted = choose.equally_trained(where(rows, op="nonzeros", metric=("nonzeros", "nonzeros_max")))
    counted = counted[counted["layer"].notna()]
    counts = range_over_seeds(where(counted, metric="nonzeros"), ["layer"]).rename(columns={"value": "mean"})
    if counts.empty:
        return None
    highest = where(counted, metric="nonzeros_max").groupby("layer")["value"].mean()
    counts = counts.assign(maximum=counts["layer"].map(highest).astype("float64"))
    parts, papers_parts = _contributions(rows), _contributions(where(rows, plan=paper.PLAN))
    if set(parts["plan"]) <= {paper.PLAN}:
        return _Model(name, l1, counts, parts, parts.iloc[:0], _trained(rows))
    # Layers that are slower than dense ones stay dense; time and ratio remain as measured.
    used, ratio = parts["time_ms"] * parts["ratio"].clip(upper=1.0), parts["ratio"].clip(lower=1.0)
    parts = parts.assign(contribution_pct=stats.layer_contributions(used, ratio), left_dense=parts["ratio"] < 1)
    return _Model(name, l1, counts, parts, papers_parts, _trained(rows))


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
    saved = stats.layer_contributions(best["time_ms"], best["ratio"])
    return best.assign(contribution_pct=saved, left_dense=False)


def _data(model: _Model) -> pd.DataFrame:
    data = model.counts.assign(model=model.name, l1=model.l1)
    data = data.merge(model.parts, on="layer", how="left") if len(model.parts) else data
    if model.papers_parts.empty:
        return data
    names = {"time_ms": "papers_ms", "ratio": "papers_ratio", "contribution_pct": "papers_pct"}
    return data.merge(model.papers_parts[["layer", *names]].rename(columns=names), on="layer", how="left")


def _counts_panel(axes: Axes, letter: str, *, model: _Model) -> None:
    counts = model.counts
    style.line_with_spread(
        axes, counts["layer"], counts["mean"], counts["low"], counts["high"], label="mean", **style.category(0)
    )
    axes.plot(counts["layer"], counts["maximum"], label="maximum over tokens", **style.category(1))
    style.layer_axis(axes, int(counts["layer"].max()) + 1)
    axes.set(title=f"{letter}non-zeros: {model.name}, L1 {l1_label(model.l1)}", ylabel="non-zeros (neurons/token)")
    style.log_axis(axes.yaxis)
    style.legend_below(axes)


def _parts_panel(axes: Axes, letter: str, *, model: _Model, parts: pd.DataFrame) -> None:
    """Bars of the layers' contributions with one plan; above them their sum, and Pearson's r of the sparse layers."""
    plan, saved, left_dense = parts["plan"].iloc[0], parts["contribution_pct"], parts["left_dense"]
    slower = saved < 0
    for chosen, label, colour, hatch in (
        (~slower, "sparse is faster", style.CATEGORIES[0], ""),
        (slower, "sparse is slower", style.CATEGORIES[1], "////"),
    ):
        if chosen.any():
            axes.bar(
                parts.loc[chosen, "layer"], saved[chosen], color=colour, hatch=hatch, edgecolor="white", linewidth=0.3,
                label=label,
            )  # fmt: skip
    if left_dense.any():
        dense = parts.loc[left_dense, "layer"]
        axes.plot(dense, 0 * dense, "x", color=style.MUTED, clip_on=False, label="stays dense")
    axes.axhline(0, color=style.INK, linewidth=0.8)
    style.layer_axis(axes, int(parts["layer"].max()) + 1)
    words = schema.WORDS[plan] + (" or dense" if left_dense.any() else "")
    axes.set(title=f"{letter}time saved, {model.name}: {words}", ylabel="% of all layers' dense time")
    low, high = axes.get_ylim()
    axes.set_ylim(top=high + 0.2 * (high - low))  # room for the text
    style.percent_axis(axes.yaxis)
    sparse = parts[~left_dense].merge(model.counts[["layer", "mean"]], on="layer")
    r = stats.pearson(sparse["mean"], sparse["contribution_pct"]) if len(sparse) >= FEWEST_FOR_R else math.nan
    text = f"all layers: {signed(saved.sum())}" + ("" if math.isnan(r) else f"\nr = {r:.3f}".replace("-", "−"))
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.text(0.98, 0.97, text, ha="right", va="top", transform=axes.transAxes, bbox=background)
    if slower.any() or left_dense.any():
        style.legend_below(axes)


def _trained(rows: pd.DataFrame) -> pd.DataFrame:
    """The trainings whose non-zeros are shown: of several, those that ended at a step with a seed that was measured."""
    counted = choose.equally_trained(where(rows, op="nonzeros"))
    trained = choose.trainings(where(rows, op="train"))
    shown = trained[trained["step"].isin(set(counted["step"])) & trained["seed"].isin(set(counted["seed"]))]
    return choose.trainings(choose.equally_trained(where(rows, op="train"))) if shown.empty else shown


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


def at_recommended(results: Results, name: str) -> pd.DataFrame:
    """The rows of `described` at the recommended L1 value of its model."""
    data = described(results, name)
    if data.empty:
        return data
    l1 = choose.recommended_l1(results.rows, data["model"].iloc[0])
    return data.iloc[:0] if l1 is None else where(data, l1=l1)
