"""Figure B: the speedup of one feed-forward block (dense time / sparse time) against its non-zeros and its tokens."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from analysis import choose, paper, schema
from analysis.choose import where
from analysis.figures import style
from analysis.figures.drawn import Sketch, figure
from analysis.figures.speed import no_speed
from analysis.floors import floors
from analysis.gains import gains
from analysis.load import Results
from analysis.render import device

BENCH = "python -m experiments.bench_kernels"
OPS = {"ffn_forward": "forward", "ffn_training": "forward and backward"}
KINDS = {True: "gated", False: "non-gated"}
FLOOR: style.Look = {"color": style.INK, "linestyle": (0, (1, 1.2)), "linewidth": 1.1}
PUBLISHED: style.Look = {**style.OPEN, "marker": "o", "color": style.PAPER, "markersize": 6}


@figure(
    "B",
    "figureB_speedup_against_nonzeros",
    "speedup of one feed-forward block against its non-zeros",
    "Synthetic patterns, against the fastest dense implementation of the same run. Hopper, triton: our kernels in CUDA "
    "and in Triton. Hot: dense products compute the neurons that fire most; sorted: these stand in front. Backup: the "
    "paper's training format. Published kernels: the authors' code, measured by us. Dotted: estimate if no weight row "
    "is reused.",
)
def against_nonzeros(results: Results) -> Sketch:
    data = measured(results)
    panels = [panel for op in OPS for gated in KINDS for panel in _panels(where(data, op=op, gated=gated))]
    if not panels:
        wanted = "rows of ffn_forward or ffn_training with a ratio, of several numbers of non-zeros or tokens"
        raise no_speed(where(results.rows, op=tuple(OPS)), wanted, BENCH)
    rows = -(-len(panels) // 2)
    picture, grid = style.panels(rows, 2, 0.4 + 2.1 * rows)
    ours = data[~data["published"]]
    for letter, axes, (title, shown, against, xlabel) in zip("abcdefgh", grid.flat, panels, strict=False):
        axes.set(title=f"({letter}) {title}", xlabel=xlabel, ylabel="dense time / sparse time")
        _draw(axes, shown, against)
    kinds = {
        f"{backend}, {schema.WORDS[plan]}": style.of_plan(plan) | style.of_backend(backend)
        for backend, plan in sorted(set(zip(ours["backend"], ours["plan"], strict=True)))
    }
    handles = [Line2D([], [], label=label, **look) for label, look in kinds.items()]
    if data["floor_ratio"].notna().any():
        handles.append(Line2D([], [], label="estimate, no row reused", **FLOOR))
    if data["published"].any():
        handles.append(Line2D([], [], label="published kernels", **PUBLISHED))
    if data["wrong"].any():
        wrong = PUBLISHED | {"marker": "x"}
        handles.append(Line2D([], [], label="published kernels, wrong at their default", **wrong))
    style.legend_of_panels(picture, grid, len(panels), handles)
    lacks = ", ".join(f"rows of {op}" for op in OPS if op not in set(data["op"]))
    return Sketch(picture, data, f"{device(ours['device'].iloc[0])}, bfloat16.", lacks)


def measured(results: Results) -> pd.DataFrame:
    """The measurements of blocks on synthetic patterns, with `floor_ratio`, the best ratio that the plan can reach, and
    `about`, the non-zeros in two digits. Rows with `published` are those of the published kernels for the same blocks,
    on the device where they were measured."""
    rows = choose.whole_function(where(results.rows, op=tuple(OPS), metric="time"))
    rows = choose.main_device(choose.made_for_speed(rows))
    ours = gains(rows[rows["mean_nnz"].notna() & rows["pattern"].str.startswith("synthetic")], "time")
    ours["floor_ratio"] = ours["ratio"] * ours["value"] / floors(ours, results.rows)
    ours = ours.assign(published=False, wrong=False)
    if len(ours) and paper.PUBLISHED_KERNELS_ON in ours["device"].iloc[0]:
        known = paper.published_kernels().rename(columns={"published_ms": "value"}).drop(columns="dense_ms")
        known = known.assign(gated=known["gated"] == "yes", wrong=known["wrong_pct"] > 0, pattern="synthetic")
        same = ["op", "gated", "tokens", "hidden", "intermediate"]
        theirs = known.merge(ours[same].drop_duplicates().astype(known[same].dtypes), on=same)
        theirs = theirs.assign(published=True, series="published kernels", unit="ms")
        ours = pd.concat([ours, theirs], ignore_index=True)
    return ours.assign(about=ours["mean_nnz"].map(lambda value: float(f"{value:.2g}")))


def fastest_on_synthetic(results: Results) -> pd.DataFrame:
    """`mean_nnz`, `ratio`, `op`, `published`, `wrong` of gated blocks on synthetic patterns, of the size and of the
    calls with the most measured numbers of non-zeros; for ours, of the fastest form."""
    data = measured(results)
    if data.empty:
        return data.assign(ratio=pd.Series(dtype="float64"))
    data = _most_measured_size(data[data["gated"].fillna(False).astype(bool)])
    data = data[data["tokens"] == data["op"].map(_most_measured_call(data))]
    best = data.groupby(["op", "published", "about"])["ratio"].idxmax()
    return data.loc[best].sort_values(["op", "published", "mean_nnz"], kind="stable").reset_index(drop=True)


def _most_measured_size(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the blocks with the most calls and numbers of non-zeros (the largest, if several)."""
    size = ["hidden", "intermediate"]
    calls = data[[*size, "op", "tokens", "about"]].drop_duplicates()
    counts = calls.groupby(size).size().reset_index(name="calls").sort_values(["calls", *size])
    return data.merge(counts[size].tail(1), on=size)


def _most_measured_call(data: pd.DataFrame) -> dict[str, int]:
    """Operation -> the tokens per call with the most measured numbers of non-zeros (the largest, if several)."""
    counts = data.groupby(["op", "tokens"])["about"].nunique().reset_index().sort_values(["about", "tokens"])
    return dict(zip(counts["op"], counts["tokens"].astype(int), strict=True))


def _panels(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame, str, str]]:
    """The panels of one operation and kind of block, of the size most measured: against non-zeros, in the call most
    measured, and against tokens, at the non-zeros most measured. A single point of ours has no panel. Title, rows, the
    column on the x axis, and its label."""
    if data.empty:
        return []
    data = _most_measured_size(data)
    ours, first = data[~data["published"]], data.iloc[0]
    title = f"{OPS[first['op']]}, {KINDS[bool(first['gated'])]}, N = {int(first['intermediate']):,}"
    tokens = _most_measured_call(ours)[first["op"]]
    about = ours.groupby("about")["tokens"].nunique().idxmax()
    panels = (
        (title, where(data, tokens=tokens), "mean_nnz", f"mean non-zeros ({tokens:,} tokens)"),
        (title, where(data, about=about), "tokens", f"tokens in one call ({about:g} non-zeros)"),
    )
    return [panel for panel in panels if panel[1].loc[~panel[1]["published"], panel[2]].round().nunique() > 1]


def _draw(axes: Axes, data: pd.DataFrame, x: str) -> None:
    """One panel against the column `x`; a line for each backend and plan."""
    ours = data[~data["published"]]
    for (backend, plan), points in ours.groupby(["backend", "plan"]):
        points = points.groupby("about" if x == "mean_nnz" else x)[[x, "ratio", "floor_ratio"]].median()
        axes.plot(points[x], points["ratio"], **style.of_plan(plan) | style.of_backend(backend))
        axes.plot(points[x], points["floor_ratio"], **FLOOR)
    for wrong, points in data[data["published"]].groupby("wrong"):
        axes.plot(points[x], points["ratio"], **PUBLISHED | {"marker": "x" if wrong else "o"})
    axes.axhline(1, color=style.INK, linewidth=0.8)
    style.log_axis(axes.xaxis)
    style.room_for_labels(axes)
    style.log_axis(axes.yaxis)
    if x == "tokens":
        axes.set_xticks(sorted(set(data[x])), [f"{tokens:,}" for tokens in sorted(set(data[x]))])
