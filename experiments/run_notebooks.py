"""Execute the notebooks on the committed results or on those of a study, and save the executed copies.

    python -m experiments.run_notebooks
    python -m experiments.run_notebooks notebooks=notebooks/tokens.ipynb    # one of them
    python -m experiments.run_notebooks results=paper_figures/demo out=runs/demo/notebooks
    python -m experiments.run_notebooks out=notebooks    # in place: the committed notebooks, to be read on the web

A copy's metadata identify its origin: `results` is the hash of the rows (`results_hash`), `cells` that of its cells.
The same rows give the same bytes on one machine. Texts that repeat an output's HTML are left out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.run.config import entry, option
from experiments.run.errors import RunError
from experiments.run.files import sha256_file, sha256_json, write_atomic

if TYPE_CHECKING:
    from nbformat import NotebookNode

CELL_SECONDS = 600  # at most
log = logging.getLogger(__name__)


@dataclass
class NotebooksConfig:
    """Execute one notebook, or every notebook of a folder."""

    notebooks: str = option(
        "notebooks", "a notebook, or a folder of notebooks; unchanged unless they are in `out`", required=True
    )
    results: str = option("", "results to read: a folder made by analysis.build; empty: all committed results")
    out: str = option("runs/notebooks", "folder for the executed copies", required=True)


def results_hash(results: Path | None) -> str:
    """SHA-256 of everything that notebooks read from a folder of results; None: from all committed folders."""
    from analysis.load import COMMITTED, FIGURES

    folders = [results] if results else [FIGURES / name for name in COMMITTED]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for form in ("*.parquet", "rows.csv", "settings.csv") for path in folder.glob(form)):
            digest.update(f"{folder.name}/{path.name} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def cells_hash(notebook: NotebookNode) -> str:
    """SHA-256 over the text of all cells, without outputs."""
    return sha256_json([[cell.cell_type, cell.source] for cell in notebook.cells])


async def execute(path: Path, results: Path | None, out: Path) -> Path:
    """Execute one notebook (results=None: on all committed results). The copy with its outputs is written even if a
    cell fails.

    Raises:
        nbclient.exceptions.CellExecutionError: with the cell and its error.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"TWELL_RESULTS": str(results.resolve()) if results else ""}
    places = {"metadata": {"path": str(path.parent)}}
    # Without the times of cells and the version of Python, which would differ each time.
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources=places, record_timing=False)
    try:
        await client.async_execute(env=environment)
    finally:
        # The plain text of outputs that have HTML, which all viewers show: a third of the bytes of a table.
        for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
            if "text/html" in output.get("data", {}):
                output.data.pop("text/plain", None)
        notebook.metadata["language_info"] = {"name": "python"}
        notebook.metadata["made_from"] = {"results": results_hash(results), "cells": cells_hash(notebook)}
        write_atomic(out / path.name, nbformat.writes(notebook) + "\n", "executed notebook")
    return out / path.name


def main(config: NotebooksConfig, report: Callable[..., None] | None = None) -> None:
    """Execute the notebook, or every notebook of the folder, as many at once as there are cores."""
    source = Path(config.notebooks)
    paths = [source] if source.suffix == ".ipynb" and source.is_file() else sorted(source.glob("*.ipynb"))
    if not paths:
        raise RunError(f"no notebooks in {config.notebooks}")
    named = config.results or os.environ.get("TWELL_RESULTS", "")
    results = Path(named) if named else None
    if results is not None and not results.is_dir():
        raise RunError(f"{'results' if config.results else 'TWELL_RESULTS'}={named}: there is no such folder")
    cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one(path: Path) -> None:
        async with cores:
            log.info("%s -> %s", path, await execute(path, results, Path(config.out)))

    async def each() -> None:
        for done, finished in enumerate(asyncio.as_completed([one(path) for path in paths])):
            if report:
                report(done, len(paths))
            await finished

    asyncio.run(each())


if __name__ == "__main__":
    entry(main, NotebooksConfig)
