"""Figures 4, 5 and 12: gains of sparsity over dense in the same run."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.figures import blocks, style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.gains import gains, published
from analysis.load import Results
from analysis.measures import NOT_FOR_SPEED, SAME_RUN, plan_keys
from analysis.render import device, signed, significant

BENCH_FORWARD = "python -m experiments.bench_forward"
BENCH_TRAINING = "python -m experiments.bench_training"
LANE = 0.26  # of a row: from one form to the next
ROW_HEIGHT = 0.3  # inches, of one model at one L1 value
# Plans of a whole model, as figures 4 and 5 name them.
FORMS = {
    "by_layer": "the fastest form of each layer",
    "twell": "the paper's plan in every layer",
    "csr": "compressed rows in every layer",
    "hybrid": "the paper's training plan in every layer",
}
LIMIT_TEXT = 0.28  # of an axis: the width of the words beside the line
LIMITS_OF = "1.5b"  # the model that the limits in the paper's text are about
LIMIT: style.Look = {"color": style.PAPER, "linestyle": (0, (4, 3)), "linewidth": 0.9}
SPREAD = "Bars: 20th to 80th percentile of the repetitions in one run."


@dataclass(frozen=True)
class Panel:
    """One panel of figures 4 and 5: metric, title, and a limit from the paper's facts (its pattern and label)."""

    metric: str
    title: str
    limit: str = ""
    words: str = ""

    @property
    def name(self) -> str:
        return self.metric.replace("_", " ")

    @property
    def sign(self) -> int:
        """+1 where more is better."""
        return 1 if self.metric in schema.LARGER_IS_BETTER else -1


@figure("4", "figure04_forward", "forward speedup and energy saving by model and L1 value")
def forward_gains(results: Results) -> Sketch:
    """Throughput and energy of the sparse forward pass against the dense one, per model, L1 value and plan."""
    speed = Panel("throughput", "(a) throughput (more is better)", r"up to (\d+)% speedup", "up to {}")
    energy = Panel("energy", "(b) energy per token (less is better)")
    return _two_gains(results, 4, "model_forward", BENCH_FORWARD, (speed, energy))


@figure("5", "figure05_training", "training speedup and peak-memory reduction by model and L1 value")
def training_gains(results: Results) -> Sketch:
    """Throughput and peak memory of a sparse training step against a dense one, per model, L1 value and plan."""
    speed = Panel("throughput", "(a) throughput (more is better)", r"up to (\d+)% speedup", "up to {}")
    memory = Panel(
        "peak_memory",
        "(b) peak memory (less is better)",
        r"more than (\d+)% less peak memory",
        "beyond {}",
    )
    return _two_gains(results, 5, "model_training", BENCH_TRAINING, (speed, memory))


@figure("12", "figure12_devices", "speedup on two devices, or with two backends on one")
def devices(results: Results) -> Sketch:
    """Speed over dense on each kind of GPU: of one gated block on synthetic patterns, each backend, and of the whole
    models that two kinds timed. With rows from only one kind: its backends side by side."""
    timed = choose.made_for_speed(where(results.rows, op=(*schema.WHOLE_MODELS, *blocks.OPS)))
    if timed.empty:
        raise _no_speed(results, "model_training", BENCH_TRAINING)
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
    for name in schema.BACKENDS:
        if name in {backend for _, backend in series}:
            handles.append(
                Line2D([], [], label=name, **style.category(schema.BACKENDS.index(name)) | {"color": style.INK})
            )
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
    places = _places(data)
    kinds = [kind for kind in colors if kind in set(data["device"])]
    for index, kind in enumerate(kinds):
        own = where(data, device=kind)
        ends = [1 + own[column] / 100 for column in ("percent_low", "percent_high")]
        spread = [(own["ratio"] - ends[0]).clip(lower=0), (ends[1] - own["ratio"]).clip(lower=0)]
        y = _at(own, places, index, len(kinds) - 1)
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
            tokens = f" ({_span(own['tokens'], '{:,.0f}')} tokens)" if op == "model_training" else ""
            parts += [f"{_span(own['ratio'], '{:.2f}')} on {device(kind)}{tokens}"] if len(own) else []
        texts.append(f"{describe.TIMED[op]} {', '.join(parts)}")
    data = pd.concat(models.values())
    return (
        f"Whole models, each in its fastest form, with {_span(data['mean_nnz'], '{:.0f}')} non-zeros (each device may "
        f"have timed another checkpoint): {'; '.join(texts)}."
    )


def _span(values: pd.Series, form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(value) for value in (values.min(), values.max())))


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


def _no_speed(results: Results, op: str, command: str) -> NotMeasured:
    """The reason why there is nothing to draw: only the reference backend was timed, or nothing."""
    if len(where(results.rows, op=op, backend=schema.REFERENCE)):
        return NotMeasured(f"speed with a GPU backend: {NOT_FOR_SPEED}", command)
    return NotMeasured(f"rows of {op} with a ratio over dense for gated ReLU models", command)


def _two_gains(results: Results, number: int, op: str, command: str, panels: tuple[Panel, Panel]) -> Sketch:
    rows = choose.relu_runs(where(results.rows, op=op))
    if not choose.made_for_speed(rows).empty:
        rows = choose.main_device(choose.made_for_speed(rows), ["model", "l1"])
    timed = [gains(rows, panel.metric) for panel in panels]
    if timed[0].empty:
        raise _no_speed(results, op, command)
    twice = [_also_compiled(data) for data in timed]
    uncompiled = [_with_form(data[also]) for data, also in zip(timed, twice, strict=True)]
    compiled = [_with_form(data[~also]) for data, also in zip(timed, twice, strict=True)]
    found = [_like_for_like(*both) for both in zip(compiled, uncompiled, strict=True)]
    printed = published(op)
    places = _places(pd.concat([found[0][["model", "l1"]], printed[["model", "l1"]]]))
    shown = [(panel, data) for panel, data in zip(panels, found, strict=True) if len(data)]
    picture, (grid,) = style.panels(1, len(shown), 1.3 + ROW_HEIGHT * len(places), sharey=True)
    names = list(dict.fromkeys(found[0]["form"]))
    for axes, (panel, data) in zip(grid, shown, strict=True):
        _dots(axes, data, places, names)
        axes.plot(printed[panel.metric], _at(printed, places, len(names), len(names)), **style.PAPER_POINTS)
        _finish(axes, panel, number, places, _elsewhere(found[0]))
    grid[0].set_ylim(len(places) - 0.4, -0.6)
    grid[0].set_ylabel("model")
    eager = any(data["eager_percent"].notna().any() for data in found)
    picture.legend(handles=_handles(names, eager, shown), loc="outside lower center", ncols=2)
    lacks = "; ".join(
        f"{panel.name}: {_reason(rows, panel.metric)}" for panel, data in zip(panels, found, strict=True) if data.empty
    )
    checkpoints = _checkpoints(rows, choose.trainings(results.rows))
    caption = f"{_gains_caption(shown, number, checkpoints, eager, uncompiled)}{_larger_steps(rows)}"
    return Sketch(picture, pd.concat(found, ignore_index=True), caption, lacks)


def _also_compiled(data: pd.DataFrame) -> pd.Series:
    """Rows whose backend was timed in the same comparison with the rest of the model compiled."""
    names = plan_keys(data)
    known = set(names)
    also = [(*rest, f"{backend}{schema.COMPILED}") in known for *rest, backend in names]
    return pd.Series(also, data.index, dtype=bool)


def _like_for_like(drawn: pd.DataFrame, plain: pd.DataFrame) -> pd.DataFrame:
    """For open points, `eager_percent` of a compiled form becomes that of the same form with nothing compiled (of
    `plain`), as in the paper's comparison; its own is then `compiled_eager_percent`."""
    names = [*SAME_RUN, "plan", "backup", "backend"]
    compiled = drawn["backend"].str.endswith(schema.COMPILED)
    own = drawn.assign(backend=drawn["backend"].str.removesuffix(schema.COMPILED))[names]
    found = own.merge(plain[[*names, "eager_percent"]], on=names, how="left").set_index(drawn.index)
    return drawn.assign(
        compiled_eager_percent=drawn["eager_percent"].where(compiled),
        eager_percent=found["eager_percent"].where(compiled, drawn["eager_percent"]),
    )


def _with_form(data: pd.DataFrame) -> pd.DataFrame:
    """Column `form`: the plan in words, for the legend; plan and backend where one comparison timed a plan twice."""
    once = ~data.duplicated([*SAME_RUN, "plan", "backup"], keep=False)
    words = data["plan"].map(FORMS).where(data["backup"].isna() | data["backup"].eq(paper.BACKUP))
    return data.assign(form=words.where(once).fillna(data["series"]))


Pair = tuple[str, str]  # model, and its L1 value as it is printed


def _pairs(data: pd.DataFrame) -> list[Pair]:
    return [(model, l1_label(l1)) for model, l1 in zip(data["model"], data["l1"], strict=True)]


def _places(data: pd.DataFrame) -> dict[Pair, int]:
    """(model, L1) -> row from the top: models by size, then L1."""
    by_size = data.assign(size=data["model"].map(_size)).sort_values(["size", "model", "l1"])
    return {pair: position for position, pair in enumerate(dict.fromkeys(_pairs(by_size)))}


def _size(model: str) -> float:
    """The parameters in a model's name, in millions (1.5b, 21m); 0 for other names."""
    found = re.match(r"([\d.]+)([mb])", model)
    return 0.0 if found is None else float(found[1]) * (1000 if found[2] == "b" else 1)


def _at(data: pd.DataFrame, places: dict[Pair, int], index: int, forms: int) -> list[float]:
    """Where points of the `index`-th of our forms are, or with `index=forms` the paper's: below each other."""
    return [places[pair] + LANE * (index - forms / 2) for pair in _pairs(data)]


def _dots(axes: Axes, data: pd.DataFrame, places: dict[Pair, int], names: list[str]) -> None:
    """A point with its spread for each measurement, relative to the fastest dense form; open points: with nothing
    compiled, relative to eager."""
    for index, name in enumerate(names):
        own = where(data, form=name)
        y = _at(own, places, index, len(names))
        look = style.category(index) | {"linestyle": ""}
        ends = [
            (own["percent"] - own["percent_low"]).clip(lower=0),
            (own["percent_high"] - own["percent"]).clip(lower=0),
        ]
        axes.errorbar(own["percent"], y, xerr=ends, elinewidth=0.8, capsize=2, **look)
        # Above the filled point of a run without compiled forms, whose fastest dense form is the eager one.
        axes.plot(own["eager_percent"], y, **look | {"markerfacecolor": "white"}, zorder=3)


def _elsewhere(data: pd.DataFrame) -> dict[Pair, str]:
    """The device of each pair that was timed on another one than most."""
    kinds = describe.elsewhere(data)
    return {pair: kind for pair, kind in zip(_pairs(data), kinds, strict=True) if kind}


def _finish(axes: Axes, panel: Panel, number: int, places: dict[Pair, int], elsewhere: dict[Pair, str]) -> None:
    """elsewhere: the devices of pairs that were timed on another device than most."""
    axes.axvline(0, color=style.INK, linewidth=0.8)
    names = {pair: f"{pair[0]}, L1 {pair[1]}" for pair in places}
    names |= {pair: f"{names[pair]}\non {kind.removeprefix('NVIDIA ')}" for pair, kind in elsewhere.items()}
    axes.set_yticks(range(len(places)), [names[pair] for pair in places])
    axes.grid(visible=False, axis="y")
    axes.set(title=panel.title, xlabel="change against dense")
    axes.margins(x=0.12)
    if panel.limit:
        percent = panel.sign * paper.fact(number, panel.limit)
        rows = [at for (model, _), at in places.items() if model == LIMITS_OF] or list(places.values())
        ends = (min(rows) - 0.4, max(rows) + 0.4)
        axes.plot([percent, percent], ends, **LIMIT)
        left, right = axes.get_xlim()
        axes.set_xlim(left, max(right, percent + LIMIT_TEXT * (right - left)))
        axes.annotate(
            panel.words.format(signed(percent)), (percent, ends[0]), xytext=(0, 1), textcoords="offset points",
            va="bottom", ha="left", fontsize=7, path_effects=style.HALO,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(6))
    style.percent_axis(axes.xaxis)


def _handles(names: list[str], eager: bool, shown: list[tuple[Panel, pd.DataFrame]]) -> list[Line2D]:
    points: style.Look = {"linestyle": ""}
    lines = [Line2D([], [], label=f"ours: {name}", **style.category(i) | points) for i, name in enumerate(names)]
    if eager:
        open_: style.Look = {"marker": "o", "linestyle": "", "color": style.MUTED, "markerfacecolor": "white"}
        lines.append(Line2D([], [], label="open: nothing compiled on either side; filled: both compiled", **open_))
    lines.append(Line2D([], [], label="paper (H100 PCIe, against eager transformers)", **style.PAPER_POINTS))
    if any(panel.limit for panel, _ in shown):
        lines.append(Line2D([], [], label=f"the paper's text on {LIMITS_OF.upper()}, at any L1", **LIMIT))
    return lines


def _reason(rows: pd.DataFrame, metric: str) -> str:
    reasons = sorted(set(where(rows, metric=metric)["missing"]) - {""})
    return "; ".join(reasons) if reasons else "no rows with a ratio"


def _gains_caption(
    shown: list[tuple[Panel, pd.DataFrame]], number: int, checkpoints: str, eager: bool, plain: list[pd.DataFrame]
) -> str:
    """plain: with nothing compiled, of each metric, backends that are drawn with the rest of the model compiled."""
    texts = []
    for panel, data in shown:
        best = data.loc[(panel.sign * data["percent"]).idxmax()]
        text = (
            f"best {panel.name}: {signed(best['percent'], 1)} ({best['model']} at L1 {l1_label(best['l1'])}, "
            f"{significant(best['mean_nnz'])} mean non-zeros, {best['form']}"
        )
        elsewhere = _elsewhere(data).get((best["model"], l1_label(best["l1"])))
        text += f", on {elsewhere})" if elsewhere else ")"
        if panel.limit and panel.sign * best["percent"] > paper.fact(number, panel.limit):
            text += f", beyond the paper's {signed(panel.sign * paper.fact(number, panel.limit))} over eager"
        if not pd.isna(best["compiled_eager_percent"]):
            text += f", {signed(best['compiled_eager_percent'], 1)} against eager"
        without = where(data, l1=0.0)
        if len(without) and best["l1"]:
            most = without.loc[(panel.sign * without["percent"]).idxmax()]
            text += f"; without L1 {signed(most['percent'], 1)} ({most['model']})"
        text += _with_the_papers_plan(panel, data)
        texts.append(text)
    first = shown[0][1]
    baselines = " or ".join(sorted(set(first["baseline"])))
    text = "; ".join(texts)
    return (
        f"{text[0].upper()}{text[1:]}. {describe.devices(first['device'])}; changes relative to the fastest dense form "
        f"of the same run ({baselines}{'; open points: eager' if eager else '; eager was not timed'}). "
        f"{_compiled(first, plain)}{checkpoints} {SPREAD}"
    )


def _larger_steps(rows: pd.DataFrame) -> str:
    """What sparse training steps gain that fill the memory which dense ones need."""
    larger = rows.drop(choose.of_one_micro_batch(rows).index)
    larger = (
        where(larger, metric="throughput")
        .dropna(subset="ratio")
        .sort_values("ratio")
        .drop_duplicates(["model", "l1"], keep="last")
    )
    parts = [
        f"{signed((line.ratio - 1) * 100, 1)} ({line.model} at L1 {l1_label(line.l1)}, {int(line.tokens):,} tokens)"
        for line in larger.itertuples()
    ]
    if not parts:
        return ""
    told = ", ".join(parts)
    return f" Not drawn: steps with as many tokens as fit into memory with sparse blocks: {told} in throughput."


def _with_the_papers_plan(panel: Panel, data: pd.DataFrame) -> str:
    """The range of its gains, where another plan is drawn too."""
    theirs = choose.papers_plan(data).sort_values("percent", ascending=panel.sign < 0)
    if theirs.empty or len(theirs) == len(data):
        return ""
    best, worst = (f"{signed(line['percent'], 1)} ({_subject(line)})" for line in (theirs.iloc[0], theirs.iloc[-1]))
    return f"; {theirs['form'].iloc[0]} {best}" + (f" to {worst}" if len(theirs) > 1 else "")


def _subject(line: pd.Series) -> str:
    return f"{line['model']} " + (f"at L1 {l1_label(line['l1'])}" if line["l1"] else "without L1")


def _uncompiled(both: list[pd.DataFrame]) -> str:
    """What was timed with nothing compiled: open points where eager was timed, too."""
    plain = both[0]
    if plain["eager_percent"].isna().all():
        parts = [
            f"{signed(line['percent'])} {line['metric'].replace('_', ' ')} ({_subject(line)})"
            for data in both
            for _, line in data.iterrows()
        ]
        return f" Not drawn: with nothing compiled, {', '.join(parts)}." if parts else ""
    known = where(plain, form=FORMS["by_layer"]).dropna(subset="eager_percent")
    parts = [f"{signed(line['eager_percent'], 1)} ({_subject(line)})" for _, line in known.iterrows()]
    has = f"; {FORMS['by_layer']} then has {', '.join(parts)}" if parts else ""
    return f" Open points: with nothing compiled, as in the paper's comparison{has}."


def _compiled(data: pd.DataFrame, plain: list[pd.DataFrame]) -> str:
    """What torch.compile compiles, if anything."""
    compiled = data["backend"].str.endswith(schema.COMPILED)
    if not compiled.any():
        return ""
    all_, text = compiled.all(), "torch.compile compiles all but the sparse blocks"
    opened = not all_ and bool(data.loc[~compiled, "baseline"].eq(schema.EAGER).all())  # they are open points
    text = f"In ours {text}." if all_ else f"{'Filled points' if opened else 'Backends ending in _compiled'}: {text}."
    text += _uncompiled([pd.concat([plain[0], data[~compiled]]), *plain[1:]] if opened else plain)
    if not all_ and not opened:
        against = ", and are compared with a compiled dense model" if _against_compiled(data) else ""
        text += f" The others run eagerly{against}."
    return f"{text} "


def _against_compiled(data: pd.DataFrame) -> bool:
    return bool(data["baseline"].str.startswith("dense_compiled").all())


def _checkpoints(rows: pd.DataFrame, trainings: pd.DataFrame) -> str:
    """The training steps of the measured models, which determine their sparsity."""
    steps = rows.dropna(subset="step").groupby(["model", "l1"], as_index=False)["step"].max()
    listed = ", ".join(_steps(model, own.set_index("l1")["step"]) for model, own in steps.groupby("model"))
    if not listed:
        return "Models have random weights."
    return f"Training steps before the measurement: {listed}. {describe.other_checkpoints(rows, trainings)}".rstrip()


def _steps(model: str, steps: pd.Series) -> str:
    """ "1.5b 800 (at L1 1e-4: 400)": the most, and those of L1 values with fewer."""
    fewer = [f"at L1 {l1_label(l1)}: {int(step):,}" for l1, step in steps.items() if step < steps.max()]
    return f"{model} {int(steps.max()):,}" + (f" ({', '.join(fewer)})" if fewer else "")
