"""Figure C: trainings with sparse kernels beside the same trainings with dense products: loss, time, sparse layers."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.training import running_mean
from analysis.load import Results
from analysis.render import device, significant

# Trainings that are equal in these differ in seed and backend only.
SAME = [
    "study", "model", "layers", "hidden", "intermediate", "activation", "gated", "l1", "modification", "tokens",
    "step", "device",
]  # fmt: skip
RUN = ["study", "item"]
WHOLE_MODEL = ("cross_entropy", "validation_cross_entropy", "seconds", "tokens_per_s")
BY_LAYER = ("nonzeros", "capacity")
DATA = [
    *RUN, "label", "seed", "backend", "against", "step", "tokens", "seconds", "cross_entropy", "smoothed",
    "difference", "validation_cross_entropy", "validation_difference", "nonzeros", "sparse_layers", "throughput",
]  # fmt: skip
SMOOTHING = 0.08  # share of the logged steps that one point of a line stands for
START = 0.1  # share of the tokens at the steep beginning that the axes of losses need not show
TRAIN = "python -m experiments.train model=0.5b sparsity.l1=2e-5"
ZERO = {"color": style.INK, "linewidth": 0.8}


@figure("C", "figureC_training_runs", "trainings with sparse kernels and with dense products")
def kernels_in_training(results: Results) -> Sketch:
    """Cross-entropy against tokens and against training time, its difference to the dense run of the same seed beside
    that of two dense seeds, and where the time comes from: non-zeros, sparse layers, throughput."""
    runs = _runs(results)
    data = _records(results.curves, runs)
    picture, (upper, lower) = style.panels(2, 3, 4.3)
    looks = _looks(runs)
    _loss_panels(upper, data, looks)
    _speed_panels(lower, data, looks, int(runs["layers"].iloc[0]))
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))
    several = (runs["series"] == "dense").sum() > 1
    return Sketch(picture, data[DATA], _caption(runs, data), "" if several else "a dense training of another seed")


def _runs(results: Results) -> pd.DataFrame:
    """The trainings to show, one a line, dense ones first: `label`, `series`, and `against`, the item of the dense
    training that each is compared with: that of the same seed, or for another dense seed the first of those.

    Of several groups of comparable trainings (`SAME`), the one with the most feed-forward weights, then the one trained
    on the most tokens, then the one of the most runs.
    """
    rows = where(results.rows, op="train", metric="validation_cross_entropy").merge(_with_curves(results.curves))
    latest = rows.sort_values("date", kind="stable").drop_duplicates(RUN, keep="last")
    runs = latest.assign(series=latest["backend"].map(_series)).dropna(subset="series")
    groups = [_compared(group) for _, group in runs.groupby(SAME)]
    groups = [group for group in groups if _is_compared(group).any()]
    if not groups:
        raise _absent(runs)
    return max(groups, key=_weight)


def _with_curves(curves: pd.DataFrame) -> pd.DataFrame:
    """study and item of the runs whose metrics hold all that the figure shows."""
    known = where(curves, metric=(*WHOLE_MODEL, *BY_LAYER)).groupby(RUN)["metric"].nunique()
    return known[known == len(WHOLE_MODEL + BY_LAYER)].index.to_frame(index=False)


def _series(backend: str) -> str | None:
    """dense, or sparse and with what; None for the reference, which is made for results and not for speed."""
    names = set(backend.split("+")) - {"dense"}
    if names & {"", "reference"}:
        return None
    return f"sparse ({'+'.join(sorted(names))})" if names else "dense"


def _compared(group: pd.DataFrame) -> pd.DataFrame:
    ordered = group.sort_values(["series", "seed", "item"], kind="stable").reset_index(drop=True)
    dense = where(ordered, series="dense").drop_duplicates("seed").set_index("seed")["item"]
    against = ordered["seed"].map(dense).where(ordered["series"] != "dense")
    against = against.where(ordered["series"] != "dense", against.dropna().iloc[0] if against.notna().any() else None)
    label = ordered["series"] + ", seed " + ordered["seed"].astype(str)
    label = label.where(~label.duplicated(keep=False), label + " (" + ordered["item"] + ")")
    return ordered.assign(label=label, against=against.where(against != ordered["item"]))


def _is_compared(group: pd.DataFrame) -> pd.Series:
    return (group["series"] != "dense") & group["against"].notna()


def _weight(group: pd.DataFrame) -> tuple[int, int, int]:
    one = group.iloc[0]
    return one["layers"] * one["hidden"] * one["intermediate"], one["step"] * one["tokens"], len(group)


def _absent(runs: pd.DataFrame) -> NotMeasured:
    sparse = runs[runs["series"] != "dense"]
    if sparse.empty:
        what = "a training with sparse layers on a GPU (sparsity.backend=auto), beside one with sparsity.backend=dense"
        return NotMeasured(what, f"{TRAIN} sparsity.backend=auto run.item=sparse")
    one = sparse.iloc[-1]
    what = (
        f"a training like {one['study']}/{one['item']} (the same seed, {one['seed']}, and device) with "
        "sparsity.backend=dense"
    )
    return NotMeasured(what, f"{TRAIN} sparsity.backend=dense run.item=dense")


def _records(curves: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One line a run and logged step.

    seconds: of training since the first step; smoothed: of cross_entropy; difference: of cross_entropy to that of
    `against` at the same step, smoothed; validation_difference: as measured; nonzeros: mean over the layers;
    throughput: running median, tokens/s, without the first logged step, which holds what only a first step costs.
    """
    own = curves.merge(runs[[*RUN, "label", "seed", "backend", "against"]], on=RUN)
    by = [*RUN, "step", "tokens"]
    whole = where(own, metric=WHOLE_MODEL).pivot(index=by, columns="metric", values="value")
    layers = where(own, metric=BY_LAYER).assign(sparse=lambda rows: rows["value"] > 0)
    whole["nonzeros"] = where(layers, metric="nonzeros").groupby(by)["value"].mean()
    whole["sparse_layers"] = where(layers, metric="capacity").groupby(by)["sparse"].sum()
    data = runs[[*RUN, "label", "seed", "backend", "against"]].merge(whole.reset_index(), on=RUN)
    losses = ["cross_entropy", "validation_cross_entropy"]
    dense = data[["item", "step", *losses]].rename(columns={"item": "against"})
    data = data.merge(dense, on=["against", "step"], how="left", suffixes=("", "_dense"))
    data["difference"] = data["cross_entropy"] - data["cross_entropy_dense"]
    data["validation_difference"] = data["validation_cross_entropy"] - data["validation_cross_entropy_dense"]
    data["throughput"] = data["tokens_per_s"].where(data.duplicated("item"))
    of_run = data.groupby("item")
    data["smoothed"] = of_run["cross_entropy"].transform(running_mean, SMOOTHING)
    data["difference"] = of_run["difference"].transform(running_mean, SMOOTHING).where(data["difference"].notna())
    data["throughput"] = of_run["throughput"].transform(_running_median)
    return data


def _running_median(values: pd.Series) -> pd.Series:
    return values.rolling(max(1, int(len(values) * SMOOTHING)), center=True, min_periods=1).median()


def _looks(runs: pd.DataFrame) -> dict[str, dict]:
    """By label. A dense line is broad, that one upon it may be seen; runs of one series differ in their dashes."""
    series = list(dict.fromkeys(runs["series"]))
    looks = {}
    for run, number in zip(runs.itertuples(), runs.groupby("series").cumcount(), strict=True):
        dense = run.series == "dense"
        looks[run.label] = {
            "color": style.category(series.index(run.series))["color"],
            "linestyle": style.DASHES[number % len(style.DASHES)],
            "linewidth": 2.4 if dense else 1.1,
            "marker": "o",
            "markersize": 6 if dense else 3,
            "markerfacecolor": "white" if dense else None,
            "markeredgewidth": 1.0,
        }
    return looks


def _loss_panels(axes: list[Axes], data: pd.DataFrame, looks: dict[str, dict]) -> None:
    tokens, seconds = _token_unit(data["tokens"].max()), _time_unit(data["seconds"].max())
    panels = (("tokens", *tokens), ("tokens", *tokens), ("seconds", *seconds))
    values = (("smoothed", "validation_cross_entropy"), ("difference", "validation_difference")) * 2
    for panel, (x, size, label), (line, points) in zip(axes, panels, values, strict=False):
        for name, look in looks.items():
            run = where(data, label=name)
            panel.plot(run[x] / size, run[line], **look | {"marker": ""})
        for name, look in looks.items():
            run = where(data, label=name).dropna(subset=points)
            panel.plot(run[x] / size, run[points], **look | {"linestyle": ""})
        panel.set_xlabel(label)
        panel.set_ylabel("cross-entropy (nats/token)")
        panel.set_ylim(*_limits(data, [line, points]))
    axes[1].axhline(0, **ZERO)
    axes[1].set_ylabel("change in cross-entropy (nats/token)")
    for panel, title in zip(axes, ("loss", "loss, change to dense", "loss against time"), strict=True):
        panel.set_title(title)


def _limits(data: pd.DataFrame, columns: list[str]) -> tuple[float, float]:
    shown = data.loc[data["tokens"] >= START * data["tokens"].max(), columns]
    low, high = shown.min().min(), shown.max().max()
    margin = 0.06 * (high - low) or 1e-3
    return low - margin, high + margin


def _speed_panels(axes: list[Axes], data: pd.DataFrame, looks: dict[str, dict], layers: int) -> None:
    size, label = _token_unit(data["tokens"].max())
    panels = (
        ("nonzeros", "mean non-zeros", "non-zeros (neurons/token)", 1),
        ("sparse_layers", "sparse layers", f"layers, of {layers}", 1),
        ("throughput", "throughput", "thousand tokens/s", 1e3),
    )
    for panel, (column, title, ylabel, scale) in zip(axes, panels, strict=True):
        for name, look in looks.items():
            run = where(data, label=name)
            panel.plot(run["tokens"] / size, run[column] / scale, **look | {"marker": ""})
        panel.set(title=title, xlabel=label, ylabel=ylabel)
    style.log_axis(axes[0].yaxis)
    axes[1].set_ylim(-0.03 * layers, 1.03 * layers)
