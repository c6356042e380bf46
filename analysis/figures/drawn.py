"""What a figure function returns, and how a figure without data is drawn: as a placeholder that says so."""

from __future__ import annotations

import base64
import functools
import html
import io
import logging
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure

from analysis import guard
from analysis.figures import style
from analysis.load import Results

# Embedding a font tells its whole story at level INFO.
logging.getLogger("fontTools").setLevel(logging.WARNING)

DPI = 180
REPRODUCE = "make reproduce"


class NotMeasured(Exception):
    """The rows that a figure needs do not exist. Carries what is missing and the command that makes it; `command` is
    empty where no command on the same machine would."""

    def __init__(self, what: str, command: str = REPRODUCE):
        super().__init__(what)
        self.what, self.command = what, command


@dataclass(frozen=True)
class Sketch:
    """What a drawing function hands over: the figure, the data drawn, what to see in it, and what it lacks."""

    figure: Figure
    data: pd.DataFrame
    caption: str
    lacks: str = ""


@dataclass(frozen=True)
class Drawn:
    """A finished figure. `missing` is empty where everything that the paper's figure shows has been measured; `source`
    names the results that it was drawn from."""

    number: str
    name: str
    title: str
    caption: str
    figure: Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)
    missing: str = ""
    source: str = ""

    @property
    def is_placeholder(self) -> bool:
        return self.data.empty

    @property
    def label(self) -> str:
        return f"Figure {self.number}" if self.number else self.title

    @functools.cached_property
    def png(self) -> bytes:
        """The figure as PNG, the same bytes for the same data: no dates, no version."""
        self.figure.set_dpi(DPI)
        return self._print(FigureCanvasAgg(self.figure).print_png, metadata={"Software": None})

    def pdf(self) -> bytes:
        """The figure as PDF with embedded fonts, without dates."""
        metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        return self._print(FigureCanvasPdf(self.figure).print_pdf, metadata=metadata)

    def _print(self, write: Callable[..., None], **options: object) -> bytes:
        buffer = io.BytesIO()
        with style.applied():
            write(buffer, **options)
        return buffer.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Write <name>.png, .pdf and .csv (the data drawn) into `folder`."""
        paths = [folder / f"{self.name}.{ending}" for ending in ("png", "pdf", "csv")]
        paths[0].write_bytes(self.png)
        paths[1].write_bytes(self.pdf())
        self.data.to_csv(paths[2], index=False, lineterminator="\n", float_format="%.7g")
        return paths

    def _repr_html_(self) -> str:
        """In a notebook: the picture with its caption."""
        image = base64.b64encode(self.png).decode("ascii")
        label = f"{self.label} ({self.source})" if self.source else self.label
        return (
            f'<figure style="margin:0"><img src="data:image/png;base64,{image}" alt="{html.escape(self.title)}" '
            f'style="max-width:100%;width:860px"><figcaption><b>{html.escape(label)}.</b> {html.escape(self.caption)}'
            "</figcaption></figure>"
        )


class FigureOf:
    """A figure before it is drawn. Called with `Results`, it returns `Drawn`: in the style, from the first source that
    has what the figure shows, and a placeholder where none has."""

    def __init__(self, number: str, name: str, title: str, draw: Callable[[Results], Sketch]):
        self.number, self.name, self.title, self._draw = number, name, title, draw
        functools.update_wrapper(self, draw)

    def __call__(self, results: Results) -> Drawn:
        with style.applied():
            sketch, source = self._first_that_can(results.sources or (results,))
        return Drawn(
            self.number, self.name, self.title, sketch.caption, sketch.figure, sketch.data, sketch.lacks, source
        )

    def _first_that_can(self, sources: Sequence[Results]) -> tuple[Sketch, str]:
        """The drawing of the first source that allows it, laid out, and the source's name."""
        absent: list[NotMeasured] = []
        for source in sources:
            try:
                sketch = self._draw(source)
                lay_out(sketch.figure)
                return sketch, source.name
            except NotMeasured as missing:
                absent.append(missing)
            except guard.DATA_ERRORS as error:
                reason = guard.report(f"figure {self.number}", error)
                absent.append(NotMeasured(f"rows that it can be drawn from ({reason})", ""))
        placeholder = _placeholder(self.number, self.title, absent[0])
        lay_out(placeholder.figure)
        return placeholder, sources[0].name if len(sources) == 1 else ""


def figure(number: str, name: str, title: str) -> Callable[[Callable[[Results], Sketch]], FigureOf]:
    """Decorator that makes a drawing function into a `FigureOf`."""
    return functools.partial(FigureOf, number, name, title)


def lay_out(picture: Figure) -> None:
    """Arrange the panels once and for all: the layout engine, run again for a second file, would move them a little."""
    picture.set_dpi(DPI)
    FigureCanvasAgg(picture)
    picture.draw_without_rendering()
    picture.set_layout_engine("none")


def _placeholder(number: str, title: str, absent: NotMeasured) -> Sketch:
    picture, axes = style.panels(1, 1, 1.5)
    axes = axes[0, 0]
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_linestyle((0, (4, 3)))
    text = textwrap.fill(f"Missing: {absent.what}", 96)
    at = {"ha": "center", "va": "center", "transform": axes.transAxes}
    heading = textwrap.fill(f"Figure {number}: {title}: not measured yet", 84)
    axes.text(0.5, 0.76, heading, fontsize=9, weight="bold", color=style.INK, **at)
    axes.text(0.5, 0.46, text, fontsize=8, color=style.MUTED, **at)
    axes.text(0.5, 0.18, absent.command, fontsize=8, family="DejaVu Sans Mono", color=style.INK, **at)
    made_by = f" Made by: {absent.command}" if absent.command else ""
    caption = f"Not measured yet. Missing: {absent.what}.{made_by}"
    return Sketch(picture, pd.DataFrame(), caption, absent.what)
