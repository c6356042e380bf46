"""analysis.report and analysis.markdown: ratios are those of the right pairs, and pages get them."""

import pandas as pd
import pytest
from synthetic_results import Run, Study, results_of, row

from analysis import catalogue, choose, markdown, report

STUDY = Study(name="speeds", model="0.5b", gpu=True, device="A GPU")
RUN = Run("training", 2e-5)


def measured(op, plan, backend, tokens, **metrics):
    """Rows of one form: metric -> value."""
    about = {"plan": plan, "backend": backend, "tokens": tokens, "mean_nnz": 90.0}
    about |= {"backup": 0.125} if plan == "hybrid" else {}
    return [row(STUDY, RUN, "bench", op, metric, value, **about) for metric, value in metrics.items()]


def steps(tokens, plain=9.5):
    return [
        *measured("model_training", "dense", "dense_eager", tokens, throughput=10.0, peak_memory=80.0),
        *measured("model_training", "dense", "dense_transformers", tokens, throughput=plain, peak_memory=100.0),
        *measured("model_training", "by_layer", "hopper", tokens, throughput=12.0, peak_memory=70.0),
        *measured("model_training", "hybrid", "hopper", tokens, throughput=9.0, peak_memory=75.0),
    ]


COMPILED = [
    *measured("model_forward", "dense", "dense_compiled", 4096, throughput=100.0, energy=5.0),
    *measured("model_forward", "by_layer", "hopper_compiled", 4096, throughput=120.0, energy=4.0),
    *measured("model_training", "dense", "dense_compiled_layers", 8192, throughput=20.0, peak_memory=50.0),
    *measured("model_training", "by_layer", "hopper_compiled", 8192, throughput=30.0, peak_memory=40.0),
    *measured("model_training", "by_layer", "hopper_compiled", 16384, throughput=33.0, peak_memory=79.0),
]


def test_whole_models_over_the_compiled_dense_one_with_as_many_tokens(tmp_path):
    line = report.models(results_of(tmp_path, COMPILED)).iloc[0]
    assert line["forward_speed"] == pytest.approx(1.2)
    assert line["forward_energy_pct"] == pytest.approx(-20)
    assert line["step_speed"] == pytest.approx(1.5)
    assert line["step_memory_pct"] == pytest.approx(-20)
    assert line["step_tokens"] == 8192


@pytest.mark.parametrize(("own", "faster"), [(90.0, "dense_compiled"), (110.0, "dense_twell")])
def test_of_two_compiled_dense_forms_the_faster_one_counts(own, faster, tmp_path):
    rows = [
        *measured("model_forward", "by_layer", "hopper_compiled", 4096, throughput=132.0, energy=4.0),
        *measured("model_forward", "dense", "dense_compiled", 4096, throughput=100.0, energy=5.0),
        *measured("model_forward", "dense", "dense_twell", 4096, throughput=own, energy=8.0),
    ]
    line = report.models(results_of(tmp_path, [one | {"baseline": faster} for one in rows])).iloc[0]
    assert line["forward_speed"] == pytest.approx(1.32 if faster == "dense_compiled" else 1.2)
    assert line["forward_energy_pct"] == pytest.approx(-20 if faster == "dense_compiled" else -50)


def test_steps_with_nothing_compiled_beside_the_papers(tmp_path):
    line = report.uncompiled(
        results_of(tmp_path, [*steps(2048), *steps(4096, plain=6.0)]), "model_training", "peak_memory"
    ).iloc[0]
    assert line["fastest_over_eager"] == pytest.approx(1.2)
    assert line["papers_over_eager"] == pytest.approx(0.9)
    assert line["papers_over_transformers"] == pytest.approx(9 / 9.5), "of the step with fewer tokens"
    assert line["peak_memory_pct"] == pytest.approx(-25)
    assert line["published"] == pytest.approx(0.99, abs=0.01)


def test_a_step_that_fills_the_memory_is_no_baseline_for_speed(tmp_path):
    line = report.uncompiled(results_of(tmp_path, steps(4096, plain=6.0)), "model_training", "peak_memory").iloc[0]
    assert pd.isna(line["papers_over_transformers"])
    assert line["peak_memory_pct"] == pytest.approx(-25)


def test_models_are_in_order_of_their_size(tmp_path):
    rows = [one | {"model": name, "item": name} for name in ("1.5b", "0.5b", "21m") for one in COMPILED]
    assert list(report.models(results_of(tmp_path, rows))["model"]) == ["21m", "0.5b", "1.5b"]


def block(plan, backend, tokens, time, ratio, nonzeros=29.2):
    about = {"plan": plan, "backend": backend, "tokens": tokens, "mean_nnz": nonzeros, "gated": True}
    about |= {"pattern": "synthetic", "ratio": ratio, "baseline": "dense_eager" if ratio else ""}
    return row(STUDY, None, "blocks", "ffn_forward", "time", time, **about)


def test_one_block_with_the_most_tokens(tmp_path):
    rows = [
        block("dense", "dense_eager", 4096, 2.0, 1.0),
        block("dense", "dense_compiled", 4096, 1.5, 4 / 3),
        block("twell", "hopper", 4096, 1.0, 1.5),
        block("twell_ordered", "hopper", 4096, 0.75, 2.0),
        block("twell", "hopper", 1024, 0.1, 9.0),
    ]
    line = report.blocks(results_of(tmp_path, rows), "ffn_forward").iloc[0]
    assert (line["mean_nnz"], line["dense_ms"], line["plain"], line["sorted_ratio"]) == (29, 1.5, 1.5, 2.0)


def test_tables_without_rows_are_left_out(tmp_path):
    names = {table.name for table in catalogue.make(results_of(tmp_path, COMPILED), catalogue.OVERVIEW)}
    assert names == {"models"}


def test_what_all_lines_share_is_said_once(tmp_path):
    results = results_of(tmp_path, [*COMPILED, *(one | {"l1": 1e-4, "item": "other"} for one in COMPILED)])
    page = markdown.results_page(results, catalogue.make(results, catalogue.OVERVIEW))
    assert "All lines: model: 0.5b; device: A GPU; active neurons: 90" in page
    assert "| L1 |\n| ---: |\n| 2e-5 |\n| 1e-4 |" in page


def test_only_marked_blocks_of_a_page_change(tmp_path):
    results = results_of(tmp_path, COMPILED)
    page = "before\n<!-- results:begin models -->\nold\n<!-- results:end models -->\nafter 1.23\n"
    filled = markdown.fill(page, results, catalogue.make(results), [])
    assert filled.startswith("before\n<!-- results:begin models -->\n| model |")
    assert filled.endswith("<!-- results:end models -->\nafter 1.23\n")
    assert "| 0.5b | 90 | 1.20 | 1.50 | −20% |" in filled
    assert markdown.fill(filled, results, catalogue.make(results), []) == filled
    with pytest.raises(KeyError):
        markdown.fill(page.replace("models", "unknown"), results, [], [])


def test_random_ids_stand_beside_text_and_in_no_other_table(tmp_path):
    rows = [*COMPILED]  # of another item, on text alone
    for ending, nonzeros, time in (("", 95.0, 2.0), ("_random_ids", 400.0, 3.0)):
        for op in (f"model_forward{ending}", f"ffn_forward{ending}"):
            about = {"mean_nnz": nonzeros, "tokens": 4096, "layer": None if op.startswith("model") else 0}
            dense = {"plan": "dense", "backend": "dense_eager"}
            sparse = {"plan": "twell", "backend": "hopper", "ratio": 3.0 / time}
            rows.append(row(STUDY, RUN, "bench", op, "time", 3.0, **dense, **about))
            rows.append(row(STUDY, RUN, "bench", op, "time", time, **sparse, **about))
    fp8 = {"plan": "dense_fp8", "backend": "dense_fp8", "ratio": 1.25, "check_error": 0.1, "layer": None}
    rows.append(row(STUDY, RUN, "bench", "model_forward", "time", 2.4, **about | fp8))
    results = results_of(tmp_path, rows)
    table = report.random_ids(results)
    assert table["layer"].isna().tolist() == [True, False]
    assert table[["text_active", "random_active"]].to_numpy().tolist() == [[95.0, 400.0]] * 2
    assert table.loc[table["layer"].isna(), ["text_speed", "random_speed"]].to_numpy().tolist() == [[1.5, 1.0]]
    assert table.loc[table["layer"].notna(), ["text_speed", "random_speed"]].isna().all(axis=None)
    assert table[["dense_fp8", "fp8_error_pct"]].dropna().to_numpy().tolist() == [[1.25, pytest.approx(10)]]


def test_of_trainings_of_several_lengths_the_longest_counts(tmp_path):
    shorter, longer = ([line | {"item": f"of_{step}", "step": step} for line in COMPILED] for step in (10, 20))
    shorter = [line | {"value": line["value"] and 3 * line["value"]} for line in shorter if line["plan"] == "by_layer"]
    whole = report.models(results_of(tmp_path / "both", [*shorter, *longer]))
    pd.testing.assert_frame_equal(whole, report.models(results_of(tmp_path / "longer", longer)))


@pytest.mark.parametrize("unknown", ["l1", "tokens_trained"])
def test_trainings_that_do_not_say_how_long_or_with_which_l1_have_no_table_of_lengths(tmp_path, unknown):
    trained = row(STUDY, RUN, "training", "train", "validation_cross_entropy", 3.0, **{unknown: None})
    assert report.lengths(results_of(tmp_path, [trained])).empty


@pytest.mark.parametrize("unknown", ["intermediate", "tokens_trained", "tokens_per_parameter"])
def test_trainings_that_do_not_say_their_size_stand_in_tables(tmp_path, unknown):
    """At L1 values for which both readings of the paper's would be compared."""
    about = {"tokens_trained": 1000, "tokens_per_parameter": 2.0, unknown: None}
    rows = [
        row(STUDY, Run(f"at_{l1}", l1), f"at_{l1}", "train", metric, value, **about)
        for l1 in (1e-5, 3e-5, 1e-3, 3e-3)
        for metric, value in (("validation_cross_entropy", 3.0), ("nonzeros", 20.0))
    ]
    tables = {table.name: table.frame for table in catalogue.make(results_of(tmp_path, rows))}
    assert len(tables["summary"]) == 4
    factor = tables.get("l1_factor", pd.DataFrame({"trained": []}))
    assert len(factor["trained"]) == (0 if unknown == "intermediate" else 1)  # it compares shares of the neurons


def test_fp8_products_stand_beside_blocks_and_are_no_speed_of_ours(tmp_path):
    about = {"tokens": 4096, "mean_nnz": 60.0, "hidden": 64, "intermediate": 128, "pattern": "synthetic"}
    forms = (("dense", "dense_eager", 3.0), ("twell", "hopper", 2.0), ("dense_fp8", "dense_fp8", 1.5))
    rows = [
        row(STUDY, RUN, "blocks", "ffn_forward", "time", time, plan=plan, backend=backend, check_error=0.1, **about)
        | ({} if plan == "dense" else {"ratio": 3.0 / time})
        for plan, backend, time in forms
    ]
    results = results_of(tmp_path, rows)
    (line,) = report.blocks(results, "ffn_forward").to_dict("records")
    assert (line["plain"], line["dense_fp8"], line["fp8_error_pct"]) == (1.5, 2.0, pytest.approx(10))
    assert set(choose.made_for_speed(results.rows)["plan"]) == {"dense", "twell"}


def test_a_block_that_stayed_dense_has_no_speed(tmp_path):
    rows = [
        row(STUDY, RUN, "k", f"ffn_tuned{graph}", "time", 2.0, ratio=ratio, mean_nnz=29.0, pattern="synthetic", **call)
        for graph, ratio, call in (
            ("", 1.5, {"plan": "by_layer", "backend": "hopper", "tokens": 4096, "baseline": "dense_twell"}),
            ("", 1.02, {"plan": "by_layer", "backend": "dense", "tokens": 64, "baseline": "dense_twell"}),
            ("_graph", 1.25, {"plan": "by_layer", "backend": "triton", "tokens": 64, "baseline": "dense_twell"}),
        )
    ]
    table = report.tuned(results_of(tmp_path, rows)).drop(columns="device").to_numpy().tolist()
    assert table == [["no", 64, "dense"], ["no", 4096, "1.50"], ["yes", 64, "1.25"]]
