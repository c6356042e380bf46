"""Figures E and F: each layer of trained models, dense time over sparse time, for each way to treat hot and silent
neurons: the forward, and forward and backward. Figure I: the same layers against their non-zeros."""

from __future__ import annotations

import math
import textwrap
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, describe, schema
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.blocks import FLOOR
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.speed import BENCH_FORWARD, no_speed
from analysis.floors import floors
from analysis.gains import gains
from analysis.load import Results

CONTROL = schema.LIVE_PLANS["dense"]  # beside sparse plans: what dense products gain without the silent neurons


class Kind(NamedTuple):
    """What a figure shows: its operations, of which each model is shown with the first that it has; the names of
    plans; the plan of the floor; and the command that makes the rows."""

    title: str
    ops: tuple[str, ...]
    series: dict[str, str]
    floor: str
    command: str


FORWARD = Kind(
    "forward",
    ("ffn_forward",),
    {name: schema.WORDS[name] for name in ("twell", "twell_hot", "twell_ordered", "twell_live", CONTROL)},
    "twell",
    BENCH_FORWARD,
)
TRAINING = Kind(
    "forward and backward",
    ("ffn_training_stack", "ffn_training"),
    {name: schema.WORDS[name] for name in ("hybrid", "csr_hot", "csr")},
    "csr",
    'python -m experiments.bench_kernels "ops=[ffn_training_stack]" masks=nonzeros_masks.parquet',
)
OF_A_LAYER = r"^(?P<trained>.+)/layer(?P<place>[0-9]{1,6})$"  # what benchmarks write into the column `pattern`
COMPARED = ["study", "item", "trained"]
COMPARISON = [*COMPARED, "backend", "tokens"]  # what one panel shows has these in common
MOST_PANELS = 6
FEWEST_LAYERS = 8  # in one panel of figure I
STACKED = {"ffn_training_stack": "four copies of each layer, as in a model", "ffn_training": "one block alone"}


@figure(
    "E",
    "figureE_layer_speed",
    "speedup by layer: every neuron sparse, hot, sorted, pruned",
    "Each layer against its fastest dense implementation. Every neuron sparse: the paper's method. Hot: dense "
    "products compute the neurons that fire most; sorted: these stand in front. Pruned: without neurons that fired for "
    "none of the timed tokens, exact on these only; dense pruned is the control. Dotted: estimate if no weight row is "
    "reused.",
)
def layer_speed(results: Results) -> Sketch:
    return _sketch(results, FORWARD)


@figure(
    "F",
    "figureF_layer_training_speed",
    "speedup of forward and backward by layer",
    "Each layer, forward and backward, against its fastest dense implementation. Backup: the paper's method. Dotted: "
    "estimate with every neuron sparse if no weight row is reused; dense products of hot neurons can beat it, since "
    "they read each row once.",
)
def layer_training_speed(results: Results) -> Sketch:
    return _sketch(results, TRAINING)


@figure(
    "I",
    "figureI_layers_against_nonzeros",
    "speedup of layers of trained models against their non-zeros",
    "The layers of all trained models that were timed, at every L1 value, each against its fastest dense "
    "implementation. Hot neurons, those that fire most, are computed by dense products.",
)
def layers_against_nonzeros(results: Results) -> Sketch:
    shown, lacks = [], []
    for kind in (FORWARD, TRAINING):
        data = choose.whole_function(_measured(results, kind))
        data = data[data["op"].eq(next((op for op in kind.ops if op in set(data["op"])), ""))]
        if data["pattern"].nunique() < FEWEST_LAYERS:
            lacks.append(f"{kind.title} of {FEWEST_LAYERS} layers")
        else:
            shown.append((kind, data))
    if not shown:
        raise _not_measured(results, FORWARD)
    picture, (grid,) = style.panels(1, len(shown), 3.2, sharey=True)
    for letter, axes, (kind, data) in zip("ab", grid, shown, strict=False):
        for plan, label in kind.series.items():
            layers = where(data, plan=plan)
            look = style.of_plan(plan) | style.OPEN
            axes.plot(layers["mean_nnz"], layers["ratio"], label=label if len(layers) else "", **look)
        axes.axhline(1, color=style.INK, linewidth=0.8)
        axes.set(title=f"({letter}) {kind.title}", xlabel="mean non-zeros (neurons/token)")
        style.log_axis(axes.xaxis)
        style.room_for_labels(axes)
        style.log_axis(axes.yaxis)
        axes.legend(loc="lower left")
    grid[0].set_ylabel("dense time / sparse time")
    data = pd.concat([data for _, data in shown], ignore_index=True)
    note = f"{describe.devices(data['device'])}, {data['pattern'].nunique()} layers."
    return Sketch(picture, data, note, ", ".join(lacks))


def _sketch(results: Results, kind: Kind) -> Sketch:
    data = choose.at_full_width(_measured(results, kind))
    panels = [panel for name in choose.model_order(data["of"]) for panel in _panels(data, name, results, kind)]
    panels = panels[:MOST_PANELS]
    if not panels:
        raise _not_measured(results, kind)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    picture, grid = style.panels(rows, columns, 0.7 + 2.4 * rows, sharey=True)
    for letter, axes, (title, layers) in zip("abcdef", grid.flat, panels, strict=False):
        _draw(axes, layers, kind)
        axes.set_title(textwrap.fill(f"({letter}) {title}", 44) if len(panels) > 1 else title)
    for line in grid:
        line[0].set_ylabel("speed over dense (time ratio)")
    shown = pd.concat([layers for _, layers in panels], ignore_index=True)
    handles = [
        Line2D([], [], label=label, **style.of_plan(plan))
        for plan, label in kind.series.items()
        if plan in set(shown["plan"])
    ]
    if shown["floor_ratio"].notna().any():
        handles.append(Line2D([], [], label=f"estimate: {kind.series[kind.floor]}", **FLOOR))
    style.legend_of_panels(picture, grid, len(panels), handles)
    lacks = [label for plan, label in kind.series.items() if plan not in set(shown["plan"])]
    lacks += ["the machine's ceilings, of which the floors are made"] if shown["floor_ratio"].isna().all() else []
    stacked = [STACKED[op] for op in dict.fromkeys(shown["op"]) if op in STACKED]
    tokens = " or ".join(f"{tokens:,}" for tokens in sorted(set(shown["tokens"].astype(int))))
    note = f"{', '.join([describe.devices(shown['device']), f'{tokens} tokens', *stacked])}."
    return Sketch(picture, shown, note, ", ".join(lacks))


def _not_measured(results: Results, kind: Kind) -> NotMeasured:
    missing = f"rows of {' or '.join(kind.ops)} with a ratio, of the layers of trained models"
    return no_speed(_of_layers(results.rows, kind), missing, kind.command)


def _of_layers(rows: pd.DataFrame, kind: Kind) -> pd.DataFrame:
    """Times of feed-forward blocks that are layers of a trained model, without mitigations of dead neurons; `trained`:
    the run or folder that the pattern names, `place`: the layer in it."""
    rows = where(rows, op=kind.ops, metric="time", activation=("relu", ""), modification=("none", ""))
    named = rows["pattern"].str.extract(OF_A_LAYER)
    found = named["trained"].notna()
    return rows[found].assign(trained=named["trained"][found], place=named["place"][found].astype("int64"))


def _measured(results: Results, kind: Kind) -> pd.DataFrame:
    """The sparse measurements: what `gains` has, with `of`, the model (the run or folder where it is not known)."""
    rows = choose.main_device(choose.made_for_speed(_of_layers(results.rows, kind)), ["trained"])
    data = gains(rows.dropna(subset=["tokens", "hidden", "intermediate", "mean_nnz"]), "time")
    data = where(data, plan=tuple(kind.series))
    named = data["pattern"].str.extract(OF_A_LAYER)
    data = data.assign(trained=named["trained"], layer=named["place"].astype("int64"))
    # Patterns that are masks have no model, L1 value and step: those of the run that gathered them, by its name.
    gathered = where(results.rows, op="nonzeros")[["item", "model", "l1", "step"]].drop_duplicates()
    gathered = gathered.drop_duplicates("item", keep=False).set_index("item")
    known, found = data["model"] != "", {name: data["trained"].map(gathered[name]) for name in gathered}
    found["model"] = found["model"].astype(object).fillna("")
    data = data.assign(**{name: data[name].where(known, values) for name, values in found.items()})
    data = choose.sparse_models(data)
    return data.assign(of=data["model"].where(data["model"] != "", data["trained"]))


def _panels(data: pd.DataFrame, name: str, results: Results, kind: Kind) -> list[tuple[str, pd.DataFrame]]:
    """Panels of one model, one for each length of training, at the recommended or else the largest L1 value timed:
    title, and a line of data for each layer and plan."""
    own = where(data, of=name)
    values: set[float] = set(own["l1"].dropna())
    recommended = choose.recommended_l1(results.rows, name)
    l1 = recommended if recommended is not None and recommended in values else max(values, default=math.nan)
    runs = [run for _, run in where(own, l1=l1).groupby("step", dropna=False)]
    return [_panel(run, name, l1, results, kind) for run in runs if not run["plan"].eq(CONTROL).all()]


def _panel(own: pd.DataFrame, name: str, l1: float, results: Results, kind: Kind) -> tuple[str, pd.DataFrame]:
    """Panel of one trained model: the comparison with the most plans, layers and tokens."""
    op = next(op for op in kind.ops if op in set(own["op"]))
    own = where(own, op=op)
    control = own["plan"].eq(CONTROL)  # of the same run, whatever backend is beside it
    groups = own[~control].groupby(COMPARISON, sort=True)
    _, chosen = max(groups, key=lambda group: (group[1]["plan"].nunique(), group[1]["layer"].nunique(), group[0][-1]))
    beside = own[control].merge(chosen[[*COMPARED, "tokens", "layer"]].drop_duplicates())
    chosen = pd.concat([chosen, beside], ignore_index=True).drop_duplicates(["plan", "layer"])
    names = [
        "study", "item", "device", "op", "model", "l1", "trained", "layer", "plan", "backend", "hot", "silent",
        "screened", "tokens", "hidden", "intermediate", "mean_nnz",
    ]  # fmt: skip
    lines = chosen[names].assign(
        time_ms=chosen["value"],
        dense_ms=chosen["value"] * chosen["ratio"],
        ratio=chosen["ratio"],
        ratio_low=1 + chosen["percent_low"] / 100,
        ratio_high=1 + chosen["percent_high"] / 100,
        floor_ms=floors(chosen.assign(plan=kind.floor), results.rows),
    )
    lines["floor_ratio"] = lines["dense_ms"] / lines["floor_ms"]
    order = lines["plan"].map(list(kind.series).index)
    lines = lines.assign(order=order).sort_values(["order", "layer"]).drop(columns="order").reset_index(drop=True)
    title = f"layers of a trained model ({name})" if math.isnan(l1) else f"{name}, L1 {l1_label(l1)}"
    steps = chosen["step"].dropna()
    return f"{title}, after {int(steps.iloc[0]):,} steps" if len(steps) else title, lines


def _draw(axes: Axes, data: pd.DataFrame, kind: Kind) -> None:
    """The lines of one model, and the speed of all its layers together with each plan."""
    lines = []
    for plan in kind.series:
        own = where(data, plan=plan)
        if len(own):
            together = own["dense_ms"].sum() / own["time_ms"].sum()
            lines += axes.plot(own["layer"], own["ratio"], label=f"{together:.2f}", **style.of_plan(plan))
    known = data.dropna(subset="floor_ratio").groupby("layer")["floor_ratio"].median()
    axes.plot(known.index, known, zorder=5, **FLOOR)
    axes.axhline(1, color=style.INK, linewidth=0.8)
    last = int(data["layer"].max())
    style.layer_axis(axes, last + 1)
    nonzeros = data.groupby("layer")["mean_nnz"].mean()
    layers = [int(layer) for layer in axes.get_xticks()]
    if len(layers) <= last:  # not every layer has a label
        layers = [*(layer for layer in layers if last - layer >= layers[1]), last]
    named = [f"{layer}\n({nonzeros[layer]:.0f})" if layer in nonzeros.index else str(layer) for layer in layers]
    axes.set_xticks(layers, named)
    axes.set_xlabel("layer (mean non-zeros)")
    style.log_axis(axes.yaxis)
    axes.legend(
        handles=lines, title="all layers together", loc="lower center", ncols=len(lines), handlelength=1.4,
        columnspacing=0.9, handletextpad=0.4, fontsize=7, title_fontsize=7,
    )  # fmt: skip
