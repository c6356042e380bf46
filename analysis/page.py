"""One page with everything: as a single HTML file that reads offline, and as Markdown beside the pictures."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import explorer, paper, render
from analysis.figures import Drawn
from analysis.floors import ceilings
from analysis.load import Results
from analysis.summary import kernels, layers, summary
from analysis.tables import Spec

HERE = Path(__file__).parent
Tables = Sequence[tuple[Spec, pd.DataFrame]]
INTRODUCTION = (
    "Every table and figure of “Sparser, Faster, Lighter Transformer Language Models” (arXiv:2603.23198), made from "
    "our own measurements and set beside the published numbers. What has not been measured says so."
)
SUMMARY_CAPTION = (
    "Our trainings: held-out cross-entropy and its change against the ReLU model without L1, active and dead neurons, "
    "and the throughput of the fastest sparse plan over the fastest dense backend (above 1: sparse is faster)."
)
KERNELS_CAPTION = (
    "Not in the paper: time of one call on synthetic patterns (30% dead neurons, log-normal firing rates, heavy-tailed "
    "tokens) against the fastest dense backend of the same run (with statistics: against itself without), and the "
    "relative error against the reference. Floor: the time that the plan cannot go below at the rates of the machine "
    "(below) if every non-zero reads its rows of the weights anew."
)
CEILINGS_CAPTION = (
    "Not in the paper: the best rates of the machine that the floors are made of. ceiling_copy: a plain copy; "
    "ceiling_gather: rows of the weights read at random; ceiling_matmul: the gate product by torch."
)
LAYERS_CAPTION = (
    "Not in the paper: how the non-zeros of a layer are distributed over real tokens (neurons/token), how many of its "
    "neurons never fired, and how much of the work the most active tenth of the neurons carries."
)


def html_page(results: Results, tables: Tables, figures: Sequence[Drawn]) -> str:
    """The whole page: no other file, no network, readable without JavaScript (which only the explorer needs)."""
    title = f"Sparse feed-forward blocks: {_studies(results)}"
    parts = [
        _header(title, tables, figures),
        f'<h2 id="glance">At a glance</h2>{render.html_table(summary(results), SUMMARY_CAPTION)}',
        '<h2 id="tables">Tables</h2>',
        *(_table_section(spec, frame) for spec, frame in tables),
        f'<h3 id="kernels">Kernels</h3>{render.html_table(kernels(results), KERNELS_CAPTION)}',
        f'<h3 id="ceilings">Ceilings</h3>{render.html_table(ceilings(results), CEILINGS_CAPTION)}',
        f'<h3 id="layers">Layers</h3>{render.html_table(layers(results), LAYERS_CAPTION)}',
        '<h2 id="figures">Figures</h2>',
        *(_figure_section(figure) for figure in figures),
        _explorer_section(results),
        _provenance_section(results),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style></head>\n"
        "<body>" + "\n".join(parts) + "\n</main></body></html>\n"
    )


def _studies(results: Results) -> str:
    return ", ".join(sorted(set(results.rows["study"])))


def _header(title: str, tables: Tables, figures: Sequence[Drawn]) -> str:
    links = [("glance", "At a glance")]
    links += [(spec.name, f"Table {spec.number}: {spec.title}") for spec, _ in tables]
    links += [("kernels", "Kernels"), ("ceilings", "Ceilings"), ("layers", "Layers")]
    links += [(figure.name, f"{figure.label}: {figure.title}") for figure in figures]
    links += [("explorer", "Explorer of non-zeros"), ("provenance", "Where the numbers come from")]
    items = "".join(f'<li><a href="#{anchor}">{html.escape(text)}</a></li>' for anchor, text in links)
    return (
        f'<a class="skip" href="#glance">Skip to the numbers</a><header><h1>{html.escape(title)}</h1>'
        f"<p>{html.escape(INTRODUCTION)}</p></header>"
        f'<nav aria-label="Contents"><ul>{items}</ul></nav><main>'
    )


def _table_section(spec: Spec, frame: pd.DataFrame) -> str:
    heading = f'<h3 id="{spec.name}">Table {spec.number}: {html.escape(spec.title)}</h3>'
    return f"<section>{heading}{render.html_table(frame, spec.caption)}</section>"


def _figure_section(figure: Drawn) -> str:
    image = base64.b64encode(figure.png).decode("ascii")
    alternative = html.escape(f"{figure.label}: {figure.title}. {figure.caption}")
    missing = (
        f'<p class="note missing">Missing: {html.escape(figure.missing)}.</p>'
        if figure.missing and not figure.is_placeholder
        else ""
    )
    return (
        f'<section><h3 id="{figure.name}">{figure.label}: {html.escape(figure.title)}</h3><figure>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{figure.label}">'
        f'<img src="data:image/png;base64,{image}" alt="{alternative}" loading="lazy"></div>'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>{missing}{_published(figure)}</section>"
    )


def _published(figure: Drawn) -> str:
    facts = paper.facts(int(figure.number)) if figure.number.isdigit() else ""
    return f'<p class="published">The paper: {html.escape(facts)}.</p>' if facts else ""


def _explorer_section(results: Results) -> str:
    data = explorer.page_data(results)
    heading = '<h2 id="explorer">Explorer of non-zeros</h2>'
    if not data:
        return f"{heading}<p>No non-zeros were gathered.</p>"
    panels = "".join(
        f'<div><h4>{title}</h4><svg id="explorer-{name}" role="img"></svg></div>'
        for name, title in (
            ("histogram", "Tokens by their non-zeros"),
            ("positions", "By position (log axes)"),
            ("tokens", "Tokens with the most (orange) and fewest (blue)"),
        )
    )
    # "<" inside the JSON could end the script element.
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'{heading}<p>Choose a run and a layer. ␣ is a space.</p><div class="controls">'
        '<label>run <select id="explorer-run"></select></label>'
        '<label>layer <select id="explorer-layer"></select></label></div>'
        f'<div class="panels">{panels}</div>'
        "<noscript><p>The explorer needs JavaScript; figures 6 to 11 do not.</p></noscript>"
        f'<script type="application/json" id="explorer-data">{content}</script>'
        f"<script>{(HERE / 'explorer.js').read_text(encoding='utf-8')}</script>"
    )


def provenance(results: Results) -> pd.DataFrame:
    """One line for each study, device and revision: rows, dates, versions, whether the working tree was clean."""
    rows = results.rows.assign(dirty=results.rows["dirty"].map({True: "changed", False: "clean"}).fillna("unknown"))
    by = ["study", "device", "power_state", "revision", "dirty", "torch", "triton", "cuda"]
    lines = rows.groupby(by, dropna=False, as_index=False).agg(
        rows=("value", "size"), first=("date", "min"), last=("date", "max")
    )
    short = {name: lines[name].str[:16].str.replace("T", " ") for name in ("first", "last")}
    names = {"dirty": "working tree", "power_state": "power state", "first": "first (UTC)", "last": "last (UTC)"}
    return lines.assign(revision=lines["revision"].str[:12], **short).rename(columns=names)


def _provenance_section(results: Results) -> str:
    caption = "Every row of results carries these; rows.csv beside this page has them all."
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in results.notes)
    listed = f"<h3>Notes of the loader</h3><ul>{notes}</ul>" if notes else ""
    heading = '<h2 id="provenance">Where the numbers come from</h2>'
    return f"{heading}{render.html_table(provenance(results), caption)}{listed}"


def markdown_page(results: Results, tables: Tables, figures: Sequence[Drawn]) -> str:
    """README.md of the folder: the same, with the pictures beside it."""
    lines = [
        f"# Results: {_studies(results)}",
        "",
        INTRODUCTION,
        "Generated by `python -m analysis.build`; do not edit.",
        "",
    ]
    lines += ["## At a glance", "", SUMMARY_CAPTION, "", render.markdown(summary(results))]
    for spec, frame in tables:
        lines += [f"## Table {spec.number}: {spec.title}", "", spec.caption, "", render.markdown(frame)]
    lines += ["## Kernels", "", KERNELS_CAPTION, "", render.markdown(kernels(results))]
    lines += ["## Ceilings", "", CEILINGS_CAPTION, "", render.markdown(ceilings(results))]
    lines += ["## Layers", "", LAYERS_CAPTION, "", render.markdown(layers(results))]
    for figure in figures:
        facts = paper.facts(int(figure.number)) if figure.number.isdigit() else ""
        lines += [
            f"## {figure.label}: {figure.title}",
            "",
            f"![{figure.label}]({figure.name}.png)",
            "",
            figure.caption,
            "",
        ]
        lines += [f"The paper: {facts}.", ""] if facts else []
        lines += [f"Missing: {figure.missing}.", ""] if figure.missing and not figure.is_placeholder else []
    lines += ["## Where the numbers come from", "", render.markdown(provenance(results))]
    return "\n".join(lines)
