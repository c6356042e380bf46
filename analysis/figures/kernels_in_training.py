"""Figure C: trainings with sparse kernels and the same trainings with dense products: loss, time, sparse layers."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import schema
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.training import running
from analysis.load import Results
from analysis.render import device, significant

# Trainings that agree in these columns differ in seed and backend only.
SAME = [
    "study", "model", "layers", "hidden", "intermediate", "activation", "gated", "l1", "modification", "tokens",
    "step", "device",
]  # fmt: skip
RUN = ["study", "item"]
DESCRIBED = [*RUN, "label", "seed", "backend", "against"]
LOSSES = ["cross_entropy", "validation_cross_entropy"]
WHOLE_MODEL, BY_LAYER = (*LOSSES, "seconds", "tokens_per_s"), ("nonzeros", "capacity")
SMOOTHING = 0.08  # window of the running mean, as a share of the logged steps
START = 0.2  # the steep losses of this first share of the tokens may lie outside the axes
BACKEND = "execution.sparse.backend"
TRAIN = "python -m experiments.train model=0.5b sparsity.l1=2e-5"


@figure("C", "figureC_training_runs", "trainings with sparse kernels and with dense products")
def kernels_in_training(results: Results) -> Sketch:
    """Cross-entropy against tokens and against training time; its difference from the dense run of the same seed, with
    the difference between seeds for comparison; and the causes: non-zeros, sparse layers, throughput."""
    runs = _runs(results)
    data = _records(results.curves, runs)
    looks = _looks(runs)
    picture, (upper, lower) = style.panels(2, 3, 4.6)
    _loss_panels(upper, data, looks)
    _speed_panels(lower, data, looks, runs["layers"].iloc[0])
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    lacks = "" if (runs["series"] == "dense").sum() > 1 else "a dense training of another seed"
    return Sketch(picture, data, _caption(runs, data), lacks)


def _runs(results: Results) -> pd.DataFrame:
    """The trainings to show, one per line, dense ones first, with `series`, `label` and `against`.

    A group of equal trainings (`SAME`) needs a sparse one and a dense one of the same seed. Of several groups, the one
    with the most feed-forward weights is shown, then the most training tokens, the most trainings, the latest.
    """
    rows = where(results.rows, op="train", metric="validation_cross_entropy").merge(_measured(results.curves), on=RUN)
    latest = rows.sort_values("date", kind="stable").drop_duplicates(RUN, keep="last")
    runs = latest.assign(series=[_series(*cells) for cells in zip(latest["plan"], latest["backend"], strict=True)])
    runs = runs.dropna(subset="series")
    groups = [_compared(group) for _, group in runs.groupby(SAME)]
    groups = [group for group in groups if group["against"].notna().any()]
    if not groups:
        raise _absent(runs[runs["series"] != "dense"])
    return max(groups, key=_weight)


def _measured(curves: pd.DataFrame) -> pd.DataFrame:
    """study and item of the runs whose curves have everything that the figure shows."""
    known = where(curves, metric=(*WHOLE_MODEL, *BY_LAYER)).groupby(RUN)["metric"].nunique()
    return known[known == len(WHOLE_MODEL) + len(BY_LAYER)].index.to_frame(index=False)


def _series(plan: str, backend: str) -> str | None:
    """ "dense", or "sparse" with the backend; None for the reference, which is not made for speed."""
    if backend in ("", schema.REFERENCE):
        return None
    return "dense" if plan == "dense" else f"sparse ({backend})"


def _compared(group: pd.DataFrame) -> pd.DataFrame:
    """The group with a unique `label`, and `against`, the item with which a run's loss is compared: for a sparse run,
    the dense run of its seed; for other dense runs, the first dense one, which shows the difference between seeds."""
    runs = group.sort_values(["series", "seed", "item"], kind="stable").reset_index(drop=True)
    is_dense = runs["series"] == "dense"
    dense = dict(zip(runs["seed"][is_dense][::-1], runs["item"][is_dense][::-1], strict=True))  # first of a seed
    partners = [dense.get(seed) for seed in runs["seed"][~is_dense]]
    first = next(filter(None, partners), None)
    others = [first if item != first else None for item in runs["item"][is_dense]]
    label = runs["series"] + ", seed " + runs["seed"].astype(str)
    label = label.mask(label.duplicated(keep=False), label + " (" + runs["item"] + ")")
    return runs.assign(label=label, against=[*others, *partners])


def _weight(group: pd.DataFrame) -> tuple[int, int, int, str]:
    one, latest = group.iloc[0], group["date"].max()
    return one["layers"] * one["hidden"] * one["intermediate"], one["step"] * one["tokens"], len(group), latest


def _absent(sparse: pd.DataFrame) -> NotMeasured:
    if sparse.empty:
        what = f"a training with sparse kernels ({BACKEND}=auto on a GPU) and one with {BACKEND}=dense"
        return NotMeasured(what, f"{TRAIN} {BACKEND}=auto run.item=sparse")
    one = sparse.iloc[-1]
    what = f"a training with {BACKEND}=dense, else like {one['study']}/{one['item']}, of seed {one['seed']} too"
    return NotMeasured(what, f"{TRAIN} {BACKEND}=dense run.item=dense")


def _records(curves: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One line for each run and logged step, losses in nats/token.

    seconds: training time so far, without the first step, which compiles; that one took first_step_seconds. smoothed:
    the smoothed cross-entropy. change: the smoothed difference from the cross-entropy of the run `against` at the same
    step. validation_change: the same, as measured. nonzeros: mean over layers. throughput: tokens/s, a running median
    without the first record, which includes one-time costs.
    """
    by, curves = [*RUN, "step", "tokens"], curves.merge(runs[RUN], on=RUN)
    whole = where(curves, metric=WHOLE_MODEL).pivot(index=by, columns="metric", values="value")
    layers = {metric: where(curves, metric=metric).groupby(by)["value"] for metric in BY_LAYER}
    whole["nonzeros"] = layers["nonzeros"].mean()
    whole["sparse_layers"] = layers["capacity"].agg(lambda capacities: (capacities > 0).sum())
    data = runs[DESCRIBED].merge(whole.reset_index(), on=RUN)
    dense = data[["item", "step", *LOSSES]].rename(columns={"item": "against"})
    base = data[["against", "step"]].merge(dense, on=["against", "step"], how="left")
    runs_of = data["item"]
    change = data["cross_entropy"] - base["cross_entropy"]
    speed = data["tokens_per_s"].where(data.duplicated("item"))
    first = data.groupby(runs_of)["seconds"].transform("first")
    return data.assign(
        seconds=data["seconds"] - first,
        first_step_seconds=first,
        smoothed=data.groupby(runs_of)["cross_entropy"].transform(_mean),
        change=change.groupby(runs_of).transform(_mean).where(change.notna()),
        validation_change=data["validation_cross_entropy"] - base["validation_cross_entropy"],
        throughput=speed.groupby(runs_of).transform(lambda speeds: running(speeds, SMOOTHING).median()),
    )


def _mean(values: pd.Series) -> pd.Series:
    return running(values, SMOOTHING).mean()


def _looks(runs: pd.DataFrame) -> dict[str, dict]:
    """Looks by label: colours for series, dashes and markers for its runs. Dense lines are wide, to be seen below
    sparse ones."""
    series = list(dict.fromkeys(runs["series"]))
    dense = {"linewidth": 2.2, "markersize": 5, "markerfacecolor": "white"}
    sparse = {"linewidth": 1.0, "markersize": 2.5}
    return {
        run.label: {
            "color": style.category(series.index(run.series))["color"],
            "linestyle": style.DASHES[number % len(style.DASHES)],
            "marker": style.MARKERS[number % len(style.MARKERS)],
        }
        | (dense if run.series == "dense" else sparse)
        for run, number in zip(runs.itertuples(), runs.groupby("series").cumcount(), strict=True)
    }


def _loss_panels(axes: Sequence[Axes], data: pd.DataFrame, looks: dict[str, dict]) -> None:
    (many, name_of_many), (time, name_of_time) = _token_unit(data), _time_unit(data)
    tokens = ("tokens", many, f"tokens ({name_of_many})")
    seconds = ("seconds", time, f"training time ({name_of_time})")
    loss = ("smoothed", "validation_cross_entropy", "cross-entropy (nats/token)")
    change = ("change", "validation_change", "difference (nats/token)")
    titles = ("(a) cross-entropy", _title_of_change(data), "(c) over time")
    for panel, title, x, y in zip(axes, titles, (tokens, tokens, seconds), (loss, change, loss), strict=True):
        _losses(panel, data, looks, x[:2], y[:2])
        panel.set(title=title, xlabel=x[2], ylabel=y[2], ylim=_limits(data, y[:2]))
    axes[1].axhline(0, color=style.INK, linewidth=0.8)


def _title_of_change(data: pd.DataFrame) -> str:
    base = data.loc[data["item"].isin(data["against"].dropna()), "label"].unique()
    return f"(b) minus {base[0]}" if len(base) == 1 else "(b) minus dense, same seed"


def _losses(
    panel: Axes, data: pd.DataFrame, looks: dict[str, dict], x: tuple[str, float], columns: tuple[str, str]
) -> None:
    """Plot the first of `columns` as a line and the second as points against the column `x`; points on top."""
    (at, unit), (line, points) = x, columns
    for name, look in looks.items():
        run = where(data, label=name)
        panel.plot(run[at] / unit, run[line], **look | {"marker": ""})
    for name, look in looks.items():
        held_out = where(data, label=name).dropna(subset=points)
        panel.plot(held_out[at] / unit, held_out[points], **look | {"linestyle": ""})


def _limits(data: pd.DataFrame, columns: Sequence[str]) -> tuple[float, float]:
    shown = data.loc[data["tokens"] > START * data["tokens"].max(), list(columns)].stack()
    margin = 0.06 * (shown.max() - shown.min()) or 0.01
    return shown.min() - margin, shown.max() + margin


def _speed_panels(axes: Sequence[Axes], data: pd.DataFrame, looks: dict[str, dict], layers: int) -> None:
    unit, name_of_unit = _token_unit(data)
    panels = (
        ("(d) mean non-zeros", "nonzeros", "neurons/token", 1),
        ("(e) sparse layers", "sparse_layers", f"layers (of {layers})", 1),
        ("(f) throughput", "throughput", "thousand tokens/s", 1e3),
    )
    for panel, (title, column, ylabel, scale) in zip(axes, panels, strict=True):
        for name, look in looks.items():
            run = where(data, label=name)
            panel.plot(run["tokens"] / unit, run[column] / scale, **look | {"marker": ""})
        panel.set(title=title, xlabel=f"tokens ({name_of_unit})", ylabel=ylabel)
    style.log_axis(axes[0].yaxis)
    axes[1].set_ylim(-0.03 * layers, 1.03 * layers)


def _token_unit(data: pd.DataFrame) -> tuple[float, str]:
    """The unit of a token axis, and its name."""
    return (1e9, "billions") if data["tokens"].max() >= 2e9 else (1e6, "millions")


def _time_unit(data: pd.DataFrame) -> tuple[float, str]:
    """The unit of time that fits the longest run, in seconds, and its name."""
    longest = data["seconds"].max()
    return (3600, "h") if longest >= 7200 else (60, "min") if longest >= 120 else (1, "s")


def _caption(runs: pd.DataFrame, data: pd.DataFrame) -> str:
    one, last = runs.iloc[0], data["tokens"].max()
    ends = "; ".join(_end(where(data, label=label), one["layers"]) for label in runs["label"])
    second_half = data[data["change"].notna() & (data["tokens"] > last / 2)]
    apart = (second_half["change"] ** 2).groupby(second_half["label"], sort=False).mean() ** 0.5
    apart = ", ".join(f"{significant(rms, 2)} ({label})" for label, rms in apart.items())
    return (
        f"{one['model']} model, L1 {l1_label(one['l1'])}, {significant(last / 1e6)} million tokens, "
        f"{device(one['device'])}. Lines: training, smoothed over {SMOOTHING:.0%} of the logged steps; points: "
        f"held-out text. At the end: {ends}.{_whole_trainings(runs, data)} (b): sparse trainings minus the dense one "
        "of the same seed; for comparison, dense trainings of other seeds (other initial weights and order of the "
        "text) minus that one. "
        f"Root mean square of the line over the second half, nats/token: {apart}. Training time is without the first "
        f"step, which compiles ({_range(data['first_step_seconds'])} s), evaluation, checkpoints and the measurement "
        "of the kernels' costs."
    )


def _whole_trainings(runs: pd.DataFrame, data: pd.DataFrame) -> str:
    """How much faster each sparse training was than the dense one of its seed, from the second step to the last."""
    ends = data.groupby("item").agg(first=("tokens", "first"), last=("tokens", "last"), seconds=("seconds", "last"))
    speeds = (ends["last"] - ends["first"]) / ends["seconds"]
    pairs = runs[(runs["series"] != "dense") & runs["against"].notna()]
    told = [f"{speeds[own] / speeds[base]:.2f}" for own, base in zip(pairs["item"], pairs["against"], strict=True)]
    return f" Whole trainings, sparse against dense of the same seed: {' and '.join(told)} times as fast."


def _end(run: pd.DataFrame, layers: int) -> str:
    """Label, final held-out loss, time, throughput (over the last tenth of the records) and sparse layers."""
    unit, name = _time_unit(run)
    last, speed = run.iloc[-1], run["tokens_per_s"].tail(max(1, len(run) // 10)).median()
    return (
        f"{last['label']}: {last['validation_cross_entropy']:.3f} nats/token after "
        f"{significant(last['seconds'] / unit)} {name}, {significant(speed / 1e3)} thousand tokens/s, "
        f"{last['sparse_layers']} of {layers} layers sparse"
    )


def _range(values: pd.Series) -> str:
    low, high = significant(values.min()), significant(values.max())
    return low if low == high else f"{low} to {high}"
