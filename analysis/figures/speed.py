"""Figures 4 and 5: gains of sparsity over dense in the same run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.gains import gains, published
from analysis.load import Results
from analysis.measures import NOT_FOR_SPEED, SAME_RUN
from analysis.render import span

BENCH_FORWARD = "python -m experiments.bench_forward"
BENCH_TRAINING = "python -m experiments.bench_training"
GROUP = 0.8  # of the distance between models: the width of a model's points
BESIDE = 0.4  # of the distance between L1 values: the paper's points stand to the right of ours
# Plans of a whole model, as figures 4 and 5 name them.
FORMS = {
    "by_layer": schema.WORDS["by_layer"],
    "twell": "the paper's method in every layer",
    "csr": "every neuron sparse in every layer",
    "hybrid": "the paper's method in every layer",
}
LIMITS_OF = "1.5b"  # the model that the limits in the paper's text are about
LIMIT: style.Look = {"color": style.PAPER, "linestyle": (0, (4, 3)), "linewidth": 0.9}


class Panel(NamedTuple):
    """One column of figures 4 and 5: metric, title, and the pattern of a limit in the paper's facts."""

    metric: str
    title: str
    limit: str = ""


@figure(
    "4",
    "figure04_forward",
    "forward speedup and energy saving by model and L1 value",
    "A forward pass against dense in the same run. Filled: against the fastest dense implementation, both sides "
    "compiled where that was timed; open: nothing compiled, as in the paper (stars). The paper's L1 leaves our barely "
    "trained models more active neurons than its own.",
)
def forward_gains(results: Results) -> Sketch:
    speed = Panel("throughput", "throughput, more is better", r"up to (\d+)% speedup")
    energy = Panel("energy", "energy per token, less is better")
    return _two_gains(results, 4, "model_forward", BENCH_FORWARD, (speed, energy))


@figure(
    "5",
    "figure05_training",
    "training speedup and peak-memory reduction by model and L1 value",
    "A training step against dense in the same run, with equal tokens. Filled: against the fastest dense "
    "implementation, both sides compiled; open: nothing compiled, as in the paper (stars).",
)
def training_gains(results: Results) -> Sketch:
    speed = Panel("throughput", "throughput, more is better", r"up to (\d+)% speedup")
    memory = Panel("peak_memory", "peak memory, less is better", r"more than (\d+)% less peak memory")
    return _two_gains(results, 5, "model_training", BENCH_TRAINING, (speed, memory))


def no_speed(rows: pd.DataFrame, missing: str, command: str) -> NotMeasured:
    """The reason why there is nothing to draw: among these rows only the reference backend was timed, or nothing."""
    timed = where(rows, backend=schema.REFERENCE)
    return NotMeasured(f"speed with a GPU backend: {NOT_FOR_SPEED}" if len(timed) else missing, command)


def fastest_forms(rows: pd.DataFrame) -> pd.DataFrame:
    """The throughput of whole models over dense: of each device, model and L1 value, the fastest form."""
    data = gains(choose.relu_runs(rows), "throughput")
    return data.sort_values("ratio").drop_duplicates(["device", "model", "l1"], keep="last")


def _two_gains(results: Results, number: int, op: str, command: str, panels: tuple[Panel, Panel]) -> Sketch:
    """A row of panels for each form, a column for each metric; models on the x axis, a colour for each L1 value."""
    rows = choose.sparse_models(choose.relu_runs(where(results.rows, op=op)))
    rows = choose.main_device(choose.made_for_speed(rows), ["model", "l1"])
    timed = {panel: _forms(gains(rows, panel.metric)) for panel in panels}
    speed = timed[panels[0]]
    if speed.empty:
        wanted = f"rows of {op} with a ratio over dense for gated ReLU models"
        raise no_speed(where(results.rows, op=op), wanted, command)
    shown = {panel: data for panel, data in timed.items() if len(data)}
    printed = published(op)
    everywhere = where(choose.relu_runs(results.rows), op=schema.WHOLE_MODELS, plan=tuple(set(speed["plan"])))
    places = _Places(pd.concat([speed, printed]), pd.concat([everywhere["l1"], printed["l1"]]))
    elsewhere = zip(speed["model"], describe.elsewhere(speed), strict=True)
    others = {model: f"\non {kind.removeprefix('NVIDIA ')}" for model, kind in elsewhere if kind}
    ticks = [f"{model}{others.get(model, '')}" for model in places.models]
    names = list(dict.fromkeys(speed["form"]))
    picture, grid = style.panels(len(names), len(shown), 1.2 + 2.2 * len(names), sharex=True)
    letters = iter("abcdefghijklmnop")
    for line, name in zip(grid, names, strict=True):
        for axes, (panel, data) in zip(line, shown.items(), strict=True):
            axes.set_title(f"({next(letters)}) {panel.title}\n{name}")
            _points(axes, where(data, form=name), places)
            axes.plot(places.of(printed, BESIDE), printed[panel.metric], zorder=2, **style.PAPER_POINTS)
            if panel.limit:
                limit = paper.fact(number, panel.limit)
                percent = limit if panel.metric in schema.LARGER_IS_BETTER else -limit
                ends = [places.models.index(LIMITS_OF)] * 2 if LIMITS_OF in places.models else [0, len(ticks) - 1]
                axes.plot([ends[0] - 0.45, ends[1] + 0.45], [percent] * 2, **LIMIT)
            style.percent_axis(axes.yaxis)
            axes.set_ylabel("change against dense")
    for axes in grid[-1]:
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel("model")
    uncompiled = any(data["eager_percent"].notna().any() for data in shown.values())
    picture.legend(handles=_handles(speed, places, panels, uncompiled), loc="outside lower center", ncols=2)
    lacks = "; ".join(
        f"{panel.metric.replace('_', ' ')}: {_reason(rows, panel.metric)}" for panel in panels if panel not in shown
    )
    note = describe.devices(speed["device"])
    if speed["step"].notna().any():
        note += f", after {span(speed['step'].dropna(), '{:,.0f}'.format)} training steps"
    return Sketch(picture, pd.concat(shown.values(), ignore_index=True), f"{note}.", lacks)


def _forms(data: pd.DataFrame) -> pd.DataFrame:
    """Of backends that were also timed with the rest of the model compiled, the compiled form only; its `eager_percent`
    becomes that of the same form with nothing compiled, as in the paper's comparison. `form`: the plan in words; plan
    and backend where one comparison timed a plan twice."""
    keys = choose.cells(data, [*SAME_RUN, "plan", "backup", "backend"])  # unique for each measurement of a metric
    known = set(keys)
    also_compiled = np.array([(*rest, f"{backend}{schema.COMPILED}") in known for *rest, backend in keys], dtype=bool)
    shown = data[~also_compiled]
    names = [*SAME_RUN, "plan", "backup", "backend"]
    same = shown.assign(backend=shown["backend"].str.removesuffix(schema.COMPILED))[names]
    plain = same.merge(data.loc[also_compiled, [*names, "eager_percent"]], on=names, how="left").set_index(shown.index)
    compiled = shown["backend"].str.endswith(schema.COMPILED)
    once = ~shown.duplicated([*SAME_RUN, "plan", "backup"], keep=False)
    words = shown["plan"].map(FORMS).where(shown["backup"].isna() | shown["backup"].eq(paper.BACKUP))
    return shown.assign(
        eager_percent=plain["eager_percent"].where(compiled, shown["eager_percent"]),
        form=words.where(once).fillna(shown["series"]),
    )


class _Places:
    """Where the points of a model and an L1 value stand on the x axis, and the colours of L1 values."""

    def __init__(self, data: pd.DataFrame, l1: pd.Series):
        """data: what is drawn; l1: the values that have a colour, the same in figures 4 and 5."""
        self.models = choose.by_size(data["model"])
        labels = list(dict.fromkeys(map(l1_label, l1.sort_values())))
        self.l1 = [label for label in labels if label in set(map(l1_label, data["l1"]))]
        self.colours = dict(zip(labels, style.sequence(len(labels)), strict=True))

    def of(self, data: pd.DataFrame, beside: float = 0.0) -> list[float]:
        """The x of each row: its model, and within it its L1 value; `beside`: to the right, in L1 values."""
        step, middle = GROUP / len(self.l1), (len(self.l1) - 1) / 2
        rows = zip(data["model"], data["l1"], strict=True)
        return [self.models.index(model) + step * (self.l1.index(l1_label(l1)) + beside - middle) for model, l1 in rows]


def _points(axes: Axes, data: pd.DataFrame, places: _Places) -> None:
    """A filled point for each measurement beside a compiled dense form, relative to the fastest of them; an open one
    for each with nothing compiled, by `eager_ratios`."""
    for label, own in data.groupby(data["l1"].map(l1_label)):
        look: style.Look = {"color": places.colours[str(label)], "marker": "o", "markersize": 4.5, "linestyle": ""}
        filled = own[own["baseline"].ne(schema.EAGER) | own["eager_percent"].isna()]
        axes.plot(places.of(filled), filled["percent"], zorder=3, **look)
        axes.plot(places.of(own), own["eager_percent"], zorder=4, **look | {"markerfacecolor": "white"})
    axes.axhline(0, color=style.INK, linewidth=0.8)
    for between in range(1, len(places.models)):
        axes.axvline(between - 0.5, color=style.GRID, linewidth=0.6, zorder=0)
    axes.set_xlim(-0.5, len(places.models) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)


def _handles(speed: pd.DataFrame, places: _Places, panels: Iterable[Panel], uncompiled: bool) -> list[Line2D]:
    """The legend: L1 values by colour, with the range of the models' mean non-zeros, then everything else."""
    lines = []
    for label in places.l1:
        nonzeros = speed.loc[speed["l1"].map(l1_label).eq(label), "mean_nnz"].dropna()
        active = f" ({span(nonzeros, '{:.0f}'.format)} non-zeros)" if len(nonzeros) else ""
        lines.append(Line2D([], [], label=f"L1 {label}{active}", color=places.colours[label], marker="o", linestyle=""))
    if uncompiled:
        open_: style.Look = {"marker": "o", "linestyle": "", "color": style.MUTED, "markerfacecolor": "white"}
        lines.append(Line2D([], [], label="open: nothing compiled", **open_))
    lines.append(Line2D([], [], label="the paper (H100 PCIe)", **style.PAPER_POINTS))
    if any(panel.limit for panel in panels):
        lines.append(Line2D([], [], label=f"named in the paper's text ({LIMITS_OF})", **LIMIT))
    return lines


def _reason(rows: pd.DataFrame, metric: str) -> str:
    reasons = sorted(set(where(rows, metric=metric)["missing"]) - {""})
    return "; ".join(reasons) if reasons else "no rows with a ratio"
