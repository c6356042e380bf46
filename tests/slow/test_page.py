"""analysis.build and analysis.page: everything is written, the page stands alone, a rebuild gives the same bytes."""

import base64
import html.parser
import io
import json
import logging
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from PIL import Image
from synthetic_results import DEMO, TASKS, Study, trainings, write_study

from analysis import build as program
from analysis import claims, explorer, page, provenance, publish
from analysis.build import parse
from analysis.figures import FIGURES
from analysis.figures.tokens import RAREST
from analysis.load import load
from analysis.publish import build
from analysis.tables import TABLES


@pytest.fixture(scope="module")
def built(study, tmp_path_factory):
    """The folder, the paths that build returned, and what it logged. One build takes ten seconds: share it."""
    out = tmp_path_factory.mktemp("built") / "demo"
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    publish.log.addHandler(handler)
    written = build(study, out)
    publish.log.removeHandler(handler)
    return out, written, records


@pytest.fixture(scope="module")
def text(built):
    return (built[0] / "index.html").read_text(encoding="utf-8")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_table_and_figure_is_written(built):
    out, written, _ = built
    names = {path.name for path in written}
    tables = ("by_layer", "by_neuron", "histogram", "by_position", "by_token", "unions", "masks", "in_training")
    wanted = {spec.name + ending for spec in TABLES for ending in (".md", ".csv") if spec.name != "table1_scales"}
    measured = [path.stem for path in written if path.suffix == ".pdf"]
    assert {draw.name for draw in FIGURES if draw.number in ("1", "2", "3", "6", "7", "8", "9", "A")} <= set(measured)
    wanted |= {name + ending for name in measured for ending in (".png", ".pdf", ".csv")}
    wanted |= {"index.html", "README.md", "rows.csv", "curves.parquet", "settings.csv"}
    wanted |= {f"{name}.csv" for name in ("summary", "dead_neurons", "layers", "exactness", "provenance")}
    wanted |= {f"nonzeros_{name}.parquet" for name in tables}
    assert names == wanted
    assert names == set(contents(out)), "nothing else lies there, no partial file either"
    assert all(path.stat().st_size for path in written)


def test_files_that_no_longer_apply_go_when_a_folder_is_built_again(built, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "FIGURES", tuple(draw for draw in FIGURES if draw.number in ("1", "4")))
    monkeypatch.setattr(explorer, "CHARTS", ())
    before = contents(built[0])
    folder = shutil.copytree(built[0], tmp_path / "demo")
    shutil.copy(folder / "curves.parquet", folder / "nonzeros_retired.parquet")
    for name in ("figure04_forward.png", "figure04_forward.csv", "kernels.csv"):
        shutil.copy(folder / "rows.csv", folder / name)
    mine = folder / "models" / "figure04_forward.png", folder / "summary.txt"
    mine[0].parent.mkdir()
    for path in mine:
        path.write_text("a file of the user's")
    build(folder, folder)
    assert all(path.exists() for path in mine)
    mine[1].unlink()
    shutil.rmtree(mine[0].parent)
    after = contents(folder)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"index.html", "README.md"}


def test_private_settings_are_not_copied(built):
    assert "/somewhere/private" not in (built[0] / "settings.csv").read_text()


def test_what_is_missing_is_reported(built):
    assert "Figure 3 is not whole: missing the seven tasks for every L1 value" in built[2]
    absent = "Figure 12 is not drawn: missing speed with a GPU backend: only the reference backend ran"
    assert any(line.startswith(absent) for line in built[2])
    assert "## Figure 12" not in (built[0] / "README.md").read_text()


class Checker(html.parser.HTMLParser):
    """Collects what a page must have, and that its elements close in order."""

    VOID = frozenset(("meta", "img", "br", "hr", "input", "link"))

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.images, self.sources = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.images += [values] if tag == "img" else []
        self.sources += [values[name] for name in ("src", "href") if name in values]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


def test_page_needs_nothing_from_outside(checked, text):
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in checked.sources)
    ours = text.replace(explorer.script(), "")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", ours)
    assert '"url"' not in re.search(r'id="explorer-data">(.*?)</script>', text).group(1), (
        "charts have their data inside"
    )
    assert len(text) < 10e6


def test_page_is_accessible(built, checked, text):
    assert len(checked.images) == len(list(built[0].glob("*.png"))), "a figure without rows is not shown"
    assert all(len(image["alt"]) > 40 for image in checked.images)
    assert len(set(checked.ids)) == len(checked.ids)
    assert {link[1:] for link in checked.links} <= set(checked.ids)
    assert '<html lang="en">' in text
    assert 'name="viewport"' in text
    assert "<noscript>" in text


def test_the_page_of_one_study_has_what_it_measured(text):
    assert "480 (+17%)" not in text, "forward speed on a GPU"
    assert "Missing:" not in text
    assert "not tested" not in text
    assert "The paper: " in text


def test_page_says_where_the_numbers_come_from(text, study):
    table = provenance.table(load(study))
    assert list(table["rows"]) == [len(load(study).rows)]
    assert table["device"].item() == DEMO.device
    for shown in (DEMO.device, "0" * 12, "2026-01-02", "clean", "invented text", "0.08192"):
        assert f">{shown}</td>" in text


def test_rows_of_a_changed_working_tree_are_marked(study):
    results = load(study)
    dirty = results.rows.assign(dirty=results.rows["op"] == "evaluate")
    lines = provenance.table(replace(results, rows=dirty)).set_index("working tree")
    assert lines.loc["changed", "operations"] == "evaluate"
    assert "evaluate" not in lines.loc["clean", "operations"]


def test_token_texts_cannot_break_the_page(study, tmp_path, monkeypatch):
    monkeypatch.setattr(explorer, "CHARTS", (explorer.reading,))
    folder = shutil.copytree(study, tmp_path / "demo")
    for path in folder.glob("*/nonzeros_masks.parquet"):
        frame = pd.read_parquet(path)
        frame.loc[0, "text"] = "</script>"
        frame.to_parquet(path)
    page_text = page.html_page(load(folder), [], [], [])
    checker = Checker()
    checker.feed(page_text)
    assert checker.open == []
    data = re.search(r'id="explorer-data">(.*?)</script>', page_text).group(1)
    assert "</script>" in json.dumps(json.loads(data)["explorer-text"])


def test_the_page_has_every_chart_once(checked, text):
    names = [draw.name for draw in explorer.CHARTS]
    data = json.loads(re.search(r'id="explorer-data">(.*?)</script>', text).group(1))
    assert list(data) == names
    assert set(names) <= set(checked.ids)
    assert text.count("window.vegaEmbed=") == 1


def test_pictures_have_their_sizes_so_that_links_land(checked):
    for image in checked.images:
        png = base64.b64decode(image["src"].partition(",")[2])
        assert (int(image["width"]), int(image["height"])) == Image.open(io.BytesIO(png)).size


def test_the_page_says_when_nothing_was_gathered(nothing):
    text = page.html_page(nothing, [], [], [])
    assert "No non-zeros were gathered." in text
    assert "python -m experiments.gather_nonzeros" in text
    assert "vegaEmbed" not in text


def test_the_page_of_a_study_that_decides_no_claim_has_none(nothing):
    assert "laim" not in page.html_page(nothing, [], [], claims.check_all(nothing))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "out=x"], "got 'runs', wanted source=... or out=..."),
        (["source=a", "out=b", "dpi=3"], "got 'dpi=3'"),
        (["source=a", "source=b"], "source is given twice"),
        (["source=a"], "out missing"),
        (["out=b"], "source missing"),
        (["source=", "out=b"], "got 'source='"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(arguments)


def test_command_line(tmp_path, capsys):
    assert program.main(["source=" + str(tmp_path / "none"), "out=" + str(tmp_path / "out")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert program.main(["--help"]) == 0
    assert "source=runs/demo" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_command_line_takes_several_sources(monkeypatch):
    called = []
    monkeypatch.setattr(publish, "build", lambda *arguments: called.append(arguments))
    assert program.main(["out=b", "source=runs/demo,runs/second"]) == 0
    assert called == [(["runs/demo", "runs/second"], "b")]


GPU = Study(
    name="h200", model="0.5b", layers=8, hidden=2048, intermediate=5632, steps=4, gpu=True, device="A GPU<script>",
    speed=1.2, tasks=TASKS, l1=(0.0, 2e-5),
)  # fmt: skip


SOME = ("1", "2", "4", "6")  # figures: of all sources, of the one, of the other, of both


@pytest.fixture(scope="module")
def folder(study, tmp_path_factory):
    """The folder of two sources. That building again changes nothing: test_documentation.py."""
    root = tmp_path_factory.mktemp("repository")
    folder = root / "paper_figures"
    (root / "kernels").mkdir()
    for path in (root / "README.md", root / "kernels" / "README.md"):
        path.write_text("Without numbers.\n")
    shutil.copytree(study, folder / "demo")
    write_study(folder, GPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "FIGURES", tuple(draw for draw in FIGURES if draw.number in SOME))
        patch.setattr(explorer, "CHARTS", (explorer.by_layer, explorer.deaths))
        publish.build_committed(root)
    return folder


def test_one_page_of_all_sources(folder):
    assert {path.name for path in folder.iterdir()} == {
        "demo", "h200", "index.html", "README.md", "claims.md", "COLUMNS.md", "EVALUATION.md"
    }  # fmt: skip
    assert not (folder / "demo" / "index.html").exists(), "the page of all sources is enough"
    text = (folder / "index.html").read_text()
    checker = Checker()
    checker.feed(text)
    assert len(set(checker.ids)) == len(checker.ids)
    assert {link[1:] for link in checker.links} <= set(checker.ids)
    figures = {name: (folder / name / "README.md").read_text() for name in ("demo", "h200")}
    for number, sources in (("2", {"demo"}), ("4", {"h200"}), ("6", {"demo", "h200"})):
        assert {name for name in figures if f"## Figure {number}: " in figures[name]} == sources
    assert "<b>h200.</b>" in text
    assert "<b>demo.</b>" in text
    assert "480 (+17%)" in text
    assert "The paper: " in text
    assert not (folder / "demo" / "table1_scales.md").exists(), "it timed nothing with kernels made for speed"
    assert "needs a GPU" not in (folder / "h200" / "table1_scales.md").read_text()


def test_a_name_in_rows_is_no_tag_of_a_page(folder):
    pages = {path: path.read_text() for path in folder.parent.rglob("*.md")}
    assert sum("A GPU&lt;script>" in text for text in pages.values()) > 3
    assert [path for path, text in pages.items() if "<script" in text] == []


def test_claims_link_to_pictures_that_exist(folder):
    text = re.sub(r"claims\.md#[\w-]+", "claims.md", (folder / "README.md").read_text())
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len([link for link in links if link.endswith(".png")]) == len(SOME) + 1
    assert [link for link in links if not (folder / link).is_file()] == []


def test_large_tables_are_kept_of_few_runs_and_frequent_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "FIGURES", FIGURES[:1])
    monkeypatch.setattr(publish, "MASK_TOKENS", 5)
    sweep = Study(steps=4, layers=2, l1=(0.0, 1e-5, 2e-5, 1e-4), seeds=(0, 1), sweep=True)
    kept = load(build(write_study(tmp_path, sweep), tmp_path / "built")[0].parent)
    wanted = {f"nonzeros_demo_l1_{l1}_seed_0" for l1 in ("0", "2e-05", "0.0001")}
    for name in ("by_token", "by_position", "histogram", "masks"):
        assert set(kept.nonzeros[name]["item"]) == wanted
    sparse = {f"nonzeros_{run.item}" for run in trainings(sweep) if run.l1}
    assert set(kept.nonzeros["by_neuron"]["item"]) == wanted | sparse
    assert set(kept.nonzeros["in_training"]["item"]) == {item.removeprefix("nonzeros_") for item in wanted}
    assert kept.nonzeros["masks"]["index"].max() == 4
    assert len(set(kept.nonzeros["unions"]["item"])) == 8
    assert kept.nonzeros["by_token"]["mean"].dtype == "float32"
    assert kept.nonzeros["by_token"]["frequency"].min() >= RAREST
    assert set(kept.curves["item"]) == {run.item for run in trainings(sweep)}


def test_analysis_imports_neither_torch_nor_kernels_nor_experiments():
    code = (
        "import sys, analysis.publish, analysis.explorer; "
        "print([n for n in ('torch', 'twell', 'experiments') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
