"""Figures 4, 5 and 12: what sparsity gains over dense in the same run, for each L1 value."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, paper
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.gains import HIGHER_IS_BETTER, gains, published_forward, published_training
from analysis.load import Results
from analysis.render import device, signed

BENCH_FORWARD = "python -m experiments.bench_forward"
BENCH_TRAINING = "python -m experiments.bench_training"


@dataclass(frozen=True)
class Panel:
    """One panel of figures 4 and 5: a metric, its title, and a limit from the paper's facts (pattern and words)."""

    metric: str
    title: str
    published: pd.Series
    limit: str = ""
    words: str = ""

    @property
    def name(self) -> str:
        return self.metric.replace("_", " ")


@figure("4", "figure04_forward", "forward speedup and energy saving for each L1 value")
def forward_gains(results: Results) -> Sketch:
    """Throughput and energy of the sparse forward pass against the dense one, per L1 value and plan."""
    paper_points = published_forward()
    speed = Panel(
        "throughput", "(a) throughput (more is better)", paper_points["throughput"], r"up to (\d+)% speedup",
        "paper: up to {}",
    )  # fmt: skip
    energy = Panel("energy", "(b) energy per token (less is better)", paper_points["energy"])
    return _two_gains(results, 4, "model_forward", BENCH_FORWARD, (speed, energy))


@figure("5", "figure05_training", "training speedup and peak-memory reduction for each L1 value")
def training_gains(results: Results) -> Sketch:
    """Throughput and peak memory of a sparse training step against a dense one, per L1 value and plan."""
    paper_points = published_training()
    speed = Panel(
        "throughput", "(a) throughput (more is better)", paper_points["throughput"], r"up to (\d+)% speedup",
        "paper: up to {}",
    )  # fmt: skip
    memory = Panel(
        "peak_memory", "(b) peak memory (less is better)", paper_points["peak_memory"],
        r"more than (\d+)% less peak memory", "paper: more than {}",
    )  # fmt: skip
    return _two_gains(results, 5, "model_training", BENCH_TRAINING, (speed, memory))


@figure("12", "figure12_devices", "training speedup for each L1 value on different devices")
def devices(results: Results) -> Sketch:
    """Training throughput gain per L1 value, one line for each device and plan."""
    rows = choose.relu_runs(where(results.rows, op="model_training"))
    shared = choose.main_model(rows)
    data = gains(shared, "throughput")
    names = sorted(set(data["device"]))
    if len(names) < 2:
        have = f"only {device(names[0])} has rows so far" if names else "no device has rows"
        raise NotMeasured(f"rows of model_training on two devices ({have})", f"{BENCH_TRAINING} on each of two GPUs")
    picture, ((axes,),) = style.panels(1, 1, 2.7)
    _gain_lines(axes, data.assign(series=data["device"].map(device) + ": " + data["series"]))
    axes.set_title("training throughput (more is better)")
    style.legend_outside(axes)
    best = data.sort_values("percent").groupby("device").tail(1)
    text = "; ".join(f"{device(r.device)}: at best {signed(r.percent)} at {l1_label(r.l1)}" for r in best.itertuples())
    return Sketch(picture, data, f"Each device against its own dense training step ({_model(data)} model). {text}.")


def _two_gains(results: Results, number: int, op: str, command: str, panels: tuple[Panel, Panel]) -> Sketch:
    rows = choose.main_device(choose.main_model(choose.relu_runs(where(results.rows, op=op))))
    found = [gains(rows, panel.metric) for panel in panels]
    if found[0].empty:
        raise NotMeasured(f"rows of {op} with a ratio over dense for gated ReLU models", command)
    picture, grid = style.panels(1, 2, 2.8)
    lacks = []
    for axes, panel, data in zip(grid[0], panels, found, strict=True):
        axes.set_title(panel.title)
        if data.empty:
            reason = _reason(rows, panel.metric, found[0])
            lacks.append(f"{panel.name}: {reason}")
            style.note(axes, f"not measured: {reason}")
            continue
        _gain_lines(axes, data.assign(series="ours: " + data["series"]), panel.published)
        if panel.limit:
            sign = 1 if panel.metric in HIGHER_IS_BETTER else -1
            _limit_line(axes, sign * paper.fact(number, panel.limit), panel.words)
    handles, labels = grid[0][0].get_legend_handles_labels()
    ours = found[0].iloc[0]
    title = f"ours: {ours['model']} model on {device(ours['device'])}"
    picture.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), title=title)
    caption = _gains_caption(found[0], found[1], panels[1].name)
    return Sketch(picture, pd.concat(found, ignore_index=True), caption, "; ".join(lacks))


def _gain_lines(axes: Axes, data: pd.DataFrame, published: pd.Series | None = None) -> None:
    """One line a series over the L1 values, with spread; the paper's points as open diamonds."""
    values = set(data["l1"]) | (set() if published is None else set(published.index))
    place = style.l1_axis(axes, values)
    for index, (name, line) in enumerate(data.groupby("series", sort=True)):
        line = line.sort_values("l1")
        x = line["l1"].map(place)
        style.line_with_spread(
            axes, x, line["percent"], line["percent_low"], line["percent_high"], label=name, **style.category(index)
        )
    if published is not None:
        axes.plot(published.index.map(place), published, label="paper (1.5B, H100 PCIe)", **style.PAPER_POINTS)
    axes.axhline(0, color=style.INK, linewidth=0.8)
    axes.set_ylabel("change against dense")
    style.percent_axis(axes.yaxis)
    axes.margins(y=0.15)


def _limit_line(axes: Axes, percent: float, words: str) -> None:
    """A dashed line at a published limit, named at its left end on the side that points away from zero."""
    axes.axhline(percent, color=style.PAPER, linestyle=(0, (4, 3)), linewidth=0.9)
    low, high = axes.get_ylim()
    room = 0.12 * (max(high, percent) - min(low, percent))
    axes.set_ylim(min(low, percent - room), max(high, percent + room))
    at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7}
    above = percent > 0
    axes.annotate(
        words.format(signed(percent)), (0.01, percent), xytext=(0, 3 if above else -3),
        va="bottom" if above else "top", **at,
    )  # fmt: skip


def _reason(rows: pd.DataFrame, metric: str, compared: pd.DataFrame) -> str:
    """Why the plans that were compared have no `metric`; those that cannot run at all have other reasons."""
    own = where(rows, metric=metric, plan=tuple(compared["plan"]), backend=tuple(compared["backend"]))
    reasons = sorted(set(own["missing"]) - {""})
    return "; ".join(reasons) if reasons else "no rows with a ratio"


def _gains_caption(speed: pd.DataFrame, cost: pd.DataFrame, name: str) -> str:
    best = speed.loc[speed["percent"].idxmax()]
    text = (
        f"{_model(speed)} model on {device(best['device'])}, each against the fastest dense backend of the same run "
        f"({best['baseline']}): at best {signed(best['percent'], 1)} throughput ({best['series']}, L1 "
        f"{l1_label(best['l1'])})"
    )
    if len(cost):
        least = cost.loc[cost["percent"].idxmin()]
        text += f", and at best {signed(least['percent'], 1)} {name} (L1 {l1_label(least['l1'])})"
    return text + ". Bars: 20th to 80th percentile."


def _model(data: pd.DataFrame) -> str:
    return data["model"].iloc[0]
