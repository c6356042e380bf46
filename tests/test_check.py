"""analysis.check: a run is compared with the committed rows, exactly where it is reproducible, else with tolerances."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from analysis import check as program
from analysis import evaluation
from analysis.choose import where
from analysis.comparison import (
    EQUAL,
    LOSSES,
    MISSING,
    OTHER,
    OUTSIDE,
    SAME,
    TOLERANCES,
    UNMEASURED,
    WITHIN,
    committed_rows,
    compare,
    criteria,
    report,
)
from analysis.load import FIGURES, load
from analysis.read import read_rows

OTHER_CPU = "Another CPU, 4 cores"
KEPT = ("relu", "relu_l1_2e-2", "nonzeros_relu", "bench_kernels")
SCORED = "evaluate_21m_l1_0_seed_0"


@pytest.fixture(scope="module")
def committed():
    """Some of the committed rows, as if of a CPU whose name tells its model."""
    parts = where(committed_rows("demo"), item=KEPT), where(committed_rows("scaled"), item=SCORED)
    return pd.concat(parts, ignore_index=True).assign(device="CPU 8480, 2 cores", gpus=math.nan)


def verdicts(expected, measured):
    return set(compare(expected, measured).lines["verdict"])


def changed(rows, column, change, **wanted):
    """The rows with one column of those that are `wanted` changed."""
    chosen = where(rows, **wanted).index
    assert len(chosen)
    copy = rows.copy()
    copy.loc[chosen, column] = change(copy.loc[chosen, column])
    return copy


def test_the_same_rows_are_equal_to_the_last_digit(committed):
    comparison = compare(committed, committed)
    assert comparison.passed
    assert set(comparison.lines["verdict"]) == {EQUAL}
    assert set(comparison.lines["tolerance"]) == {"exact", "factor 3"}
    text = report(comparison)
    assert f"All {len(where(comparison.lines, metric=LOSSES))} losses are equal to the last digit." in text
    assert text.endswith("PASSED")


def test_on_the_same_cpu_a_last_digit_that_differs_fails(committed):
    measured = changed(committed, "value", lambda v: np.nextafter(v, math.inf), item="relu", metric="cross_entropy")
    comparison = compare(committed, measured)
    assert not comparison.passed
    wrong = where(comparison.lines, verdict=OUTSIDE)
    assert wrong["metric"].tolist() == ["cross_entropy"]
    assert "Outside their tolerance, 1:" in report(comparison)


def test_a_cpu_without_a_model_in_its_name_may_be_another(committed):
    wanted = committed.assign(device="Intel(R) Xeon(R) Processor, 2 cores")
    near = changed(wanted, "value", lambda v: v * 1.02, metric=LOSSES)
    assert verdicts(wanted, near) == {EQUAL, WITHIN}
    assert OUTSIDE in verdicts(committed, near.assign(device=committed["device"]))


@pytest.mark.parametrize(("column", "cell", "allowed"), [("device", OTHER_CPU, 0.03), ("torch", "2.12.0", 0.01)])
def test_another_cpu_or_torch_may_differ_within_the_tolerance(committed, column, cell, allowed):
    other = changed(committed, column, lambda _: cell)
    near = changed(other, "value", lambda v: v * (1 + 0.9 * allowed), metric=LOSSES)
    assert verdicts(committed, near) <= {EQUAL, WITHIN, OTHER}
    far = changed(other, "value", lambda v: v * (1 + 1.1 * allowed), metric=LOSSES)
    lines = compare(committed, far).lines
    assert set(where(lines, verdict=OUTSIDE)["metric"]) == set(LOSSES)


def test_speeds_are_compared_as_ratios_and_on_one_device_only(committed):
    slower_machine = changed(committed, "value", lambda v: v * 10, metric=("time", "throughput"))
    assert compare(committed, slower_machine).passed, "time itself belongs to a machine"
    ratio = changed(committed, "ratio", lambda v: v / 4, metric="time", item="bench_kernels")
    wrong = where(compare(committed, ratio).lines, verdict=OUTSIDE)
    assert set(wrong["quantity"]) == {"ratio"}
    elsewhere = changed(ratio, "device", lambda _: OTHER_CPU)
    lines = compare(committed, elsewhere).lines
    assert set(where(lines, quantity="ratio")["verdict"]) == {OTHER}


def test_another_gpu_may_fit_other_steps_than_the_committed_ones():
    wanted = where(committed_rows("full_shapes"), item="bench_training_1b_l1_2e-5")
    smaller = wanted.assign(device="NVIDIA H100", tokens=wanted["tokens"] // 2)
    assert verdicts(wanted, smaller) == {OTHER}
    assert MISSING in verdicts(wanted, smaller.assign(device=wanted["device"]))


def test_what_a_program_chooses_by_itself_may_be_another_choice(committed):
    trained = where(committed, op="train")
    assert verdicts(trained, trained.assign(plan="csr", backend="hopper")) == {EQUAL}
    rows = committed_rows("kernels")
    tuned = rows[rows["op"].str.startswith("ffn_tuned")]
    other = tuned.assign(backend=tuned["backend"].mask(tuned["plan"].eq("by_layer"), "dense"))
    assert verdicts(tuned, other) == verdicts(tuned, tuned) == {EQUAL}


def test_ratios_on_a_gpu_have_a_narrower_tolerance():
    rows = where(committed_rows("full_shapes"), item="bench_training_0.5b_l1_2e-5")
    assert compare(rows, changed(rows, "ratio", lambda v: v * 1.1, metric="time")).passed
    assert not compare(rows, changed(rows, "ratio", lambda v: v * 1.2, metric="time")).passed


def test_an_item_that_did_not_run_is_missing_and_fails(committed):
    measured = committed[committed["item"] != "relu_l1_2e-2"]
    comparison = compare(committed, measured)
    assert not comparison.passed
    assert set(where(comparison.lines, verdict=MISSING)["item"]) == {"relu_l1_2e-2"}
    assert "Missing: relu_l1_2e-2: all of its numbers" in report(comparison)


@pytest.mark.parametrize("metrics", [("accuracy", "accuracy_norm"), ("accuracy",)])
def test_a_row_that_says_why_it_has_no_value_is_listed_and_does_not_fail(committed, metrics):
    """Without task files, `evaluate` writes one row for each task, in place of its accuracy in every form."""
    scored = committed["metric"].isin(("accuracy", "accuracy_norm"))
    measured = committed[~scored | committed["metric"].isin(metrics)].copy()
    measured.loc[measured["metric"].isin(metrics), ["value", "missing"]] = [math.nan, "no task files"]
    comparison = compare(committed, measured)
    assert comparison.passed
    unmeasured = where(comparison.lines, verdict=UNMEASURED)
    assert len(unmeasured) == scored.sum()
    assert set(unmeasured["reason"]) == {"no task files"}
    assert "Not measured: accuracy, accuracy_norm" in report(comparison)


def test_numbers_without_a_committed_counterpart_are_counted(committed):
    expected = committed[committed["item"] != "nonzeros_relu"]
    comparison = compare(expected, committed)
    assert comparison.passed
    assert comparison.not_committed > 0


def test_rows_that_are_wanted_twice_do_not_hide_each_other(committed):
    lines = compare(committed, committed).lines
    assert not lines.duplicated([*SAME, "quantity"]).any()
    kernels = where(committed_rows("demo"), item="bench_kernels", metric="time")
    own = where(compare(kernels, kernels).lines, op="ffn_forward")
    assert own["about_nnz"].nunique() == 3, "one for each number of non-zeros"


def held(measured):
    """By criterion, whether it holds for these rows beside the committed ones of the demo."""
    return criteria(committed_rows("demo"), measured).set_index("name")["holds"].to_dict()


@pytest.mark.slow
def test_the_criteria_hold_for_other_rounding_and_fail_for_a_fault():
    rows = committed_rows("demo")
    whole = {"op": "train", "layer": None}
    other = changed(rows, "value", lambda v: v * 1.01, metric="validation_cross_entropy", **whole)
    other = changed(other, "value", lambda v: v * 1.1, metric="nonzeros", item="relu", **whole)
    assert all(held(other).values())
    loss = changed(rows, "value", lambda v: v * 1.03, metric="validation_cross_entropy", item="relu", **whole)
    assert [name for name, holds in held(loss).items() if not holds] == ["held-out cross-entropy"]
    fewer = rows[rows["item"] != "nonzeros_relu"]
    assert [name for name, holds in held(fewer).items() if not holds] == ["rows of results"]
    swapped = changed(rows, "value", lambda v: v * 0 + 1.0, metric="nonzeros", item="relu", **whole)
    assert [name for name, holds in held(swapped).items() if not holds] == ["mean non-zeros", "order by non-zeros"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["studdy=demo"], "wanted study=, source= or strict="),
        (["study="], "wanted study=, source= or strict="),
        (["strict=yes"], "wanted true or false"),
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
    assert program.main(["study=gpu", f"source={tmp_path}", "strict=true"]) == 1, "the other parts are missing"
    told = capsys.readouterr().out
    assert "Missing: 21m_l1_0_seed_0" in told
    assert "Missing: 11m_l1_0_seed_0" not in told


def test_models_on_another_text_are_not_compared(tmp_path, capsys):
    rows = where(read_rows(FIGURES / "h200" / "rows.csv"), study="sizes").assign(text="another")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    assert program.main(["study=sizes", f"source={tmp_path}"]) == 1
    told = capsys.readouterr().out
    assert "were trained on wiki-openstax-gutenberg-417MB, these on another: nothing to compare." in told
    assert "OUTSIDE" not in told


@pytest.mark.slow
def test_the_committed_demo_passes_its_own_check(capsys):
    assert program.main([f"source={FIGURES / 'demo'}"]) == 0
    assert "NO" not in capsys.readouterr().out
    assert program.main([f"source={FIGURES / 'demo'}", "strict=true"]) == 0
    told = capsys.readouterr().out
    assert "losses are equal to the last digit" in told
    assert f"expected: {len(committed_rows('demo'))} rows" in told


def test_every_metric_of_the_trainings_has_a_tolerance():
    rows = pd.concat([committed_rows(study) for study in ("demo", "scaled")])
    counted = set(rows.loc[rows["op"].isin(("train", "nonzeros", "evaluate")), "metric"])
    assert counted - set(TOLERANCES) == {"throughput", "peak_memory"}


def test_the_evaluators_page_has_the_demos_losses_and_the_studies_without_rows():
    results = load(FIGURES / "demo")
    text = evaluation.page(results)
    loss = where(results.rows, item="relu", op="train", metric="validation_cross_entropy")["value"].iloc[0]
    assert f"{loss:.6f}" in text
    assert "| sizes | – |" in text
    assert "| gpu | – | – | – | none yet | – |" in text
    assert "smoke" not in text
    assert "run by hand" not in text


def test_the_evaluators_page_names_parts_with_rows_and_rows_without_a_study():
    results = load(FIGURES / "demo")
    rows = results.rows.assign(study=["scaled" if op == "train" else "h200" for op in results.rows["op"]])
    text = evaluation.page(dataclasses.replace(results, rows=rows))
    assert "| gpu | – | – | – | those of its parts: scaled (1 of 7) | – |" in text
    assert "\n`h200`\nis no study" in text
    assert "| validation cross entropy | exact | ±1% | ±3% |" in text
