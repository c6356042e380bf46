"""Figure 3: the quality and the active neurons at each L1 value."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, paper, schema, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.measures import nonzeros_rows, task_accuracies
from analysis.render import signed, significant

FEWEST_VALUES = 3


@figure("3", "figure03_quality_and_nonzeros", "quality and mean non-zeros for each L1 value")
def by_l1(results: Results) -> Sketch:
    """Held-out cross-entropy, mean accuracy over the seven tasks (if measured) and active neurons in % of N, against
    the L1 value, as means over seeds."""
    rows = choose.main_model(choose.equally_trained(_of_trainings(choose.relu_runs(results.rows))))
    loss = stats.over_seeds(where(rows, op="train", metric="validation_cross_entropy"), ["l1"])
    active = _active(rows)
    if len(loss) < FEWEST_VALUES or len(active) < FEWEST_VALUES:
        raise NotMeasured(f"cross-entropy and non-zeros of gated ReLU trainings at {FEWEST_VALUES} L1 values or more")
    accuracy = _accuracy(rows)
    panels = [_loss_panel, _accuracy_panel, _active_panel] if len(accuracy) else [_loss_panel, _active_panel]
    picture, (grid,) = style.panels(1, len(panels), 2.7)
    for letter, axes, panel in zip("abc", grid, panels, strict=False):
        panel(axes, {_loss_panel: loss, _accuracy_panel: accuracy, _active_panel: active}[panel], letter)
    handles, labels = grid[-1].get_legend_handles_labels()
    labels = [f"ours ({rows['model'].iloc[0]} model)" if label == "ours" else label for label in labels]
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    data = [loss.assign(metric="validation_cross_entropy"), accuracy.assign(metric="accuracy")]
    data = pd.concat([frame for frame in [*data, active.assign(metric="nonzeros")] if len(frame)], ignore_index=True)
    caption = _caption(_change(rows), loss, accuracy, active, choose.trainings(rows))
    lacks = "" if len(accuracy) else "the seven tasks for every L1 value"
    return Sketch(picture, data.assign(model=rows["model"].iloc[0]), caption, lacks)


def _of_trainings(rows: pd.DataFrame) -> pd.DataFrame:
    return where(rows, op=("train", "nonzeros", "evaluate"))


def _change(rows: pd.DataFrame) -> pd.DataFrame:
    """The change of the held-out cross-entropy in percent against L1 = 0 and the same seed, for the other L1 values."""
    change = stats.over_seeds(choose.loss_change(rows), ["l1"])
    return change[change["l1"] > 0]


def _accuracy(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy over the seven tasks; empty unless every L1 value has all of them. The interval is over seeds, or
    over the tasks' items for one seed. `error`: the standard error over the items of one run."""
    runs = task_accuracies(rows)
    if set(runs["l1"]) != set(where(rows, op="train")["l1"].dropna()):
        return runs.iloc[:0]
    data = stats.over_seeds(runs, ["l1"]).merge(runs.groupby("l1", as_index=False)["error"].mean(), on="l1")
    one = data["seeds"] == 1
    width = stats.NORMAL_975 * data["error"]
    return data.assign(
        low=data["low"].mask(one, data["value"] - width), high=data["high"].mask(one, data["value"] + width)
    )


def _active(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean non-zeros over layers in percent of N, and their count."""
    means = nonzeros_rows(rows)
    share = means.assign(value=means["value"] / means["intermediate"].astype(float) * 100)
    counts = means.groupby("l1", as_index=False)["value"].mean().rename(columns={"value": "count"})
    return stats.over_seeds(share, ["l1"]).merge(counts, on="l1")


def published() -> dict[str, pd.Series]:
    """The paper's gated 1.5B models by L1 value: accuracy from table 4, active neurons in percent and the change of
    cross-entropy in percent against L1 = 0 from table 3."""
    gated = where(paper.table("table4_gating"), gated="yes").set_index("l1")
    relu = where(paper.table("table3_activations"), activation="relu").set_index("l1").sort_index()
    intermediate = paper.table("table2_hyperparameters").set_index("name").loc["intermediate_size", "gated"]
    return {
        "accuracy": gated["mean_task_accuracy_pct"],
        "active": relu["nonzeros"] / float(intermediate) * 100,
        "change": (relu["cross_entropy"] / relu["cross_entropy"].loc[0.0] - 1) * 100,
    }


def _line(axes: Axes, data: pd.DataFrame, published: pd.Series | None = None) -> None:
    place = style.l1_axis(axes, set(data["l1"]) | (set() if published is None else set(published.index)))
    x = data["l1"].map(place)
    style.line_with_spread(axes, x, data["value"], data["low"], data["high"], label="ours", **style.category(0))
    if published is not None:
        axes.plot(published.index.map(place), published, label="paper (1.5B model)", **style.PAPER_POINTS)
    axes.margins(y=0.18)


def _loss_panel(axes: Axes, loss: pd.DataFrame, letter: str) -> None:
    _line(axes, loss)
    axes.set(title=f"({letter}) cross-entropy", ylabel="held-out (nats/token)")
    base = loss.loc[loss["l1"] == 0, "value"]
    if len(base):
        bound = float(base.iloc[0]) * (1 + choose.QUALITY_TOLERANCE)
        style.reference_line(axes, bound, f"{choose.QUALITY_TOLERANCE:.0%} above L1 = 0")


def _accuracy_panel(axes: Axes, accuracy: pd.DataFrame, letter: str) -> None:
    _line(axes, accuracy, published()["accuracy"])
    axes.set(title=f"({letter}) accuracy", ylabel="mean of the seven tasks (%)")
    style.reference_line(axes, schema.MEAN_CHANCE, f"chance: {schema.MEAN_CHANCE:.1f}%")


def _active_panel(axes: Axes, active: pd.DataFrame, letter: str) -> None:
    theirs = published()["active"]
    _line(axes, active, theirs)
    axes.set(title=f"({letter}) active neurons", ylabel="mean non-zeros (% of N)")
    style.log_axis(axes.yaxis)
    place = {value: at for at, value in enumerate(sorted(set(active["l1"]) | set(theirs.index)))}
    for line in active.itertuples():
        axes.annotate(
            significant(line.count), (place[line.l1], line.value), xytext=(3, 4), textcoords="offset points",
            fontsize=6.5, color=style.CATEGORIES[0],
        )  # fmt: skip


def _caption(
    change: pd.DataFrame, loss: pd.DataFrame, accuracy: pd.DataFrame, active: pd.DataFrame, trained: pd.DataFrame
) -> str:
    first, last = active.iloc[0], active.iloc[-1]
    text = (
        f"From L1 {l1_label(first['l1'])} to {l1_label(last['l1'])}, mean non-zeros fall from "
        f"{significant(first['count'])} to {significant(last['count'])} neurons (labels of the points)."
    )
    if len(change):
        low, high = signed(change["value"].min(), 1), signed(change["value"].max(), 1)
        text += f" Held-out cross-entropy changes by {low} to {high} against L1 = 0, each run against that of its seed."
    if len(accuracy):
        text += " " + _about_accuracy(accuracy)
    bars = describe.interval(loss["seeds"])
    if len(accuracy) and accuracy["seeds"].max() == 1:
        bars = "One seed: the bars of the accuracies are 95% intervals over the tasks' items."
    elif len(alone := accuracy.loc[accuracy["seeds"] == 1, "l1"] if len(accuracy) else []):
        bars += f" Accuracies at L1 {', '.join(map(l1_label, alone))} are of one seed; their bars are over the items."
    stars = "Stars: the paper's 1.5B model; L1 values are comparable within one shape only."
    return f"{text} {bars} {stars} {describe.runs(trained)}"


def _about_accuracy(accuracy: pd.DataFrame) -> str:
    """Whether accuracies are above chance, and how they differ between L1 values."""
    least, most = accuracy.loc[accuracy["value"].idxmin()], accuracy.loc[accuracy["value"].idxmax()]
    above = accuracy["low"] > schema.MEAN_CHANCE
    kind = "all above" if above.all() else "partly above" if above.any() else "not above"
    return (
        f"By their intervals, accuracies are {kind} chance ({schema.MEAN_CHANCE:.1f}%): {least['value']:.1f}% (L1 "
        f"{l1_label(least['l1'])}) to {most['value']:.1f}% (L1 {l1_label(most['l1'])}), with a standard error of "
        f"{accuracy['error'].mean():.1f} points over the items of one run."
    )
