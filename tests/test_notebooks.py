"""The notebooks: valid, thin, and they run on any built folder, also one with next to nothing in it."""

import functools
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from synthetic_results import Study, row, write_rows, write_study

from analysis.build import write_data
from analysis.load import load

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STUDY = Study(steps=20, layers=3)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The tidy frames of a built folder: all that the notebooks read of it."""
    root = tmp_path_factory.mktemp("results")
    (root / "built").mkdir()
    write_data(load(write_study(root / "runs", STUDY)), root / "built")
    return root / "built"


def run(path, results):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=os.environ | {"TWELL_RESULTS": str(results)})
    return notebook


@pytest.fixture(scope="module")
def executed(built):
    """Notebook by name, executed on the built folder at most once."""
    return functools.cache(lambda name: run(FOLDER / f"{name}.ipynb", built))


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_one_for_each_theme():
    themes = ["01_quality_against_l1", "02_nonzeros", "03_kernels", "04_inference", "05_training"]
    assert [path.stem for path in NOTEBOOKS] == themes


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_valid_and_thin(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(len(cell.source.splitlines()) <= 3 for cell in code[1:]), "one call a cell, the work is in analysis"
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_something_in_every_cell(path, executed):
    shown = [cell for cell in executed(path.stem).cells if cell.cell_type == "code"][1:]
    for cell in shown:
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert kinds & {"text/html", "text/markdown"}, cell.source
        assert not [output for output in cell.outputs if output.output_type == "stream"], cell.source


def test_explorer_leaves_a_picture_without_a_kernel(executed):
    cell = next(cell for cell in executed("02_nonzeros").cells if "explorer.interactive" in cell.source)
    assert "data:image/png;base64," in cell.outputs[0]["data"]["text/html"]
    assert any("application/vnd.jupyter.widget-view+json" in output["data"] for output in cell.outputs)


def test_nothing_gathered_is_said_and_no_error(tmp_path):
    write_rows(tmp_path / "rows.csv", [row(STUDY, None, "item", "ffn_other", "time", 1.0, plan="dense")])
    text = str(outputs(run(FOLDER / "02_nonzeros.ipynb", tmp_path)))
    assert "no non-zeros were gathered" in text
    assert "Not measured yet" in text
