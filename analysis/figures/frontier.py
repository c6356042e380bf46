"""Figure J, trained and timed: cross-entropy against the measured time of a forward pass, sparse and dense models."""

from __future__ import annotations

import itertools
import string

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, schema, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import span

COMMAND = "python -m slurm.submit study=frontier cluster=gpu_box"
DENSE, SILU = "dense, ReLU", "dense, SiLU"
KINDS = {"none": "L1", "l1_warmup": "L1 with a warm-up", "hot_exempt": "L1, hot neurons exempt"}
LOOKS = dict(zip((DENSE, *KINDS.values(), SILU), map(style.category, range(5)), strict=True))
FEWEST_WIDTHS = 2  # of dense models, for a frontier
ARM = ["model", "activation", "modification", "l1"]
TRAINING = [*ARM, "seed", "text", "tokens_trained"]
SIZE = ["layers", "hidden"]
SHAPE = [*SIZE, "text", "tokens_trained"]
TIMES = ["time", "energy", "step", "blocks", "pruned"]
MEANS = ["change", "train_change", *TIMES, "beyond"]


@figure(
    "J",
    "figureJ_frontier",
    "cross-entropy against measured time, sparse models and dense ones with fewer neurons",
    "Further left is faster, further down is better. Numbers: L1 coefficients, and the neurons of each block. "
    "Compiled, each layer dense or sparse as is faster; a seed that was not timed has the mean time of the others. "
    "Blocks: alone, added up; open: without the neurons that stayed silent.",
)
def frontier(results: Results) -> Sketch:
    data = points(results)
    sizes = data["scale"].unique()
    picture, grid = style.panels(len(sizes), 2, 0.5 + 2.8 * len(sizes), sharey="row")
    letters = iter(string.ascii_lowercase)
    for line, size in zip(grid, sizes, strict=True):
        for axes, name, title in zip(line, ("time", "blocks"), ("whole model", "blocks"), strict=True):
            _panel(axes, where(data, scale=size), name)
            axes.set(title=f"({next(letters)}) {size}, {title}", xlabel="measured time, % of the dense model's")
            axes.locator_params(axis="x", nbins=6)
        line[0].set_ylabel("cross-entropy against dense ReLU")
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid[:, 0]]
    kinds = {label: handle for legend in legends for handle, label in legend}
    picture.legend(kinds.values(), kinds.keys(), loc="outside lower center", ncols=len(kinds))
    for line, size in zip(grid, sizes, strict=True):
        own = where(data, scale=size)
        names = [f"{each.intermediate:,.0f}" if each.l1 == 0 else l1_label(each.l1) for each in own.itertuples()]
        style.place_labels(line[0], own["time"], own["change"], names, [LOOKS[kind]["color"] for kind in own["kind"]])
    seeds = span(data["seeds"], "{:.0f}".format)
    return Sketch(picture, data, f"{', '.join(sizes)}; seeds of each: {seeds}.")


def points(results: Results) -> pd.DataFrame:
    """One line for each way to train, mean over seeds: `scale`, `kind`, model, l1, intermediate, seeds; of each size
    that has them, the trainings with the most dense widths on one text, small sizes first.

    In percent of the dense ReLU model with the most neurons and the same seed: `change` and `train_change` of the
    cross-entropy on held-out text and on the text of the last steps; `time` and `energy` of the forward pass and time
    of the training `step` in its fastest form, `blocks` and `pruned` (without silent neurons) of the blocks alone.
    `beyond`: the cross-entropy in percent over the least of dense models at the same measured time (below 0: sparse is
    better), with its 95% interval from `beyond_low` to `beyond_high`, NaN outside of the dense models' times.

    Raises:
        NotMeasured: there are no dense models of several widths that were trained alike and timed.
    """
    runs = _runs(results.rows)
    plain = where(runs, activation="relu", modification="none", l1=0.0)
    widths = plain.groupby(SHAPE)["intermediate"].nunique()
    several = widths[widths >= FEWEST_WIDTHS].groupby(SIZE).idxmax()
    if several.empty:
        raise NotMeasured("dense models of several widths, and sparse ones, trained alike and timed", COMMAND)
    runs = runs[pd.MultiIndex.from_frame(runs[SHAPE]).isin(several.tolist())]
    runs = pd.concat([_relative(alike) for _, alike in runs.groupby([*SHAPE, "seed"])], ignore_index=True)
    runs = runs.assign(scale=runs["model"].map(choose.scale))
    by = [*SIZE, "scale", "kind", *ARM, "intermediate"]
    data = runs.groupby(by, as_index=False)[MEANS].mean()
    data["seeds"] = runs.groupby(by)["seed"].nunique().to_numpy()
    for name in ("change", "beyond"):
        spread = stats.over_seeds(runs.assign(value=runs[name]), by)[[*by, "low", "high"]]
        data = data.merge(spread.rename(columns={"low": f"{name}_low", "high": f"{name}_high"}), on=by, how="left")
    return data.sort_values([*SIZE, "kind", "l1", "intermediate"], ignore_index=True).drop(columns=SIZE)


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each training with its losses and times; one that was not timed has the mean times of its arm's
    other seeds, and is left out where there are none."""
    losses = where(rows, op="train", layer=None, metric=("validation_cross_entropy", "cross_entropy"))
    keys = [*TRAINING, "layers", "hidden", "intermediate"]
    runs = losses.pivot_table(index=keys, columns="metric", values="value").reset_index()
    forward = where(rows, op="model_forward", metric="throughput")
    fastest = forward.sort_values("value").drop_duplicates(TRAINING, keep="last")
    same = ["study", "item", "pattern", "plan", "backend", "tokens"]
    energy = where(rows, op="model_forward", metric="energy")[[*same, "value"]].rename(columns={"value": "energy"})
    timed = fastest.merge(energy, on=same, how="left").assign(time=lambda line: 1 / line["value"].astype("float64"))
    step = where(rows, op="model_training", metric="throughput").groupby(TRAINING)["value"].max()
    runs = runs.merge(timed[[*TRAINING, "time", "energy"]], on=TRAINING, how="left")
    runs = runs.merge((1 / step).rename("step").reset_index(), on=TRAINING, how="left")
    runs = runs.merge(_blocks(rows), on=TRAINING, how="left")
    means = runs.groupby([name for name in TRAINING if name != "seed"])[TIMES].transform("mean")
    return runs.fillna({name: means[name] for name in TIMES}).dropna(subset="time")


def _blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """The time of all blocks of a model, each in its fastest form: `blocks`, and `pruned` without silent neurons."""
    timed = where(rows, op="ffn_forward", metric="time").dropna(subset=["layer", "value"])
    is_pruned = timed["plan"].isin(schema.LIVE_PLANS.values())
    each = {
        name: part.groupby([*TRAINING, "layer"])["value"].min().groupby(TRAINING).sum()
        for name, part in (("blocks", timed[~is_pruned]), ("pruned", timed))
    }
    return pd.DataFrame(each, columns=["blocks", "pruned"]).rename_axis(TRAINING).reset_index()


def _relative(runs: pd.DataFrame) -> pd.DataFrame:
    """The trainings of one seed relative to the dense ReLU model with the most neurons; none if that is missing."""
    dense = where(runs, modification="none", l1=0.0)
    relu = where(dense, activation="relu").sort_values("intermediate")
    if relu.empty:
        return runs.iloc[:0].assign(kind="", **dict.fromkeys(MEANS, np.nan))
    base = relu.iloc[-1]
    plain = runs["activation"].map({"relu": DENSE}).fillna(SILU)
    runs = runs.assign(
        kind=runs["modification"].replace(KINDS).mask(runs["l1"] == 0, plain),
        change=(runs["validation_cross_entropy"] / base["validation_cross_entropy"] - 1) * 100,
        train_change=(runs["cross_entropy"] / base["cross_entropy"] - 1) * 100,
        **{name: runs[name] / base[name] * 100 for name in ("time", "energy", "step")},
        **{name: runs[name] / base["blocks"] * 100 for name in ("blocks", "pruned")},
    )
    return runs.assign(beyond=np.where(runs["l1"] > 0, _over(runs[runs["l1"] == 0], runs), np.nan))


def _over(dense: pd.DataFrame, runs: pd.DataFrame) -> np.ndarray:
    """The cross-entropy of each run in percent over the least at its time on any straight line between two of these
    dense models, ReLU or SiLU."""
    at_time = np.full(len(runs), np.nan)
    line = dense.sort_values("time")[["time", "validation_cross_entropy"]].astype("float64")
    for ends in itertools.combinations(range(len(line)), 2):
        times, losses = line.iloc[list(ends)].to_numpy().T
        at_time = np.fmin(at_time, np.interp(runs["time"], times, losses, left=np.nan, right=np.nan))
    return (runs["validation_cross_entropy"].to_numpy() / at_time - 1) * 100


def _panel(axes: Axes, data: pd.DataFrame, name: str) -> None:
    for kind, look in LOOKS.items():
        line = where(data, kind=kind)
        if line.empty:
            continue
        style.line_with_spread(
            axes, line[name], line["change"], line["change_low"], line["change_high"], label=kind, **look
        )
        if name == "blocks":
            axes.scatter(
                line["pruned"], line["change"], marker=look["marker"], edgecolors=look["color"], facecolors="white"
            )
    axes.margins(x=0.12, y=0.12)
    style.percent_axis(axes.yaxis)
    style.reference_line(axes, 0)
