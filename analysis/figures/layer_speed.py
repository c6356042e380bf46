"""Figures E and F: each layer of trained models, dense time over sparse time, for each way to treat hot and silent
neurons: the forward, and forward and backward."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, describe, schema
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.blocks import POINT_FLOOR
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.speed import BENCH_FORWARD, SPREAD
from analysis.floors import floors
from analysis.gains import gains
from analysis.load import Results
from analysis.measures import NOT_FOR_SPEED
from analysis.render import significant

CONTROL = schema.LIVE_PLANS["dense"]  # beside sparse plans: what dense products gain without the silent neurons


class Series(NamedTuple):
    """What the legend, the caption and the list of what is missing call a plan."""

    label: str
    words: str
    subject: str


class Kind(NamedTuple):
    """What a figure shows: operations, of which each model is shown with the first that it has, plans, the plan of the
    floor, and what makes the rows."""

    ops: tuple[str, ...]
    series: dict[str, Series]
    floor: str
    command: str


FORWARD = Kind(
    ("ffn_forward",),
    {
        "twell": Series("the paper's plan", "with the paper's plan", "the paper's plan"),
        schema.HOT_PLANS["twell"]: Series("hot neurons by index", "with hot neurons by index", "hot neurons by index"),
        schema.ORDERED_PLANS["twell"]: Series(
            "sorted by firing rate", "with neurons sorted by firing rate", "neurons sorted by firing rate"
        ),
        schema.LIVE_PLANS["twell"]: Series(
            "sorted, silent neurons left out", "without the silent neurons as well", "silent neurons left out"
        ),
        CONTROL: Series(
            "dense, silent neurons left out",
            "by dense products without the silent neurons",
            "dense without silent ones",
        ),
    },
    "twell",
    BENCH_FORWARD,
)
TRAINING = Kind(
    ("ffn_training_stack", "ffn_training"),
    {
        "csr": Series("every neuron sparse", "with every neuron sparse", "every neuron sparse"),
        schema.HOT_PLANS["csr"]: Series("hot neurons by index", "with hot neurons by index", "hot neurons by index"),
        "hybrid": Series("the paper's plan", "with the paper's plan (dense backup)", "the paper's plan"),
    },
    "csr",
    'python -m experiments.bench_kernels "ops=[ffn_training_stack]" masks=nonzeros_masks.parquet',
)
OF_A_LAYER = r"^(?P<trained>.+)/layer(?P<place>[0-9]{1,6})$"  # what benchmarks write into the column `pattern`
COMPARED = ["study", "item", "trained"]
COMPARISON = [*COMPARED, "backend", "tokens"]  # what one panel shows has these in common
MOST_PANELS = 6
OPERATIONS = {
    "ffn_training_stack": "Each layer is one of four copies of itself, whose forwards run before their backwards, as "
    "in a model.",
    "ffn_training": "One block alone, whose backward starts right behind its forward.",
}


@dataclass(frozen=True)
class Panel:
    """The layers of one trained model: a line of `data` for each layer and plan."""

    title: str
    data: pd.DataFrame


@figure("E", "figureE_layer_speed", "speedup by layer: hot neurons, sorted by firing rate, silent neurons left out")
def layer_speed(results: Results) -> Sketch:
    """Time ratio over dense by layer of trained models, with the paper's plan, hot neurons by index, neurons
    sorted by firing rate and silent neurons left out; with the floor of the paper's plan in each layer."""
    return _sketch(results, FORWARD)


@figure("F", "figureF_layer_training_speed", "speedup of forward and backward by layer")
def layer_training_speed(results: Results) -> Sketch:
    """Time ratio over dense of forward and backward by layer of trained models, with every neuron sparse, and with hot
    neurons by index; with the floor of the first in each layer."""
    return _sketch(results, TRAINING)


def _sketch(results: Results, kind: Kind) -> Sketch:
    data = _measured(results, kind)
    found = [panel for name in choose.model_order(data["of"]) for panel in _panels(data, name, results, kind)]
    panels, others = found[:MOST_PANELS], found[MOST_PANELS:]
    if not panels:
        timed = where(_of_layers(results.rows, kind), backend=schema.REFERENCE)
        what = f"rows of {' or '.join(kind.ops)} with a ratio, of the layers of trained models"
        raise NotMeasured(f"speed with a GPU backend: {NOT_FOR_SPEED}" if len(timed) else what, kind.command)
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    picture, grid = style.panels(rows, columns, 0.7 + 2.3 * rows, sharey=True)
    for letter, axes, panel in zip("abcdef", grid.flat, panels, strict=False):
        _draw(axes, panel, kind)
        axes.set_title(textwrap.fill(f"({letter}) {panel.title}", 44) if len(panels) > 1 else panel.title)
    for line in grid:
        line[0].set_ylabel("speed over dense (time ratio)")
    shown = pd.concat([panel.data for panel in panels], ignore_index=True)
    if len(panels) < grid.size:
        grid[-1][1].set_axis_off()
        grid[-1][1].legend(handles=_handles(shown, kind), loc="center left", alignment="left")
    else:
        picture.legend(handles=_handles(shown, kind), loc="outside lower center", ncols=3)
    return Sketch(picture, shown, _caption(panels, [panel.title for panel in others], kind), _lacks(shown, kind))


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
    data = _with_models(data, results.rows)
    return data.assign(of=data["model"].where(data["model"] != "", data["trained"]))


def _with_models(data: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Model, L1 value and step also of patterns that are masks: those of the run that gathered them, by its name."""
    gathered = where(rows, op="nonzeros")[["item", "model", "l1", "step"]].drop_duplicates()
    gathered = gathered.drop_duplicates("item", keep=False).set_index("item")
    named = data["model"] != ""
    model = data["trained"].map(gathered["model"]).astype(object).fillna("")
    others = {name: data[name].where(named, data["trained"].map(gathered[name])) for name in ("l1", "step")}
    return data.assign(model=data["model"].where(named, model), **others)


def _panels(data: pd.DataFrame, name: str, results: Results, kind: Kind) -> list[Panel]:
    """Of one model, at the recommended L1 value, or the largest one timed: one panel for each length of training."""
    own = where(data, of=name)
    values: set[float] = set(own["l1"].dropna())
    recommended = choose.recommended_l1(results.rows, name)
    l1 = recommended if recommended is not None and recommended in values else max(values, default=math.nan)
    runs = [run for _, run in where(own, l1=l1).groupby("step", dropna=False)]
    return [_panel(run, name, l1, results, kind) for run in runs if not run["plan"].eq(CONTROL).all()]


def _panel(own: pd.DataFrame, name: str, l1: float, results: Results, kind: Kind) -> Panel:
    """Of one trained model: the comparison with the most plans, layers and tokens."""
    op = next(op for op in kind.ops if op in set(own["op"]))
    own = where(own, op=op)
    control = own["plan"].eq(CONTROL)  # of the same run, whatever backend is beside it
    groups = own[~control].groupby(COMPARISON, sort=True)
    _, chosen = max(groups, key=lambda group: (group[1]["plan"].nunique(), group[1]["layer"].nunique(), group[0][-1]))
    beside = own[control].merge(chosen[[*COMPARED, "tokens", "layer"]].drop_duplicates())
    chosen = pd.concat([chosen, beside], ignore_index=True).drop_duplicates(["plan", "layer"])
    lines = pd.DataFrame(
        {
            **{
                column: chosen[column]
                for column in ("study", "item", "device", "op", "model", "l1", "trained", "layer")
            },
            **{column: chosen[column] for column in ("plan", "backend", "hot", "silent", "tokens", "hidden")},
            "intermediate": chosen["intermediate"],
            "mean_nnz": chosen["mean_nnz"],
            "time_ms": chosen["value"],
            "dense_ms": chosen["value"] * chosen["ratio"],
            "ratio": chosen["ratio"],
            "ratio_low": 1 + chosen["percent_low"] / 100,
            "ratio_high": 1 + chosen["percent_high"] / 100,
            "floor_ms": floors(chosen.assign(plan=kind.floor), results.rows),
        }
    )
    lines["floor_ratio"] = lines["dense_ms"] / lines["floor_ms"]
    order = lines["plan"].map(list(kind.series).index)
    lines = lines.assign(order=order).sort_values(["order", "layer"]).drop(columns="order").reset_index(drop=True)
    title = f"layers of a trained model ({name})" if math.isnan(l1) else f"{name}, L1 {l1_label(l1)}"
    steps = chosen["step"].dropna()
    return Panel(f"{title}, after {int(steps.iloc[0]):,} steps" if len(steps) else title, lines)


def _draw(axes: Axes, panel: Panel, kind: Kind) -> None:
    for place, (plan, series) in enumerate(kind.series.items()):
        line = where(panel.data, plan=plan)
        style.line_with_spread(
            axes, line["layer"], line["ratio"], line["ratio_low"], line["ratio_high"], label=series.label,
            **_look(place, plan),
        )  # fmt: skip
    known = panel.data.dropna(subset="floor_ratio").groupby("layer")["floor_ratio"].median()
    axes.plot(known.index, known, zorder=5, **POINT_FLOOR)
    axes.axhline(1, color=style.INK, linewidth=0.8)
    last = int(panel.data["layer"].max())
    style.layer_axis(axes, last + 1)
    axes.annotate(
        "dense",
        (0.45, 1),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        va="top",
        fontsize=7,
    )
    nonzeros = panel.data.groupby("layer")["mean_nnz"].mean()
    layers = [int(layer) for layer in axes.get_xticks()]
    if len(layers) <= last:  # not every layer has a label
        layers = [*(layer for layer in layers if last - layer >= layers[1]), last]
    axes.set_xticks(layers, [_tick(layer, nonzeros) for layer in layers])
    axes.set_xlabel("layer (mean non-zeros)")
    style.log_axis(axes.yaxis)


def _look(place: int, plan: str) -> style.Look:
    """Hot neurons by index and sorted by firing rate are about as fast: the former's points are larger, to be
    seen behind the latter's."""
    larger: style.Look = {"markersize": 8} if plan in schema.HOT_PLANS.values() else {}
    return style.category(place) | larger


def _tick(layer: int, nonzeros: pd.Series) -> str:
    return f"{layer}\n({nonzeros[layer]:.0f})" if layer in nonzeros.index else str(layer)


def _handles(data: pd.DataFrame, kind: Kind) -> list[Line2D]:
    lines = [
        Line2D([], [], label=series.label, **_look(place, plan))
        for place, (plan, series) in enumerate(kind.series.items())
        if plan in set(data["plan"])
    ]
    if data["floor_ratio"].notna().any():
        lines.append(
            Line2D(
                [],
                [],
                label=f"estimate {kind.series[kind.floor].words}, no row reused",
                **POINT_FLOOR,
            )
        )
    return lines


def _lacks(data: pd.DataFrame, kind: Kind) -> str:
    parts = [series.subject for plan, series in kind.series.items() if plan not in set(data["plan"])]
    parts += ["the machine's ceilings, of which the floors are made"] if data["floor_ratio"].isna().all() else []
    return ", ".join(parts)


def _caption(panels: list[Panel], others: list[str], kind: Kind) -> str:
    plans = set().union(*(panel.data["plan"] for panel in panels))
    backends = " and ".join(dict.fromkeys(panel.data["backend"].iloc[0] for panel in panels))
    shapes = "; ".join(dict.fromkeys(_shape(panel.data.iloc[0]) for panel in panels))
    text = " ".join(_result(panel, kind, plans) for panel in panels)
    text += " In brackets: mean non-zeros of the tokens timed, which are others than those of figures 6 and 10."
    kinds = describe.devices(pd.concat([panel.data["device"] for panel in panels]))
    text += f" {kinds}, {backends}, {shapes}; each against the fastest dense form of the same run."
    text += "".join(
        f" {said}" for op, said in OPERATIONS.items() if any(op in set(panel.data["op"]) for panel in panels)
    )
    if any(panel.data["hot"].notna().any() for panel in panels):
        text += " Hot neurons, those that fire most, are computed by dense products: their rows are copied by index"
        ordered = plans & set(schema.ORDERED_PLANS.values())
        text += ", or, with neurons sorted by how often they fire, are a slice of the weights." if ordered else "."
    if any(panel.data["silent"].notna().any() for panel in panels):
        text += (
            " Neurons left out fired for none of these very tokens, so the result is exact here, and the speed an "
            "upper bound: on other text some of them fire, and leaving them out changes the result."
        )
    if CONTROL in plans:
        text += (
            " Dense products without the silent neurons are the control: what leaving these out gives without any "
            "sparse kernel."
        )
    if any(panel.data["floor_ratio"].notna().any() for panel in panels):
        text += (
            f" Dashes: the speedup estimated {kind.series[kind.floor].words} from the machine's measured rates if "
            f"every non-zero reads its rows of the weights again{_against_floor(panels, kind)}."
        )
        if plans - {kind.floor}:
            text += " The other lines can exceed it: dense products of hot neurons read each row once"
            text += ", and neurons left out need no gate product." if plans & set(schema.LIVE_PLANS.values()) else "."
    text += f" {SPREAD}"
    return text + (f" Also timed, and not drawn: {', '.join(others)}." if others else "")


def _against_floor(panels: list[Panel], kind: Kind) -> str:
    """Whether the plan of the estimate stays below it."""
    own = where(pd.concat([panel.data for panel in panels]), plan=kind.floor).dropna(subset="floor_ratio")
    above = int((own["ratio"] > own["floor_ratio"]).sum())
    if own.empty or not above:
        return f"; all points {kind.series[kind.floor].words} are below it" if len(own) else ""
    return f"; {above} of {len(own)} measured exceed it, since neighbouring tokens share rows in a nearer cache"


def _result(panel: Panel, kind: Kind, drawn: set[str]) -> str:
    """How much faster than dense all layers together are with each plan, in how many layers it is faster, and which of
    the plans drawn were not timed."""
    found = []
    absent = [series.subject for plan, series in kind.series.items() if plan in drawn - set(panel.data["plan"])]
    for plan, series in kind.series.items():
        own = where(panel.data, plan=plan)
        if own.empty:
            continue
        ratio = own["dense_ms"].sum() / own["time_ms"].sum()
        told = f"faster in {(own['ratio'] > 1).sum()} of {len(own)} layers"
        if own["silent"].notna().any():
            told += f"; {significant(float(own['silent'].sum() / own['intermediate'].sum()) * 100, 2)}% are left out"
        found.append(f"{ratio:.2f} {series.words} ({told})")
    rest = f"; not timed: {', '.join(absent)}" if absent else ""
    return f"{panel.title}: relative to dense, the speed of all layers together is {', '.join(found)}{rest}."


def _shape(row: pd.Series) -> str:
    return f"M = {int(row['tokens']):,} tokens, K = {int(row['hidden']):,}, N = {int(row['intermediate']):,}"
