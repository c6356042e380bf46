"""Figure 1: the three sparse formats, packed from one small pattern.

Packing is plain numpy here, since analysis does not import the kernels.
Shape letters: M tokens, N neurons, T tile width, S slots of a tile, W width of the hybrid's ELL part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.typing import ColorType

from analysis.figures import style
from analysis.figures.drawn import Sketch, figure
from analysis.load import Results

M, K, N = 6, 8, 24
T, S, W = 8, 4, 5
TILE_COLOURS = (style.CATEGORIES[0], style.CATEGORIES[1], style.CATEGORIES[3])
PADDING = "#eceef1"
SMALL, NORMAL = 5.6, 7.5
WIDE, HIGH = 39.0, 31.4  # the drawing's size in cells


@figure(
    "1",
    "figure01_formats",
    "the sparse formats: ELL, TwELL and hybrid",
    "One pattern of non-zeros in three layouts. ELL pads every row to the longest. TwELL stores each tile's "
    "non-zeros in that tile's own slots, so that no tile waits for another. The hybrid stores short rows in a narrow "
    "ELL and longer rows in a dense backup.",
)
def format_diagram(results: Results) -> Sketch:
    h_MN = example()
    picture = Figure(figsize=(style.WIDTH, style.WIDTH * HIGH / WIDE))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDE), ylim=(HIGH, 0), aspect="equal")
    axes.set_axis_off()
    _draw_dense(axes, h_MN, 1.4, 2.6)
    _draw_ell(axes, h_MN, 27.2, 2.6)
    _draw_twell(axes, h_MN, 1.4, 13.4)
    _draw_word(axes, h_MN, 20.6, 13.4)
    _draw_hybrid(axes, h_MN, 1.4, 24.2)
    return Sketch(picture, _data(h_MN))


def example() -> np.ndarray:
    """Activations h = relu(x W - b) [M, N] of random tokens: one dense row, the others with 1 to W non-zeros."""
    generator = np.random.default_rng(395)
    x_MK, w_KN = generator.normal(size=(M, K)), generator.normal(size=(K, N))
    threshold_N = generator.gamma(2, 1.2, size=N) + 1.2
    scale_M1 = np.array([1, 1.2, 0.9, 2.2, 0.8, 1.0])[:, None]
    return np.maximum(scale_M1 * (x_MK @ w_KN) - threshold_N, 0)


def pack_ell(h_MN: np.ndarray) -> list[list[int]]:
    """Columns of each row's non-zeros, left-aligned (the padding to the longest row is drawn, not stored)."""
    return [np.flatnonzero(row).tolist() for row in h_MN]


def pack_twell(h_MN: np.ndarray) -> list[list[list[int]]]:
    """For each row and tile, the columns of the tile's non-zeros."""
    tiles = range(0, N, T)
    return [[(start + np.flatnonzero(row[start : start + T])).tolist() for start in tiles] for row in h_MN]


def pack_hybrid(h_MN: np.ndarray) -> tuple[list[int], list[int]]:
    """Rows that fit the ELL part, and rows that go to the dense backup."""
    counts = (h_MN > 0).sum(axis=1)
    return np.flatnonzero(counts <= W).tolist(), np.flatnonzero(counts > W).tolist()


def word(value: float, column: int) -> int:
    """The packed 32-bit word: bfloat16 (nearest, ties to even) in the high half, column in the low half."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & 0xFFFF0000) | column


def _cell(axes: Axes, x: float, y: float, fill: ColorType, text: str = "", width: float = 1) -> None:
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=fill, edgecolor="white", linewidth=0.8))
    if text:
        axes.text(x + width / 2, y + 0.53, text, ha="center", va="center", fontsize=SMALL, color=style.INK)


def _entry(axes: Axes, x: float, y: float, h_MN: np.ndarray, row: int, column: int) -> None:
    strength = 0.25 + 0.4 * h_MN[row, column] / h_MN.max()
    colour = np.array(to_rgb(TILE_COLOURS[column // T]))
    _cell(axes, x, y, tuple(1 - strength * (1 - colour)), str(column))


def _slots(axes: Axes, x: float, y: float, h_MN: np.ndarray, row: int, columns: list[int], slots: int) -> None:
    """A packed row: its entries, and padding in the slots that are left."""
    for slot in range(slots):
        if slot < len(columns):
            _entry(axes, x + slot, y, h_MN, row, columns[slot])
        else:
            _cell(axes, x + slot, y, PADDING)


def _note(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    look: dict[str, Any] = {"fontsize": SMALL, "color": style.MUTED, "va": "center"}
    axes.text(x, y, text, **look | options)


def _heading(axes: Axes, x: float, y: float, letter: str, name: str, text: str) -> None:
    axes.text(x, y - 1.5, f"({letter}) {name}", fontsize=NORMAL + 1, weight="bold", color=style.INK, va="bottom")
    _note(axes, x, y - 0.9, text, fontsize=6.2)


def _row_names(axes: Axes, x: float, y: float, names: list[str]) -> None:
    for row, name in enumerate(names):
        _note(axes, x - 0.25, y + row + 0.53, name, ha="right")


def _draw_dense(axes: Axes, h_MN: np.ndarray, x: float, y: float) -> None:
    _heading(axes, x, y, "a", "activations", f"{M} tokens, {N} neurons; shade: value, number: column")
    _row_names(axes, x, y, [f"t{row}" for row in range(M)])
    for row, column in np.ndindex(M, N):
        if h_MN[row, column] > 0:
            _entry(axes, x + column, y + row, h_MN, row, column)
        else:
            _cell(axes, x + column, y + row, "#f7f8f9")
    for tile, colour in enumerate(TILE_COLOURS):
        left = x + tile * T
        axes.plot([left + 0.1, left + T - 0.1], [y + M + 0.3] * 2, color=colour, linewidth=2, solid_capstyle="butt")
        _note(axes, left + T / 2, y + M + 0.95, f"tile {tile}", ha="center", color=style.INK)


def _draw_ell(axes: Axes, h_MN: np.ndarray, x: float, y: float) -> None:
    rows = pack_ell(h_MN)
    width = max(map(len, rows))
    _heading(axes, x, y, "b", "ELL", f"as wide as the longest row: {width}")
    for row, columns in enumerate(rows):
        _slots(axes, x, y + row, h_MN, row, columns, width)
    stored, used = M * width, sum(map(len, rows))
    _note(axes, x, y + M + 0.5, f"{stored} slots for {used} non-zeros")


def _draw_twell(axes: Axes, h_MN: np.ndarray, x: float, y: float) -> None:
    text = f"tiles of T = {T} columns with T/C = {S} slots each (C = {T // S}) and a count (#)"
    _heading(axes, x, y, "c", "TwELL", text)
    _row_names(axes, x, y, [f"t{row}" for row in range(M)])
    for row, tiles in enumerate(pack_twell(h_MN)):
        for tile, columns in enumerate(tiles):
            left = x + tile * (S + 1.8)
            _cell(axes, left, y + row, "white", str(len(columns)))
            _slots(axes, left + 1, y + row, h_MN, row, columns, S)
    for tile, colour in enumerate(TILE_COLOURS):
        left = x + tile * (S + 1.8)
        _note(axes, left + 0.5, y - 0.2, "#", ha="center")
        axes.plot([left + 1.1, left + S + 0.9], [y + M + 0.3] * 2, color=colour, linewidth=2, solid_capstyle="butt")
    _note(axes, x, y + M + 0.95, "Tiles are independent, so the matmul's epilogue can write their slots.")


def _draw_word(axes: Axes, h_MN: np.ndarray, x: float, y: float) -> None:
    row, column = 3, int(np.argmax(h_MN[3]))
    packed = word(h_MN[row, column], column)
    _heading(axes, x, y, "d", "one TwELL slot", "32 bits: the value and its column in one word")
    half = 8.4
    colour = np.array(to_rgb(TILE_COLOURS[column // T]))
    for number, (name, fill, bits) in enumerate(
        (
            ("bfloat16 value", tuple(1 - 0.55 * (1 - colour)), packed >> 16),
            ("uint16 column", tuple(1 - 0.2 * (1 - colour)), packed & 0xFFFF),
        )
    ):
        left = x + number * half
        axes.add_patch(Rectangle((left, y + 1), half, 1.6, facecolor=fill, edgecolor="white", linewidth=1.2))
        mono = {"color": None, "family": "DejaVu Sans Mono"}
        _note(axes, left + half / 2, y + 1.8, f"{bits:016b}", ha="center", fontsize=6.4, **mono)
        _note(axes, left + half / 2, y + 0.55, name, ha="center", fontsize=SMALL + 0.6, color=style.INK)
    for place, bit, align in ((x, "31", "left"), (x + half, "16", "center"), (x + 2 * half, "0", "right")):
        _note(axes, place, y + 3.05, bit, ha=align)
    value = np.uint32(packed & 0xFFFF0000).view(np.float32)
    text = f"token t{row}: value {value:g} in column {column} is 0x{packed:08X}"
    _note(axes, x, y + 4.3, text, fontsize=6.2, color=style.INK)


def _draw_hybrid(axes: Axes, h_MN: np.ndarray, x: float, y: float) -> None:
    sparse, dense = pack_hybrid(h_MN)
    text = f"rows with at most W = {W} non-zeros go to a narrow ELL, longer rows to a dense backup"
    _heading(axes, x, y, "e", "hybrid (training)", text)
    _row_names(axes, x, y, [f"t{row}" for row in range(M)])
    for row in range(M):
        backup = row in dense
        place = f"{dense.index(row)}" if backup else "−1"
        _cell(axes, x, y + row, "#d9cfe6" if backup else PADDING, place, width=1.5)
    _note(axes, x + 0.75, y + M + 0.5, "row map", ha="center")
    left = x + 3.2
    for row in range(M):
        columns = np.flatnonzero(h_MN[row]).tolist() if row in sparse else []
        _slots(axes, left, y + row, h_MN, row, columns, W)
    _note(axes, left + W / 2, y + M + 0.5, "ELL part (row map −1)", ha="center")
    left += W + 3.4
    _row_names(axes, left, y, ["0", "1"])
    for line, token in enumerate([*dense, None]):
        for column in range(N):
            if token is not None and h_MN[token, column] > 0:
                _entry(axes, left + column, y + line, h_MN, token, column)
            else:
                _cell(axes, left + column, y + line, PADDING if token is None else "#f7f8f9")
    _note(axes, left, y + 2.6, "dense backup: row 0 holds t3, row 1 is free")


def _data(h_MN: np.ndarray) -> pd.DataFrame:
    rows, columns = np.nonzero(h_MN)
    sparse, _ = pack_hybrid(h_MN)
    return pd.DataFrame(
        {
            "token": rows,
            "column": columns,
            "value": h_MN[rows, columns],
            "tile": columns // T,
            "word": [f"0x{word(h_MN[r, c], int(c)):08X}" for r, c in zip(rows, columns, strict=True)],
            "hybrid_part": ["ell" if r in sparse else "backup" for r in rows],
        }
    )
