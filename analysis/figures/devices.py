"""Figure 12: gains of sparsity over dense on several kinds of GPU."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, describe, schema
from analysis.choose import where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.speed import BENCH_TRAINING, SPREAD, at_places, no_speed, places_of
from analysis.gains import gains
from analysis.load import Results
from analysis.render import device, significant, span


@figure("12", "figure12_devices", "speedup on two devices, or with two backends on one")
def devices(results: Results) -> Sketch:
    """Speed over dense on each kind of GPU: of one gated block on synthetic patterns, each backend, and of the whole
    models that two kinds timed. With rows from only one kind: its backends side by side."""
    timed = choose.made_for_speed(where(results.rows, op=(*schema.WHOLE_MODELS, *blocks.OPS)))
    if timed.empty:
        raise no_speed(results, "model_training", BENCH_TRAINING)
    one_block, models = _one_block(timed), _whole_models(timed)
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
            (_draw_block if op in blocks.OPS else _draw_models)(axes, own, colors)
            axes.set_title(f"({next(letters)}) {_operation(op)}")
        for axes in line[len(found) :]:
            axes.set_visible(False)
    handles = [Line2D([], [], label=device(kind), color=color) for kind, color in colors.items()]
    backends = {backend for _, backend in series}
    handles += [
        Line2D([], [], label=name, **style.category(index) | {"color": style.INK})
        for index, name in enumerate(schema.BACKENDS)
        if name in backends
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), handlelength=4)
    texts = ["Speedup over the fastest dense form of the same run."]
    texts += [_block_caption(one_block, kinds)] if one_block else []
    texts += [_models_caption(models, kinds)] if models else []
    texts += [_against_the_paper(kinds, bool(models)), SPREAD]
    lacks = "" if models else "a second kind of GPU" if len(kinds) == 1 else "whole models on two devices"
    return Sketch(picture, data, " ".join(texts), lacks)


def _operation(op: str) -> str:
    if op in blocks.OPS:
        return f"one block: {blocks.OPS[op]}"
    return f"whole models: {describe.TIMED[op]}"


def _one_block(timed: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of each operation, training first, the gains of each backend in one gated block on synthetic patterns, on every
    kind of GPU with such rows."""
    measured = {op: _same_on_each_device(where(timed, op=op, gated=True)) for op in reversed(blocks.OPS)}
    return {op: data for op, data in measured.items() if data["mean_nnz"].nunique() > 1}


def _whole_models(timed: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Of each operation, training first, the gain of the fastest form of each model and L1 value that two kinds of GPU
    timed, on each of them."""
    found = {}
    for op in reversed(schema.WHOLE_MODELS):
        data = gains(choose.relu_runs(where(timed, op=op)), "throughput")
        best = data.sort_values("ratio").drop_duplicates(["device", "model", "l1"], keep="last")
        both = best.groupby(["model", "l1"])["device"].transform("nunique") > 1
        if both.any():
            found[op] = best[both].sort_values(["device", "model", "l1"], kind="stable")
    return found


def _draw_block(axes: Axes, data: pd.DataFrame, colors: dict[str, str]) -> None:
    """Ratio over the non-zeros. A colour for each device, marker and dash for each backend."""
    for (kind, backend), line in data.sort_values("mean_nnz").groupby(["device", "backend"]):
        ratio, low, high = (1 + line[column] / 100 for column in ("percent", "percent_low", "percent_high"))
        look = style.category(schema.BACKENDS.index(backend)) | {"color": colors[kind]}
        style.line_with_spread(axes, line["mean_nnz"], ratio, low, high, label="", **look)
    axes.axhline(1, color=style.INK, linewidth=0.8)
    axes.set(xlabel="mean non-zeros (neurons/token)", ylabel="dense time / sparse time")
    style.log_axis(axes.xaxis)
    style.room_for_labels(axes)


def _draw_models(axes: Axes, data: pd.DataFrame, colors: dict[str, str]) -> None:
    """A point with its spread for each model, L1 value and device."""
    places = places_of(data)
    kinds = [kind for kind in colors if kind in set(data["device"])]
    for index, kind in enumerate(kinds):
        own = where(data, device=kind)
        ends = [1 + own[column] / 100 for column in ("percent_low", "percent_high")]
        spread = [(own["ratio"] - ends[0]).clip(lower=0), (ends[1] - own["ratio"]).clip(lower=0)]
        y = at_places(own, places, index, len(kinds) - 1)
        axes.errorbar(own["ratio"], y, xerr=spread, color=colors[kind], marker="o", linestyle="", capsize=2)
    axes.axvline(1, color=style.INK, linewidth=0.8)
    axes.set(xlabel="dense time / sparse time", ylabel="model", ylim=(len(places) - 0.5, -0.5))
    axes.set_yticks(range(len(places)), [f"{model}, L1 {l1}" for model, l1 in places])
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)


def _block_caption(shown: dict[str, pd.DataFrame], kinds: list[str]) -> str:
    text = "; ".join(f"{blocks.OPS[op]}, {_sparsest(data, kinds)}" for op, data in shown.items())
    sizes = "; ".join(f"{blocks.OPS[op]} of M = {int(data['tokens'].iloc[0]):,}" for op, data in shown.items())
    one = next(iter(shown.values())).iloc[0]
    return (
        f"One gated block: {text}. {sizes[0].upper()}{sizes[1:]} tokens, K = {int(one['hidden']):,}, N = "
        f"{int(one['intermediate']):,}, synthetic pattern; the fastest plan of each backend, of those timed on every "
        "device."
    )


def _models_caption(models: dict[str, pd.DataFrame], kinds: list[str]) -> str:
    """In words, how much each device gains."""
    texts = []
    for op, data in models.items():
        parts = []
        for kind in kinds:
            own = where(data, device=kind)
            tokens = f" ({span(own['tokens'], '{:,.0f}'.format)} tokens)" if op == "model_training" else ""
            parts += [f"{span(own['ratio'], '{:.2f}'.format)} on {device(kind)}{tokens}"] if len(own) else []
        texts.append(f"{describe.TIMED[op]} {', '.join(parts)}")
    nonzeros = span(pd.concat(models.values())["mean_nnz"], "{:.0f}".format)
    return (
        f"Whole models, each in its fastest form, with {nonzeros} non-zeros (each device may have timed another "
        f"checkpoint): {'; '.join(texts)}."
    )


def _in_order(series: set[tuple[str, str]], kinds: list[str]) -> list[tuple[str, str]]:
    return [(kind, name) for kind in kinds for name in schema.BACKENDS if (kind, name) in series]


def _against_the_paper(kinds: list[str], models: bool) -> str:
    if len(kinds) == 1:
        return (
            "The paper's figure compares two kinds of GPU. Our rows are from one kind "
            f"({device(kinds[0])}), so this figure shows two backends side by side."
        )
    if models:
        return "The paper's figure compares training steps of whole models on an H100 PCIe and an RTX PRO 6000."
    return "The paper's figure compares whole models on two kinds of GPU; ours compares one block."


def _sparsest(data: pd.DataFrame, kinds: list[str]) -> str:
    """The speedups at the fewest non-zeros that were measured."""
    fewest = data[data["mean_nnz"] == data["mean_nnz"].min()]
    found = fewest.set_index(["device", "backend"])["ratio"]
    order = _in_order(set(found.index), kinds)
    texts = [f"{found[key]:.2f} with {key[1]}{f' on {device(key[0])}' if len(kinds) > 1 else ''}" for key in order]
    return f"at {significant(fewest['mean_nnz'].iloc[0])} non-zeros {', '.join(texts)}"


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
