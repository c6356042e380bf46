"""Figure 3: what an L1 value costs in quality, and how many neurons stay active."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, paper, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.measures import TASKS
from analysis.render import signed, significant


@figure("3", "figure03_quality_and_nonzeros", "quality and mean non-zeros for each L1 value")
def by_l1(results: Results) -> Sketch:
    """Mean accuracy (or held-out cross-entropy where the tasks lack) and active neurons, in % of N, per L1 value."""
    rows = choose.main_model(choose.relu_runs(results.rows))
    quality, active = _quality(rows), _active(rows)
    if quality.empty or active.empty:
        raise NotMeasured("cross-entropy and non-zeros of gated ReLU trainings")
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    published = _published()
    _line(left, quality, published["accuracy"] if quality["metric"].iloc[0] == "accuracy" else None)
    left.set(title=f"(a) {_QUALITY_TITLES[quality['metric'].iloc[0]]}", ylabel=_unit(quality))
    _line(right, active, published["active"])
    right.set(title="(b) active neurons", ylabel="mean non-zeros (% of N)")
    style.log_axis(right.yaxis)
    _count_labels(right, active)
    handles, labels = right.get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return Sketch(picture, pd.concat([quality, active], ignore_index=True), _caption(quality, active), _lacks(quality))


_QUALITY_TITLES = {
    "accuracy": "mean accuracy of the seven tasks",
    "validation_cross_entropy": "held-out cross-entropy (less is better)",
}


def _quality(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean accuracy over the seven tasks where every L1 value has all of them, else held-out cross-entropy."""
    accuracy = where(rows, op="evaluate", metric="accuracy", task=TASKS)
    accuracy = accuracy[accuracy["value"].notna()]
    tasks = accuracy.groupby("l1")["task"].nunique()
    if len(tasks) and (tasks == len(TASKS)).all() and set(tasks.index) == set(rows["l1"].dropna()):
        return _over_l1(_mean_accuracy(accuracy))
    return _over_l1(where(rows, op="train", metric="validation_cross_entropy"))


def _mean_accuracy(accuracy: pd.DataFrame) -> pd.DataFrame:
    """Mean over the tasks of each run; low and high are one standard error away, that of independent tasks."""
    by = ["study", "item", "model", "metric", "unit", "l1"]
    squares = accuracy.assign(square=((accuracy["high"] - accuracy["low"]) / 2) ** 2)
    runs = squares.groupby(by, as_index=False).agg(
        value=("value", "mean"), square=("square", lambda s: s.sum(skipna=False))
    )
    error = runs["square"] ** 0.5 / len(TASKS)
    return runs.assign(low=runs["value"] - error, high=runs["value"] + error)


def _active(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean non-zeros over layers in percent of N, from real text where gathered, else from the end of training."""
    gathered = where(rows, op="nonzeros", metric="nonzeros")
    chosen = gathered if len(gathered) else where(rows, op="train", metric="nonzeros", layer=None)
    by = ["study", "item", "model", "metric", "l1"]
    means = chosen.groupby(by, as_index=False).agg(count=("value", "mean"), intermediate=("intermediate", "first"))
    means["value"] = means["count"] / means["intermediate"].astype(float) * 100
    data = _over_l1(means.assign(unit="% of N", low=float("nan"), high=float("nan")))
    return data.merge(means.groupby("l1", as_index=False)["count"].mean(), on="l1")


def _over_l1(rows: pd.DataFrame) -> pd.DataFrame:
    return stats.over_repeats(rows, ["model", "metric", "unit", "l1"])


def _published() -> dict[str, pd.Series]:
    """The paper's points for its 1.5B model by L1 value: accuracy (tables 3 and 4), active neurons in % of N."""
    gated = where(paper.table("table4_gating"), gated="yes").set_index("l1")["mean_task_accuracy_pct"]
    relu = where(paper.table("table3_activations"), activation="relu").set_index("l1")["nonzeros"]
    n = float(paper.table("table2_hyperparameters").set_index("name").loc["intermediate_size", "gated"])
    return {"accuracy": gated, "active": relu / n * 100}


def _line(axes: Axes, data: pd.DataFrame, published: pd.Series | None) -> None:
    place = style.l1_axis(axes, set(data["l1"]) | (set() if published is None else set(published.index)))
    x = data["l1"].map(place)
    label = f"ours ({data['model'].iloc[0]} model)"
    style.line_with_spread(axes, x, data["value"], data["low"], data["high"], label=label, **style.category(0))
    if published is not None:
        axes.plot(published.index.map(place), published, label="paper (1.5B model)", **style.PAPER_POINTS)
    axes.margins(y=0.18)


def _count_labels(axes: Axes, active: pd.DataFrame) -> None:
    place = {tick.get_text(): at for tick, at in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)}
    for line in active.itertuples():
        axes.annotate(
            significant(line.count), (place[l1_label(line.l1)], line.value), xytext=(4, 4), textcoords="offset points",
            fontsize=7, color=style.CATEGORIES[0],
        )  # fmt: skip


def _unit(quality: pd.DataFrame) -> str:
    return {"accuracy": "accuracy (%)", "validation_cross_entropy": "cross-entropy (nats/token)"}[
        quality["metric"].iloc[0]
    ]


def _lacks(quality: pd.DataFrame) -> str:
    return (
        "" if quality["metric"].iloc[0] == "accuracy" else "the seven tasks for every L1 value (cross-entropy is shown)"
    )


def _caption(quality: pd.DataFrame, active: pd.DataFrame) -> str:
    first, last = active.iloc[0], active.iloc[-1]
    text = (
        f"Mean non-zeros over layers go from {significant(first['count'])} (L1 {l1_label(first['l1'])}) to "
        f"{significant(last['count'])} (L1 {l1_label(last['l1'])}); the numbers beside the points count neurons."
    )
    if quality["metric"].iloc[0] != "accuracy" and len(quality) > 1:
        change = (quality["value"] / quality["value"].iloc[0] - 1) * 100
        text += (
            f" Against L1 {l1_label(quality['l1'].iloc[0])}, held-out cross-entropy changes by "
            f"{signed(change.iloc[1:].min(), 1)} to {signed(change.iloc[1:].max(), 1)}."
        )
    return text + " Diamonds: the paper's 1.5B model."
