"""Notebooks as HTML pages whose charts stay interactive."""

from __future__ import annotations

import json
from typing import Any

from analysis.explorer.chart import MIME, script

OPTIONS = {"actions": False}


def interactive(notebook: Any, resources: Any) -> tuple[Any, Any]:
    """A preprocessor of nbconvert's HTML exporter, which has no renderer of Vega charts and would show their pictures.
    Charts become elements that Vega fills; Vega is part of the page, so search and zoom need no network."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    charts = [output.data for output in outputs if MIME in output.get("data", {})]
    for number, data in enumerate(charts):
        bundle = f"<script>{script()}</script>" if number == 0 else ""
        # No token of the text may end the element.
        call = f'vegaEmbed("#chart-{number}", {json.dumps(data[MIME])}, {json.dumps(OPTIONS)})'.replace("</", "<\\/")
        data["text/html"] = f'{bundle}<div id="chart-{number}"></div><script>{call}</script>'
    return notebook, resources
