"""Figures 2, 8 and 9: curves of training, as means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.typing import Rolling

from analysis import choose, describe, stats
from analysis.choose import RUN, l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import signed, significant

SMOOTHING = 0.04  # window of the running mean, as a share of the steps
FEWEST_VALUES = 3  # the L1 values, 0 included, that a sweep needs at least


@figure("2", "figure02_training_curves", "training curves for each L1 value")
def curves_by_l1(results: Results) -> Sketch:
    """Training and validation cross-entropy against the step, one line for each L1 value (gated ReLU models)."""
    curves, trained = _sweep(results)
    training = _over_seeds(_smooth(_whole_model(curves, "cross_entropy")), ["l1"])
    held_out = _whole_model(curves, "validation_cross_entropy")
    if training.empty:
        raise NotMeasured("curves of gated ReLU trainings (metrics.jsonl)")
    change = _over_seeds(_against_unregularised(held_out), ["l1"])
    if change.empty:
        raise NotMeasured("held-out cross-entropy of gated ReLU trainings with and without L1 at the same steps")
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    _lines(left, training, "l1")
    left.set(title="(a) training, smoothed", xlabel="optimizer step", ylabel="cross-entropy (nats/token)")
    lowest = training["value"].groupby(training["l1"]).last().min()
    left.set_ylim(bottom=lowest - 0.15, top=_upper(training, lowest))
    _change_panel(right, change)
    right.set_xlim(left.get_xlim())
    _legend(picture, left, "L1 coefficient")
    validation = _over_seeds(held_out, ["l1"])
    data = [training.assign(split="training"), validation.assign(split="validation"), change.assign(split="change_pct")]
    return Sketch(picture, pd.concat(data, ignore_index=True), _curves_caption(validation, change, trained))


@figure("8", "figure08_mitigation", "non-zeros and dead neurons in training, by mitigation strategy")
def mitigation(results: Results) -> Sketch:
    """Mean non-zeros and dead fraction against the step for no mitigation, reinitialisation and L1 warm-up."""
    curves, trained = _with_seeds(results, where(results.curves, activation="relu", gated=True))
    changed = curves[curves["modification"] != "none"]
    if changed.empty:
        raise NotMeasured("trainings with dead-neuron reinitialisation or L1 warm-up")
    changed = choose.main_model(changed)
    reinit_l1 = set(where(changed, modification="dead_neuron_reinit")["l1"]) or set(changed["l1"])
    plain = where(curves, modification="none", l1=tuple(reinit_l1), model=changed["model"].iloc[0])
    chosen = pd.concat([plain, changed])
    names = chosen["modification"].map(choose.MODIFICATIONS).replace("none", "no mitigation")
    seeds = chosen.groupby(["modification", "l1"])["seed"].transform("nunique")
    counted = seeds.map(lambda count: "1 seed" if count == 1 else f"{count} seeds")
    chosen = chosen.assign(strategy=names + " (L1 " + chosen["l1"].map(l1_label) + ", " + counted + ")")
    order = list(dict.fromkeys(chosen["strategy"]))
    lines: style.Look = {"marker": ""}
    looks = {name: style.category(i) | lines for i, name in enumerate(order)}
    picture, data = _two_panels(chosen, "strategy", looks, "mitigation")
    trained = trained.merge(chosen[RUN].drop_duplicates(), on=RUN)
    return Sketch(picture, data, _final_caption(data, "strategy", "At the end", trained))


@figure("9", "figure09_sparsity_in_training", "non-zeros and dead neurons in training, for each L1 value")
def sparsity_by_l1(results: Results) -> Sketch:
    """Mean non-zeros and dead fraction against the step, one line for each L1 value (gated ReLU models)."""
    curves, trained = _sweep(results)
    if where(curves, metric="nonzeros").empty:
        raise NotMeasured("curves of non-zeros of gated ReLU trainings (metrics.jsonl)")
    looks = style.in_order(sorted(set(curves["l1"])))
    picture, data = _two_panels(curves, "l1", looks, "L1 coefficient")
    return Sketch(picture, data, _final_caption(data, "l1", "At the end, by L1 value", trained))


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
    """A centred running mean over a share SMOOTHING of each run's steps."""
    ordered = curves.sort_values([*RUN, "step"], kind="stable")
    runs = ordered.groupby(RUN)["value"]
    return ordered.assign(value=runs.transform(lambda values: running(values, SMOOTHING).mean()))


def _over_seeds(curves: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The mean over seeds at each step, with its interval."""
    return stats.over_seeds(curves, ["model", "metric", *by, "step", "tokens"])


def _lines(axes: Axes, data: pd.DataFrame, by: str, looks: Mapping[Any, style.Look] | None = None) -> None:
    """The mean for each value of `by`, with a band for its interval."""
    looks = looks or style.in_order(sorted(set(data[by])))
    for value, look in looks.items():
        line = where(data, **{by: value})
        few: style.Look = {"marker": "o", "markersize": 3} if len(line) < 3 else {"marker": ""}
        axes.plot(line["step"], line["value"], label=l1_label(value) if by == "l1" else value, **look | few)
        axes.fill_between(line["step"], line["low"], line["high"], color=look["color"], alpha=0.18, linewidth=0)


def _against_unregularised(validation: pd.DataFrame) -> pd.DataFrame:
    """Held-out cross-entropy in percent above that of the model without L1, same seed, same step."""
    return choose.above_unregularised(validation, where(validation, l1=0.0), "step")


def _change_panel(axes: Axes, change: pd.DataFrame) -> None:
    tolerance = choose.QUALITY_TOLERANCE * 100
    _lines(axes, change, "l1")
    axes.set(title="(b) against L1 = 0 (dashed: the paper's bound)", xlabel="optimizer step")
    axes.set_ylabel("change in held-out cross-entropy")
    low, high = min(change["value"].min(), 0), max(change["value"].max(), tolerance)
    margin = 0.12 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    style.percent_axis(axes.yaxis)
    style.reference_line(axes, tolerance)


def _upper(training: pd.DataFrame, lowest: float) -> float:
    """An upper limit that cuts off the steep beginning of training: differences between runs appear later."""
    after = training[training["step"] >= training["step"].max() * 0.08]["value"].max()
    return max(after, lowest + 0.5)


def _two_panels(
    curves: pd.DataFrame, by: str, looks: Mapping[Any, style.Look], legend: str
) -> tuple[Figure, pd.DataFrame]:
    nonzeros = _over_seeds(_whole_model(curves, "nonzeros"), [by])
    dead = _over_seeds(_whole_model(curves, "dead_fraction"), [by])
    picture, grid = style.panels(1, 2 if len(dead) else 1, 2.6)
    axes = grid[0]
    _lines(axes[0], nonzeros, by, looks)
    axes[0].set(title="(a) non-zeros", xlabel="optimizer step", ylabel="mean non-zeros (neurons/token)")
    style.log_axis(axes[0].yaxis)
    # An interval over few seeds may reach below zero, which a log axis cannot show.
    axes[0].set_ylim(bottom=nonzeros["value"].min() / 2)
    if len(dead):
        shares = dead.assign(**{name: dead[name] * 100 for name in ("value", "low", "high")})
        _lines(axes[1], shares, by, looks)
        axes[1].set(title="(b) dead neurons", xlabel="optimizer step", ylabel="dead neurons (% of N)")
        axes[1].set_ylim(0, min(100, shares[["value", "high"]].max().max() * 1.05))
    _legend(picture, axes[0], legend)
    return picture, pd.concat([nonzeros, dead], ignore_index=True)


def _legend(picture: Figure, axes: Axes, title: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    wide = max(map(len, labels)) > 10
    if wide:
        picture.legend(
            handles, labels, loc="outside lower center", ncols=len(labels) if sum(map(len, labels)) < 100 else 2
        )
    else:
        picture.legend(handles, labels, title=title, loc="outside right center")


def _curves_caption(validation: pd.DataFrame, change: pd.DataFrame, trained: pd.DataFrame) -> str:
    ends = validation.sort_values("step").groupby("l1").last()
    listed = ", ".join(f"{_with_interval(line, 3)} at {l1_label(l1)}" for l1, line in ends.iterrows())
    return (
        f"{_within(change)} Final held-out cross-entropy (nats/token) by L1 value: {listed}. (b): each run relative to "
        f"the run without L1 of the same seed. {describe.interval(change['seeds'], 'Bands and ±')} "
        f"{describe.runs(trained)}"
    )


def _within(change: pd.DataFrame) -> str:
    """The L1 values within the paper's bound, and by how much the others exceed it."""
    ends = change.sort_values("step").groupby("l1")["value"].last()
    ends, bound = ends[ends.index > 0], choose.QUALITY_TOLERANCE * 100
    inside, outside = ends[ends <= bound], ends[ends > bound]
    text = (
        f"Final held-out cross-entropy is within {bound:g}% of that without L1 up to L1 {l1_label(inside.index.max())}"
    )
    if inside.empty:
        text = f"At no L1 value is the final held-out cross-entropy within {bound:g}% of that without L1"
    beyond = ", ".join(f"{signed(value, 1)} at {l1_label(l1)}" for l1, value in outside.items())
    return f"{text}{f'; beyond, {beyond}' if beyond else ''} (the paper: within 2% up to 3e-5)."


def _with_interval(line: pd.Series, digits: int) -> str:
    half = line["high"] - line["value"]
    return f"{line['value']:.{digits}f}" + ("" if pd.isna(half) else f" ± {half:.{digits}f}")


def _final_caption(data: pd.DataFrame, by: str, lead: str, trained: pd.DataFrame) -> str:
    last = data.sort_values("step").groupby([by, "metric"]).last()
    parts = []
    for name in dict.fromkeys(last.index.get_level_values(by)):
        nonzeros = last.loc[(name, "nonzeros")]
        text = f"{l1_label(name) if by == 'l1' else name}: {_counted(nonzeros)} non-zeros"
        if (name, "dead_fraction") in last.index:
            text += f", {last.loc[(name, 'dead_fraction'), 'value']:.0%} dead"
        parts.append(text)
    seeds: Sequence[int] = list(last["seeds"])
    return (
        f"{lead}: {'; '.join(parts)}. {describe.step_tokens(trained)} {describe.interval(seeds, 'Bands and ±')} "
        f"{describe.runs(trained)}"
    )


def _counted(line: pd.Series) -> str:
    half = line["high"] - line["value"]
    return significant(line["value"]) + ("" if pd.isna(half) else f" ± {significant(half, 2)}")
