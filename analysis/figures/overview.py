"""Figure D, the result at a glance: the speedup from skipping zeros, and the quality cost of the L1 term."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, stats
from analysis.choose import l1_label, where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.quality import published
from analysis.load import Results
from analysis.measures import nonzeros_rows
from analysis.render import significant

MOST_NONZEROS = 250  # beyond this, dense is faster: see figure B
FEWEST_POINTS = 3


@figure("D", "figureD_overview", "the result at a glance: speed of one block, and quality against sparsity")
def overview(results: Results) -> Sketch:
    """(a) Speedup of the gated block (fastest sparse form over fastest dense form) against mean non-zeros, for our
    kernels and the published ones. (b) Held-out cross-entropy against active neurons in the L1 sweep."""
    speed, quality = blocks.fastest_on_synthetic(results), _quality(results)
    speed = speed[speed["mean_nnz"] <= MOST_NONZEROS]
    if speed["mean_nnz"].nunique() < FEWEST_POINTS or len(quality) < FEWEST_POINTS:
        raise NotMeasured("the block's speed with a GPU backend, and a sweep of the L1 coefficient", blocks.BENCH)
    picture, (grid,) = style.panels(1, 2, 3.0)
    _speed_panel(grid[0], speed)
    _quality_panel(grid[1], quality)
    data = pd.concat([speed.assign(panel="a"), quality.assign(panel="b")], ignore_index=True)
    return Sketch(picture, data, _caption(speed, quality, results))


def _quality(results: Results) -> pd.DataFrame:
    """One line per L1 value of the main model: `change` of the held-out cross-entropy in percent, against L1 = 0 and
    the same seed, with its interval, and `active` neurons in percent of N, each as a mean over seeds."""
    rows = choose.main_model(choose.equally_trained(choose.relu_runs(results.rows)))
    means = nonzeros_rows(rows)
    share = means.assign(value=means["value"] / means["intermediate"].astype(float) * 100)
    active = stats.over_seeds(share, ["l1"])[["l1", "value"]].rename(columns={"value": "active"})
    lines = stats.over_seeds(choose.loss_change(rows), ["model", "l1"]).rename(columns={"value": "change"})
    return lines[["model", "l1", "change", "low", "high", "seeds"]].merge(active, on="l1")


def _speed_panel(axes: Axes, speed: pd.DataFrame) -> None:
    for number, (op, name) in enumerate(blocks.OPS.items()):
        ours = where(speed, op=op, published=False)
        look = style.category(number)
        tokens = f", {_size(ours, 'tokens'):,} tokens" if len(ours) else ""
        axes.plot(ours["mean_nnz"], ours["ratio"], label=f"{name}{tokens}, ours", **look)
        theirs = where(speed, op=op, published=True, wrong=False)
        shown = look | style.OPEN
        axes.plot(theirs["mean_nnz"], theirs["ratio"], label=f"{name}, published kernels", **shown)
    wrong = where(speed, published=True, wrong=True)
    if len(wrong):
        axes.plot(
            wrong["mean_nnz"], wrong["ratio"], "x", color=style.PAPER, label="forward, published kernels, wrong result"
        )
    style.log_axis(axes.xaxis)
    axes.set(
        title="(a) one block, synthetic patterns",
        xlabel=f"mean non-zeros per token (of {_size(speed, 'intermediate'):,} neurons)",
        ylabel="dense time / sparse time",
    )
    axes.set_ylim(min(speed["ratio"].min(), 1) * 0.85, speed["ratio"].max() * 2.6)  # dense, and room for the legend
    style.log_axis(axes.yaxis)
    style.reference_line(axes, 1, "dense")
    axes.legend(loc="upper right", fontsize=7)


def _quality_panel(axes: Axes, quality: pd.DataFrame) -> None:
    label, ends = f"{quality['model'].iloc[0]} model, ours", (quality["low"], quality["high"])
    style.line_with_spread(axes, quality["active"], quality["change"], *ends, label=label, **style.category(2))
    for line in quality.itertuples():
        place = (-4, 4 if line.l1 else -10)  # above its point, where the next label would cover that of 0
        axes.annotate(
            l1_label(line.l1), (line.active, line.change), xytext=place, textcoords="offset points", fontsize=6.5,
            ha="right", path_effects=style.HALO,
        )  # fmt: skip
    theirs = {name: values.loc[[choose.RECOMMENDED_L1]] for name, values in published().items()}
    axes.plot(theirs["active"], theirs["change"], label="1.5b model, the paper, L1 2e-5", **style.PAPER_POINTS)
    style.log_axis(axes.xaxis)
    style.room_for_labels(axes)
    axes.invert_xaxis()
    axes.set(
        title="(b) quality, by L1 coefficient",
        xlabel="active neurons (% of all), fewer to the right",
        ylabel="cross-entropy against L1 = 0",
    )
    style.percent_axis(axes.yaxis)
    axes.margins(y=0.15)
    tolerance = choose.QUALITY_TOLERANCE * 100
    style.reference_line(axes, tolerance, f"the paper's bound: {tolerance:g}%")
    axes.legend(loc="upper left", fontsize=7)


def _caption(speed: pd.DataFrame, quality: pd.DataFrame, results: Results) -> str:
    best = {op: where(speed, op=op, published=False) for op in blocks.OPS}
    told = "; ".join(_about_speed(op, rows) for op, rows in best.items() if len(rows))
    within = quality[quality["change"] <= choose.QUALITY_TOLERANCE * 100]
    sparsest = within.loc[within["active"].idxmin()] if len(within) else None
    trained = choose.trainings(choose.main_model(choose.equally_trained(choose.relu_runs(results.rows))))
    best_within = (
        ""
        if sparsest is None
        else (
            f"At L1 {l1_label(sparsest['l1'])}, {significant(sparsest['active'], 2)}% of the neurons are active and "
            f"held-out cross-entropy is {sparsest['change']:.1f}% above that without L1. "
        )
    )
    return (
        f"(a) Gated block, K = {_size(speed, 'hidden'):,}, N = {_size(speed, 'intermediate'):,}, bfloat16, synthetic "
        f"pattern, {speed['device'].iloc[0]}: {told}. Dense is the fastest dense form of the same run; ours is "
        f"the fastest sparse form.{_about_published(speed)} (b) Means over seeds; the labels are L1 coefficients. "
        f"{describe.interval([*quality['seeds']])} "
        f"{best_within}{describe.runs(trained)}"
    )


def _about_published(speed: pd.DataFrame) -> str:
    if not speed["published"].any():
        return ""
    told = " Crosses: the result was wrong, without a warning (analysis/reference/README.md)."
    wrong = told if speed["wrong"].any() else ""
    return f" Published kernels: the authors' public code, measured by us, relative to its dense form.{wrong}"


def _size(speed: pd.DataFrame, name: str) -> int:
    return int(speed[name].dropna().iloc[0])


def _about_speed(op: str, rows: pd.DataFrame) -> str:
    ratios = ", ".join(f"{ratio:.2f}" for ratio in rows["ratio"])
    counts = ", ".join(significant(count, 2) for count in rows["mean_nnz"])
    return (
        f"{blocks.OPS[op]} of {_size(rows, 'tokens'):,} tokens is {ratios} times as fast as dense at {counts} non-zeros"
    )
