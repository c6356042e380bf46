"""Figure 12: gains of sparsity over dense on several kinds of GPU."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, schema
from analysis.choose import l1_label, where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.overview import MODELS
from analysis.figures.speed import BENCH_TRAINING, fastest_forms, no_speed
from analysis.gains import gains
from analysis.load import Results
from analysis.render import device

LANE = 0.26  # of a row: from one device to the next


@figure(
    "12",
    "figure12_devices",
    "speedup on two devices, or with two backends on one",
    "Speed over the fastest dense implementation of the same run. One gated block: synthetic patterns, the fastest "
    "plan of each backend, of those timed on every device. Whole models: the fastest form; devices may have timed "
    "different checkpoints. Bars: 20th to 80th percentile of the repetitions.",
)
def devices(results: Results) -> Sketch:
    timed = choose.made_for_speed(where(results.rows, op=(*schema.WHOLE_MODELS, *blocks.OPS)))
    if timed.empty:
        wanted = "rows of model_training with a ratio over dense for gated ReLU models"
        raise no_speed(where(results.rows, op="model_training"), wanted, BENCH_TRAINING)
    one_block = {op: _same_on_each_device(where(timed, op=op, gated=True)) for op in reversed(blocks.OPS)}
    one_block = {op: data for op, data in one_block.items() if data["mean_nnz"].nunique() > 1}
    models = _whole_models(timed)
    series = {(line.device, line.backend) for data in one_block.values() for line in data.itertuples()}
    if not models and ("ffn_training" not in one_block or len(series) < 2):
        names = " and ".join(map(device, sorted(set(timed["device"]))))
        raise NotMeasured(f"rows of model_training on two devices, or of two backends on one (there is {names})", "")
    shown = [*one_block.values(), *models.values()]
    data = pd.concat(shown, ignore_index=True)
    kinds = sorted(set(data["device"]), reverse=True)
    colors = {kind: style.category(index)["color"] for index, kind in enumerate(kinds)}
    rows = (one_block, models) if one_block and models else (one_block or models,)
    picture, grid = style.panels(len(rows), max(map(len, rows)), 2.9 * len(rows))
    letters = iter("abcd")
    for line, found in zip(grid, rows, strict=True):
        for axes, (op, own) in zip(line, found.items(), strict=False):
            if op in blocks.OPS:
                title = f"one block: {blocks.OPS[op]}"
                _draw_block(axes, own, colors)
            else:
                title = MODELS[op]
                _draw_models(axes, own, colors)
            axes.set_title(f"({next(letters)}) {title}")
        for axes in line[len(found) :]:
            axes.set_visible(False)
    handles = [Line2D([], [], label=device(kind), color=color) for kind, color in colors.items()]
    backends = {backend for _, backend in series}
    handles += [
        Line2D([], [], label=name, **style.category(0) | {"color": style.INK} | style.of_backend(name))
        for name in schema.BACKENDS
        if name in backends
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=4)
    sizes = [f"{blocks.OPS[op]} of {int(own['tokens'].iloc[0]):,}" for op, own in one_block.items()]
    note = f"One block: {', '.join(sizes)} tokens." if sizes else ""
    lacks = "" if models else "a second kind of GPU" if len(kinds) == 1 else "whole models on two devices"
    return Sketch(picture, data, note, lacks)


def _whole_models(timed: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """For each operation, training first, the gain of the fastest form of each model and L1 value that two kinds of GPU
    timed, on each of them."""
    found = {}
    for op in reversed(schema.WHOLE_MODELS):
        best = fastest_forms(where(timed, op=op))
        both = best.groupby(["model", "l1"])["device"].transform("nunique") > 1
        if both.any():
            found[op] = best[both].sort_values(["device", "model", "l1"], kind="stable")
    return found


def _draw_block(axes: Axes, data: pd.DataFrame, colors: dict[str, str]) -> None:
    """Ratio over the non-zeros. A colour for each device, a dash for each backend."""
    for (kind, backend), line in data.sort_values("mean_nnz").groupby(["device", "backend"]):
        ratio, low, high = (1 + line[column] / 100 for column in ("percent", "percent_low", "percent_high"))
        look = style.category(0) | {"color": colors[kind]} | style.of_backend(backend)
        style.line_with_spread(axes, line["mean_nnz"], ratio, low, high, label="", **look)
    axes.axhline(1, color=style.INK, linewidth=0.8)
    axes.set(xlabel="mean non-zeros (neurons/token)", ylabel="dense time / sparse time")
    style.log_axis(axes.xaxis)
    style.room_for_labels(axes)


def _draw_models(axes: Axes, data: pd.DataFrame, colors: dict[str, str]) -> None:
    """A point with its spread for each model, L1 value and device."""
    pairs = [
        (model, l1) for model in choose.by_size(data["model"]) for l1 in sorted(set(where(data, model=model)["l1"]))
    ]
    kinds = [kind for kind in colors if kind in set(data["device"])]
    for index, kind in enumerate(kinds):
        own = where(data, device=kind)
        ends = [1 + own[column] / 100 for column in ("percent_low", "percent_high")]
        spread = [(own["ratio"] - ends[0]).clip(lower=0), (ends[1] - own["ratio"]).clip(lower=0)]
        rows = zip(own["model"], own["l1"], strict=True)
        y = [pairs.index(pair) + LANE * (index - (len(kinds) - 1) / 2) for pair in rows]
        axes.errorbar(own["ratio"], y, xerr=spread, color=colors[kind], marker="o", linestyle="", capsize=2)
    axes.axvline(1, color=style.INK, linewidth=0.8)
    axes.set(xlabel="dense time / sparse time", ylabel="model", ylim=(len(pairs) - 0.5, -0.5))
    axes.set_yticks(range(len(pairs)), [f"{model}, L1 {l1_label(l1)}" for model, l1 in pairs])
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)


def _same_on_each_device(timed: pd.DataFrame) -> pd.DataFrame:
    """The gains of each backend's fastest plan on synthetic patterns: at the sizes, at the non-zeros and with the plans
    that every device has, all plans and backends from one run."""
    data = gains(timed[timed["pattern"].str.startswith("synthetic")], "time")
    data = data.assign(mean_nnz=data["mean_nnz"].round())
    kinds = data["device"].nunique()
    for names in (["tokens", "hidden", "intermediate"], ["backend", "plan", "mean_nnz"]):
        data = data[data.groupby(names)["device"].transform("nunique") == kinds]
    data = _largest_group(data, ["tokens", "hidden", "intermediate"])
    runs = [_largest_group(own, ["study", "item"]) for _, own in data.groupby(["device", "mean_nnz"])]
    data = pd.concat(runs) if runs else data
    return data.loc[data.groupby(["device", "backend", "mean_nnz"])["ratio"].idxmax()]


def _largest_group(data: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    group = data.groupby(names).ngroup()
    return data[group == group.mode().get(0)]
