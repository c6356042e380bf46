"""Figures 2, 8 and 9: curves of training, as means over seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.typing import Rolling

from analysis import choose, describe, stats
from analysis.choose import RUN, l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.quality import FEWEST_VALUES, range_over_seeds
from analysis.load import Results

SMOOTHING = 0.02  # standard deviation of the smoothing kernel, as a share of the steps
COLOURS = dict(zip(choose.MODIFICATIONS, style.CATEGORIES, strict=False))
SPARSITY = (
    "(a) Mean over layers. (b) Neurons that no token of an optimizer step activates: their share depends on the "
    "tokens in a step. Lines: means over seeds; bands: lowest to highest seed."
)


@figure(
    "2",
    "figure02_training_curves",
    "training curves for each L1 value",
    "(a) Cross-entropy on training text: it steps down where a new pass over the text begins. (b) Held-out "
    "cross-entropy against the run without L1 of the same seed. Lines: means over seeds; bands: 95% intervals.",
)
def curves_by_l1(results: Results) -> Sketch:
    curves, trained = _sweep(results)
    by = ["model", "metric", "l1", "step", "tokens"]
    training = stats.over_seeds(_smooth(_whole_model(curves, "cross_entropy")), by)
    held_out = _whole_model(curves, "validation_cross_entropy")
    if training.empty:
        raise NotMeasured("curves of gated ReLU trainings (metrics.jsonl)")
    change = stats.over_seeds(choose.above_unregularised(held_out, where(held_out, l1=0.0), "step"), by)
    if change.empty:
        raise NotMeasured("held-out cross-entropy of gated ReLU trainings with and without L1 at the same steps")
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    _lines(left, training, "l1")
    left.set(title="(a) training, smoothed", xlabel="optimizer step", ylabel="cross-entropy (nats/token)")
    lowest = training["value"].groupby(training["l1"]).last().min()
    # The steep beginning is cut off: differences between runs appear later.
    after = training[training["step"] >= training["step"].max() * 0.08]["value"].max()
    left.set_ylim(bottom=lowest - 0.15, top=max(after, lowest + 0.5))
    tolerance = choose.QUALITY_TOLERANCE * 100
    _lines(right, change, "l1")
    right.set(title="(b) against L1 = 0 (dashed: the paper's bound)", xlabel="optimizer step")
    right.set_ylabel("change in held-out cross-entropy")
    low, high = min(change["value"].min(), 0), max(change["value"].max(), tolerance)
    margin = 0.12 * (high - low)
    right.set(xlim=left.get_xlim(), ylim=(low - margin, high + margin))
    style.percent_axis(right.yaxis)
    style.reference_line(right, tolerance)
    _legend(picture, left, "L1 coefficient")
    validation = stats.over_seeds(held_out, by)
    data = [training.assign(split="training"), validation.assign(split="validation"), change.assign(split="change_pct")]
    return Sketch(picture, pd.concat(data, ignore_index=True), describe.brief(trained))


@figure(
    "8",
    "figure08_mitigation",
    "non-zeros and dead neurons in training, by mitigation strategy",
    f"Colours: mitigations; dashes: their other L1 values. {SPARSITY}",
)
def mitigation(results: Results) -> Sketch:
    curves, trained = _with_seeds(results, where(results.curves, activation="relu", gated=True))
    changed = curves[curves["modification"] != "none"]
    if changed.empty:
        raise NotMeasured("trainings with dead-neuron reinitialisation or L1 warm-up")
    changed = choose.main_model(changed)
    reinit_l1 = set(where(changed, modification="dead_neuron_reinit")["l1"]) or set(changed["l1"])
    plain = where(curves, modification="none", l1=tuple(reinit_l1), model=changed["model"].iloc[0])
    chosen = pd.concat([plain, changed])
    looks: dict[str, style.Look] = {}
    parts = []
    for modification, colour in COLOURS.items():
        runs = where(chosen, modification=modification)
        most_seeds_first = runs.groupby("l1")["seed"].nunique().sort_values(ascending=False, kind="stable")
        for (l1, seeds), dashes in zip(most_seeds_first.items(), style.DASHES, strict=False):
            words = "no mitigation" if modification == "none" else choose.MODIFICATIONS[modification]
            name = f"{words} (L1 {l1_label(l1)}, {describe.counted(seeds)})"
            looks[name] = {"color": colour, "linestyle": dashes, "marker": ""}
            parts.append(where(runs, l1=l1).assign(strategy=name))
    picture, data = _two_panels(pd.concat(parts), "strategy", looks, "mitigation")
    return Sketch(picture, data, _note(trained.merge(chosen[RUN].drop_duplicates(), on=RUN)))


@figure("9", "figure09_sparsity_in_training", "non-zeros and dead neurons in training, for each L1 value", SPARSITY)
def sparsity_by_l1(results: Results) -> Sketch:
    curves, trained = _sweep(results)
    if where(curves, metric="nonzeros").empty:
        raise NotMeasured("curves of non-zeros of gated ReLU trainings (metrics.jsonl)")
    picture, data = _two_panels(curves, "l1", style.in_order(sorted(set(curves["l1"]))), "L1 coefficient")
    return Sketch(picture, data, _note(trained))


def running(values: pd.Series, share: float) -> Rolling:
    """Centred windows over `share` of a curve's values, shorter at its ends."""
    return values.rolling(max(1, int(len(values) * share)), center=True, min_periods=1)


def _with_seeds(results: Results, curves: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The curves of equally long trainings, with seeds, and `choose.trainings` of these runs."""
    rows = where(results.rows, op="train", layer=None)
    trained = choose.trainings(choose.equally_trained(rows))
    trained = trained.merge(curves[RUN].drop_duplicates(), on=RUN)
    return curves.merge(trained[[*RUN, "seed"]], on=RUN), trained


def _sweep(results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The curves of the model with the most L1 values, and its trainings.

    Raises:
        NotMeasured: fewer than FEWEST_VALUES, or none without L1.
    """
    curves, trained = _with_seeds(results, choose.relu_runs(results.curves))
    curves = choose.main_model(curves)
    values = set(curves["l1"])
    if len(values) < FEWEST_VALUES or 0.0 not in values:
        raise NotMeasured(
            f"trainings of gated ReLU models of one shape at {FEWEST_VALUES} L1 values or more, with L1 = 0 among them"
        )
    return curves, where(trained, model=curves["model"].iloc[0])


def _whole_model(curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The curve of the whole model, or the mean over its layers if only those were measured."""
    chosen = where(curves, metric=metric)
    by = [name for name in chosen.columns if name not in ("layer", "value")]
    return chosen.groupby(by, dropna=False, as_index=False)["value"].mean()


def _smooth(curves: pd.DataFrame) -> pd.DataFrame:
    """A running mean of each run with Gaussian weights of the distance in steps, of standard deviation SMOOTHING."""
    smoothed = [curves.iloc[:0]]
    for _, run in curves.dropna(subset=["value"]).groupby(RUN):
        step = run["step"].to_numpy(dtype=float)
        weights = np.exp(-(((step[:, None] - step) / (SMOOTHING * step.max())) ** 2) / 2)
        smoothed.append(run.assign(value=weights @ run["value"].to_numpy(dtype=float) / weights.sum(axis=1)))
    return pd.concat(smoothed)


def _lines(axes: Axes, data: pd.DataFrame, by: str, looks: Mapping[Any, style.Look] | None = None) -> None:
    """The mean for each value of `by`, with a band for its interval."""
    looks = looks or style.in_order(sorted(set(data[by])))
    for value, look in looks.items():
        line = where(data, **{by: value})
        few: style.Look = {"marker": "o", "markersize": 3} if len(line) < 3 else {"marker": ""}
        axes.plot(line["step"], line["value"], label=l1_label(value) if by == "l1" else value, **look | few)
        axes.fill_between(line["step"], line["low"], line["high"], color=look["color"], alpha=0.18, linewidth=0)


def _two_panels(
    curves: pd.DataFrame, by: str, looks: Mapping[Any, style.Look], legend: str
) -> tuple[Figure, pd.DataFrame]:
    keys = ["model", "metric", by, "step", "tokens"]
    nonzeros = range_over_seeds(_whole_model(curves, "nonzeros"), keys)
    dead = range_over_seeds(_whole_model(curves, "dead_fraction"), keys)
    picture, grid = style.panels(1, 2 if len(dead) else 1, 2.6)
    axes = grid[0]
    _lines(axes[0], nonzeros, by, looks)
    axes[0].set(title="(a) non-zeros", xlabel="optimizer step", ylabel="non-zeros (neurons/token)")
    style.log_axis(axes[0].yaxis)
    if len(dead):
        shares = dead.assign(**{name: dead[name] * 100 for name in ("value", "low", "high")})
        _lines(axes[1], shares, by, looks)
        axes[1].set(title="(b) dead neurons", xlabel="optimizer step", ylabel="dead neurons (% of N)")
        axes[1].set_ylim(0, min(100, shares["high"].max() * 1.05))
    _legend(picture, axes[0], legend)
    return picture, pd.concat([nonzeros, dead], ignore_index=True)


def _legend(picture: Figure, axes: Axes, title: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if max(map(len, labels)) > 10:
        columns = len(labels) if sum(map(len, labels)) < 100 else 2
        picture.legend(handles, labels, loc="outside lower center", ncols=columns)
    else:
        picture.legend(handles, labels, title=title, loc="outside right center")


def _note(trained: pd.DataFrame) -> str:
    """The trainings, and the tokens of a step, on which the number of dead neurons depends."""
    return f"{describe.brief(trained)} A step has {describe.listed(trained['tokens'], ' or ')} tokens."
