"""The notebooks are valid, and run on any built folder, even an almost empty one."""

import asyncio
import base64
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from synthetic_results import DEMO, row, write_rows
from tiny_run import make_run

from analysis.explorer.chart import MIME
from analysis.publish import write_data
from experiments.run.errors import RunError
from experiments.run_notebooks import NotebooksConfig, cells_hash, execute, main, results_hash

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def built(demo, tmp_path_factory):
    """The tidy frames of a built folder: all that the notebooks read of it."""
    root = tmp_path_factory.mktemp("results")
    (root / "built").mkdir()
    write_data(demo, root / "built")
    return root / "built"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Executes a notebook on a folder of results, with a model of random weights as the reader's."""
    checkpoint = make_run(tmp_path_factory.mktemp("model"))

    def execute_on(results, name):
        notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
        client.execute(env=os.environ | {"TWELL_RESULTS": str(results), "TWELL_CHECKPOINT": str(checkpoint)})
        return notebook

    return execute_on


@pytest.fixture(scope="module")
def executed(run, built):
    """Notebook by name, executed on the built folder at most once."""
    return functools.cache(functools.partial(run, built))


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_valid(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_copy_outside_the_repository_says_so(path, tmp_path):
    first = nbformat.read(path, as_version=4).cells[1].source
    ran = subprocess.run([sys.executable, "-c", first], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.stderr.endswith("AssertionError: keep the notebook inside the repository\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_shows_something_in_every_cell(path, executed):
    shown = [cell for cell in executed(path.stem).cells if cell.cell_type == "code"][1:]
    for cell in shown:
        kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert kinds & {"text/html", MIME}, cell.source
        assert not [output for output in cell.outputs if output.output_type == "stream"], cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_charts_begin_with_one_run(path, executed):
    charts = [output["data"][MIME] for output in outputs(executed(path.stem)) if MIME in output["data"]]
    params = [param for chart in charts for param in chart["params"] if param["name"] in ("run", "second")]
    assert len({param["value"] for param in params}) == (1 if params else 0)


@pytest.mark.parametrize("name", ["nonzeros", "tokens", "two_runs"])
def test_charts_are_interactive_and_leave_a_picture_where_nothing_draws_them(name, executed):
    shown = [output["data"] for output in outputs(executed(name)) if MIME in output["data"]]
    assert shown
    assert all(base64.b64decode(data["image/png"]).startswith(b"\x89PNG") for data in shown)
    assert not [data for data in shown if "url" in data[MIME].get("data", {})], "its data are inside"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_a_folder_with_almost_nothing(path, run, tmp_path):
    write_rows(tmp_path / "rows.csv", [row(DEMO, None, "item", "ffn_other", "time", 1.0, plan="dense")])
    shown = outputs(run(tmp_path, path.stem))
    said = {"paper": "Not measured yet", "your_model": "change_pct"}.get(path.stem, "Missing: nonzeros_")
    assert said in str(shown)
    assert not [output for output in shown if output.output_type in ("error", "stream")]


def test_exported_pages_have_interactive_charts(executed, tmp_path):
    notebook = executed("tokens")
    nbformat.write(notebook, tmp_path / "tokens.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--config", "html_config.py"]
    subprocess.run([*command, str(tmp_path / "tokens.ipynb")], cwd=FOLDER, check=True, capture_output=True, timeout=300)
    page = (tmp_path / "tokens.html").read_text(encoding="utf-8")
    charts = [output["data"][MIME] for output in outputs(notebook) if MIME in output["data"]]
    assert page.count("window.vegaEmbed") == 1, "Vega is part of the page, once"
    calls = list(re.finditer(r'vegaEmbed\("#chart-([0-9]+)", ', page))
    assert [call[1] for call in calls] == [str(number) for number in range(len(charts))]
    for call, chart in zip(calls, charts, strict=True):
        assert f'id="chart-{call[1]}"' in page
        assert json.JSONDecoder().raw_decode(page, call.end())[0] == chart


# --- as they are committed --------------------------------------------------------------------------------------------

AGAIN = "make figures"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_belong_to_the_committed_rows(path):
    notebook = nbformat.read(path, as_version=4)
    made_from = notebook.metadata.get("made_from", {})
    assert made_from.get("cells") == cells_hash(notebook), f"its cells have changed: {AGAIN}"
    assert made_from.get("results") == results_hash(None), f"paper_figures has changed: {AGAIN}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code[1:])
    assert not [output for output in outputs(notebook) if output.output_type in ("error", "stream")]
    assert path.stat().st_size < 1.2e6


def test_one_notebook_can_be_executed_by_itself(tmp_path):
    for name in ("one", "two"):
        cells = [nbformat.v4.new_code_cell("1 + 1", id="a")]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    main(NotebooksConfig(notebooks=str(tmp_path / "one.ipynb"), out=str(tmp_path / "out")))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one.ipynb"]
    with pytest.raises(RunError, match="no notebooks in"):
        main(NotebooksConfig(notebooks=str(tmp_path / "three.ipynb"), out=str(tmp_path / "out")))


def test_results_are_also_named_by_the_environment(built, tmp_path, monkeypatch):
    """As in the notebooks themselves; the option comes first."""
    cells = [nbformat.v4.new_code_cell("import os; os.environ['TWELL_RESULTS']", id="a")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
    config = NotebooksConfig(notebooks=str(tmp_path / "one.ipynb"), out=str(tmp_path / "out"))

    def shown():
        main(config)
        made = nbformat.read(tmp_path / "out" / "one.ipynb", as_version=4)
        return made.cells[0].outputs[0]["data"]["text/plain"]

    monkeypatch.delenv("TWELL_RESULTS", raising=False)
    assert shown() == "''"
    monkeypatch.setenv("TWELL_RESULTS", str(built))
    assert str(built) in shown()
    config.results = str(built.parent)
    assert str(built) not in shown()
    config.results = ""
    monkeypatch.setenv("TWELL_RESULTS", "nowhere")
    with pytest.raises(RunError, match="TWELL_RESULTS=nowhere: there is no such folder"):
        main(config)


def test_an_executed_copy_says_what_it_was_made_from(built, tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    cells = [
        nbformat.v4.new_code_cell("import os", id="a"),
        nbformat.v4.new_code_cell("os.environ['TWELL_RESULTS']", id="b"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "one.ipynb")
    outs = [tmp_path / name for name in ("first", "second")]
    copies = [asyncio.run(execute(folder / "one.ipynb", built, out)).read_bytes() for out in outs]
    assert copies[0] == copies[1], "neither times nor versions"
    made = nbformat.reads(copies[0].decode(), as_version=4)
    assert made.metadata["made_from"] == {"results": results_hash(built), "cells": cells_hash(made)}
    assert str(built) in made.cells[1].outputs[0]["data"]["text/plain"]
    before = results_hash(built)
    copied = shutil.copytree(built, tmp_path / built.name)
    assert results_hash(copied) == before
    (copied / "summary.csv").write_text("generated, not read")
    assert results_hash(copied) == before
    with (copied / "rows.csv").open("a") as file:
        file.write("one more\n")
    assert results_hash(copied) != before
