"""Figures 4, 5 and 12: what sparsity gains over dense in the same run, for each L1 value; and figure B."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, paper, stats
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.load import Results
from analysis.render import signed, significant

HIGHER_IS_BETTER = {"throughput"}
SAME_RUN = [
    "study",
    "item",
    "op",
    "metric",
    "device",
    "model",
    "l1",
    "activation",
    "gated",
    "modification",
    "tokens",
    "layer",
    "pattern",
    "mean_nnz",
]
BENCH_FORWARD = "python -m experiments.bench_forward"
BENCH_TRAINING = "python -m experiments.bench_training"


@figure("4", "figure04_forward", "forward speedup and energy saving for each L1 value")
def forward_gains(results: Results) -> Sketch:
    """Throughput gain and energy saving of the sparse forward pass over the dense one, per L1 value and plan."""
    return _two_gains(
        results, 4, "model_forward", ("throughput", "energy"), BENCH_FORWARD,
        limits=((r"up to (\d+)% speedup", "paper: up to {}"), None), published=_published_forward(),
    )  # fmt: skip


@figure("5", "figure05_training", "training speedup and peak-memory reduction for each L1 value")
def training_gains(results: Results) -> Sketch:
    """Throughput gain and peak-memory saving of a sparse training step over a dense one, per L1 value and plan."""
    return _two_gains(
        results, 5, "model_training", ("throughput", "peak_memory"), BENCH_TRAINING,
        limits=(
            (r"up to (\d+)% speedup", "paper: up to {}"),
            (r"more than (\d+)% less peak memory", "paper: more than {}"),
        ),
        published=_published_training(),
    )  # fmt: skip


@figure("12", "figure12_devices", "training speedup for each L1 value on different devices")
def devices(results: Results) -> Sketch:
    """Training throughput gain per L1 value, one line for each device and plan."""
    rows = choose.relu_runs(where(results.rows, op="model_training"))
    shared = choose.main_model(rows)
    data = gains(shared, "throughput")
    names = sorted(set(data["device"]))
    if len(names) < 2:
        have = f"only {names[0]} has rows so far" if names else "no device has rows"
        raise NotMeasured(f"rows of model_training on two devices ({have})", f"{BENCH_TRAINING} on each of two GPUs")
    picture, ((axes,),) = style.panels(1, 1, 2.7)
    _gain_lines(axes, data.assign(series=data["device"] + ": " + data["series"]))
    axes.set_title("training throughput (more is better)")
    style.legend_outside(axes)
    best = data.sort_values("percent").groupby("device").tail(1)
    text = "; ".join(f"{r.device}: at best {signed(r.percent)} at {l1_label(r.l1)}" for r in best.itertuples())
    return Sketch(picture, data, f"Each device against its own dense training step ({_model(data)} model). {text}.")


@figure("B", "figureB_speedup_against_nonzeros", "speedup of one feed-forward block against its non-zeros")
def against_nonzeros(results: Results) -> Sketch:
    """Time ratio over dense against mean non-zeros for every feed-forward measurement, synthetic and real, per plan."""
    ops = {"ffn_forward": "(a) forward", "ffn_training": "(b) forward and backward"}
    rows = choose.main_device(where(results.rows, op=tuple(ops), metric="time"))
    data = gains(rows[rows["mean_nnz"].notna()], "time")
    if data.empty:
        raise NotMeasured("rows of ffn_forward or ffn_training with a ratio", "python -m experiments.bench_kernels")
    picture, grid = style.panels(1, 2, 2.7, sharey=True)
    series = sorted(set(data["series"]))
    for axes, (op, title) in zip(grid[0], ops.items(), strict=True):
        chosen = where(data, op=op)
        axes.set_title(title)
        if chosen.empty:
            style.note(axes, "not measured yet")
            continue
        _nonzeros_panel(axes, chosen, series)
    grid[0][0].set_ylabel("dense time / sparse time")
    handles, labels = next(axes for axes in grid[0] if axes.lines).get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside right center", title="plan (backend)")
    best = data.loc[data["ratio"].idxmax()]
    caption = (
        f"Above 1 the sparse plan is faster. On {best['device']} the best is {best['ratio']:.2f} times dense "
        f"({best['series']}, {significant(best['mean_nnz'])} non-zeros). Filled: synthetic patterns; open: layers of "
        "trained models."
    )
    return Sketch(picture, data, caption)


def gains(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The sparse measurements of `metric`, with `percent`, the change against dense, and its spread.

    `series` names plan and backend.
    """
    chosen = where(rows, metric=metric)
    compared = chosen[chosen["ratio"].notna() & chosen["value"].notna() & (chosen["plan"] != "dense")]
    spread = [_ratio_spread(row, chosen) for _, row in compared.iterrows()]
    percent = stats.gain_percent if metric in (*HIGHER_IS_BETTER, "time") else stats.cost_percent
    columns = [*SAME_RUN, "layers", "hidden", "intermediate", "plan", "backend", "baseline", "value", "unit", "ratio"]
    data = compared[columns].assign(
        series=compared["plan"] + " (" + compared["backend"] + ")",
        percent=percent(compared["ratio"]),
        percent_low=[min(map(percent, ends)) for ends in spread],
        percent_high=[max(map(percent, ends)) for ends in spread],
    )
    return data.sort_values(["op", "device", "plan", "l1", "layer", "mean_nnz"], kind="stable").reset_index(drop=True)


def _ratio_spread(row: pd.Series, rows: pd.DataFrame) -> tuple[float, float]:
    """Bounds of a row's ratio, from its spread and the baseline's where that is known."""
    same = {name: None if pd.isna(row[name]) else row[name] for name in SAME_RUN}
    dense = where(rows, plan="dense", backend=row["baseline"], **same)
    ours = (row["value"], row["low"], row["high"])
    if len(dense) == 1 and dense["low"].notna().all():
        base = tuple(dense.iloc[0][["value", "low", "high"]])
    else:
        value = row["value"] / row["ratio"] if row["metric"] in HIGHER_IS_BETTER else row["value"] * row["ratio"]
        base = (value, value, value)
    pair = (ours, base) if row["metric"] in HIGHER_IS_BETTER else (base, ours)
    return stats.ratio_with_spread(*pair)[1:]


TITLES = {
    "throughput": "throughput (more is better)",
    "energy": "energy per token (less is better)",
    "peak_memory": "peak memory (less is better)",
}


def _two_gains(
    results: Results, number: int, op: str, metrics: tuple, command: str, limits: tuple, published: dict
) -> Sketch:
    rows = choose.main_device(choose.main_model(choose.relu_runs(where(results.rows, op=op))))
    found = {metric: gains(rows, metric) for metric in metrics}
    if found[metrics[0]].empty:
        raise NotMeasured(f"rows of {op} with a ratio over dense for gated ReLU models", command)
    picture, grid = style.panels(1, 2, 2.8)
    lacks = []
    for axes, letter, metric, limit in zip(grid[0], "ab", metrics, limits, strict=True):
        axes.set_title(f"({letter}) {TITLES[metric]}")
        if found[metric].empty:
            lacks.append(f"{metric.replace('_', ' ')}: {_reason(rows, metric)}")
            style.note(axes, f"not measured: {_reason(rows, metric)}")
            continue
        _gain_lines(axes, found[metric].assign(series="ours: " + found[metric]["series"]), published.get(metric))
        if limit is not None:
            pattern, words = limit
            _limit_line(axes, paper.fact(number, pattern) * (1 if metric in HIGHER_IS_BETTER else -1), words)
    handles, labels = grid[0][0].get_legend_handles_labels()
    ours = found[metrics[0]].iloc[0]
    title = f"ours: {ours['model']} model on {ours['device']}"
    picture.legend(handles, labels, loc="outside lower center", ncols=len(labels), title=title)
    data = pd.concat(found.values(), ignore_index=True)
    return Sketch(picture, data, _gains_caption(found, metrics), "; ".join(lacks))


def _gain_lines(axes: Axes, data: pd.DataFrame, published: pd.Series | None = None) -> None:
    """One line a series over the L1 values, with spread; the paper's points as open diamonds."""
    values = set(data["l1"]) | (set() if published is None else set(published.index))
    place = style.l1_axis(axes, values)
    for index, (name, line) in enumerate(data.groupby("series", sort=True)):
        line = line.sort_values("l1")
        x = line["l1"].map(place)
        style.line_with_spread(
            axes, x, line["percent"], line["percent_low"], line["percent_high"], label=name, **style.category(index)
        )
    if published is not None:
        axes.plot(published.index.map(place), published, label="paper (1.5B, H100 PCIe)", **style.PAPER_POINTS)
    axes.axhline(0, color=style.INK, linewidth=0.8)
    axes.set_ylabel("change against dense")
    style.percent_axis(axes.yaxis)
    axes.margins(y=0.15)


def _limit_line(axes: Axes, percent: float, words: str) -> None:
    """A dashed line at a published limit, named at the right end on the side that points away from zero."""
    axes.axhline(percent, color=style.PAPER, linestyle=(0, (4, 3)), linewidth=0.9)
    low, high = axes.get_ylim()
    room = 0.12 * (max(high, percent) - min(low, percent))
    axes.set_ylim(min(low, percent - room), max(high, percent + room))
    at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "fontsize": 7}
    above = percent > 0
    axes.annotate(
        words.format(signed(percent)), (0.01, percent), xytext=(0, 3 if above else -3),
        va="bottom" if above else "top", **at,
    )  # fmt: skip


def _published_forward() -> dict[str, pd.Series]:
    """Percent over dense of the gated rows of the paper's table 4, by L1 value."""
    gated = where(paper.table("table4_gating"), gated="yes").set_index("l1")
    dense, sparse = gated.loc[0], gated.drop(index=0)
    speed = stats.gain_percent(sparse["forward_tokens_per_ms"] / dense["forward_tokens_per_ms"])
    energy = stats.cost_percent(dense["energy_mj_per_token"] / sparse["energy_mj_per_token"])
    return {"throughput": speed, "energy": energy}


def _published_training() -> dict[str, pd.Series]:
    """Percent over dense of the 1.5B rows of the paper's table 1, by L1 value."""
    scale = where(paper.table("table1_scales"), scale="1.5B").set_index("l1")
    dense, sparse = scale.loc[0], scale.drop(index=0)
    speed = stats.gain_percent(sparse["train_tokens_per_ms"] / dense["train_tokens_per_ms"])
    memory = stats.cost_percent(dense["peak_memory_gb"] / sparse["peak_memory_gb"])
    return {"throughput": speed, "peak_memory": memory}


def _reason(rows: pd.DataFrame, metric: str) -> str:
    reasons = sorted(set(where(rows, metric=metric)["missing"]) - {""})
    return "; ".join(reasons) if reasons else "no rows with a ratio"


def _gains_caption(found: dict[str, pd.DataFrame], metrics: tuple) -> str:
    speed = found[metrics[0]]
    best = speed.loc[speed["percent"].idxmax()]
    text = (
        f"{_model(speed)} model on {best['device']}, each against the fastest dense backend of the same run "
        f"({best['baseline']}): at best {signed(best['percent'], 1)} throughput ({best['series']}, L1 "
        f"{l1_label(best['l1'])})"
    )
    if len(found[metrics[1]]):
        least = found[metrics[1]].loc[found[metrics[1]]["percent"].idxmin()]
        change = signed(least["percent"], 1)
        text += f", and at best {change} {metrics[1].replace('_', ' ')} (L1 {l1_label(least['l1'])})"
    return text + ". Bars: 20th to 80th percentile."


def _model(data: pd.DataFrame) -> str:
    return data["model"].iloc[0]


def _nonzeros_panel(axes: Axes, data: pd.DataFrame, series: list[str]) -> None:
    for index, name in enumerate(series):
        look = style.category(index)
        chosen = where(data, series=name)
        made_up = chosen["pattern"].str.startswith("synthetic")
        synthetic, real = chosen[made_up], chosen[~made_up]
        synthetic = synthetic.groupby("mean_nnz", as_index=False)["ratio"].median()
        axes.plot(synthetic["mean_nnz"], synthetic["ratio"], label=name, **look)
        axes.plot(
            real["mean_nnz"], real["ratio"], **look | {"linestyle": "", "markerfacecolor": "none", "markersize": 4}
        )
    axes.axhline(1, color=style.INK, linewidth=0.8)
    axes.set_xlabel("mean non-zeros (neurons/token)")
    style.log_axis(axes.xaxis)
    style.log_axis(axes.yaxis)
