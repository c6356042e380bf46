"""The common style of all figures: sizes, fonts, colours that work in greyscale and for colour-blind readers, axes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.typing import RcKeyType

from analysis import schema
from analysis.choose import l1_label
from analysis.render import signed

Value = TypeVar("Value", bound=Hashable)


Look = dict[str, Any]  # keyword arguments of a line with markers, for `Axes.plot`, `Axes.errorbar` and `Line2D`
WIDTH = 6.9  # inches: the text width of the paper
SMALL = 6.5  # points: labels of single points
INK, MUTED, GRID = "#1b1b1b", "#5f6368", "#dfe1e5"
PAPER = "#000000"  # published numbers: always black, open or dashed
# Okabe and Ito's colours, ordered so that neighbours also differ in lightness (L* 46, 71, 30, 58, 83).
CATEGORIES: tuple[str, ...] = ("#0072b2", "#e69f00", "#5b2a86", "#009e73", "#9bd3f5")
OPEN: Look = {"linestyle": "", "markerfacecolor": "none"}  # points without a line, not filled
PAPER_POINTS: Look = {"linestyle": "", "marker": "*", "markersize": 9, "markerfacecolor": "white", "color": PAPER}
MARKERS = ("o", "s", "D", "^", "v")
# Ways to compute a block, by their word in `schema.WORDS`. Two that no figure shows together share a look.
BLOCKS = {"every neuron sparse": 0, "hot": 1, "sorted": 2, "backup": 3, "sorted, pruned": 3, "dense, pruned": 4}
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (8, 2)))

RC: dict[RcKeyType, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.fontsize": 7.5,
    "legend.title_fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "pdf.fonttype": 42,
    "svg.hashsalt": "analysis",
    "text.parse_math": False,  # tokens may hold dollar signs
}


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Apply the style to figures that are made and saved inside the block."""
    with sns.axes_style("whitegrid"), mpl.rc_context(RC):
        yield


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure of text width and `height` inches with a grid of axes; options go to `Figure.subplots`."""
    figure = _empty(height)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def mosaic(shape: list[str], height: float) -> tuple[Figure, dict[str, Axes]]:
    """The same as `panels`, with one panel for each letter of `shape` and rows of `height` inches."""
    figure = _empty(height * len(shape))
    return figure, figure.subplot_mosaic([list(row) for row in shape])


def _empty(height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.05, wspace=0.04, hspace=0.05)
    return Figure(figsize=(WIDTH, height), layout=layout)


def sequence(count: int) -> list[str]:
    """`count` colours for ordered values such as L1, from dark to light: lightness rises evenly, also in greyscale."""
    positions = np.linspace(0.0, 0.88, count) if count > 1 else [0.3]
    colours = sns.color_palette("viridis", as_cmap=True)
    return [to_hex(colours(position)) for position in positions]


def in_order(values: Sequence[Value]) -> dict[Value, Look]:
    """A colour of `sequence` for each value."""
    return {value: {"color": colour} for value, colour in zip(values, sequence(len(values)), strict=True)}


def category(index: int) -> Look:
    """Colour, marker and dash of the index-th category, as keywords for `Axes.plot`."""
    round_, at = divmod(index, len(CATEGORIES))
    other = (at + round_) % len(CATEGORIES)  # a repeated colour gets another marker and dash
    return {"color": CATEGORIES[at], "marker": MARKERS[other], "linestyle": DASHES[other]}


def of_plan(plan: str) -> Look:
    """The look of a sparse plan, the same in every figure. Hot neurons by index are about as fast as sorted ones: a
    wide line and large markers behind theirs."""
    look = category(BLOCKS[schema.WORDS[plan].removesuffix(", backup")]) | {"markersize": 3.5}
    wide = {"linewidth": 4.5, "linestyle": "-", "markersize": 6, "zorder": 1.9}
    return look | wide if plan in schema.HOT_PLANS.values() else look


def of_backend(backend: str) -> Look:
    """What the look of a line becomes: dashed and with open points, unless the kernels are those for Hopper."""
    return {} if backend == "hopper" else {"linestyle": DASHES[1], "markerfacecolor": "white"}


def for_text(colour: str) -> str:
    """A colour dark enough for small text."""
    red, green, blue = to_rgb(colour)
    return to_hex((0.6 * red, 0.6 * green, 0.6 * blue))


def line_with_spread(
    axes: Axes, x: pd.Series, y: pd.Series, low: pd.Series, high: pd.Series, *, label: str, **look: Any
) -> None:
    """A line with an error bar from `low` to `high` at every point that has both."""
    ends = [(y - low).fillna(0).clip(lower=0), (high - y).fillna(0).clip(lower=0)]
    axes.errorbar(x, y, yerr=ends, capsize=2, elinewidth=0.8, label=label, **look)


def l1_axis(axes: Axes, values: Iterable[float]) -> dict[float, int]:
    """Give the x axis one evenly spaced tick for each L1 value (a log axis has no 0); returns value -> position."""
    values = sorted(set(values))
    labels = [l1_label(value) for value in values]
    axes.set_xticks(range(len(values)), labels)
    if len(values) > 5:
        slant_labels(axes.xaxis)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.set_xlabel("L1 coefficient")
    axes.grid(visible=False, axis="x")
    return {value: position for position, value in enumerate(values)}


def slant_labels(axis: Axis) -> None:
    """Slant the tick labels of an x axis. Call it after setting the ticks."""
    for label in axis.get_ticklabels():
        label.set(rotation=40, ha="right", rotation_mode="anchor")


def layer_axis(axes: Axes, count: int) -> None:
    """Integer layers on the x axis, with at most eight labels."""
    step = max(1, -(-count // 8))
    axes.set_xticks(range(0, count, step))
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_xlabel("layer")
    axes.grid(visible=False, axis="x")


def percent_axis(axis: Axis) -> None:
    """Format an axis as signed percentages with a true minus sign. Call it after plotting."""
    ticks = axis.get_major_locator()()
    digits = next((n for n in range(3) if np.allclose(np.round(ticks, n), ticks, atol=1e-6)), 3)
    axis.set_major_formatter(FuncFormatter(lambda value, _: signed(value, digits)))


HALO = [withStroke(linewidth=2, foreground="white")]  # keeps small labels readable on lines


def log_axis(axis: Axis) -> None:
    """Make `axis` logarithmic with plain numbers, the more of them the less it spans. Call it after plotting. It stays
    linear if no value is above 0."""
    if not math.isfinite(axis.get_minpos()):
        return
    scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
    scale("log")
    low, high = axis.get_view_interval()
    span, has_room = high / low, not isinstance(axis, XAxis)  # for three labels in each of three decades
    if span < 3:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    elif span < 8:
        axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
    elif span < 30:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < (1500 if has_room else 150) else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def reference_line(axes: Axes, value: float, text: str = "") -> None:
    """A dashed horizontal line, with a label at its left end if there is a text."""
    axes.axhline(value, color=PAPER, linestyle=(0, (4, 3)), linewidth=0.9)
    if not text:
        return
    axes.annotate(
        text, (0.01, value), xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points",
        va="bottom", fontsize=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
    )  # fmt: skip


def place_labels(axes: Axes, x: pd.Series, y: pd.Series, texts: Sequence[str], colours: Iterable[str]) -> None:
    """Label points, each in its colour, so that labels lie inside the axes, near their points and, where there is room,
    on no point, line, error bar or other label. Call it after everything else is drawn, with the scales and the legend
    as they stay."""
    picture = cast(Figure, axes.figure)
    picture.draw_without_rendering()  # lays the panels out
    point = 72 / picture.dpi
    known = [
        (*at, text, colour)
        for *at, text, colour in zip(x, y, texts, colours, strict=True)
        if not any(map(math.isnan, at))
    ]
    centres = axes.transData.transform([at[:2] for at in known]).reshape(-1, 2) * point
    frame = tuple(np.asarray(axes.get_window_extent().extents) * point)
    radius = RC["lines.markersize"] / 2 + 1
    taken = [(2, (*(centre - radius), *(centre + radius))) for centre in centres]  # weight, box
    for part in axes.collections:
        if isinstance(part, PathCollection):
            offsets = axes.transData.transform(part.get_offsets()) * point
            taken += [(2, (*(centre - radius), *(centre + radius))) for centre in offsets]
        for ends in part.get_segments() if isinstance(part, LineCollection) else ():
            (left, low), (right, high) = axes.transData.transform(ends) * point
            taken.append((1, (left - 1, low, right + 1, high)))
    for line in axes.lines:
        if line.get_linestyle() != "None":
            path = line.get_transform().transform_path(line.get_path()).interpolated(40)
            taken += [(2, (*(at - 1.5), *(at + 1.5))) for at in np.asarray(path.vertices) * point]
    for (at_x, at_y, text, colour), centre in zip(known, centres, strict=True):
        width, height = np.asarray(TextPath((0, 0), text, size=SMALL).get_extents().size) + 2
        reach = np.array([width / 2 + radius, height / 2 + radius])
        boxes = []
        for shift in _AROUND * reach:
            (middle_x, middle_y), half = centre + shift, (width / 2, height / 2)
            box = (middle_x - half[0], middle_y - half[1], middle_x + half[0], middle_y + half[1])
            outside = width * height - _overlap(box, frame)
            cost = 9 * outside + sum(weight * _overlap(box, other) for weight, other in taken) + np.hypot(*shift)
            boxes.append((round(cost), box, shift))
        _, box, shift = min(boxes, key=lambda candidate: candidate[0])
        taken.append((9, box))
        axes.annotate(
            text, (at_x, at_y), xytext=shift, textcoords="offset points", fontsize=SMALL, ha="center",
            va="center_baseline", color=for_text(colour), path_effects=HALO,
        )  # fmt: skip


# Where a label may stand beside its point, in order of preference.
_AROUND = np.array(
    [
        *((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.9), (-0.8, 0.9), (-0.8, -0.9), (0.8, -0.9)),
        *((0, 2), (0, -2), (1, 1.5), (-1, 1.5), (-1, -1.5), (1, -1.5), (0, 3), (0, -3)),
    ]
)


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """The area that two boxes (left, low, right, high) share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0) * max(height, 0)


def room_for_labels(axes: Axes) -> None:
    """Widen a logarithmic x axis so that its first and last tick labels stay inside."""
    low, high = axes.get_xlim()
    margin = (high / low) ** 0.05
    axes.set_xlim(low / margin, high * margin)


def legend_of_panels(picture: Figure, grid: np.ndarray, panels: int, handles: Sequence[Artist]) -> None:
    """The legend of this many panels: in the last place of their grid where that is free, else under all of them."""
    if panels < grid.size:
        grid[-1][-1].set_axis_off()
        grid[-1][-1].legend(handles=handles, loc="center left", alignment="left")
    else:
        picture.legend(handles=handles, loc="outside lower center", ncols=min(3, -(-len(handles) // 2)))


def legend_below(axes: Axes) -> None:
    """The legend in one row under the axes."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, borderaxespad=0)
