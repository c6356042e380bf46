"""Figure B: the speedup of one feed-forward block (dense time / sparse time) against its non-zeros, with its floor."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.typing import MarkerType

from analysis import choose, paper, schema
from analysis.choose import where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.floors import floors
from analysis.gains import gains
from analysis.load import Results
from analysis.measures import NOT_FOR_SPEED
from analysis.render import device, significant

BENCH = "python -m experiments.bench_kernels"
OPS = {"ffn_forward": "forward", "ffn_training": "forward and backward"}
KINDS = {True: "gated", False: "non-gated"}
NONZEROS_LABEL, TOKENS_LABEL = "mean non-zeros (neurons/token)", "tokens in one call"
FLOOR: style.Look = {"color": style.INK, "linestyle": (0, (1, 1.2)), "linewidth": 1.1}
POINT_FLOOR: style.Look = {"color": style.INK, "linestyle": "", "marker": "_", "markersize": 11, "markeredgewidth": 1.1}
OPEN: style.Look = {**style.OPEN, "markersize": 4}
PUBLISHED: style.Look = {**style.OPEN, "marker": "o", "color": style.PAPER, "markersize": 6}


@dataclass(frozen=True)
class Panel:
    """One panel: rows to plot against a column, `mean_nnz` or `tokens`."""

    title: str
    rows: pd.DataFrame
    against: str
    xlabel: str


@figure("B", "figureB_speedup_against_nonzeros", "speedup of one feed-forward block against its non-zeros")
def against_nonzeros(results: Results) -> Sketch:
    """Speedup over dense against mean non-zeros for every feed-forward measurement, synthetic and real, and against the
    number of tokens where it was varied; with the floor of the plan, and the published kernels."""
    data = measured(results)
    panels = [panel for op in OPS for kind in (*KINDS, None) for panel in _panels(where(data, op=op, gated=kind))]
    if not panels:
        timed = where(results.rows, op=tuple(OPS), backend=schema.REFERENCE)
        what = "rows of ffn_forward or ffn_training with a ratio, of several numbers of non-zeros or tokens"
        raise NotMeasured(f"speed with a GPU backend: {NOT_FOR_SPEED}" if len(timed) else what, BENCH)
    rows = -(-len(panels) // 2)
    picture, grid = style.panels(rows, 2, 0.4 + 2.3 * rows, sharey=True)
    looks = _Looks(data, panels)
    for letter, axes, panel in zip("abcdefgh", grid.flat, panels, strict=False):
        axes.set_title(f"({letter}) {panel.title}")
        looks.draw(axes, panel)
    for line in grid:
        line[0].set_ylabel("dense time / sparse time")
    if len(panels) % 2:
        grid[-1][1].set_axis_off()
        grid[-1][1].legend(handles=looks.handles(), loc="center left", alignment="left")
    else:
        picture.legend(handles=looks.handles(), loc="outside lower center", ncols=3, fontsize=6.8, columnspacing=1)
    lacks = ", ".join(f"rows of {op}" for op in OPS if op not in set(data["op"]))
    return Sketch(picture, data, _caption(data, panels), lacks)


def measured(results: Results) -> pd.DataFrame:
    """The measurements of whole functions, with `floor_ratio`, the best ratio that the plan can reach. Rows with
    `published` are those of the published kernels for the same blocks, on the device where they were measured."""
    rows = choose.whole_function(where(results.rows, op=tuple(OPS), metric="time"))
    rows = choose.main_device(choose.made_for_speed(rows))
    ours = gains(rows[rows["mean_nnz"].notna()], "time")
    ours["floor_ratio"] = ours["ratio"] * ours["value"] / floors(ours, results.rows)
    ours["published"] = False
    ours["wrong"] = False
    if ours.empty or paper.PUBLISHED_KERNELS_ON not in ours["device"].iloc[0]:
        return ours
    return pd.concat([ours, _published(ours)], ignore_index=True)


def fastest_on_synthetic(results: Results) -> pd.DataFrame:
    """`mean_nnz`, `ratio`, `op`, `published`, `wrong` of gated blocks on synthetic patterns, of the size and of the
    calls with the most measured numbers of non-zeros; for ours, of the fastest form."""
    data = measured(results)
    if data.empty:
        return data.assign(ratio=pd.Series(dtype="float64"))
    data = data[data["gated"].fillna(False).astype(bool) & _made_up(data)]
    data = data.assign(about=data["mean_nnz"].map(_two_digits))
    data = data[_of_size(data, _most_measured_size(data))]
    data = data[data["tokens"] == data["op"].map(_most_measured_call(data))]
    best = data.groupby(["op", "published", "about"])["ratio"].idxmax()
    return data.loc[best].sort_values(["op", "published", "mean_nnz"], kind="stable").reset_index(drop=True)


def _most_measured_size(data: pd.DataFrame) -> tuple[int, int]:
    """Hidden and intermediate size of the blocks with the most calls and numbers of non-zeros (the largest, if
    several)."""
    calls = data[["hidden", "intermediate", "op", "tokens", "about"]].drop_duplicates()
    counts = calls.groupby(["hidden", "intermediate"]).size().reset_index(name="calls")
    most = counts.sort_values(["calls", "hidden", "intermediate"]).iloc[-1]
    return int(most["hidden"]), int(most["intermediate"])


def _of_size(data: pd.DataFrame, size: tuple[int, int]) -> pd.Series:
    return data["hidden"].eq(size[0]) & data["intermediate"].eq(size[1])


def _most_measured_call(data: pd.DataFrame) -> dict[str, int]:
    """Operation -> the tokens per call with the most measured numbers of non-zeros (the largest, if several)."""
    counts = data.groupby(["op", "tokens"])["about"].nunique().reset_index().sort_values(["about", "tokens"])
    return dict(zip(counts["op"], counts["tokens"].astype(int), strict=True))


def _published(ours: pd.DataFrame) -> pd.DataFrame:
    known = paper.table("published_kernels_h200").rename(columns={"published_ms": "value"})
    known = known.assign(gated=known["gated"] == "yes", wrong=known["wrong"] == "yes", pattern="synthetic")
    same = ["op", "gated", "tokens", "hidden", "intermediate"]
    shown = known.merge(ours[same].drop_duplicates().astype(known[same].dtypes), on=same)
    return shown.drop(columns="dense_ms").assign(published=True, series="published kernels", unit="ms")


def _panels(data: pd.DataFrame) -> list[Panel]:
    """The panels of one operation and one kind of block: against non-zeros, and against tokens at the non-zeros that
    were measured with the most numbers of tokens. Blocks measured with one pattern are in the second panel only, and
    blocks measured at a single point are in the caption only."""
    if data.empty or (data["mean_nnz"].map(_two_digits).nunique() < 2 and data["tokens"].nunique() < 2):
        return []
    title = _title(data)
    made_up = data[_made_up(data)].assign(about=lambda rows: rows["mean_nnz"].map(_two_digits))
    sizes = made_up.groupby("about")["tokens"].nunique()
    if not len(sizes) or sizes.max() < 2:
        return [Panel(title, data, "mean_nnz", NONZEROS_LABEL)]
    about = sizes.idxmax()
    swept = made_up.groupby("tokens")["about"].nunique()
    swept = data[~_made_up(data) | data["tokens"].isin(swept.index[swept > 1])]
    by_tokens = Panel(f"{title}, {about:g} non-zeros", made_up[made_up["about"] == about], "tokens", TOKENS_LABEL)
    return [by_tokens] if swept.empty else [Panel(title, swept, "mean_nnz", NONZEROS_LABEL), by_tokens]


def _title(data: pd.DataFrame) -> str:
    kind, sizes = data["gated"].iloc[0], sorted(set(data["intermediate"].dropna()))
    block = "" if pd.isna(kind) else f", {KINDS[bool(kind)]}"
    return OPS[data["op"].iloc[0]] + block + (f", N = {sizes[0]:,}" if len(sizes) == 1 else "")


def _made_up(data: pd.DataFrame) -> pd.Series:
    return data["pattern"].str.startswith("synthetic")


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


class _Looks:
    """The meaning of colours and markers, the same in all panels."""

    def __init__(self, data: pd.DataFrame, panels: list[Panel]):
        self._data = data
        ours = data[~data["published"]]
        self._kinds = {kind: sorted(set(own["plan"])) for kind, own in ours.groupby(_kind(ours))}
        swept = [tokens for panel in panels if panel.against == "mean_nnz" for tokens in panel.rows["tokens"]]
        self._tokens = sorted(set(swept), reverse=True)

    def draw(self, axes: Axes, panel: Panel) -> None:
        """One panel."""
        data, x = panel.rows, panel.against
        apart = ["tokens"] if x == "mean_nnz" else []
        data = data.assign(kind=_kind(data))
        for keys, points in data[_made_up(data) & ~data["published"]].groupby(["kind", "plan", *apart]):
            points = points.groupby(x, as_index=False)[["ratio", "floor_ratio"]].median()
            kind, _, *tokens = keys
            axes.plot(points[x], points["ratio"], **self._look(kind, *tokens))
            known = points.dropna(subset="floor_ratio")
            axes.plot(known[x], known["floor_ratio"], **FLOOR if len(known) > 1 else POINT_FLOOR)
        for (kind, tokens), points in data[~_made_up(data)].groupby(["kind", "tokens"]):
            axes.plot(points[x], points["ratio"], **self._look(kind, tokens) | OPEN)
        for (wrong, *tokens), points in data[data["published"]].groupby(["wrong", *apart]):
            marker = "x" if wrong else self._marker(*tokens)
            axes.plot(points[x], points["ratio"], **PUBLISHED | {"marker": marker})
        axes.axhline(1, color=style.INK, linewidth=0.8)
        axes.set_xlabel(panel.xlabel)
        style.log_axis(axes.xaxis)
        style.room_for_labels(axes)
        style.log_axis(axes.yaxis)
        if x == "tokens":
            axes.set_xticks(sorted(set(data[x])), [f"{tokens:,}" for tokens in sorted(set(data[x]))])

    def _look(self, kind: str, tokens: int | None = None) -> style.Look:
        colour = style.category(list(self._kinds).index(kind))["color"]
        return {"color": colour, "marker": self._marker(tokens), "linestyle": "-"}

    def _marker(self, tokens: int | None = None) -> MarkerType:
        """The marker of a number of tokens; None: of a line over several numbers."""
        return style.category(0 if tokens is None else self._tokens.index(tokens))["marker"]

    def handles(self) -> list[Line2D]:
        """The legend: backends by colour, tokens by marker, then everything else that was drawn."""
        lines = [
            Line2D([], [], color=style.category(index)["color"], linewidth=2.5, label=f"{name} ({', '.join(plans)})")
            for index, (name, plans) in enumerate(self._kinds.items())
        ]
        for tokens in self._tokens if len(self._tokens) > 1 else []:
            marker: style.Look = {"marker": self._marker(tokens), "color": style.MUTED, "linestyle": ""}
            lines.append(Line2D([], [], label=f"{tokens:,} tokens", **marker))
        if self._data["floor_ratio"].notna().any():
            lines.append(Line2D([], [], label="estimate without shared rows", **FLOOR))
        if not _made_up(self._data).all():
            layer: style.Look = {"marker": "o", "color": style.MUTED, **OPEN}
            lines.append(Line2D([], [], label="pattern of a trained layer", **layer))
        if self._data["published"].any():
            lines.append(Line2D([], [], label="published kernels", **PUBLISHED))
        if self._data["wrong"].any():
            lines.append(Line2D([], [], label="published kernels, wrong result", **PUBLISHED | {"marker": "x"}))
        return lines


def _kind(data: pd.DataFrame) -> pd.Series:
    """The kinds with a colour of their own: a backend, with hot neurons (also sorted by firing rate) or a dense backup
    if these were requested."""
    hot = data["plan"].isin(schema.HOT_PLANS.values()).map({True: ", hot neurons dense", False: ""})
    ordered = data["plan"].isin(schema.ORDERED_PLANS.values()).map({True: ", sorted by firing rate", False: ""})
    backup = data["backup"].notna().map({True: ", dense backup", False: ""})
    return data["backend"] + hot + ordered + backup


def _left_out(ours: pd.DataFrame, panels: list[Panel]) -> str:
    """The measurements without a panel, as a sentence."""
    drawn = {index for panel in panels for index in panel.rows.index}
    rest = ours.loc[[index for index in ours.index if index not in drawn]]
    parts = [
        f"{OPS[op]}, {KINDS[bool(gated)]}, N = {int(n):,}, {int(tokens):,} tokens, "
        f"{significant(own['mean_nnz'].mean())} non-zeros: "
        + ", ".join(f"{line.ratio:.2f} ({line.kind})" for line in own.itertuples())
        for (op, gated, n, tokens), own in rest.assign(kind=_kind(rest)).groupby(
            ["op", "gated", "intermediate", "tokens"]
        )
    ]
    return f" Measured at one point only: {'; '.join(parts)}." if parts else ""


def _caption(data: pd.DataFrame, panels: list[Panel]) -> str:
    ours = data[~data["published"]]
    best = ours.loc[ours["ratio"].idxmax()]
    text = (
        f"On {device(best['device'])}, a sparse block is up to {best['ratio']:.2f} times as fast as the fastest dense "
        f"form of the same run ({best['series']}, {significant(best['mean_nnz'])} non-zeros, {best['tokens']:,} "
        "tokens). Above 1, the sparse plan is faster. In brackets: plans, see the table of kernels. Filled markers: "
        "synthetic patterns"
    )
    text += "." if _made_up(ours).all() else "; open markers: activation patterns of a trained model's layers."
    if len(set(ours["tokens"])) > 1:
        text += " In a panel over the tokens of a call, all markers are circles."
    if data["published"].any():
        text += (
            " Published kernels: the authors' public code, measured by us on an "
            f"{paper.PUBLISHED_KERNELS_ON}, relative to its dense form."
        )
    shares = (ours["ratio"] / ours["floor_ratio"]).dropna()
    if len(shares):
        text += (
            " Dotted line (a dash for one point): the speedup estimated from the machine's measured rates for kernels "
            f"in which every non-zero reads its weight rows again; the measured speedups are {_percents(shares)} of it."
        )
        if shares.max() > 1:
            text += " Speedups above 100% are possible because neighbouring tokens share rows in a nearer cache."
    return text + _left_out(ours, panels)


def _percents(shares: pd.Series) -> str:
    low, high = (f"{share * 100:.0f}" for share in (shares.min(), shares.max()))
    return f"{low}%" if low == high else f"{low} to {high}%"
