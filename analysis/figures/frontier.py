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
PAIRED = ("time", "energy", "step", "memory", "blocks")
OWN_DENSE = {"pruned": "dense_blocks"} | {name: f"dense_{name}" for name in PAIRED}  # of the same run
AS_TRAINED = ["own_steps", "own_memory"]
COSTS = [*OWN_DENSE, *AS_TRAINED]
MEANS = ["change", "train_change", *COSTS, "beyond", "train_beyond"]


@figure(
    "J",
    "figureJ_frontier",
    "cross-entropy against measured time, sparse models and dense ones with fewer neurons",
    "Left is faster, down better. Numbers: L1 (neurons); dense ones' neurons. Compiled, each layer dense or sparse as "
    "is faster: sparse models over dense products of the same run, dense ones and other widths over the widest ReLU "
    "model. Seeds not timed: the others' mean time. Blocks: alone, added up; open: without silent neurons.",
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
            axes.margins(x=0.1)  # room for labels
            axes.locator_params(axis="x", nbins=6)
        line[0].set_ylabel("held-out cross-entropy against dense")
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid[:, 0]]
    kinds = {label: handle for legend in legends for handle, label in legend}
    picture.legend(kinds.values(), kinds.keys(), loc="outside lower center", ncols=len(kinds))
    for line, size in zip(grid, sizes, strict=True):
        own = where(data, scale=size)
        colors = [LOOKS[kind]["color"] for kind in own["kind"]]
        style.place_labels(line[0], own["time"], own["change"], _labels(own), colors)
    seeds = span(data["seeds"], "{:.0f}".format)
    return Sketch(picture, data, f"{', '.join(sizes)}; seeds of each: {seeds}.")


def points(results: Results) -> pd.DataFrame:
    """One line for each way to train, mean over seeds: `scale`, `kind`, model, l1, intermediate, seeds; of each size
    that has them, the trainings with the most dense widths on one text, small sizes first.

    In percent of the dense ReLU model with the most neurons and the same seed: `change` and `train_change` of the
    cross-entropy on held-out text and on the text of the last steps; `time` and `energy` of the forward pass, time of
    the training `step` in its fastest form and its peak `memory`, `blocks` and `pruned` (without silent neurons) of the
    blocks alone, median time of the training's `own_steps` as they ran and its peak, `own_memory`. But for these two,
    a sparse model with as many neurons is in percent of dense products of its own weights, which its benchmark timed
    beside it on the same card.
    `beyond` and `train_beyond`: these cross-entropies in percent over the least of dense models at the same measured
    time (below 0: sparse is better), NaN outside of the dense models' times; the first with its 95% interval from
    `beyond_low` to `beyond_high`.

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
    data = runs.groupby(by, as_index=False)[MEANS].mean().astype(dict.fromkeys(MEANS, "float64"))
    data["seeds"] = runs.groupby(by)["seed"].nunique().to_numpy()
    for name in ("change", "beyond"):
        spread = stats.over_seeds(runs.assign(value=runs[name]), by)[[*by, "low", "high"]]
        data = data.merge(spread.rename(columns={"low": f"{name}_low", "high": f"{name}_high"}), on=by, how="left")
    return data.sort_values([*SIZE, "kind", "l1", "intermediate"], ignore_index=True).drop(columns=SIZE)


def _runs(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each training with its losses and times; one that was not timed has the mean times of its arm's
    other seeds, and is left out where there are none."""
    metrics = ("validation_cross_entropy", "cross_entropy", "throughput", "peak_memory")
    kept = where(rows, op="train", layer=None, metric=metrics)
    keys = [*TRAINING, "layers", "hidden", "intermediate"]
    runs = kept.pivot_table(index=keys, columns="metric", values="value").reset_index()
    runs = runs.reindex(columns=[*keys, *metrics]).rename(columns={"peak_memory": "own_memory"})
    runs["own_steps"] = 1 / runs["throughput"].astype("float64")
    forward = _fastest(rows, "model_forward", "time", "energy", "energy")
    step = _fastest(rows, "model_training", "step", "peak_memory", "memory")
    for measured in (forward, step, _blocks(rows)):
        runs = runs.merge(measured, on=TRAINING, how="left")
    costs = [*COSTS, *{*OWN_DENSE.values()}]
    means = runs.groupby([name for name in TRAINING if name != "seed"])[costs].transform("mean")
    return runs.fillna({name: means[name] for name in costs}).dropna(subset="time")


def _fastest(rows: pd.DataFrame, op: str, time: str, metric: str, beside: str) -> pd.DataFrame:
    """The time of each model's fastest form and, as `beside`, this metric of it; with `dense_` before their names those
    of its fastest dense form."""
    same = ["study", "item", "pattern", "plan", "backend", "tokens"]
    other = where(rows, op=op, metric=metric)[[*same, "value"]].rename(columns={"value": beside})
    timed = where(rows, op=op, metric="throughput").merge(other, on=same, how="left")
    timed = timed.assign(**{time: 1 / timed["value"].astype("float64")}).sort_values(time)
    first, dense = (
        lines.drop_duplicates(TRAINING).set_index(TRAINING)[[time, beside]]
        for lines in (timed, where(timed, plan="dense"))
    )
    return first.join(dense.add_prefix("dense_")).reset_index()


def _blocks(rows: pd.DataFrame) -> pd.DataFrame:
    """The time of all blocks of a model, each in its fastest form: `blocks`, `dense_blocks` in its fastest dense one,
    and `pruned` without silent neurons."""
    timed = where(rows, op="ffn_forward", metric="time").dropna(subset=["layer", "value"])
    fastest = timed.groupby([*TRAINING, "layer", "plan"], as_index=False)["value"].min()
    is_pruned = fastest["plan"].isin(schema.LIVE_PLANS.values())
    parts = {"blocks": ~is_pruned, "dense_blocks": fastest["plan"].eq("dense"), "pruned": fastest["plan"].notna()}
    each = {
        name: fastest[part].groupby([*TRAINING, "layer"])["value"].min().groupby(TRAINING).sum()
        for name, part in parts.items()
    }
    return pd.DataFrame(each, columns=list(parts)).rename_axis(TRAINING).reset_index()


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
    )
    paired = (runs["l1"] > 0) & (runs["intermediate"] == base["intermediate"])
    over = {name: runs[dense].where(paired, base[dense]) for name, dense in OWN_DENSE.items()}
    over |= base[AS_TRAINED]
    runs = runs.assign(**{name: runs[name] / over[name] * 100 for name in COSTS})
    return runs.assign(beyond=_over(runs, "validation_cross_entropy"), train_beyond=_over(runs, "cross_entropy"))


def _over(runs: pd.DataFrame, loss: str) -> np.ndarray:
    """The loss of each sparse run in percent over the least at its time on any straight line between two of the dense
    models, ReLU or SiLU; NaN for these."""
    at_time = np.full(len(runs), np.nan)
    line = where(runs, l1=0.0).sort_values("time")[["time", loss]].astype("float64")
    for ends in itertools.combinations(range(len(line)), 2):
        times, losses = line.iloc[list(ends)].to_numpy().T
        at_time = np.fmin(at_time, np.interp(runs["time"], times, losses, left=np.nan, right=np.nan))
    return np.where(runs["l1"] > 0, (runs[loss].to_numpy() / at_time - 1) * 100, np.nan)


def _labels(size: pd.DataFrame) -> list[str]:
    """Neurons of dense models; of sparse ones L1, and their neurons if the widest dense ReLU model has others."""
    sparse, widest = size["l1"] > 0, where(size, kind=DENSE)["intermediate"].max()
    neurons = size["intermediate"].map("{:,.0f}".format)
    other_width = (" (" + neurons + ")").where(size["intermediate"] != widest, "")
    return list(neurons.mask(sparse, size["l1"].map(l1_label) + other_width))


def _panel(axes: Axes, data: pd.DataFrame, name: str) -> None:
    sparse_width = data["intermediate"].where(data["l1"] > 0, 0)  # a line joins dense widths, but L1 at one width
    for (kind, _), line in data.groupby(["kind", sparse_width]):
        look = LOOKS[kind]
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
