"""Figure C: trainings with sparse kernels beside the same trainings with dense products."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis import schema
from analysis.choose import RUN, l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.training import running
from analysis.load import Results
from analysis.render import device, span

# Trainings that agree in these columns differ in seed and backend only.
SAME = [
    "study", "model", "layers", "hidden", "intermediate", "activation", "gated", "l1", "modification", "tokens",
    "step", "device",
]  # fmt: skip
DESCRIBED = [*RUN, "label", "seed", "backend", "against"]
LOSSES = ["cross_entropy", "validation_cross_entropy"]
WHOLE_MODEL, BY_LAYER = (*LOSSES, "seconds", "tokens_per_s"), ("nonzeros", "capacity")
SMOOTHING = 0.08  # window of the running mean, as a share of the logged steps
BACKEND = "execution.sparse.backend"
TRAIN = "python -m experiments.train model=0.5b sparsity.l1=2e-5"


@figure(
    "C",
    "figureC_training_runs",
    "trainings with sparse kernels and with dense products",
    "Equal trainings with sparse kernels, where a layer's sparse form is faster, and with dense products only. (a) "
    "Cross-entropy minus that of the dense training of the same seed (dense: of another seed); lines: training, "
    "smoothed; points: held-out text.",
)
def kernels_in_training(results: Results) -> Sketch:
    runs = _runs(results)
    data = _records(results.curves, runs)
    looks = _looks(runs)
    picture, axes = style.mosaic(["aaa", "bcd"], 2.3)
    scale, unit = (1e9, "billions") if data["tokens"].max() >= 2e9 else (1e6, "millions")
    layers = runs["layers"].iloc[0]
    panels = {
        "a": ("change", "change against dense", "nats/token"),
        "b": ("nonzeros", "mean non-zeros", "neurons/token"),
        "c": ("sparse_layers", "sparse layers", f"layers (of {layers})"),
        "d": ("throughput", "throughput", "tokens/s"),
    }
    for letter, (column, title, ylabel) in panels.items():
        for label, look in looks.items():
            run = where(data, label=label)
            thin = {} if letter == "a" else {"linewidth": 1.0}
            axes[letter].plot(run["tokens"] / scale, run[column], **look | {"marker": ""} | thin)
        axes[letter].set(title=f"({letter}) {title}", xlabel=f"tokens ({unit})", ylabel=ylabel)
    for label, look in looks.items():
        held_out = where(data, label=label).dropna(subset="validation_change")
        axes["a"].plot(held_out["tokens"] / scale, held_out["validation_change"], **look | {"linestyle": ""})
    axes["a"].axhline(0, color=style.INK, linewidth=0.8)
    style.log_axis(axes["b"].yaxis)
    axes["c"].set_ylim(-0.03 * layers, 1.03 * layers)
    axes["d"].set_ylim(bottom=0)
    axes["d"].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    handles = [Line2D([], [], label=label, **look) for label, look in looks.items()]
    picture.legend(handles=handles, loc="outside lower center", ncols=runs["series"].nunique())
    first = runs.iloc[0]
    note = f"{first['model']} model, L1 {l1_label(first['l1'])}, {device(first['device'])}; whole sparse trainings are "
    note += f"{span(_speedups(runs, data), '{:.2f}'.format)} times as fast."
    lacks = "" if (runs["series"] == "dense").sum() > 1 else "a dense training of another seed"
    return Sketch(picture, data, note, lacks)


def sparse_over_dense(results: Results) -> pd.DataFrame:
    """Sparse trainings of the figure, with the item of the dense one of their seed as
    `against`, and `whole_speed`, the speed of the whole training over its.

    Raises:
        NotMeasured: there are no such trainings.
    """
    runs = _runs(results)
    speeds = _speedups(runs, _records(results.curves, runs)).rename("whole_speed")
    return runs.merge(speeds, left_on="item", right_index=True)


def _runs(results: Results) -> pd.DataFrame:
    """The trainings to show, whose curves have all that the figure needs, one per line, dense ones first, with
    `series`, `label` and `against`.

    A group of equal trainings (`SAME`) needs a sparse one and a dense one of the same seed. Of several groups, the one
    with the most feed-forward weights is shown, then the most training tokens, the most trainings, the latest.
    """
    metrics = (*WHOLE_MODEL, *BY_LAYER)
    known = where(results.curves, metric=metrics).groupby(RUN)["metric"].nunique()
    complete = known[known == len(metrics)].index.to_frame(index=False)
    rows = where(results.rows, op="train", metric="validation_cross_entropy").merge(complete, on=RUN)
    latest = rows.sort_values("date", kind="stable").drop_duplicates(RUN, keep="last")
    latest = latest[~latest["backend"].isin(("", schema.REFERENCE))]  # the reference is not made for speed
    runs = latest.assign(series=("sparse (" + latest["backend"] + ")").mask(latest["plan"] == "dense", "dense"))
    groups = [_compared(group) for _, group in runs.groupby(SAME)]
    groups = [group for group in groups if group["against"].notna().any()]
    if not groups:
        missing = f"a training with sparse kernels ({BACKEND}=auto on a GPU) and the same with {BACKEND}=dense"
        raise NotMeasured(missing, f"{TRAIN} {BACKEND}=auto run.item=sparse")

    def weight(group: pd.DataFrame) -> tuple[int, int, int, str]:
        one, latest = group.iloc[0], group["date"].max()
        return one["layers"] * one["hidden"] * one["intermediate"], one["step"] * one["tokens"], len(group), latest

    return max(groups, key=weight)


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


def _records(curves: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """One line for each run and logged step, losses in nats/token.

    seconds: training time so far, without the first step, which compiles. change: the smoothed difference from the
    cross-entropy of the run `against` at the same step. validation_change: the same, as measured. nonzeros: mean over
    layers. throughput: tokens/s, a running median without the first record, which includes one-time costs.
    """
    by, curves = [*RUN, "step", "tokens"], curves.merge(runs[RUN], on=RUN)
    whole = where(curves, metric=WHOLE_MODEL).pivot(index=by, columns="metric", values="value")
    layers = {metric: where(curves, metric=metric).groupby(by)["value"] for metric in BY_LAYER}
    whole["nonzeros"] = layers["nonzeros"].mean()
    whole["sparse_layers"] = layers["capacity"].agg(lambda capacities: (capacities > 0).sum())
    data = runs[DESCRIBED].merge(whole.reset_index(), on=RUN)
    dense = data[["item", "step", *LOSSES]].rename(columns={"item": "against"})
    base = data[["against", "step"]].merge(dense, on=["against", "step"], how="left")
    change = data["cross_entropy"] - base["cross_entropy"]
    smooth = change.groupby(data["item"]).transform(lambda values: running(values, SMOOTHING).mean())
    speed = data["tokens_per_s"].where(data.duplicated("item"))
    return data.assign(
        seconds=data["seconds"] - data.groupby(data["item"])["seconds"].transform("first"),
        change=smooth.where(change.notna()),
        validation_change=data["validation_cross_entropy"] - base["validation_cross_entropy"],
        throughput=speed.groupby(data["item"]).transform(lambda speeds: running(speeds, SMOOTHING).median()),
    )


def _looks(runs: pd.DataFrame) -> dict[str, dict]:
    """Looks by label: colours for series, dashes and markers for its runs."""
    series = list(dict.fromkeys(runs["series"]))
    dense = {"linewidth": 1.1, "markerfacecolor": "white"}
    return {
        run.label: {
            "color": style.category(series.index(run.series))["color"],
            "linestyle": style.DASHES[number % len(style.DASHES)],
            "marker": style.MARKERS[number % len(style.MARKERS)],
        }
        | (dense if run.series == "dense" else {"linewidth": 1.8})
        for run, number in zip(runs.itertuples(), runs.groupby("series").cumcount(), strict=True)
    }


def _speedups(runs: pd.DataFrame, data: pd.DataFrame) -> pd.Series:
    """The speed of each sparse training relative to the dense one of its seed, from the second step to the last."""
    ends = data.groupby("item").agg(first=("tokens", "first"), last=("tokens", "last"), seconds=("seconds", "last"))
    speeds = (ends["last"] - ends["first"]) / ends["seconds"]
    sparse = runs[runs["series"] != "dense"].dropna(subset="against").set_index("item")["against"]
    return speeds[sparse.index] / speeds[sparse].to_numpy()
