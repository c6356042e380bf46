"""Figure 3: the quality and the active neurons at each L1 value."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, paper, schema, stats
from analysis.choose import where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.measures import accuracies_over_seeds, nonzeros_rows, task_accuracies
from analysis.render import significant

FEWEST_VALUES = 3  # the L1 values, 0 included, that a sweep needs at least


@figure(
    "3",
    "figure03_quality_and_nonzeros",
    "quality and mean non-zeros for each L1 value",
    "Means over seeds at the end of training. (b) Labels: active neurons for each token. Bars: 95% intervals; in (b), "
    "lowest to highest seed. Stars: the paper's model; coefficients of models of different shape are not comparable.",
)
def by_l1(results: Results) -> Sketch:
    rows = choose.sweep(results.rows, "evaluate")
    loss = stats.over_seeds(where(rows, op="train", metric="validation_cross_entropy"), ["l1"])
    active = active_neurons(nonzeros_rows(rows), ["l1"])
    if len(loss) < FEWEST_VALUES or len(active) < FEWEST_VALUES:
        raise NotMeasured(f"cross-entropy and non-zeros of gated ReLU trainings at {FEWEST_VALUES} L1 values or more")
    runs, theirs, model = task_accuracies(rows), published(), rows["model"].iloc[0]
    scored = set(runs["l1"]) == set(where(rows, op="train")["l1"].dropna())  # each L1 value, on all seven tasks
    accuracy = accuracies_over_seeds(runs, ["l1"]) if scored else runs.iloc[:0]
    widths = [1, 1, 0.22, 1, 0.33] if len(accuracy) else [1, 1, 0.22]
    picture, (grid,) = style.panels(1, len(widths), 2.5, width_ratios=widths)
    _line(grid[0], model, loss)
    grid[0].set(title="(a) cross-entropy", ylabel="held-out (nats/token)")
    for base in loss.loc[loss["l1"] == 0, "value"]:
        bound = base * (1 + choose.QUALITY_TOLERANCE)
        style.reference_line(grid[0], bound, f"{choose.QUALITY_TOLERANCE:.0%} above L1 = 0")
    _line(grid[1], model, active)
    grid[1].set(title="(b) active neurons", ylabel="mean non-zeros (% of N)")
    for place, line in enumerate(active.itertuples()):
        grid[1].annotate(
            significant(line.count, 2), (place, line.value), xytext=(3, 4), textcoords="offset points", fontsize=6.5,
            color=style.CATEGORIES[0],
        )  # fmt: skip
    _paper_panel(grid[2], grid[1], theirs["active"])
    style.log_axis(grid[1].yaxis)
    if len(accuracy):
        _line(grid[3], model, accuracy)
        grid[3].set(title="(c) accuracy", ylabel="mean of the seven tasks (%)")
        style.reference_line(grid[3], schema.MEAN_CHANCE)
        grid[3].annotate(
            f"chance: {schema.MEAN_CHANCE:.1f}%", (0.02, max(accuracy["high"].max(), schema.MEAN_CHANCE)),
            xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", fontsize=7,
        )  # fmt: skip
        _paper_panel(grid[4], grid[3], theirs["accuracy"])
    data = [loss.assign(metric="validation_cross_entropy"), accuracy.assign(metric="accuracy")]
    data = pd.concat([frame for frame in [*data, active.assign(metric="nonzeros")] if len(frame)], ignore_index=True)
    lacks = "" if len(accuracy) else "the seven tasks for every L1 value"
    return Sketch(picture, data.assign(model=model), describe.brief(choose.trainings(rows)), lacks)


def range_over_seeds(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The columns of `stats.over_seeds`, with the lowest and the highest seed as low and high. An interval that
    is symmetric about the mean misleads on a log axis, and may reach below 0."""
    each = rows[rows["value"].notna()].groupby([*by, "seed"], dropna=False, as_index=False)["value"].mean()
    seeds = each.groupby(by, dropna=False)["value"]
    return seeds.agg(value="mean", low="min", high="max", seeds="count").reset_index()


def active_neurons(means: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Of mean non-zeros (`nonzeros_rows`), the percentage of N over seeds, and their `count`."""
    share = means.assign(value=means["value"] / means["intermediate"].astype(float) * 100)
    counts = means.groupby(by, as_index=False)["value"].mean().rename(columns={"value": "count"})
    return range_over_seeds(share, by).merge(counts, on=by)


def published() -> dict[str, pd.Series]:
    """The paper's gated 1.5B models by L1 value: accuracy from table 4, active neurons in percent and the change of
    cross-entropy in percent against L1 = 0 from table 3."""
    gated = where(paper.table("table4_gating"), gated="yes").set_index("l1")
    relu = where(paper.table("table3_activations"), activation="relu").set_index("l1").sort_index()
    return {
        "accuracy": gated["mean_task_accuracy_pct"],
        "active": relu["nonzeros"] / paper.WIDTH * 100,
        "change": (relu["cross_entropy"] / relu["cross_entropy"].loc[0.0] - 1) * 100,
    }


def _line(axes: Axes, model: str, data: pd.DataFrame) -> None:
    x = data["l1"].map(style.l1_axis(axes, data["l1"]))
    style.line_with_spread(axes, x, data["value"], data["low"], data["high"], label="ours", **style.category(0))
    axes.set_xlabel(f"L1 coefficient, {model}")
    axes.margins(y=0.18)


def _paper_panel(axes: Axes, ours: Axes, published: pd.Series) -> None:
    """The paper's model, on the y axis of our panel and with an axis of L1 values of its own."""
    axes.sharey(ours)
    place = style.l1_axis(axes, published.index)
    style.slant_labels(axes.xaxis)
    axes.plot(published.index.map(place), published, **style.PAPER_POINTS)
    axes.tick_params(labelleft=False)
    axes.set_xlabel("paper,\n1.5B")
