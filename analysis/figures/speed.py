"""Figures 4 and 5: gains of sparsity over dense in the same run."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.gains import gains, published
from analysis.load import Results
from analysis.measures import NOT_FOR_SPEED, SAME_RUN, plan_keys
from analysis.render import signed, significant

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


def no_speed(results: Results, op: str, command: str) -> NotMeasured:
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
        raise no_speed(results, op, command)
    twice = [_also_compiled(data) for data in timed]
    uncompiled = [_with_form(data[also]) for data, also in zip(timed, twice, strict=True)]
    compiled = [_with_form(data[~also]) for data, also in zip(timed, twice, strict=True)]
    found = [_like_for_like(*both) for both in zip(compiled, uncompiled, strict=True)]
    printed = published(op)
    places = places_of(pd.concat([found[0][["model", "l1"]], printed[["model", "l1"]]]))
    shown = [(panel, data) for panel, data in zip(panels, found, strict=True) if len(data)]
    picture, (grid,) = style.panels(1, len(shown), 1.3 + ROW_HEIGHT * len(places), sharey=True)
    names = list(dict.fromkeys(found[0]["form"]))
    for axes, (panel, data) in zip(grid, shown, strict=True):
        _dots(axes, data, places, names)
        axes.plot(printed[panel.metric], at_places(printed, places, len(names), len(names)), **style.PAPER_POINTS)
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


def places_of(data: pd.DataFrame) -> dict[Pair, int]:
    """(model, L1) -> row from the top: models by size, then L1."""
    by_size = data.assign(size=data["model"].map(_size)).sort_values(["size", "model", "l1"])
    return {pair: position for position, pair in enumerate(dict.fromkeys(_pairs(by_size)))}


def _size(model: str) -> float:
    """The parameters in a model's name, in millions (1.5b, 21m); 0 for other names."""
    found = re.match(r"([\d.]+)([mb])", model)
    return 0.0 if found is None else float(found[1]) * (1000 if found[2] == "b" else 1)


def at_places(data: pd.DataFrame, places: dict[Pair, int], index: int, forms: int) -> list[float]:
    """Where points of the `index`-th of our forms are, or with `index=forms` the paper's: below each other."""
    return [places[pair] + LANE * (index - forms / 2) for pair in _pairs(data)]


def _dots(axes: Axes, data: pd.DataFrame, places: dict[Pair, int], names: list[str]) -> None:
    """A point with its spread for each measurement, relative to the fastest dense form; open points: with nothing
    compiled, relative to eager."""
    for index, name in enumerate(names):
        own = where(data, form=name)
        y = at_places(own, places, index, len(names))
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
