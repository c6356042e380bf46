"""Figure D, the result at a glance: the speedup from skipping zeros, and the quality cost of the L1 term."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from analysis import choose, stats
from analysis.choose import l1_label, where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.quality import active_neurons, published
from analysis.figures.speed import fastest_forms
from analysis.load import Results
from analysis.measures import nonzeros_rows
from analysis.render import device, span

MOST_NONZEROS = 250  # beyond this, dense is faster: see figure I
FEWEST_POINTS = 3
FEWEST_MODELS = 2  # with the same L1 value, to name it
MODELS = {"model_forward": "whole models: forward", "model_training": "whole models: training step"}


@figure(
    "D",
    "figureD_overview",
    "the result at a glance: speed and quality against active neurons",
    "Above, the speed of one block (lines) and of whole models of such blocks (points) over dense. Below, the "
    "cross-entropy of a small model, a point for each L1 value. Grey: L1 values at which larger models were timed; "
    "they are barely trained, so their own quality is not shown.",
)
def overview(results: Results) -> Sketch:
    speed, quality = blocks.fastest_on_synthetic(results), _quality(results)
    speed = speed[speed["mean_nnz"] <= MOST_NONZEROS]
    points = {
        "the block's speed with a GPU backend": speed["mean_nnz"].nunique(),
        "a sweep of the L1 coefficient": len(quality),
    }
    if lacking := [what for what, count in points.items() if count < FEWEST_POINTS]:
        raise NotMeasured(" and ".join(lacking), blocks.BENCH)
    of_such_blocks = where(results.rows, op=tuple(MODELS), intermediate=tuple(speed["intermediate"].unique()))
    timed = choose.main_device(choose.made_for_speed(of_such_blocks))
    models = pd.concat([fastest_forms(where(timed, op=op)) for op in MODELS], ignore_index=True)
    speed, models = (
        rows.assign(active=rows["mean_nnz"] / rows["intermediate"].astype("float64") * 100) for rows in (speed, models)
    )
    picture, ((above,), (below,)) = style.panels(2, 1, 4.5, sharex=True)
    _speed_panel(above, speed, models)
    _quality_panel(below, quality)
    _timed(above, below, models)
    data = pd.concat([speed.assign(panel="a"), models.assign(panel="a"), quality.assign(panel="b")], ignore_index=True)
    note = f"{device(speed['device'].iloc[0])}; {quality['model'].iloc[0]} model, "
    note += f"{span(quality['seeds'], '{:.0f}'.format)} seeds, 95% intervals."
    return Sketch(picture, data, note)


def _quality(results: Results) -> pd.DataFrame:
    """One line per L1 value of the main model: `change` of the held-out cross-entropy in percent, against L1 = 0 and
    the same seed, with its interval, and `active` neurons in percent of N, each as a mean over seeds."""
    rows = choose.main_model(choose.equally_trained(choose.relu_runs(results.rows)))
    active = active_neurons(nonzeros_rows(rows), ["l1"])[["l1", "value"]].rename(columns={"value": "active"})
    lines = stats.over_seeds(choose.loss_change(rows), ["model", "l1"]).rename(columns={"value": "change"})
    return lines[["model", "l1", "change", "low", "high", "seeds"]].merge(active, on="l1")


def _speed_panel(axes: Axes, speed: pd.DataFrame, models: pd.DataFrame) -> None:
    looks = dict(zip(blocks.OPS, map(style.category, (0, 1)), strict=True))
    for (op, name), look in zip(blocks.OPS.items(), looks.values(), strict=True):
        ours = where(speed, op=op, published=False)
        axes.plot(ours["active"], ours["ratio"], label=f"one block: {name}", **look | {"marker": "", "linewidth": 2})
    for (op, name), look in zip(MODELS.items(), looks.values(), strict=True):
        timed = where(models, op=op)
        axes.plot(timed["active"], timed["ratio"], label=name if len(timed) else "", **look | {"linestyle": ""})
    for op, look in looks.items():
        theirs = where(speed, op=op, published=True, wrong=False)
        label = "hollow: published kernels" if op == "ffn_forward" and len(theirs) else ""
        axes.plot(theirs["active"], theirs["ratio"], label=label, **look | style.OPEN)
    style.log_axis(axes.yaxis)
    axes.set_ylim(0.85, speed["ratio"].max() * 1.15)
    axes.yaxis.set_major_locator(FixedLocator([1.5, 2, 4]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    style.reference_line(axes, 1, "dense")
    axes.set(title="Fewer active neurons: faster", ylabel="speed over dense")
    axes.legend(loc="upper right")


def _quality_panel(axes: Axes, quality: pd.DataFrame) -> None:
    ends = (quality["low"], quality["high"])
    label = f"{quality['model'].iloc[0]} model, ours"
    style.line_with_spread(axes, quality["active"], quality["change"], *ends, label=label, **style.category(2))
    theirs = {name: values.loc[[choose.RECOMMENDED_L1]] for name, values in published().items()}
    axes.plot(theirs["active"], theirs["change"], label="1.5b model, the paper", **style.PAPER_POINTS)
    style.log_axis(axes.xaxis)
    axes.xaxis.set_major_locator(FixedLocator([0.1, 1, 10]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.margins(y=0.15)
    axes.yaxis.set_major_locator(MultipleLocator(5))
    style.percent_axis(axes.yaxis)
    bound = choose.QUALITY_TOLERANCE * 100
    style.reference_line(axes, bound, f"+{bound:g}%, the paper's bound")
    axes.set(title="Fewer active neurons: worse", xlabel="active neurons", ylabel="cross-entropy against no L1")
    axes.legend(loc="upper right")


def _timed(above: Axes, below: Axes, models: pd.DataFrame) -> None:
    """Grey bands where whole models were timed: their active neurons at each L1 value that several of them have."""
    for l1, timed in models.groupby("l1"):
        if timed["model"].nunique() < FEWEST_MODELS:
            continue
        low, high = timed["active"].min() / 1.06, timed["active"].max() * 1.06
        for axes in (above, below):
            axes.axvspan(low, high, color=style.GRID, alpha=0.7, linewidth=0, zorder=0)
        name = f"L1 {l1_label(float(l1))}" if l1 else "no L1"
        above.annotate(
            name, ((low * high) ** 0.5, 0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=7,
        )  # fmt: skip
