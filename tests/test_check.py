"""analysis.check: a run is compared with the committed rows by criteria that hold on every processor."""

import dataclasses

import pytest

from analysis import check as program
from analysis import evaluation
from analysis.choose import where
from analysis.comparison import committed_rows, criteria
from analysis.load import FIGURES, load
from analysis.read import read_rows

WHOLE = {"op": "train", "layer": None}


def changed(rows, column, change, **wanted):
    """The rows with one column of those that are `wanted` changed."""
    chosen = where(rows, **wanted).index
    assert len(chosen)
    copy = rows.copy()
    copy.loc[chosen, column] = change(copy.loc[chosen, column])
    return copy


def failed(committed, measured):
    """The criteria that do not hold for these rows beside the committed ones."""
    lines = criteria(committed, measured)
    return lines.loc[~lines["holds"].astype(bool), "name"].tolist()


@pytest.mark.slow
def test_the_criteria_hold_for_other_rounding_and_fail_for_a_fault():
    rows = committed_rows("demo")
    other = changed(rows, "value", lambda v: v * 1.01, metric="validation_cross_entropy", **WHOLE)
    other = changed(other, "value", lambda v: v * 1.1, metric="nonzeros", item="relu", **WHOLE)
    assert failed(rows, other) == []
    loss = changed(rows, "value", lambda v: v * 1.03, metric="validation_cross_entropy", item="relu", **WHOLE)
    assert failed(rows, loss) == ["held-out cross-entropy"]
    assert failed(rows, rows[rows["item"] != "nonzeros_relu"]) == ["rows of results"]
    swapped = changed(rows, "value", lambda v: v * 0 + 1.0, metric="nonzeros", item="relu", **WHOLE)
    assert failed(rows, swapped) == ["mean non-zeros", "order by non-zeros"]


def test_accuracies_are_compared_in_points():
    rows = where(committed_rows("scaled"), item="evaluate_21m_l1_0_seed_0")
    assert failed(rows, changed(rows, "value", lambda v: v + 4, metric="accuracy")) == []
    assert failed(rows, changed(rows, "value", lambda v: v + 6, metric="accuracy")) == ["accuracies"]
    without_tasks = rows.assign(value=rows["value"].mask(rows["metric"].eq("accuracy")), missing="no task files")
    assert failed(rows, without_tasks) == []


def test_speeds_are_compared_as_ratios_and_on_one_gpu_only():
    rows = where(committed_rows("full_shapes"), item="bench_training_0.5b_l1_2e-5")
    assert failed(rows, changed(rows, "value", lambda v: v * 10, metric=("time", "throughput"))) == []
    ratios = {"metric": ("time", "energy", "peak_memory")}
    assert failed(rows, changed(rows, "ratio", lambda v: v * 1.1, **ratios)) == []
    slower = changed(rows, "ratio", lambda v: v * 1.2, **ratios)
    assert failed(rows, slower) == ["ratios to dense on the same GPU"]
    assert failed(rows, slower.assign(device="NVIDIA H100")) == []


def test_one_slower_operation_among_many_fails():
    rows = committed_rows("full_shapes")
    slower = changed(rows, "ratio", lambda v: v * 1.2, op="model_forward", metric="time")
    assert failed(rows, slower) == ["ratios to dense on the same GPU"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["studdy=demo"], "wanted study= or source="),
        (["study="], "wanted study= or source="),
        (["study=demo", "study=demo"], "study is given twice"),
        (["study=demmo"], "study=demmo: wanted one of demo, "),
        (["study=demo", "source=/does/not/exist"], "/does/not/exist is not a folder"),
        (["study=demo", f"source={FIGURES / 'h200'}"], "has no rows of the study demo"),
    ],
)
def test_wrong_commands_are_explained_in_one_line(arguments, message, capsys):
    assert program.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_study_that_has_not_been_run_names_the_command_to_run_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert program.main([]) == 2
    assert "runs/demo does not exist: run the study first (make reproduce)" in capsys.readouterr().err
    assert program.main(["study=scaled"]) == 2
    assert "python -m slurm.submit study=scaled" in capsys.readouterr().err


def test_a_study_without_committed_rows_says_so(capsys):
    assert program.main(["study=l1_sweep", f"source={FIGURES}"]) == 1
    assert "has no rows of the study l1_sweep yet" in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_of_parts_is_compared_with_the_rows_of_its_parts(tmp_path, capsys):
    rows = where(read_rows(FIGURES / "h200" / "rows.csv"), study="sizes").assign(study="gpu")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert program.main(["study=gpu", f"source={tmp_path}"]) == 1, "the other parts are missing"
    told = capsys.readouterr().out
    assert "21m_l1_0_seed_0" in told
    assert "11m_l1_0_seed_0" not in told


def test_models_on_another_text_are_not_compared(tmp_path, capsys):
    rows = where(read_rows(FIGURES / "h200" / "rows.csv"), study="sizes").assign(text="another")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert program.main(["study=sizes", f"source={tmp_path}"]) == 1
    told = capsys.readouterr().out
    assert "were trained on wiki-openstax-gutenberg-417MB, these on another: nothing to compare." in told


@pytest.mark.slow
def test_the_committed_demo_passes_its_own_check(capsys):
    assert program.main([f"source={FIGURES / 'demo'}"]) == 0
    assert "NO" not in capsys.readouterr().out


def test_the_evaluators_page_has_the_demos_losses_and_the_studies_without_rows():
    results = load(FIGURES / "demo")
    text = evaluation.page(results)
    loss = where(results.rows, item="relu", op="train", metric="validation_cross_entropy")["value"].iloc[0]
    assert f"{loss:.6f}" in text
    assert "| sizes | – |" in text
    assert "| gpu | – | – | – | none yet |" in text
    assert "smoke" not in text


def test_the_evaluators_page_names_parts_with_rows():
    results = load(FIGURES / "demo")
    text = evaluation.page(dataclasses.replace(results, rows=results.rows.assign(study="scaled")))
    assert "| gpu | – | – | – | those of its parts: scaled (1 of 7) |" in text
