"""Execute the notebooks on the committed results or on those of a study, and keep the executed copies.

python -m experiments.run_notebooks
python -m experiments.run_notebooks results=paper_figures/demo out=runs/demo/notebooks
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from experiments.run.config import entry, option
from experiments.run.errors import RunError
from experiments.run.files import write_atomic

log = logging.getLogger(__name__)


@dataclass
class NotebooksConfig:
    """Execute every notebook of a folder."""

    notebooks: str = option("notebooks", "folder of the notebooks; they stay as they are", required=True)
    results: str = option("", "what they read: a folder made by analysis.build; empty: all committed results")
    out: str = option("runs/notebooks", "folder of the executed copies", required=True)
    timeout: int = option(120, "longest time for one cell", unit="s", minimum=1)


def execute(path: Path, results: Path | None, out: Path, timeout: int) -> Path:
    """Execute one notebook, on all committed results without `results`; the copy with its outputs is written even when
    a cell fails.

    Raises:
        nbclient.exceptions.CellExecutionError: with the cell and its error.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"TWELL_RESULTS": str(results.resolve()) if results else ""}
    client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(path.parent)}})
    try:
        client.execute(env=environment)
    finally:
        write_atomic(out / path.name, nbformat.writes(notebook), "executed notebook")
    return out / path.name


def main(config: NotebooksConfig, report: Callable[..., None] | None = None) -> None:
    """Execute every notebook of the folder, in the order of their names."""
    paths = sorted(Path(config.notebooks).glob("*.ipynb"))
    if not paths:
        raise RunError(f"no notebooks in {config.notebooks}")
    results = Path(config.results) if config.results else None
    if results is not None and not results.is_dir():
        raise RunError(f"results={config.results}: there is no such folder")
    for done, path in enumerate(paths):
        if report:
            report(done, len(paths))
        log.info("%s -> %s", path, execute(path, results, Path(config.out), config.timeout))


if __name__ == "__main__":
    entry(main, NotebooksConfig)
