"""Figure H, what sparsity is worth: sparse models beside dense ones that were trained with fewer neurons."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, stats
from analysis.choose import RUN, l1_label, where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import span

COMMAND = "python -m slurm.submit study=narrow cluster=gpu_box"  # beside study=scaled
SPARSE, LIVE, DENSE = "sparse", "sparse, silent neurons left out", "dense, fewer neurons"
NEAR_ZERO = 0.5  # percent: sparse points below have no label
FEWEST_POINTS = 2  # of each kind; the dense model with all neurons is one


@figure(
    "H",
    "figureH_narrow_dense",
    "sparse models, and dense ones trained with fewer neurons",
    "Further left is cheaper, further down is better. Numbers: L1 coefficients, and the neurons of dense models. A "
    "sparse gated block multiplies the gate for all its neurons. (b) is estimated from the timed block with the same "
    "share of active neurons: this model is too small to time.",
)
def narrow_dense(results: Results) -> Sketch:
    """Held-out cross-entropy against (a) the multiplications of the feed-forward blocks and (b) an estimate of their
    time, all relative to the dense model without L1: for each L1 value, with and without the neurons that stayed silent
    on held-out text, and for dense models that were trained with fewer neurons."""
    data = points(results)
    panels = {"cost": "multiplications of the blocks"}
    panels |= {"time": "time of the blocks, estimated"} if data["time"].notna().all() else {}
    picture, (grid,) = style.panels(1, len(panels), 3.3, sharey=True)
    for letter, axes, (name, title) in zip("ab", grid, panels.items(), strict=False):
        _panel(axes, data, name, labels=letter == "a")
        axes.set(title=f"({letter}) {title}", xlabel="% of the dense model's")
    grid[0].set_ylabel("cross-entropy against dense, without L1")
    handles, labels = grid[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    seeds = span(data["seeds"], "{:.0f}".format)
    note = f"{where(data, kind=SPARSE)['model'].iloc[0]} model, {seeds} seeds, 95% confidence intervals."
    return Sketch(picture, data, note)


def points(results: Results) -> pd.DataFrame:
    """The points of the figure: `kind`, model, l1, seeds; `change` of the cross-entropy in percent, with its interval
    from `low` to `high`; `neurons` in use; `cost` and `time` of the blocks in percent of the dense ones with all
    neurons.

    Raises:
        NotMeasured: there are too few of them.
    """
    sweep = where(choose.relu_runs(results.rows), op=("train", "nonzeros"))
    sweep = choose.main_model(choose.equally_trained(sweep))
    narrow = choose.narrower(where(results.rows, op="train"), sweep)
    speed = where(blocks.fastest_on_synthetic(results), op="ffn_forward", published=False).sort_values("mean_nnz")
    data = pd.concat([_sparse(sweep, speed), _dense(narrow, where(sweep, l1=0.0))], ignore_index=True)
    counts = data["kind"].value_counts()
    if min(counts.get(kind, 0) for kind in (SPARSE, DENSE)) < FEWEST_POINTS:
        raise NotMeasured("an L1 sweep, and dense trainings like it with fewer neurons in each block", COMMAND)
    return data


def _sparse(sweep: pd.DataFrame, speed: pd.DataFrame) -> pd.DataFrame:
    """For each L1 value: `change` of the cross-entropy in percent; `cost` and `time` in percent of dense blocks with
    all neurons; and the `neurons` in use. A sparse gated block multiplies the gate for all its neurons, up and down for
    active ones."""
    change = stats.over_seeds(choose.loss_change(sweep), ["model", "l1"]).rename(columns={"value": "change"})
    rows = where(sweep, op="nonzeros", metric=("nonzeros", "silent_fraction"))
    rows = rows[rows["layer"].notna()]
    by_layer = rows.pivot_table(index=["l1", "intermediate", *RUN, "layer"], columns="metric", values="value")
    by_layer = by_layer.reindex(columns=["nonzeros", "silent_fraction"]).dropna().reset_index()
    neurons, active = (by_layer[name].astype("float64") for name in ("intermediate", "nonzeros"))
    parts = []
    for kind, used in ((SPARSE, neurons), (LIVE, neurons * (1 - by_layer["silent_fraction"].astype("float64")))):
        each = by_layer.assign(
            neurons=used,
            cost=(used + 2 * active) / (3 * neurons) * 100,
            time=_time(used, active, speed) / neurons * 100,
        )
        means = each.groupby("l1", as_index=False)[["neurons", "cost", "time"]].mean()
        parts.append(change.merge(means, on="l1").assign(kind=kind))
    return pd.concat(parts, ignore_index=True)


def _time(used: pd.Series, active: pd.Series, speed: pd.DataFrame) -> pd.Series:
    """The time of blocks in that of one dense neuron, by the measured speedup of a block with the same share of active
    neurons. Dense where that is faster, and where the share is above all that were measured."""
    if speed.empty:
        return used * np.nan
    known = speed["mean_nnz"].astype("float64") / speed["intermediate"].astype("float64")
    share = (active / used.where(used > 0)).fillna(0)
    ratio = np.exp(
        np.interp(np.log(share.clip(lower=known.min())), np.log(known), np.log(speed["ratio"].astype(float)))
    )
    return used / np.where(share > known.max(), 1.0, np.maximum(ratio, 1.0))


def _dense(narrow: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """The same of the dense models, whose products take a time in proportion to their neurons. `base`: the trainings
    with all neurons, which are the last line."""
    losses = where(pd.concat([narrow, base]), op="train", metric="validation_cross_entropy")
    whole = where(base, op="train", metric="validation_cross_entropy")
    each = [choose.above_unregularised(own, whole) for _, own in losses.groupby("model")]
    if not each:
        return pd.DataFrame(columns=["kind"])
    lines = stats.over_seeds(pd.concat(each, ignore_index=True), ["model", "l1", "intermediate"])
    neurons = lines["intermediate"].astype("float64")
    lines = lines.assign(kind=DENSE, neurons=neurons, cost=neurons / neurons.max() * 100)
    return lines.assign(time=lines["cost"]).rename(columns={"value": "change"}).sort_values("cost")


def _panel(axes: Axes, data: pd.DataFrame, name: str, *, labels: bool) -> None:
    for number, kind in enumerate((SPARSE, LIVE, DENSE)):
        own = where(data, kind=kind).sort_values("cost" if kind == DENSE else "l1")
        style.line_with_spread(
            axes, own[name], own["change"], own["low"], own["high"], label=kind, **style.category(number)
        )
        for line in own.itertuples() if labels else ():
            if kind == DENSE:
                text, offset, side = f"{line.neurons:,.0f}", (6, 6), "left"
            elif kind == LIVE and line.change > NEAR_ZERO:
                text, offset, side = l1_label(line.l1), (-7, 0), "right"
            else:
                continue
            axes.annotate(
                text, (getattr(line, name), line.change), xytext=offset, textcoords="offset points", fontsize=6.5,
                ha=side, va="center", color=style.INK, path_effects=style.HALO,
            )  # fmt: skip
    axes.set_xlim(-9, 109)
    axes.margins(y=0.12)
    style.percent_axis(axes.yaxis)
    style.reference_line(axes, 0)
