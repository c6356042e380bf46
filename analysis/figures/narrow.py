"""Figure H, what sparsity is worth: sparse models beside dense ones that were trained with fewer neurons."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, stats
from analysis.choose import RUN, l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.frontier import KINDS
from analysis.load import Results
from analysis.render import signed, significant, span

COMMAND = "python -m slurm.submit study=narrow cluster=gpu_box"  # beside study=scaled
DENSE, NON_GATED = "dense, fewer neurons", "L1, non-gated"
LOOKS = dict(zip((DENSE, *KINDS.values(), NON_GATED), map(style.category, range(5)), strict=True))
FEWEST_POINTS = 2  # of dense models, and of sparse ones; the dense model with all neurons is one
# The time of a neuron with firing rate r, in that of a dense one, is min(1, FLOOR + SLOPE * r). From one H200 with
# K = 2048, N = 5632: the gate product alone takes 4.43 of the 13.7 ms of a dense block, a mean non-zero 0.114 ms.
FLOOR = 0.325
SLOPE = 47.0
TRAINING = ["model", "gated", "modification", "l1", "seed"]
ARM = ["kind", "model", "l1", "neurons"]
MEANS = ["change", "train_change", "live", "time", "pruned"]


@figure(
    "H",
    "figureH_narrow_dense",
    "sparse models, and dense ones trained with fewer neurons",
    "Left is cheaper, down better. Numbers: the largest L1; neurons of dense models. Live: of neurons that ever fire. "
    "(c) A neuron of firing rate r takes min(1, 0.325 + 47 r); open: silent ones nothing.",
)
def narrow_dense(results: Results) -> Sketch:
    data = points(results)
    panels = [("held-out text", "live", "change"), ("training text", "live", "train_change")]
    if where(data, kind=tuple(KINDS.values()))["time"].notna().any():
        panels.append(("held-out text, estimated time", "time", "change"))
    rows = -(-len(panels) // 2)
    picture, grid = style.panels(rows, 2, 0.4 + 2.5 * rows, sharey=True)
    for letter, axes, (title, x, y) in zip("abc", grid.flat, panels, strict=False):
        _panel(axes, data, x, y)
        what = "time of the blocks" if x == "time" else "live weights"
        axes.set(title=f"({letter}) {title}", xlabel=f"{what}, % of the dense model's")
    for line in grid:
        line[0].set_ylabel("cross-entropy against dense")
    style.percent_axis(grid[0][0].yaxis)
    style.legend_of_panels(picture, grid, len(panels), grid[0][0].get_legend_handles_labels()[0])
    for axes, (_, x, y) in zip(grid.flat, panels, strict=False):
        drawn = data.dropna(subset=[x, y])
        first, last = (~drawn.duplicated("kind", keep=keep) for keep in ("first", "last"))
        ends = drawn[last | (first & drawn["kind"].eq(DENSE))]
        names = [f"{line.neurons:,.0f}" if line.kind == DENSE else l1_label(line.l1) for line in ends.itertuples()]
        style.place_labels(axes, ends[x], ends[y], names, [LOOKS[kind]["color"] for kind in ends["kind"]])
    return Sketch(picture, data, _note(results, data))


def points(results: Results) -> pd.DataFrame:
    """One line for each way to train, mean over seeds: `kind`, model, l1, neurons, seeds; in percent of the dense model
    with all neurons and the same seed, `change` of the cross-entropy on held-out text with its 95% interval from `low`
    to `high`, and `train_change` on the text of the last steps; in percent of that model, the weights `live`, of
    neurons that fire for any held-out token, and the estimated `time` of the blocks, `pruned` without silent neurons
    (NaN where rates by neuron were not kept).

    Raises:
        NotMeasured: there are too few of them.
    """
    rows, sweep = where(results.rows, activation="relu", modification=tuple(KINDS)), choose.sweep(results.rows)
    rows = choose.trained_alike(rows[rows["model"].map(choose.scale).isin(set(sweep["model"]))], sweep)
    losses = where(rows, op="train", layer=None, metric=("validation_cross_entropy", "cross_entropy"))
    runs = losses.pivot_table(index=[*TRAINING, "intermediate"], columns="metric", values="value").reset_index()
    base = where(runs, model=tuple(set(sweep["model"])), l1=0.0, gated=True)
    if base.empty or not {"cross_entropy", "validation_cross_entropy"} <= set(runs):
        raise NotMeasured("an L1 sweep, and dense trainings like it with fewer neurons in each block", COMMAND)
    silent = where(rows, op="nonzeros", metric="silent_fraction")
    silent = silent[silent["layer"].notna()].groupby(TRAINING)["value"].mean().astype("float64")
    live = (1 - silent).rename("live").reset_index()
    runs = runs.merge(live, on=TRAINING, how="left").merge(_time(results, rows), on=TRAINING, how="left")
    runs = runs[(runs["l1"] > 0) | runs["gated"]].rename(columns={"intermediate": "neurons"})
    own = runs.merge(base[["seed", "validation_cross_entropy", "cross_entropy"]], on="seed", suffixes=("", "_base"))
    size = own["neurons"].astype("float64") / float(base["intermediate"].iloc[0]) * np.where(own["gated"], 1, 2 / 3)
    dense = own["l1"] == 0
    live, time, pruned = (own[name] * size * 100 for name in ("live", "time", "pruned"))
    own = own.assign(
        kind=own["modification"].map(KINDS).mask(dense, DENSE).mask(~own["gated"].astype(bool), NON_GATED),
        change=(own["validation_cross_entropy"] / own["validation_cross_entropy_base"] - 1) * 100,
        train_change=(own["cross_entropy"] / own["cross_entropy_base"] - 1) * 100,
        live=live, time=time.mask(dense, size * 100), pruned=pruned.mask(dense, live),
    )  # fmt: skip
    data = own.groupby(ARM, as_index=False)[MEANS].mean()
    change = stats.over_seeds(own.assign(value=own["change"]), ARM)[[*ARM, "low", "high", "seeds"]]
    data = data.merge(change, on=ARM).sort_values(["kind", "l1", "neurons"], ignore_index=True)
    if min((data["l1"] == 0).sum(), (data["l1"] > 0).sum()) < FEWEST_POINTS:
        raise NotMeasured("an L1 sweep, and dense trainings like it with fewer neurons in each block", COMMAND)
    return data


def _time(results: Results, rows: pd.DataFrame) -> pd.DataFrame:
    """The estimated `time` of a gated training's blocks, and `pruned`, as a share of dense ones with as many neurons,
    from the firing rate of each neuron."""
    rates = results.nonzeros.get("by_neuron", pd.DataFrame(columns=[*RUN, "rate"]))
    runs = where(rows, op="nonzeros", gated=True)[[*RUN, *TRAINING]].drop_duplicates()
    rates = rates[[*RUN, "rate"]].merge(runs, on=RUN)
    time = (FLOOR + SLOPE * rates["rate"].astype("float64")).clip(upper=1)
    rates = rates.assign(time=time, pruned=time.where(rates["rate"] > 0, 0))
    return rates.groupby(TRAINING, as_index=False)[["time", "pruned"]].mean()


def _note(results: Results, data: pd.DataFrame) -> str:
    """Model, seeds, how often the text was read, and what the recommended L1 costs on both texts."""
    swept = choose.sweep(results.rows)
    model, passes = swept["model"].iloc[0], describe.passes(swept)
    tokens = f"{significant(float(swept['tokens_trained'].max()) / 1e6)}M tokens"
    note = f"{model}, {span(data['seeds'], '{:.0f}'.format)} seeds, 95% intervals; {tokens}"
    note += f", {passes} passes over the text." if passes else "."
    for line in where(data, kind=KINDS["none"], l1=choose.recommended_l1(results.rows, model)).itertuples():
        price = f"{signed(line.train_change, 1)} on training text, {signed(line.change, 1)} held out"
        note += f" L1 {l1_label(line.l1)} costs {price}."
    return note


def _panel(axes: Axes, data: pd.DataFrame, x: str, y: str) -> None:
    for kind, look in LOOKS.items():
        line = where(data, kind=kind).dropna(subset=[x, y])
        if line.empty:
            continue
        ends = (line["low"], line["high"]) if y == "change" else (line[y], line[y])
        style.line_with_spread(axes, line[x], line[y], *ends, label=kind, **look)
        if x == "time" and kind != DENSE:
            axes.scatter(
                line["pruned"], line[y], marker=look["marker"], edgecolors=look["color"], facecolors="white", s=22
            )
    axes.margins(x=0.12, y=0.1)
    style.reference_line(axes, 0)
