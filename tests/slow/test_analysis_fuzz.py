"""Odd but valid results: a build refuses a file and names it, or makes every item with its content or a reason.

`FUZZ_CASES=500 FUZZ_SEED=1000 pytest tests/slow/test_analysis_fuzz.py` tries more than the suite does.
"""

import os
import random
from dataclasses import replace

import analysis_fuzz
import pandas as pd
import pytest
from analysis_fuzz import alter, reduce
from synthetic_results import Run, Study, results_of, row, write_rows, write_study

from analysis import catalogue, claims, page, publish, render
from analysis.build import main
from analysis.claims.evidence import VERDICTS, Evidence
from analysis.figures import FIGURES
from analysis.figures.drawn import NotMeasured, figure
from analysis.load import COMMITTED, NotMade, load
from analysis.load import FIGURES as FOLDER
from analysis.publish import build, compact
from analysis.read import ResultsError

CASES, FIRST = int(os.environ.get("FUZZ_CASES", "6")), int(os.environ.get("FUZZ_SEED", "0"))
AT_ONCE = 4  # of the figures and of the tables in one case, eight of the claims


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Small copies of the committed results."""
    root = tmp_path_factory.mktemp("bases")
    return [reduce(FOLDER / name, root / name) for name in COMMITTED]


def load_or_refuse(folder):
    """The results, or why they were refused."""
    try:
        return compact(load(folder)), ""
    except ResultsError as error:
        return None, str(error)


@pytest.mark.filterwarnings("error::analysis.load.NotMade")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_altered_results_are_refused_by_file_or_built(bases, tmp_path, seed):
    names = alter(bases[seed % len(bases)], tmp_path / "altered", seed)
    chosen = random.Random(seed)
    results, refusal = load_or_refuse(tmp_path / "altered")
    if results is None:
        assert str(tmp_path) in refusal, names
        assert "\n" not in refusal, names
        return
    try:
        evidence = Evidence.of(results)
        for name in chosen.sample(list(claims.TESTS), k=2 * AT_ONCE):
            claim = claims.check(name, evidence)
            assert claim.ours, name
            assert claim.verdict in VERDICTS
        for make in chosen.sample(catalogue.ALL, k=AT_ONCE):
            render.markdown(make.make(results))
        for draw in chosen.sample(FIGURES, k=AT_ONCE):
            drawn = draw(results)
            assert drawn.png.startswith(b"\x89PNG")
            assert drawn.missing or not drawn.is_placeholder
    except Exception as error:
        error.add_note(f"seed {seed}: {names}")
        raise


@pytest.fixture
def few_items(monkeypatch):
    """Builds make one figure, one table and one claim."""
    monkeypatch.setattr(publish, "FIGURES", FIGURES[:1])
    monkeypatch.setattr(catalogue, "ALL", catalogue.ALL[1:2])
    monkeypatch.setattr(claims, "TESTS", {"sparsity": claims.TESTS["sparsity"]})


FOREIGN = Study(name="own", model="", layers=3, hidden=64, intermediate=256, tasks=())
UNKNOWN = dict.fromkeys(analysis_fuzz.UNKNOWN)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Statistics of a model that was not trained here, as gather_nonzeros writes them."""
    folder = write_study(tmp_path_factory.mktemp("runs"), replace(FOREIGN, l1=(0.0,), sweep=True))
    item = next(folder.glob("nonzeros_*"))
    own = load(item).rows
    kept = own.astype(object).where(own.notna(), None).to_dict("records")
    write_rows(item / "rows.csv", [line | UNKNOWN for line in kept])
    for path in item.glob("*.parquet"):
        pd.read_parquet(path).assign(model="", l1=None).to_parquet(path, index=False)
    return item


@pytest.mark.filterwarnings("error::analysis.load.NotMade")
def test_a_model_from_elsewhere_has_its_layers_tokens_and_unions(foreign, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "FIGURES", tuple(draw for draw in FIGURES if draw.number in ("3", "6", "7", "A")))
    build(foreign, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for name in ("figure06_layers_recommended", "figure07_tokens_and_positions", "figureA_unions", "layers"):
        assert (tmp_path / "out" / f"{name}.csv").exists(), name
    assert f"{foreign.name}, L1 unknown" in text
    layers = next(table.frame for table in catalogue.make(load(tmp_path / "out")) if table.name == "layers")
    assert layers["layer"].tolist() == [0, 1, 2]
    assert set(layers["model"]) == {foreign.name}
    assert any("has no name: the item's is used" in note for note in load(foreign).notes)


@pytest.mark.filterwarnings("error::analysis.load.NotMade")
def test_speed_of_a_model_from_elsewhere(tmp_path):
    study = replace(FOREIGN, gpu=True, device="A GPU")
    same = {"tokens": 64, "pattern": "own", "mean_nnz": 9.0, "n": 3, "baseline": "dense_eager"} | UNKNOWN
    rows = [
        row(study, Run("x"), "bench", "model_forward", "throughput", value, plan=plan, backend=backend, low=value,
            high=value, ratio=value / 100, **same)
        for plan, backend, value in (("dense", "dense_eager", 100.0), ("twell", "hopper", 130.0))
    ]  # fmt: skip
    drawn = FIGURES[3](results_of(tmp_path, rows))
    assert drawn.data["percent"].tolist() == pytest.approx([30.0])
    legend = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert "L1 unknown (9 non-zeros)" in legend


def broken(results):
    return results.rows.loc["no such row"]


def test_an_item_that_cannot_be_made_says_why_and_the_others_are_made(few_items, tmp_path, monkeypatch, capsys):
    write_study(tmp_path / "runs", replace(FOREIGN, name="small", model="21m", l1=(0.0, 1e-3), sweep=True))
    some = (figure("1", "figure_broken", "a broken figure")(broken), FIGURES[0])
    monkeypatch.setattr(publish, "FIGURES", some)
    monkeypatch.setattr(catalogue, "ALL", (replace(catalogue.ALL[0], make=broken),))
    code = main([f"source={tmp_path / 'runs'}", f"out={tmp_path / 'out'}"])
    assert code == 1
    told = capsys.readouterr().err
    assert "figure 1 could not be made: KeyError" in told
    assert f"table {catalogue.ALL[0].name} could not be made: KeyError" in told
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert text.count("KeyError: &#39;no such row&#39;") == 2, "in place of the table, and of the figure"
    assert (tmp_path / "out" / "figure01_formats.png").exists()
    assert not (tmp_path / "out" / "figure_broken.png").exists()


def test_what_was_not_measured_is_no_defect(recwarn):
    def absent(results):
        raise NotMeasured("rows of something")

    drawn = figure("9", "figure_absent", "an absent figure")(absent)(load(FOLDER / "demo"))
    assert drawn.is_placeholder
    assert not [warning for warning in recwarn if warning.category is NotMade]


def test_a_build_that_fails_leaves_the_folder_as_it_was(few_items, tmp_path, monkeypatch):
    write_study(tmp_path / "runs", replace(FOREIGN, name="small", model="21m", l1=(0.0, 1e-3), sweep=True))
    build(tmp_path / "runs", tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("of the user")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "html_page", full)
    assert main([f"source={tmp_path / 'runs'}", f"out={tmp_path / 'out'}"]) == 2
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"], "no temporary folder stays"


@pytest.mark.parametrize(
    ("name", "content"),
    [("rows.csv", b"\xff\xfe\n"), ("settings.csv", b""), ("nonzeros_by_layer.parquet", b"PAR1")],
)
def test_a_damaged_file_is_named_in_one_line(bases, tmp_path, name, content, capsys):
    for path in bases[1].iterdir():
        (tmp_path / path.name).write_bytes(content if path.name == name else path.read_bytes())
    assert main([f"source={tmp_path}", f"out={tmp_path / 'out'}"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith(str(tmp_path / name))
    assert "\n" not in told
