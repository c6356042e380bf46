"""Figure H, what sparsity is worth: sparse models beside dense ones with fewer neurons, by their multiplications."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe, stats
from analysis.choose import RUN, l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.measures import nonzeros_rows
from analysis.render import signed, significant

COMMAND = "python -m slurm.submit study=narrow cluster=gpu_box"  # beside study=scaled
SPARSE, LIVE, DENSE = "sparse", "sparse, silent neurons left out", "dense, fewer neurons"
FEWEST_POINTS = 2  # of each kind; the dense model with all neurons is one


@figure("H", "figureH_narrow_dense", "sparse models, and dense ones with fewer neurons")
def narrow_dense(results: Results) -> Sketch:
    """Held-out cross-entropy against the multiplications of the feed-forward blocks, both relative to the dense model
    without L1: for each L1 value, with and without the neurons that stayed silent on held-out text, and for dense
    models that were trained with fewer neurons."""
    sweep = where(choose.relu_runs(results.rows), op=("train", "nonzeros"))
    sweep = choose.main_model(choose.equally_trained(sweep))
    narrow = choose.narrower(where(results.rows, op="train"), sweep)
    data = pd.concat([_sparse(sweep), _dense(narrow, where(sweep, l1=0.0))], ignore_index=True)
    counts = data["kind"].value_counts()
    if min(counts.get(kind, 0) for kind in (SPARSE, DENSE)) < FEWEST_POINTS:
        raise NotMeasured("an L1 sweep, and dense trainings like it with fewer neurons in each block", COMMAND)
    picture, (grid,) = style.panels(1, 1, 3.2)
    _panel(grid[0], data)
    trained = choose.trainings(pd.concat([sweep, narrow]))
    return Sketch(picture, data, _caption(data, trained))


def _sparse(sweep: pd.DataFrame) -> pd.DataFrame:
    """For each L1 value: `change` of the cross-entropy in percent, `cost` in percent of the dense multiplications, and
    `neurons` in use. A sparse gated block multiplies the gate for all its neurons, up and down for active ones."""
    change = stats.over_seeds(choose.loss_change(sweep), ["model", "l1"]).rename(columns={"value": "change"})
    active = nonzeros_rows(sweep).set_index(RUN)
    all_neurons = active["intermediate"].astype("float64")
    silent = where(sweep, op="nonzeros", metric="silent_fraction")
    share = silent[silent["layer"].notna()].groupby(RUN)["value"].mean().reindex(active.index)
    parts = []
    for kind, used in ((SPARSE, all_neurons), (LIVE, all_neurons * (1 - share))):
        cost = (used + 2 * active["value"]) / (3 * all_neurons) * 100
        means = active.assign(cost=cost, neurons=used).groupby("l1", as_index=False)[["cost", "neurons"]].mean()
        parts.append(change.merge(means.dropna(), on="l1").assign(kind=kind))
    return pd.concat(parts, ignore_index=True)


def _dense(narrow: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """The same of the dense models; `base`: the trainings with all neurons, which are the last line."""
    losses = where(pd.concat([narrow, base]), op="train", metric="validation_cross_entropy")
    whole = where(base, op="train", metric="validation_cross_entropy")
    each = [choose.above_unregularised(own, whole) for _, own in losses.groupby("model")]
    if not each:
        return pd.DataFrame(columns=["kind"])
    lines = stats.over_seeds(pd.concat(each, ignore_index=True), ["model", "l1", "intermediate"])
    neurons = lines["intermediate"].astype("float64")
    lines = lines.assign(kind=DENSE, neurons=neurons, cost=neurons / neurons.max() * 100)
    return lines.rename(columns={"value": "change"}).drop(columns="intermediate").sort_values("cost")


def _panel(axes: Axes, data: pd.DataFrame) -> None:
    for number, kind in enumerate((SPARSE, LIVE, DENSE)):
        own = where(data, kind=kind).sort_values("l1" if kind != DENSE else "cost")
        if own.empty:
            continue
        style.line_with_spread(
            axes, own["cost"], own["change"], own["low"], own["high"], label=kind, **style.category(number)
        )
        for line in own.itertuples():
            text = f"{line.neurons:,.0f} neurons" if kind == DENSE else l1_label(line.l1)
            axes.annotate(
                text, (line.cost, line.change), xytext=(5, 3), textcoords="offset points", fontsize=6.5,
                color=style.CATEGORIES[number],
            )  # fmt: skip
    axes.set(
        xlabel="multiplications of the feed-forward blocks (% of the dense model's)",
        ylabel="cross-entropy against dense, without L1",
    )
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    style.percent_axis(axes.yaxis)
    style.reference_line(axes, 0, "")
    axes.legend(loc="upper right")


def _caption(data: pd.DataFrame, trained: pd.DataFrame) -> str:
    fewer = where(data, kind=DENSE).iloc[:-1]
    told = ", ".join(
        f"{signed(line.change, 1)} with {line.neurons:,.0f} ({significant(line.cost, 2)}% of the multiplications)"
        for line in fewer.itertuples()
    )
    within = where(data, kind=SPARSE)
    within = within[(within["l1"] > 0) & (within["change"] <= choose.QUALITY_TOLERANCE * 100)]
    text = f"Dense models with fewer neurons in each block change held-out cross-entropy by {told}."
    if len(within):
        best = within.loc[within["l1"].idxmax()]
        text += (
            f" At L1 {l1_label(best['l1'])} (labels: L1 coefficients), a sparse model changes it by "
            f"{signed(best['change'], 1)} with {significant(best['cost'], 2)}% of the multiplications"
        )
        live = where(data, kind=LIVE, l1=best["l1"])
        if len(live):
            text += (
                f", and with {significant(live['cost'].iloc[0], 2)}% if the neurons are left out that stayed silent on "
                f"held-out text ({live['neurons'].iloc[0]:,.0f} remain)"
            )
        text += "."
    return (
        f"{text} A sparse gated block computes the gate for all its neurons, and up and down for the active ones. "
        "Multiplications are not time, and a narrower dense model also needs less memory. Each run against that of its "
        f"seed. {describe.interval([*data['seeds']])} {describe.runs(trained)}"
    )
