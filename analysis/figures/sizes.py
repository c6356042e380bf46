"""Figure G: active neurons, cross-entropy and accuracy by model size, without and with the same L1 coefficient."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, schema, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.quality import active_neurons, published
from analysis.load import Results
from analysis.measures import accuracies_over_seeds, chance, nonzeros_rows, task_accuracies, tasks_above_chance
from analysis.render import significant

COMMAND = "python -m slurm.submit study=gpu cluster=gpu_box"  # its parts `scaled` and `sizes`
THE_PAPERS = 1500.0  # millions of parameters of the model that `published` is about


@figure(
    "G",
    "figureG_model_sizes",
    "active neurons, cross-entropy and accuracy by model size",
    "Small models were trained for fewer steps. Labels: neurons active for a token. (b) Against the same seed "
    "without L1. (c) The tasks on which the largest model beats chance. Bars: 95% intervals; in (a), lowest to "
    "highest seed.",
)
def model_sizes(results: Results) -> Sketch:
    rows = where(choose.relu_runs(results.rows), op=("train", "nonzeros", "evaluate"))
    rows = choose.equally_trained(rows)
    models = list(rows["model"].drop_duplicates())
    main = choose.main_model(rows)["model"].iloc[0] if models else ""
    l1 = choose.recommended_l1(results.rows, main)
    sizes = choose.comparable_sizes(rows, main, l1)
    rows = where(rows, model=tuple(sizes.index), l1=(0.0, l1))
    active, change = _active(rows, sizes), _change(rows, sizes)
    complete = [len(data["model"].unique()) == len(sizes) for data in (active, change)]
    if len(sizes) < choose.FEWEST_SIZES or not all(complete):
        needed = f"{choose.FEWEST_SIZES} sizes trained alike, each without L1 and with the same coefficient"
        raise NotMeasured(needed, COMMAND)
    accuracy, tasks = _accuracy(rows, sizes)
    picture, (grid,) = style.panels(1, 3 if len(accuracy) else 2, 2.7)
    _active_panel(grid[0], active)
    _lines(grid[1], change)
    grid[1].plot([THE_PAPERS], published()["change"].loc[[choose.RECOMMENDED_L1]], **style.PAPER_POINTS)
    grid[1].set(title="(b) cross-entropy", ylabel="change by L1")
    style.log_axis(grid[1].xaxis)
    style.room_for_labels(grid[1])
    grid[1].margins(y=0.18)
    style.percent_axis(grid[1].yaxis)
    tolerance = choose.QUALITY_TOLERANCE * 100
    style.reference_line(grid[1], tolerance, f"the paper's bound: {tolerance:g}%")
    if len(accuracy):
        _lines(grid[2], accuracy)
        names = textwrap.fill(", ".join(schema.TASKS[task].title for task in tasks), 30)
        grid[2].set(title="(c) accuracy", ylabel=f"{names} (%)")
        style.log_axis(grid[2].xaxis)
        style.room_for_labels(grid[2])
        style.reference_line(grid[2], chance(tasks), f"chance: {chance(tasks):.1f}%")
        grid[2].margins(y=0.12)
    handles, labels = grid[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    data = [active.assign(metric="active"), change.assign(metric="change_pct"), accuracy.assign(metric="accuracy")]
    lacks = "" if len(accuracy) else "the seven tasks for every size"
    data = pd.concat([frame for frame in data if len(frame)], ignore_index=True)
    return Sketch(picture, data, describe.brief(choose.trainings(rows)), lacks)


def _by_size(lines: pd.DataFrame, sizes: pd.Series) -> pd.DataFrame:
    """One line for each model and L1 value, with `size` in millions of parameters, by size."""
    return lines.assign(size=lines["model"].map(sizes).astype("float64")).sort_values(["l1", "size"])


def _active(rows: pd.DataFrame, sizes: pd.Series) -> pd.DataFrame:
    """Mean non-zeros over layers in percent of N, and their count."""
    means = pd.concat([nonzeros_rows(where(rows, model=model)) for model in sizes.index] or [rows])
    return _by_size(active_neurons(means, ["model", "l1"]), sizes)


def _change(rows: pd.DataFrame, sizes: pd.Series) -> pd.DataFrame:
    """The change of the held-out cross-entropy in percent against L1 = 0 and the same seed."""
    changes = pd.concat([choose.loss_change(where(rows, model=model)) for model in sizes.index] or [rows])
    return _by_size(stats.over_seeds(changes[changes["l1"] > 0], ["model", "l1"]), sizes)


def _accuracy(rows: pd.DataFrame, sizes: pd.Series) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The mean accuracy over the tasks on which the largest model without L1 is above chance, and these tasks. Empty
    unless every model was scored."""
    tasks = tasks_above_chance(where(rows, model=sizes.index[-1], l1=0.0))
    runs = task_accuracies(rows, tasks) if tasks else rows.iloc[:0]
    if runs[["model", "l1"]].drop_duplicates().shape[0] < 2 * len(sizes):
        return pd.DataFrame(), ()
    return _by_size(accuracies_over_seeds(runs, ["model", "l1"]), sizes), tasks


def _lines(axes: Axes, data: pd.DataFrame) -> None:
    for l1, line in data.groupby("l1"):
        label, look = (f"L1 {l1_label(l1)}" if l1 else "without L1"), style.category(int(l1 > 0))
        beside = line["size"] * (1.02 if l1 else 0.98)  # so that bars do not hide each other
        style.line_with_spread(axes, beside, line["value"], line["low"], line["high"], label=label, **look)
    axes.set_xlabel("parameters (millions)")


def _active_panel(axes: Axes, data: pd.DataFrame) -> None:
    _lines(axes, data)
    theirs = published()["active"]
    label = f"the paper's 1.5B model, without L1 and with {l1_label(choose.RECOMMENDED_L1)}"
    axes.plot([THE_PAPERS] * len(theirs), theirs, label=label, **style.PAPER_POINTS)
    axes.set(title="(a) active neurons", ylabel="mean non-zeros (% of N)")
    for axis in (axes.xaxis, axes.yaxis):
        style.log_axis(axis)
    style.room_for_labels(axes)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    largest = data["size"].max()
    for line in data.itertuples():
        beside = line.l1 or line.size == largest
        axes.annotate(
            significant(line.count, 2), (line.size, line.value), xytext=(7, -3) if beside else (4, 4),
            textcoords="offset points", fontsize=6.5, color=style.for_text(style.CATEGORIES[int(line.l1 > 0)]),
        )  # fmt: skip
