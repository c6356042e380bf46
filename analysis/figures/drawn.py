"""The return value of a figure function: a figure, or a sentence on the data that it lacks."""

from __future__ import annotations

import base64
import functools
import html
import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from PIL import Image

from analysis import paper
from analysis.figures import style
from analysis.load import DATA_ERRORS, Results, not_made

# fontTools logs every step of embedding a font at level INFO.
logging.getLogger("fontTools").setLevel(logging.WARNING)

DPI = 180
REPRODUCE = "make reproduce"


class NotMeasured(Exception):
    """The rows that a figure needs do not exist. Holds what is missing and the command that would measure it; `command`
    is empty if no command on this machine would."""

    def __init__(self, what: str, command: str = REPRODUCE):
        super().__init__(what)
        self.what, self.command = what, command


@dataclass(frozen=True)
class Sketch:
    """The result of a drawing function: the figure, the plotted data, one line about the runs behind it, and what is
    missing. `is_broken`: of data that exist, and that it cannot draw."""

    figure: Figure
    data: pd.DataFrame
    note: str = ""
    lacks: str = ""
    is_broken: bool = False


@dataclass(frozen=True)
class Drawn:
    """A finished figure. `missing` is empty if everything that the paper's figure shows has been measured; `source`
    names the results from which it was drawn."""

    number: str
    name: str
    title: str
    caption: str
    figure: Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)
    missing: str = ""
    source: str = ""
    is_broken: bool = False

    @property
    def is_placeholder(self) -> bool:
        return self.data.empty

    @property
    def label(self) -> str:
        return f"Figure {self.number}"

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as PNG of 256 colours, a third of the size of one with all, without dates or versions: the same
        data give the same bytes."""
        self.figure.set_dpi(DPI)
        canvas = FigureCanvasAgg(self.figure)
        with style.applied():
            canvas.draw()
        drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        buffer = io.BytesIO()
        drawn.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        return buffer.getvalue()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels. With them a browser can lay out a page before it loads the pictures, so that
        links land in the right place."""
        return Image.open(io.BytesIO(self.png)).size

    @property
    def published(self) -> str:
        """What the paper says of this figure; empty for one of ours."""
        return paper.facts(int(self.number)) if self.number.isdigit() else ""

    def pdf(self) -> bytes:
        """The figure as PDF with embedded fonts, without dates."""
        metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        buffer = io.BytesIO()
        with style.applied():
            FigureCanvasPdf(self.figure).print_pdf(buffer, metadata=metadata)
        return buffer.getvalue()

    def save(self, folder: Path) -> None:
        """Write <name>.png, .pdf and .csv (the plotted data) into `folder`."""
        (folder / f"{self.name}.png").write_bytes(self.png)
        (folder / f"{self.name}.pdf").write_bytes(self.pdf())
        self.data.to_csv(folder / f"{self.name}.csv", index=False, lineterminator="\n", float_format="%.7g")

    def _repr_html_(self) -> str:
        """For notebooks: the picture with its caption; of a placeholder the caption."""
        label = f"{self.label} ({self.source})" if self.source else self.label
        if self.is_placeholder:
            return f"<p><b>{html.escape(label)}.</b> {html.escape(self.caption)}</p>"
        image = base64.b64encode(self.png).decode("ascii")
        return (
            f'<figure style="margin:0"><img src="data:image/png;base64,{image}" alt="{html.escape(self.title)}" '
            f'style="max-width:100%;width:860px"><figcaption><b>{html.escape(label)}.</b> {html.escape(self.caption)}'
            "</figcaption></figure>"
        )


class FigureOf:
    """A figure before it is drawn. Calling it with `Results` returns `Drawn`, drawn in the common style from the first
    source that has the data; if none has, a placeholder: an empty figure, without data, whose caption says what is
    missing."""

    def __init__(self, number: str, name: str, title: str, caption: str, draw: Callable[[Results], Sketch]):
        self.number, self.name, self.title, self.caption, self._draw = number, name, title, caption, draw
        functools.update_wrapper(self, draw)

    def __call__(self, results: Results) -> Drawn:
        with style.applied():
            sketch, source = self._first_that_can(results.sources or (results,))
        caption = self.caption if len(sketch.data) else ""
        caption = f"{caption} {sketch.note}".strip()
        made = self.number, self.name, self.title, caption, sketch.figure, sketch.data
        return Drawn(*made, sketch.lacks, source, sketch.is_broken)

    def _first_that_can(self, sources: Sequence[Results]) -> tuple[Sketch, str]:
        """The drawing from the first source that has the data, laid out, and that source's name."""
        absent: list[NotMeasured] = []
        broken: list[NotMeasured] = []
        for source in sources:
            try:
                sketch = self._draw(source)
                lay_out(sketch.figure)
                return sketch, source.name
            except NotMeasured as missing:
                absent.append(missing)
            except DATA_ERRORS as error:
                reason = not_made(f"figure {self.number}", error)
                broken.append(NotMeasured(f"rows from which it can be drawn ({reason})", ""))
        cause, source_name = (broken or absent)[0], sources[0].name if len(sources) == 1 else ""
        made_by = f" Made by: {cause.command}" if cause.command else ""
        note = f"Not measured yet. Missing: {cause.what}.{made_by}"
        return Sketch(Figure(), pd.DataFrame(), note, cause.what, bool(broken)), source_name


def figure(number: str, name: str, title: str, caption: str = "") -> Callable[[Callable[[Results], Sketch]], FigureOf]:
    """Decorator that turns a drawing function into a `FigureOf`. `caption`: what the figure shows and how to read it;
    with the note of its `Sketch` at most 60 words."""
    return functools.partial(FigureOf, number, name, title, caption)


def lay_out(picture: Figure) -> None:
    """Lay out the panels once and freeze them: running the layout engine again for the second file would shift them."""
    picture.set_dpi(DPI)
    FigureCanvasAgg(picture)
    picture.draw_without_rendering()
    picture.set_layout_engine("none")
