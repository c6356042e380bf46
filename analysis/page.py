"""Everything on one HTML page that needs no other file and no network (template: page.html.j2)."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from analysis import choose, claims, describe, explorer, render
from analysis.catalogue import Table
from analysis.claims import Claim
from analysis.claims.evidence import INCONSISTENT, SHORT, UNTESTED
from analysis.figures import Drawn
from analysis.load import Results
from analysis.tables import COMMON

HERE = Path(__file__).parent
INTRODUCTION = (
    "Every table and figure of “Sparser, Faster, Lighter Transformer Language Models” (arXiv:2603.23198), made from "
    "our own measurements, beside the published numbers."
)


def common(results: Results) -> list[str]:
    """What holds for all tables and figures: the sentences at the top of a page."""
    trainings = choose.trainings(results.rows)
    return [*COMMON, *describe.by_model(trainings), *filter(None, [describe.dead_and_silent(results.rows)])]


def html_page(
    results: Results, tables: Sequence[Table], figures: Sequence[Sequence[Drawn]], checked: Sequence[Claim]
) -> str:
    """The page as text. Only the explorer and the search need JavaScript. That of one study has only what the study
    measured.

    figures: for each figure, the drawings from all sources, placeholders included.
    checked: all claims.
    """
    if not results.sources:
        figures = [of for of in figures if of[0].is_broken or not of[0].is_placeholder]
        checked = [claim for claim in checked if claim.verdict not in (INCONSISTENT, SHORT, UNTESTED)]
    charts = [view for view in (draw(results) for draw in explorer.CHARTS) if isinstance(view, explorer.Chart)]
    data = json.dumps({chart.name: chart.specification for chart in charts}, ensure_ascii=False)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"cells": _cells, "base64": lambda data: base64.b64encode(data).decode("ascii")}
    return environment.get_template("page.html.j2").render(
        title=f"Sparse feed-forward blocks: {results.name}",
        introduction=INTRODUCTION,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        common=common(results),
        tally=claims.tally(checked),
        claims=checked,
        tables=tables,
        figures=figures,
        charts=charts,
        chart_data=data.replace("<", "\\u003c"),  # "<" could end the script element
        chart_script=explorer.script() if charts else "",
        notes=results.notes,
    )


def _cells(frame: pd.DataFrame, label: str) -> dict[str, Any]:
    """What the template's macro `table` needs: columns and cells with their CSS classes, and notes."""
    texts = render.texts(frame)
    kinds = ["number" if render.is_numeric(frame, heading) else "text" for heading in texts.columns]
    kinds = ["device" if heading == "device" else kind for heading, kind in zip(texts, kinds, strict=True)]
    sources = frame["source"] if "source" in frame else [""] * len(frame)
    rows = texts.itertuples(index=False, name=None)
    return {
        "label": label,
        "columns": list(zip(texts.columns, kinds, strict=True)),
        "rows": [(source, list(zip(row, kinds, strict=True))) for source, row in zip(sources, rows, strict=True)],
        "notes": render.notes(frame),
    }
