"""Figures 2, 8 and 9: what happens while training."""

from __future__ import annotations

import pandas as pd
from pandas.api.typing import Rolling

from analysis import choose
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import significant

SMOOTHING = 0.04  # share of the steps that one point of a smoothed curve stands for


@figure("2", "figure02_training_curves", "training curves for each L1 value")
def curves_by_l1(results: Results) -> Sketch:
    """Training and validation cross-entropy against the step, one line an L1 value (gated ReLU models)."""
    curves = _l1_curves(results)
    training = _smooth(_whole_model(curves, "cross_entropy"), ["l1"])
    validation = _whole_model(curves, "validation_cross_entropy")
    if training.empty:
        raise NotMeasured("curves of gated ReLU trainings (metrics.jsonl)")
    change = _against_unregularised(validation)
    picture, ((left, right),) = style.panels(1, 2, 2.6)
    _lines(left, training, "l1")
    left.set(title="(a) training, smoothed", xlabel="optimizer step", ylabel="cross-entropy (nats/token)")
    lowest = training.groupby("l1")["value"].last().min()
    left.set_ylim(bottom=lowest - 0.15, top=_upper(training, lowest))
    if change.empty:
        style.note(right, "no held-out cross-entropy\nof the model without L1 and another")
    else:
        _change_panel(right, change)
        right.set_xlim(left.get_xlim())
    _legend(picture, left, "L1 coefficient")
    data = pd.concat([training.assign(split="training"), validation.assign(split="validation")])
    return Sketch(picture, _tidy(data, ["split"]), _curves_caption(curves, training, validation))


@figure("8", "figure08_mitigation", "non-zeros and dead neurons in training, by mitigation strategy")
def mitigation(results: Results) -> Sketch:
    """Mean non-zeros and dead fraction against the step for no mitigation, reinitialisation and L1 warm-up."""
    curves = choose.main_model(where(results.curves, activation="relu", gated=True))
    changed = where(curves, modification=tuple(name for name in choose.MODIFICATIONS if name != "none"))
    if changed.empty:
        raise NotMeasured("trainings with dead-neuron reinitialisation or L1 warm-up")
    reinit_l1 = set(where(changed, modification="dead_neuron_reinit")["l1"]) or set(changed["l1"])
    plain = where(curves, modification="none", l1=tuple(reinit_l1))
    chosen = pd.concat([plain, changed])
    names = chosen["modification"].map(choose.MODIFICATIONS)
    chosen = chosen.assign(strategy=names + " (L1 " + chosen["l1"].map(l1_label) + ")")
    order = list(dict.fromkeys(chosen["strategy"]))
    picture, data = _two_panels(
        chosen, "strategy", {name: style.category(i) for i, name in enumerate(order)}, "mitigation"
    )
    return Sketch(picture, data, _final_caption(data, "strategy", "At the end: "))


@figure("9", "figure09_sparsity_in_training", "non-zeros and dead neurons in training, for each L1 value")
def sparsity_by_l1(results: Results) -> Sketch:
    """Mean non-zeros and dead fraction against the step, one line an L1 value (gated ReLU models)."""
    curves = _l1_curves(results)
    if where(curves, metric="nonzeros").empty:
        raise NotMeasured("curves of non-zeros of gated ReLU trainings (metrics.jsonl)")
    values = sorted(set(curves["l1"]))
    colours = {value: {"color": colour} for value, colour in zip(values, style.sequence(len(values)), strict=True)}
    picture, data = _two_panels(curves, "l1", colours, "L1 coefficient")
    return Sketch(picture, data, _final_caption(data, "l1", "At the end, by L1 value: "))


def _l1_curves(results: Results) -> pd.DataFrame:
    return choose.main_model(choose.relu_runs(results.curves))


def running(values: pd.Series, share: float) -> Rolling:
    """Centred windows over `share` of the values of a curve, shorter at its ends."""
    return values.rolling(max(1, int(len(values) * share)), center=True, min_periods=1)


def _whole_model(curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The curve of the whole model: measured for it, or else the mean over its layers."""
    chosen = where(curves, metric=metric)
    by = [name for name in chosen.columns if name not in ("layer", "value")]
    return chosen.groupby(by, dropna=False, as_index=False)["value"].mean()


def _smooth(curves: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """A centred running mean over SMOOTHING of the steps of every run."""
    ordered = curves.sort_values([*by, "item", "step"], kind="stable")
    runs = ordered.groupby([*by, "study", "item"])["value"]
    return ordered.assign(value=runs.transform(lambda values: running(values, SMOOTHING).mean()))


def _lines(axes, curves: pd.DataFrame, by: str, looks: dict | None = None) -> None:
    values = sorted(set(curves[by]))
    looks = looks or {v: {"color": c} for v, c in zip(values, style.sequence(len(values)), strict=True)}
    for value, look in looks.items():
        for number, (_, run) in enumerate(where(curves, **{by: value}).groupby(["study", "item"])):
            label = (l1_label(value) if by == "l1" else value) if number == 0 else None
            few = {"marker": "o", "markersize": 3} if len(run) < 3 else {"marker": ""}
            axes.plot(run["step"], run["value"], label=label, **look | few)


def _against_unregularised(validation: pd.DataFrame) -> pd.DataFrame:
    """Held-out cross-entropy in percent above that of the model without L1 at the same step."""
    base = where(validation, l1=0.0).groupby("step")["value"].mean()
    if base.empty or len(set(validation["l1"])) < 2:
        return validation.iloc[:0]
    change = validation[validation["step"].isin(base.index)]
    return change.assign(value=(change["value"] / change["step"].map(base) - 1) * 100)


def _change_panel(axes, change: pd.DataFrame) -> None:
    tolerance = choose.QUALITY_TOLERANCE * 100
    _lines(axes, change, "l1")
    axes.axhline(tolerance, color=style.PAPER, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(
        f"paper: within {tolerance:g}% up to 3e-5", (1, tolerance), xycoords=("axes fraction", "data"), ha="right",
        xytext=(0, 3), textcoords="offset points", fontsize=7,
    )  # fmt: skip
    axes.set(title="(b) held-out, against L1 = 0", xlabel="optimizer step", ylabel="change in cross-entropy")
    style.percent_axis(axes.yaxis)
    span = max(abs(change["value"]).max(), tolerance) * 1.25
    axes.set_ylim(-span, span)


def _upper(training: pd.DataFrame, lowest: float) -> float:
    """Leave the steep first tenth of training out of sight: what differs between runs comes after it."""
    after = training[training["step"] >= training["step"].max() * 0.08]["value"].max()
    return max(after, lowest + 0.5)


def _two_panels(curves: pd.DataFrame, by: str, looks: dict, legend: str) -> tuple:
    nonzeros, dead = _whole_model(curves, "nonzeros"), _whole_model(curves, "dead_fraction")
    picture, (axes,) = style.panels(1, 2, 2.6)
    _lines(axes[0], nonzeros, by, looks)
    axes[0].set(title="(a) non-zeros", xlabel="optimizer step", ylabel="mean non-zeros (neurons/token)")
    style.log_axis(axes[0].yaxis)
    if dead.empty:
        style.note(axes[1], "dead neurons were not tracked")
    else:
        _lines(axes[1], dead.assign(value=dead["value"] * 100), by, looks)
        axes[1].set(title="(b) dead neurons", xlabel="optimizer step", ylabel="dead neurons (% of N)")
        axes[1].set_ylim(bottom=0)
    _legend(picture, axes[0], legend)
    return picture, _tidy(pd.concat([nonzeros, dead]), [by, "metric"])


def _legend(picture, axes, title: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    wide = max(map(len, labels)) > 10
    where_ = "outside lower center" if wide else "outside right center"
    picture.legend(handles, labels, title=None if wide else title, loc=where_, ncols=len(labels) if wide else 1)


def _tidy(data: pd.DataFrame, first: list[str]) -> pd.DataFrame:
    names = dict.fromkeys([*first, "study", "item", "model", "l1", "metric", "step", "tokens", "value"])
    return data[list(names)].reset_index(drop=True)


def _curves_caption(curves: pd.DataFrame, training: pd.DataFrame, validation: pd.DataFrame) -> str:
    shown = validation if len(validation) else training
    ends = shown.sort_values("step").groupby("l1")["value"].last()
    text = ", ".join(f"{value:.3f} at {l1_label(l1)}" for l1, value in ends.items())
    kind = "Held-out" if len(validation) else "Training"
    return f"{kind} cross-entropy at the last measurement, by L1 value ({curves['model'].iloc[0]} model): {text}."


def _final_caption(data: pd.DataFrame, by: str, lead: str) -> str:
    last = data.sort_values("step").groupby([by, "metric"])["value"].last().unstack()
    parts = []
    for name, line in last.iterrows():
        dead = f", {line['dead_fraction']:.0%} dead" if "dead_fraction" in line else ""
        parts.append(f"{l1_label(name) if by == 'l1' else name}: {significant(line['nonzeros'])} non-zeros{dead}")
    return lead + "; ".join(parts) + "."
