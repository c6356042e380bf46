"""The return values of explorer functions: a Vega-Lite chart, or a sentence about what is missing."""

from __future__ import annotations

import base64
import functools
import html
import io
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
import pandas as pd
import vl_convert
from PIL import Image

from analysis.explorer.runs import gathered, layer_name
from analysis.figures.drawn import NotMeasured
from analysis.figures.style import GRID, INK, MUTED
from analysis.load import Results

# The version that JupyterLab draws without an extension. Altair's is newer; everything used here is in both.
VEGA_LITE = "5.21"
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
MIME = "application/vnd.vegalite.v5+json"
# The layout fits the width of a notebook's output and of the page.
WIDTH = 800  # pixels
CAPTION_CHARACTERS = 132  # in one line of that width
SANS, MONO = "DejaVu Sans, Verdana, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
CONFIG = {
    "font": SANS,
    "background": "white",
    "axis": {"labelColor": INK, "titleColor": INK, "gridColor": GRID, "domainColor": MUTED, "tickColor": MUTED,
             "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelLimit": 200},
    "header": {"labelFontSize": 11, "titleFontSize": 11},
    "legend": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "labelLimit": 320},
    "title": {"anchor": "start", "fontSize": 13, "color": INK, "subtitleColor": MUTED, "subtitleFontSize": 11,
              "subtitlePadding": 6, "offset": 12},
    "view": {"stroke": None},
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """A finished chart. `name` is its anchor on the page; `specification` is plain Vega-Lite, data included."""

    name: str
    title: str
    caption: str
    specification: Mapping[str, Any]

    @functools.cached_property
    def png(self) -> bytes:
        """A picture of its initial state, in 256 colours, which need a third of the bytes."""
        picture = vl_convert.vegalite_to_png(dict(self.specification), vl_version=VEGA_LITE, scale=1.25)
        buffer = io.BytesIO()
        Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(buffer, "png", optimize=True)
        return buffer.getvalue()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        """For notebooks: interactive where the viewer supports it, the picture elsewhere."""
        return {
            MIME: self.specification,
            "image/png": base64.b64encode(self.png).decode("ascii"),
            "text/plain": f"{self.title}. {self.caption}",
        }


@dataclass(frozen=True)
class Absent:
    """Stands for a chart or table without data: what is missing, and the command that would gather it."""

    name: str
    title: str
    missing: str
    command: str = ""

    @property
    def sentence(self) -> str:
        return f"Not measured here. Missing: {self.missing}.{f' Made by: {self.command}' if self.command else ''}"

    def _repr_html_(self) -> str:
        return f"<p><em>{html.escape(self.title)}</em>: {html.escape(self.sentence)}</p>"

    def __repr__(self) -> str:
        return f"{self.title}: {self.sentence}"


@dataclass(frozen=True)
class Sketch:
    """The result of a drawing function: an Altair chart, its caption, and the expressions of the parameters that its
    title names."""

    chart: Any
    caption: str
    selected: Sequence[str] = ("run", "layer")


class View:
    """A chart before it is drawn, or a table before it is made. Calling it with `Results` returns a `Chart` or a
    frame, or `Absent` if there are no data."""

    def __init__(self, name: str, title: str, tables: Sequence[str], draw: Callable[..., Any]):
        self.name, self.title, self._tables, self._draw = name, title, tables, draw
        functools.update_wrapper(self, draw)

    def __call__(self, results: Results) -> Any:
        try:
            sketch = self._draw(results, gathered(results, *self._tables))
        except NotMeasured as absent:
            return Absent(self.name, self.title, absent.what, absent.command)
        if isinstance(sketch, pd.DataFrame):
            return sketch
        chosen = " + ', ' + ".join(sketch.selected)
        specification = sketch.chart.to_dict(validate=False) | {
            "$schema": SCHEMA,
            "config": CONFIG,
            "title": {
                "text": {"expr": f"{json.dumps(f'{self.title}: ')} + {chosen}"} if chosen else self.title,
                "subtitle": textwrap.wrap(sketch.caption, CAPTION_CHARACTERS),
            },
            "description": f"{self.title}. {sketch.caption}",
        }
        return Chart(self.name, self.title, sketch.caption, specification)


def view(name: str, title: str, *tables: str) -> Callable[[Callable[..., Any]], View]:
    """Decorator that turns a function of the results, and of the runs that are in all of these tables, into a `View`.
    The function returns a `Sketch` or a frame."""
    return functools.partial(View, name, title, tables)


def choice(name: str, options: Iterable[str], initial: str | None = None, label: str | None = None) -> Any:
    """A parameter with a drop-down list."""
    options = list(options)
    bound = alt.binding_select(options=options, name=f"{label or name} ")
    return alt.param(name=name, bind=bound, value=options[0] if initial is None else initial)


def layer_choice(layers: Iterable[int], own: Iterable[int], *others: str) -> Any:
    """The parameter `layer`: `others`, then `layers`. First the middle one of `own`, the layers of the run shown first:
    the outer ones are often unlike the rest."""
    own = sorted(set(own))
    names = [layer_name(layer) for layer in sorted(set(layers))]
    return choice("layer", [*others, *names], layer_name(own[len(own) // 2]))


def search_box(label: str) -> Any:
    """The parameter `find`, with a text field."""
    return alt.param(name="find", bind=alt.binding(input="text", name=f"{label} ", placeholder="any"), value="")


def zoom(name: str, *encodings: Literal["x", "y"]) -> Any:
    """Zoom with the mouse wheel, drag to pan, double-click to reset."""
    return alt.selection_interval(name=name, bind="scales", encodings=list(encodings or ("x", "y")))


def records(frame: pd.DataFrame) -> Any:
    """Inline data: fractions with three significant digits, missing ones as null, integers and lists unchanged."""
    columns = [[_plain(value) for value in frame[name]] for name in frame.columns]
    values = [dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True)]
    return _inline(values)


def nested(frame: pd.DataFrame, *keys: str) -> Any:
    """Inline data with one record for each value of `keys` and the other columns as lists, which is far smaller than
    `records`. A chart filters by the keys and then flattens the lists."""
    others = [name for name in frame.columns if name not in keys]
    rows = []
    for values, group in frame.groupby(list(keys), sort=False):
        lists = {name: [_plain(value) for value in group[name]] for name in others}
        rows.append(dict(zip(keys, values, strict=True)) | lists)
    return _inline(rows)


def _inline(rows: list[dict[str, Any]]) -> Any:
    # As text: notebooks are indented JSON, which would put every number on a line of its own.
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return alt.InlineData(values=text, format=alt.JsonDataFormat(type="json"))


def short(value: float) -> float | int:
    """A number with the three significant digits that charts use; an integer as it is."""
    number = float(value) if float(value).is_integer() else float(f"{value:.3g}")
    return int(number) if number.is_integer() else number


def _plain(value: Any) -> Any:
    if isinstance(value, (str, list, dict, bool)):
        return value
    return None if pd.isna(value) else short(value)


@functools.cache
def script() -> str:
    """The JavaScript that draws charts in a page: Vega, Vega-Lite and Vega-Embed, as one script without a network."""
    text = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    assert "</script" not in text, "the bundle contains the end tag of the element that holds it"
    return text
