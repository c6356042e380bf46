"""analysis.load and analysis.read: accepted files, refused files, and their messages."""

import csv
import logging
import math
import shutil

import pandas as pd
import pytest
import yaml
from synthetic_results import DEMO, Run, Study, row, trainings, write_rows, write_study

from analysis import read, schema
from analysis.load import load
from analysis.read import ResultsError, read_metrics, read_rows


@pytest.fixture
def copy(study, tmp_path):
    """A copy of two trainings of the study."""
    for item in ("relu", "silu"):
        shutil.copytree(study / item, tmp_path / study.name / item)
    return tmp_path / study.name


def change_rows(path, change):
    """Rewrite a rows.csv after `change(header, rows)`, both lists of cells, changed in place."""
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file))
    change(header, rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def test_types_are_the_schemas(demo):
    rows = demo.rows
    kinds = {"str": "str", "int": "Int64", "float": "float64", "bool": "boolean"}
    assert {name: str(dtype) for name, dtype in rows.dtypes.items()} == {c.name: kinds[c.kind] for c in schema.COLUMNS}


def test_every_row_of_every_item_is_there_once(study, demo):
    rows = demo.rows
    files = list(study.glob("*/rows.csv"))
    assert len(rows) == sum(len(path.read_text().splitlines()) - 1 for path in files)
    assert set(rows["item"]) == {path.parent.name for path in files}


def test_empty_cells_stay_empty(demo):
    energy = demo.rows.query("metric == 'energy'")
    assert energy["value"].isna().all()
    assert set(energy["missing"]) == {"no NVML on this device"}
    assert energy["layer"].isna().all()


def test_curves_are_long_and_carry_the_run(demo):
    curves = demo.curves
    one = curves.query("item == 'dead_reinit' and step == 7 and metric == 'nonzeros'")
    assert list(one["layer"]) == [0, 1, 2]
    assert set(one["modification"]) == {"dead_neuron_reinit"}
    assert set(one["l1"]) == {2e-5}
    validation = curves.query("item == 'relu' and metric == 'validation_cross_entropy'")
    assert list(validation["step"]) == [10, 20], "null means not measured at that step"


def test_settings_and_nonzeros_tables(demo):
    settings = demo.settings.query("item == 'relu'").set_index("key")["value"]
    assert settings["model.hidden_size"] == "128"
    assert set(demo.nonzeros) == {*read.NONZEROS}
    assert len(demo.nonzeros["by_layer"]) == 3 * sum(run.activation == "relu" for run in trainings(DEMO))


def test_unfinished_run_is_left_out_and_named(copy, caplog):
    (copy / "relu" / "rows.csv").unlink()
    with caplog.at_level(logging.WARNING):
        results = load(copy)
    assert "relu" not in set(results.curves["item"])
    assert any("relu" in note and "unfinished" in note for note in results.notes)
    assert results.notes[0] in caplog.text


def test_checkpoint_folders_are_not_searched(copy):
    shutil.copytree(copy / "relu", copy / "silu" / "checkpoints" / "step_1")
    load(copy)


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_nothing_to_load(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=folder):
        load(tmp_path / folder)


BROKEN = {
    "missing column": (lambda h, r: [line.pop() for line in [h, *r]], r"missing \['date'\]"),
    "unknown column": (lambda h, r: h.__setitem__(3, "plam"), r"unknown \['plam'\]"),
    "order": (lambda h, r: h.reverse(), "another order"),
    "unknown metric": (lambda h, r: r[0].__setitem__(h.index("metric"), "speed"), "row 2: unknown metric 'speed'"),
    "wrong unit": (lambda h, r: r[1].__setitem__(h.index("unit"), "s"), "row 3: .* in 's', wanted 'nats/token'"),
    "not a number": (lambda h, r: r[0].__setitem__(h.index("value"), "fast"), "value='fast' is not a float"),
    "not finite": (lambda h, r: r[0].__setitem__(h.index("value"), "nan"), "value='nan' is not a float"),
    "not a whole number": (lambda h, r: r[0].__setitem__(h.index("step"), "1.5"), "step='1.5' is not a int"),
    "not a truth value": (lambda h, r: r[0].__setitem__(h.index("gated"), "maybe"), "gated='maybe' is not a bool"),
    "neither value nor reason": (lambda h, r: r[0].__setitem__(h.index("value"), ""), "neither a value nor a reason"),
    "value and reason": (lambda h, r: r[0].__setitem__(h.index("missing"), "x"), "a value and a reason"),
    "duplicate": (lambda h, r: r.append(r[0]), "measured twice"),
    "unknown plan": (lambda h, r: r[0].__setitem__(h.index("plan"), "csr+hot"), r"unknown plan 'csr\+hot'"),
    "short row": (lambda h, r: r[-1].pop(), "half-written"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rows_are_refused_by_file_name(study, tmp_path, name):
    change, message = BROKEN[name]
    path = shutil.copytree(study / "relu", tmp_path / "relu") / "rows.csv"
    change_rows(path, change)
    with pytest.raises(ResultsError, match=message) as error:
        load(tmp_path)
    assert str(path) in str(error.value)


def test_a_file_without_a_column_is_refused(copy):
    path = copy / "relu" / "rows.csv"
    change_rows(path, lambda header, rows: [line.pop() for line in (header, *rows)])
    with pytest.raises(ResultsError, match=r"columns are not those of analysis\.schema: missing \['date'\]"):
        read_rows(path)


def test_half_written_last_line(copy):
    path = copy / "relu" / "rows.csv"
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ResultsError, match="half-written"):
        read_rows(path)


METRICS = {
    "[" * 100_000: "line 3 is not JSON",
    '{"step": 1, "tok': "line 3 is not JSON",
    '{"step": 21}': "line 3: wanted an object with step and tokens",
    '{"step": 2, "tokens": 9}': "line 3: step 2 comes after step 2",
    '{"step": 3, "tokens": 9, "loss": "low"}': "line 3: loss holds 'low'",
    '{"step": 3, "tokens": 9, "nonzeros": [1, null]}': "line 3: nonzeros holds None",
}


@pytest.mark.parametrize("line", METRICS)
def test_broken_metrics_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "tokens": 4}\n{"step": 2, "tokens": 8, "cross_entropy": 3.5}\n' + line)
    with pytest.raises(ResultsError, match=METRICS[line]) as error:
        read_metrics(path)
    assert str(path) in str(error.value)


def test_damaged_and_incomplete_parquet(study, tmp_path):
    copy = tmp_path
    path = shutil.copytree(study / "nonzeros_relu", copy / "nonzeros_relu") / "nonzeros_unions.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultsError, match="not a whole parquet file"):
        load(copy)
    path.write_bytes(whole)
    frame = pd.read_parquet(path)
    frame.drop(columns="fraction").to_parquet(path)
    with pytest.raises(ResultsError, match=r"columns \['fraction'\] are missing"):
        load(copy)
    pd.concat([frame, frame]).to_parquet(path)
    with pytest.raises(ResultsError, match="measured twice"):
        load(copy)
    frame.assign(item="relu").to_parquet(path)
    with pytest.raises(ResultsError, match=r"items \['relu'\] have no rows"):
        load(copy)


def test_integers_of_a_parquet_file_are_nullable_only_where_one_is_missing(tmp_path):
    layers = {"whole": pd.array([0, 1], "Int64"), "some": pd.array([0, None], "Int64")}
    pd.DataFrame({"step": [1, 2]} | layers).to_parquet(tmp_path / "a.parquet")
    table = read.read_table(tmp_path / "a.parquet", ("step",), ("whole", "some"))
    assert table.dtypes.astype(str).to_dict() == {"step": "int64", "whole": "int64", "some": "Int64"}


OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"
TIMED, SYNTHETIC = {"op": "ffn_forward", "plan": "dense"}, {"pattern": "synthetic", "mean_nnz": 10.0}


def single(folder, value, date, op="train", **fields):
    study = Study(date=date)
    run = trainings(study)[0]
    write_rows(folder / "rows.csv", [row(study, run, "relu", op, "cross_entropy", value, **fields)])
    return folder


@pytest.mark.parametrize(
    "result",
    [{}, {"mean_nnz": 7.0}, {"power_state": "other"}, {"baseline": "dense_eager"}, {"device": "another", "gpus": 8}],
)
def test_latest_measurement_wins_and_says_so(tmp_path, result):
    """A training on another device is the same training."""
    old, new = single(tmp_path / "old", 5.0, OLD), single(tmp_path / "new", 4.0, NEW, **result)
    for sources in ((old, new), (new, old)):
        results = load(*sources)
        assert list(results.rows["value"]) == [4.0]
        (note,) = results.notes
        assert str(old) in note


def test_a_later_choice_of_backends_replaces_an_earlier_one(tmp_path):
    chosen = TIMED | {"plan": "by_layer"}
    old = single(tmp_path / "old", 5.0, OLD, **chosen, backend="dense")
    assert list(load(old, single(tmp_path / "new", 4.0, NEW, **chosen, backend="triton")).rows["value"]) == [4.0]
    compiled = single(tmp_path / "compiled", 4.0, NEW, **chosen, backend="dense_compiled")
    assert sorted(load(old, compiled).rows["value"]) == [4.0, 5.0]


@pytest.mark.parametrize(
    ("fields", "other"),
    [(TIMED, {"device": "another"}), (TIMED, {"step": 3}), (TIMED, {"plan": "twell"}), (SYNTHETIC, {"mean_nnz": 29.0})],
)
def test_other_measurements_are_both_kept(tmp_path, fields, other):
    old = single(tmp_path / "old", 5.0, OLD, **fields)
    results = load(old, single(tmp_path / "new", 4.0, NEW, **(fields | other)))
    assert sorted(results.rows["value"]) == [4.0, 5.0]
    assert results.notes == ()


def changed_setting(folder, item, section, **values):
    path = folder / item / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config.setdefault(section, {}).update(values)
    path.write_text(yaml.safe_dump(config))


def test_seeds_of_one_training_do_not_differ_in_other_options(tmp_path):
    study = Study(name="rates", runs=(Run("low"), Run("high", seed=1), Run("sparse", 1e-3)), steps=4, sweep=True)
    folder = write_study(tmp_path, study)
    changed_setting(folder, "sparse", "optimizer", learning_rate=0.1)  # another line of every table
    changed_setting(folder, "high", "training", seed=1)
    changed_setting(folder, "high", "run", dir="/elsewhere")
    assert set(load(folder).rows["item"]) >= {"low", "high", "sparse"}
    changed_setting(folder, "high", "optimizer", learning_rate=0.01)
    with pytest.raises(ResultsError) as error:
        load(folder)
    assert "rates/high and rates/low differ in optimizer.learning_rate (0.01 and 0.001)" in str(error.value)
    assert "model.name" in str(error.value)


def test_settings_are_those_of_the_newest_of_two_runs_of_one_name(tmp_path):
    """An earlier run of the name had another learning rate; its rows are replaced, and so are its settings."""
    runs = (Run("first"), Run("second", seed=1))
    earlier = write_study(tmp_path / "earlier", Study(runs=runs, date=OLD, steps=4, sweep=True))
    changed_setting(earlier, "second", "optimizer", learning_rate=0.01)
    later = write_study(tmp_path / "later", Study(runs=runs, date="2026-02-01T00:00:00+00:00", steps=4, sweep=True))
    for sources in ((earlier, later), (later, earlier)):
        rates = load(*sources).settings.query("key == 'optimizer.learning_rate'")["value"]
        assert set(rates) == {"0.001"}


def test_different_trainings_of_one_name_are_refused(tmp_path):
    """Their curves, which are found by the name, would be one training's alone."""
    zero = single(tmp_path / "zero", 5.0, OLD)
    one = single(tmp_path / "one", 4.0, NEW, seed=1)
    with pytest.raises(
        ResultsError, match=r"zero and .*one hold different trainings \(seed 0 and 1\) of the same name"
    ):
        load(zero, one)


@pytest.mark.parametrize("name", ["seed", "gated", "l1"])
def test_a_training_may_lack_what_tells_it_from_others(tmp_path, name):
    """Rows from elsewhere may not say it; that it is unknown in one of two is a difference."""
    lacks = single(tmp_path / "lacks", 5.0, OLD, **{name: None})
    assert load(lacks).rows[name].isna().all()
    with pytest.raises(ResultsError, match=rf"different trainings \({name} None and "):
        load(lacks, single(tmp_path / "says", 4.0, NEW))


def test_same_file_twice_is_no_conflict_but_a_contradiction_is(tmp_path):
    one = single(tmp_path / "one", 5.0, OLD)
    shutil.copytree(one, tmp_path / "two")
    assert len(load(one, tmp_path / "two").rows) == 1
    single(tmp_path / "two", 4.0, OLD)
    with pytest.raises(ResultsError, match="same date"):
        load(one, tmp_path / "two")


def test_curves_come_from_the_folder_with_the_latest_rows(copy, tmp_path):
    later = Study(steps=30, layers=3, date="2026-03-01T00:00:00+00:00", runs=(Run("relu"),), sweep=True)
    again = write_study(tmp_path / "again", later)
    curves = load(copy, again).curves
    assert curves.query("item == 'relu'")["step"].max() == 30
    assert not curves.duplicated(["study", "item", "step", "metric", "layer"]).any()


def test_metrics_without_training_rows(copy):
    change_rows(copy / "relu" / "rows.csv", lambda h, r: r[0].__setitem__(h.index("l1"), "0.5"))
    with pytest.raises(ResultsError, match="rows of one training, got 2"):
        load(copy)


def test_values_survive_exactly(tmp_path):
    value = math.pi / 7
    assert load(single(tmp_path / "one", value, OLD)).rows["value"][0] == value
