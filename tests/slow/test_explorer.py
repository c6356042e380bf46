"""The explorer: its charts have the right data, Vega-Lite accepts them, and labels of runs are unique."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import vl_convert
from synthetic_results import NEURONS, Study, write_study

from analysis import dictionary, explorer
from analysis.explorer import masks, neurons
from analysis.explorer.chart import VEGA_LITE, short
from analysis.explorer.runs import gathered, initial
from analysis.explorer.tokens import CHARACTER, CLASSES, LINE, _laid_out, class_of
from analysis.load import load, side_by_side


def data_of(chart):
    """Every record that a chart holds, of all its data sets."""
    sets = chart.specification.get("datasets", {}).values()
    inline = [chart.specification["data"]["values"]] if "values" in chart.specification.get("data", {}) else []
    return [record for text in (*sets, *inline) for record in (json.loads(text) if isinstance(text, str) else text)]


# --- charts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", explorer.CHARTS, ids=lambda draw: draw.name)
def test_vega_lite_draws_every_chart_with_its_title_and_caption(draw, demo):
    chart = draw(demo)
    assert isinstance(chart, explorer.Chart)
    picture = vl_convert.vegalite_to_svg(dict(chart.specification), vl_version=VEGA_LITE)
    assert f"{chart.title}: " in picture
    assert picture.count("<path") + picture.count("<rect") > 20
    assert "NaN" not in json.dumps(chart.specification)
    again = draw(demo)
    assert json.dumps(again.specification) == json.dumps(chart.specification), "the same rows give the same bytes"


def test_every_chart_says_what_is_missing(nothing):
    for draw in (*explorer.CHARTS, explorer.pairs, explorer.fates):
        absent = draw(nothing)
        assert isinstance(absent, explorer.Absent)
        assert "Missing: nonzeros_" in absent.sentence
        assert "python -m experiments." in absent.sentence
        assert "<em>" in absent._repr_html_()


def test_shares_of_a_histogram_add_up(demo):
    bars = [record for record in data_of(explorer.distribution(demo)) if "share" in record]
    assert {record["layer"] for record in bars} == {"layer 0", "layer 1", "layer 2"}
    for record in bars:
        assert sum(record["share"]) == pytest.approx(100, abs=0.1)
        assert all(low < high for low, high in zip(record["low"], record["high"], strict=True))


def test_two_runs_are_compared_over_the_tokens_of_one_layer(demo):
    specification = explorer.two_runs(demo).specification
    (layer,) = [param for param in specification["params"] if param["name"] == "layer"]
    assert layer["bind"]["options"] == ["layer 0", "layer 1", "layer 2"]
    (panel,) = [panel for panel in specification["vconcat"][1]["hconcat"] if "over tokens" in panel.get("title", "")]
    assert {"filter": "datum.layer === layer"} in panel["transform"]


def test_two_runs_stand_side_by_side_where_only_another_has_tokens_and_positions(demo):
    """Of the runs that have a line for each layer."""
    one = demo.nonzeros["by_layer"]["item"].iloc[0]
    other = {name: table[table["item"] == one] for name, table in demo.nonzeros.items()}
    other["by_layer"] = demo.nonzeros["by_layer"].query("item != @one")
    chart = explorer.two_runs(replace(demo, nonzeros=other))
    assert [len(row["hconcat"]) for row in chart.specification["vconcat"]] == [1]


def test_texts_of_tokens_stay_data(study, tmp_path):
    frame = pd.read_parquet(study / "nonzeros_relu" / "nonzeros_by_token.parquet").assign(text='"}<script>alert(1)')
    hostile = replace(load(study), nonzeros={"by_token": frame})
    chart = explorer.search(hostile)
    assert all(token.startswith('"}<script>') for record in data_of(chart) for token in record["token"])
    vl_convert.vegalite_to_svg(dict(chart.specification), vl_version=VEGA_LITE)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_two_seeds_have_two_labels(tmp_path):
    sweep = Study(steps=4, layers=2, l1=(0.0, 1e-4), seeds=(0, 1), sweep=True)
    labels = list(gathered(load(write_study(tmp_path, sweep)), "by_layer")["label"])
    assert labels == ["demo, L1 0, seed 0", "demo, L1 0, seed 1", "demo, L1 1e-4, seed 0", "demo, L1 1e-4, seed 1"]


def test_seeds_are_lines_of_one_colour_in_the_chart_by_layer(tmp_path):
    sweep = Study(steps=4, layers=2, l1=(0.0, 1e-4), seeds=(0, 1), sweep=True)
    chart = explorer.by_layer(load(write_study(tmp_path, sweep)))
    lines = [(record["trained"], record["label"]) for record in data_of(chart)]
    wanted = ("demo, L1 0", "demo, L1 1e-4")
    assert lines == [(trained, f"{trained}, seed {seed}") for trained in wanted for seed in (0, 1)]
    encoding = chart.specification["encoding"]
    assert encoding["color"]["field"] == "trained"
    assert encoding["detail"]["field"] == "label"
    assert encoding["y"]["scale"]["type"] == "log"


def test_the_preferred_source_comes_first_and_charts_begin_with_its_recommended_value(study, tmp_path):
    other = write_study(tmp_path, Study(name="aaa", steps=4, layers=2))
    results = side_by_side(study, other)
    runs = gathered(results, "by_layer")
    assert list(dict.fromkeys(runs["study"])) == ["demo", "aaa"]
    assert initial(results, runs) == "demo: demo, L1 2e-5"


def test_charts_begin_with_the_model_that_has_the_most_l1_values(study, tmp_path):
    """Neither with the first source nor with the first model, where that has one training only."""
    swept = Study(name="aaa", model="21m", steps=4, layers=2, l1=(0.0, 1e-5, 2e-5, 1e-4, 1e-3), sweep=True)
    both = side_by_side(study, write_study(tmp_path, swept))
    assert initial(both, gathered(both, "by_layer")).startswith("aaa: 21m, L1 ")
    (model,) = [p for p in explorer.by_layer(both).specification["params"] if p["name"] == "model"]
    assert model["value"] == "aaa, 21m"


def test_charts_begin_with_that_model_even_where_others_have_as_many_values(tmp_path):
    """Built folders keep the large tables of three L1 values of each model only."""
    swept = Study(name="aaa", model="21m", steps=4, layers=2, l1=(0.0, 1e-5, 2e-5, 1e-4, 1e-3), sweep=True)
    large = Study(name="bbb", model="0.5b", steps=4, layers=2, l1=(0.0, 2e-5, 1e-4), sweep=True)
    both = side_by_side(*(write_study(tmp_path, study) for study in (large, swept)))
    kept = both.nonzeros["masks"]["l1"].isin((0.0, 2e-5, 1e-4))
    both.nonzeros["masks"] = both.nonzeros["masks"][kept]
    runs = gathered(both, "masks", "by_neuron")
    assert list(runs["model"]) == ["21m"] * 3 + ["0.5b"] * 3
    assert initial(both, runs) == explorer.first_run(both) == "aaa: 21m, L1 2e-5"


def test_a_run_and_its_training_have_one_label_in_all_tables(tmp_path):
    sweep = Study(steps=4, layers=2, l1=(0.0, 2e-5), seeds=(0, 1), sweep=True)
    results = load(write_study(tmp_path, sweep))
    masks_of = results.nonzeros["masks"]
    results.nonzeros["masks"] = masks_of[masks_of["item"].str.endswith("seed_1")]
    for name in results.nonzeros:
        shown = explorer.table(results, name)
        assert set(shown["run"]) <= set(gathered(results, "by_layer")["label"])
        assert len(shown) == len(results.nonzeros[name])
    assert explorer.first_run(results) == "demo, L1 2e-5, seed 1", "the one with masks"
    assert initial(results, gathered(results, "in_training")) == "demo, L1 2e-5, seed 0"


def test_charts_begin_with_the_middle_layer_of_the_run_shown_first(study, tmp_path):
    both = side_by_side(study, write_study(tmp_path, Study(name="aaa", model="deep", steps=4, layers=8)))
    for draw in (explorer.distribution, explorer.coactivation, explorer.search, explorer.reading, explorer.classes):
        (layer,) = [p for p in draw(both).specification["params"] if p["name"] == "layer"]
        assert layer["value"] == "layer 1"


def test_tables_without_rows_have_their_columns(nothing):
    assert explorer.first_run(nothing) == ""
    for name in ("by_layer", "by_token", "masks"):
        shown = explorer.table(nothing, name)
        assert shown.empty
        assert {"run", *dictionary.TABLES[name].names} == set(shown.columns)


def test_a_model_from_elsewhere_has_a_label_and_every_chart(study, tmp_path):
    """Without L1, modification, seed and training: what `gather_nonzeros` leaves of a Hugging Face model."""
    folder = tmp_path / "mine"
    folder.mkdir()
    rows = pd.read_csv(study / "nonzeros_relu" / "rows.csv", dtype=str, keep_default_na=False)
    empty = ["l1", "modification", "seed", "text", "tokens_trained", "tokens_per_parameter", "step"]
    rows = rows.assign(study="local", item="mine", model="Qwen/Qwen2-0.5B", **dict.fromkeys(empty, ""))
    rows.to_csv(folder / "rows.csv", index=False, lineterminator="\n")
    for path in (study / "nonzeros_relu").glob("*.parquet"):
        frame = pd.read_parquet(path).assign(study="local", item="mine", model="Qwen/Qwen2-0.5B", l1=None)
        frame.to_parquet(folder / path.name)
    mine = load(folder)
    assert list(gathered(mine, "by_layer")["label"]) == ["Qwen/Qwen2-0.5B"]
    drawn = {draw.name: draw(mine) for draw in explorer.CHARTS}
    absent = {name for name, chart in drawn.items() if isinstance(chart, explorer.Absent)}
    assert absent == {"explorer-drift", "explorer-deaths"}, "only these are about training"
    beside = side_by_side(study, folder)
    assert "local: Qwen/Qwen2-0.5B" in list(gathered(beside, "by_layer")["label"])


# --- neurons ----------------------------------------------------------------------------------------------------------


def test_masks_come_back_as_they_were_packed():
    mask = np.random.default_rng(0).random((7, 21)) < 0.5
    table = pd.DataFrame({"layer_3": [line.tobytes() for line in np.packbits(mask, axis=1)], "layer_10": None})
    assert masks.layers_of(table) == [3]
    assert (masks.unpack_masks(table, 3, 21) == mask).all()
    assert (masks.unpack_masks(table[2:4], 3)[:, :21] == mask[2:4]).all()
    assert masks.unpack_masks(table, 3).shape == (7, 24)
    assert masks.unpack_masks(table[:0], 3).shape == (0, 0)


def test_correlation_is_that_of_numpy_and_leaves_rare_and_constant_neurons_out():
    mask = np.random.default_rng(0).random((400, 12)) < 0.3
    mask[:, 0], mask[:, 1], mask[:, 3], mask[:, 5] = True, False, mask[:, 2], ~mask[:, 4]
    index, phi = masks.correlation(mask)
    assert list(index) == list(range(2, 12))
    wanted = np.corrcoef(mask[:, 2:].T)
    np.fill_diagonal(wanted, 0)
    assert phi == pytest.approx(wanted, abs=1e-5)
    assert phi[0, 1] == pytest.approx(1, abs=1e-5)
    assert phi[2, 3] == pytest.approx(-1, abs=1e-5)


def test_groups_that_fire_together_become_neighbours():
    rng = np.random.default_rng(0)
    cause = rng.random((600, 3)) < 0.3
    mask = cause[:, np.arange(12) % 3] ^ (rng.random((600, 12)) < 0.03)
    _, phi = masks.correlation(mask)
    order = masks.strongest(phi, 12)
    assert sorted(order) == list(range(12))
    groups = list(order % 3)
    assert sum(a != b for a, b in itertools.pairwise(groups)) == 2, groups
    assert list(masks.strongest(phi, 12)) == list(order)
    assert len(masks.strongest(phi, 5)) == 5
    assert list(masks.strongest(np.zeros((0, 0)), 5)) == []


def test_overlap_counts_pairs_of_one_sequence_only():
    a, b = np.array([1, 1, 0, 0], bool), np.array([0, 1, 1, 0], bool)
    mask = np.array([a, b, a, b, a, b])
    found = masks.overlap(mask, np.array([0, 1, 2, 0, 1, 2]), (1, 2, 3, 64))
    assert found[1] == pytest.approx(1 / 3)
    assert found[0] == pytest.approx(1 / 3), "three tokens further on there is always the other one"
    assert found[2] == 1.0
    assert set(found) == {0, 1, 2}
    assert set(masks.overlap(mask, np.array([0, 0, 0, 0, 0, 0]), (1,))) == {0}
    assert masks.overlap(np.zeros((4, 4), bool), np.arange(4), (1,)) == {}, "nothing is active"


def test_pairs_that_always_fire_together_are_found(demo):
    found = explorer.pairs(demo)
    assert list(found["layer"]) == [0, 1, 2]
    assert set(found["strongest pair"]) == {"4 and 5 (1.00)"}
    assert set(found["with a partner above 0.9"]) == {2}
    assert set(found["neurons"]) == {NEURONS}


def test_what_becomes_of_neurons_of_the_run_shown_first(demo):
    fates = explorer.fates(demo)
    assert set(fates["run"]) == {explorer.first_run(demo)}
    found = fates.iloc[0]
    assert found["silent at the end"] == 2
    assert found["from step (median)"] == "2", "between 1, of the one that never fires, and 4"
    assert found["silent once, fire at the end"] == 1


def test_shares_of_the_most_active_neurons_add_up(demo):
    table = demo.nonzeros["by_neuron"].query("neuron < 4")
    rates = table["neuron"].map({0: 0.4, 1: 0.0, 2: 0.1, 3: 0.5}) * (table["layer"] < 2)
    chart = explorer.firing_rates(replace(demo, nonzeros={"by_neuron": table.assign(rate=rates)}))
    shares = [record["share"] for record in data_of(chart)]
    assert shares[:3] == [[50, 90, 100, 100], [50, 90, 100, 100], [0, 0, 0, 0]], "the last layer never fires"


def test_neurons_that_come_back_are_counted(demo):
    records = [r for r in data_of(explorer.deaths(demo)) if r["run"] == "demo, L1 0" and r["layer"] == 0]
    by_step = {record["step"]: record for record in records}
    assert sorted(by_step) == [1, 2, 4, 20]
    assert by_step[2]["silent"] == pytest.approx(100 * 2 / NEURONS, rel=1e-3)
    assert by_step[2]["back"] == 50, "neuron 3, and not neuron 1"
    assert by_step[4]["back"] == 0
    assert by_step[20]["back"] is None, "there is no later step"


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<|endoftext|>", "special token"), ("<s>", "special token"), ("\n    ", "line break, indentation"),
        ("  ", "line break, indentation"), (" 1,024", "number"), ("7", "number"), (" (", "punctuation"),
        ("__", "punctuation"), ("日本", "other script"), (" the", "function word"), ("The", "function word"),
        (" Paris", "word, capitalised"), (" house", "word"), ("ing", "part of a word"), ("'s", "part of a word"),
        ("in", "part of a word"), ("", "line break, indentation"),
    ],
)  # fmt: skip
def test_classes_of_tokens(text, kind):
    assert class_of(text) == kind
    assert kind in CLASSES


@pytest.mark.parametrize(("percent", "shown"), [(0.09, False), (0.11, True)])
def test_classes_with_a_thousandth_of_the_tokens_are_shown(demo, percent, shown):
    table = demo.nonzeros["by_token"]
    rare = table["token_id"] == table["token_id"].max()
    text = table["text"].where(~rare, "<s>")
    count = (table["count"].where(~rare, 0) * 1000).astype(int)
    count = count.where(~rare, int(count.sum() / table["item"].nunique() * percent / (100 - percent)))
    few = replace(demo, nonzeros={"by_token": table.assign(text=text, count=count)})
    assert ("special token" in {record["kind"] for record in data_of(explorer.classes(few))}) == shown


def test_running_text_is_laid_out_in_lines():
    found = _laid_out(pd.Series(["def", " f", "\n\n    ", "x" * 30, "y" * 90, "\n"]))
    texts = list(
        zip(found["token"], found["shown"].str.replace("\u00a0", " "), found["line"], found["column"], strict=True)
    )
    assert texts[:5] == [(0, "def", 0, 0), (1, " f", 0, 3), (2, "⏎", 0, 5), (2, "⏎", 1, 0), (2, "    ", 2, 0)]
    assert texts[5] == (3, "x" * 30, 2, 4)
    assert texts[6] == (4, "y" * 39 + "…", 2, 34)
    assert (found["end"] <= LINE).all()


def test_running_text_frames_what_is_typed_and_is_drawn_from_its_first_letter_on(demo):
    chart = explorer.reading(demo)
    specification = json.loads(json.dumps(dict(chart.specification)))
    choices = {param["name"]: param for param in specification["params"]}
    (text,) = (record for record in data_of(chart) if record["run"] == choices["run"]["value"])
    spaced = next(i for i, shown in enumerate(text["shown"]) if shown[0] == "\u00a0" and shown.strip())
    for typed, framed in ((text["shown"][spaced].replace("\u00a0", " ").upper(), True), ("no such token", False)):
        choices["find"]["value"] = typed
        picture = vl_convert.vegalite_to_svg(specification, vl_version=VEGA_LITE)
        assert ('stroke="#0072b2"' in picture) == framed
    places = zip(text["column"], text["shown"], strict=True)
    letters = {column + len(shown) - len(shown.lstrip("\u00a0")) for column, shown in places}
    drawn = re.findall(r'<text [^>]*transform="translate\(([\d.]+),[\d.]+\)[^>]*>[^<]*</text>', picture)
    assert {round(letter * CHARACTER, 1) for letter in letters} <= {round(float(x), 1) for x in drawn}


@pytest.mark.parametrize("view", [explorer.coactivation, explorer.drift])
def test_charts_with_much_data_count_the_runs_that_they_leave_out(demo, monkeypatch, view):
    tables = ("masks", "by_neuron") if view is explorer.coactivation else ("in_training",)
    labels = gathered(demo, *tables)["label"].tolist()
    assert len(labels) > 1
    monkeypatch.setattr(neurons, "MOST_RUNS", len(labels))
    whole = view(demo)
    assert "The first" not in whole.caption
    monkeypatch.setattr(neurons, "MOST_RUNS", 1)
    chart = view(demo)
    assert chart.caption.endswith(f" The first 1 of {len(labels)} runs.")
    assert {record["run"] for record in data_of(chart) if "run" in record} == {labels[0]}


def test_charts_have_three_digits_of_fractions_and_integers_as_they_are():
    assert [short(value) for value in (0.123456, 1234.56, 99.96, np.float32(0.5))] == [0.123, 1230, 100, 0.5]
    assert [short(value) for value in (5497, 12345, np.int64(65535), 12345.0)] == [5497, 12345, 65535, 12345]
    assert type(short(np.int64(7))) is int
    assert type(short(np.float32(0.25))) is float
