"""analysis.stats, measures, tables and render: numbers recomputed by hand from rows, and explicit gaps."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from synthetic_results import DEMO, TASKS, Run, Study, layer_nonzeros, results_of, row, trainings, validation_loss

from analysis import choose, describe, paper, render, stats, tables
from analysis.gains import gains
from analysis.load import load
from analysis.measures import NOT_FOR_SPEED, Variant, measure
from analysis.publish import left_out
from analysis.summary import dead_by_window, generation, kernels, layers, summary


@pytest.fixture(scope="module")
def both(paper, study):
    return load(paper, study)


def test_gains_have_the_widest_bounds_of_both_spreads(tmp_path):
    about = {"metric": "time", "pattern": "synthetic", "tokens": 8, "mean_nnz": 2.0, "gated": True}
    dense = {"plan": "dense", "backend": "dense_fused", "value": 6.0, "low": 5.0, "high": 8.0}
    sparse = {"plan": "twell", "backend": "hopper", "baseline": "dense_fused", "ratio": 3.0, "value": 2.0, "low": 1.0}
    forms = (dense, sparse | {"high": 4.0}, sparse | {"backend": "triton", "low": 0.0, "high": 4.0})
    rows = [row(Study(), None, "k", op="ffn_forward", **about | form) for form in forms]
    data = gains(results_of(tmp_path, rows).rows, "time").set_index("backend")
    assert data.loc["hopper", ["percent", "percent_low", "percent_high"]].tolist() == pytest.approx([200, 25, 700])
    assert data.loc["triton", ["percent_low", "percent_high"]].tolist() == pytest.approx([25, 25]), "nothing over 0"


def test_pearson_against_its_definition_and_where_undefined():
    x, y = np.array([1.0, 2, 4, 7]), np.array([3.0, 1, 1, -6])
    by_hand = ((x - x.mean()) * (y - y.mean())).sum() / math.sqrt(
        ((x - x.mean()) ** 2).sum() * ((y - y.mean()) ** 2).sum()
    )
    assert stats.pearson(x, y) == pytest.approx(by_hand)
    assert math.isnan(stats.pearson([1, 2], [3, 4]))
    assert math.isnan(stats.pearson([1, 1, 1], [3, 4, 5]))


def test_the_interval_of_pearsons_r():
    low, high = stats.pearson_interval(0.5, 28)
    assert (low, high) == pytest.approx((0.156, 0.736), abs=0.001)  # the textbook's: z = 0.549, half 0.392
    assert stats.pearson_interval(-0.5, 28) == pytest.approx((-high, -low))
    assert stats.pearson_interval(1.0, 8) == (1.0, 1.0)
    assert all(math.isnan(bound) for bound in (*stats.pearson_interval(0.5, 3), *stats.pearson_interval(math.nan, 9)))


def test_layer_contributions_sum_to_the_speedup_and_keep_the_sign():
    parts = stats.layer_contributions(pd.Series([1.0, 2.0, 4.0]), pd.Series([3.0, 1.5, 0.5]))  # dense 3, 3, 2
    assert list(parts) == [25.0, 12.5, -25.0]


def test_interval_of_the_mean_by_students_t():
    values = [3.0, 4.0, 8.0]
    by_hand = 4.302653 * np.std(values, ddof=1) / math.sqrt(3)
    assert stats.half_width_95(values) == pytest.approx(by_hand, rel=1e-4)
    assert math.isnan(stats.half_width_95([1.0]))
    assert stats.half_width_95([3.0, 8.0]) == 2.5, "of two values, half their range"
    many = np.random.default_rng(3).normal(10, 1, 400)
    assert stats.half_width_95(many) == pytest.approx(1.96 * many.std(ddof=1) / 20)


def test_quantiles_of_students_t():
    t = pytest.importorskip("scipy.stats").t
    assert pytest.approx([t.ppf(0.975, degrees) for degrees in range(2, 31)], abs=1e-4) == stats.T_975


def test_over_seeds_averages_the_runs_of_a_seed_first():
    rows = pd.DataFrame({"l1": [0, 1, 1, 1, 2], "seed": [0, 0, 0, 1, 0], "value": [5.0, 1.0, 2.0, 3.5, None]})
    table = stats.over_seeds(rows, ["l1"])
    assert list(table["l1"]) == [0, 1]
    assert list(table["value"]) == [5.0, 2.5]
    assert list(table["seeds"]) == [1, 2]
    assert math.isnan(table["low"][0])
    assert table["high"][1] == 3.5, "of two seeds, the range"


def test_equally_trained_runs_only(tmp_path):
    """A longer training of one L1 value does not stand beside shorter ones of the others."""
    rows = loss_rows({0.0: 4.0, 2e-5: 4.1})
    longer = row(Study(), Run("longer", 2e-5), "longer", "train", "validation_cross_entropy", 3.0, tokens_trained=10**9)
    chosen = choose.equally_trained(results_of(tmp_path, [*rows, longer]).rows)
    assert set(chosen["item"]) == {"relu_0.0", "relu_2e-05"}


def loss_rows(losses):
    study = Study()
    return [
        row(study, Run(f"relu_{l1}", l1), f"relu_{l1}", "train", "validation_cross_entropy", loss)
        for l1, loss in losses.items()
    ]


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ({0.0: 4.0, 2e-5: 9.0, 1e-4: 4.0}, 2e-5),  # the paper's value where measured
        ({0.0: 4.0, 1e-5: 4.0, 5e-5: 4.079, 1e-4: 4.081}, 5e-5),  # the largest within 2%
        ({0.0: 4.0, 1e-4: 4.5}, None),
        ({1e-5: 4.0}, None),
    ],
)
def test_recommended_l1(tmp_path, losses, wanted):
    assert choose.recommended_l1(results_of(tmp_path, loss_rows(losses)).rows, "demo") == wanted


def test_recommended_l1_follows_the_study(tmp_path):
    rows = loss_rows({0.0: 4.0, 3e-4: 4.0, 1e-3: 4.0, 5e-3: 4.0})
    reinit = Run("dead_reinit", 1e-3, modification="dead_neuron_reinit")
    rows.append(row(Study(), reinit, "dead_reinit", "train", "validation_cross_entropy", 4.0))
    assert choose.recommended_l1(results_of(tmp_path, rows).rows, "demo") == 1e-3


def test_losses_are_compared_with_those_of_the_same_seed():
    losses = pd.DataFrame(
        [(0.0, 0, 4.0), (0.0, 1, 5.0), (1e-4, 0, 4.2), (1e-4, 2, 9.0), (1e-3, 3, 5.4), (1e-2, 1, math.nan)],
        columns=["l1", "seed", "value"],
    )
    base = choose.where(losses, l1=0.0)
    found = choose.above_unregularised(losses, base)
    assert found.groupby("l1")["seed"].apply(list).to_dict() == {0.0: [0, 1], 1e-4: [0], 1e-3: [3], 1e-2: [1]}
    by_l1 = found.groupby("l1")["value"].mean()
    assert by_l1[[0.0, 1e-4]].round(9).tolist() == [0.0, 5.0]
    assert by_l1[1e-3] == pytest.approx(20.0), "no seed in common: against the mean of 4.0 and 5.0"
    assert math.isnan(by_l1[1e-2])
    assert choose.above_unregularised(losses, base.iloc[:0])["value"].isna().all()
    steps = pd.concat([losses.assign(step=1), losses.assign(step=2, value=losses["value"] * 2)])
    by_step = choose.above_unregularised(steps, choose.where(steps, l1=0.0), "step")
    assert by_step.groupby("l1")["value"].mean().round(9)[[1e-4, 1e-3]].tolist() == [5.0, 20.0]


def test_an_empty_cell_is_chosen_by_any_of_its_forms():
    frame = pd.DataFrame({"gated": pd.array([True, None, False], dtype="boolean"), "l1": [0.0, math.nan, 1e-3]})
    for empty in (None, pd.NA, math.nan):
        assert choose.where(frame, gated=empty).index.tolist() == [1]
        assert choose.where(frame, l1=empty).index.tolist() == [1]
    assert choose.where(frame, gated=True).index.tolist() == [0]


def test_passes_over_a_text_that_is_shorter_than_the_training(sweep):
    trained = choose.trainings(sweep.rows).assign(text="wiki-openstax-gutenberg-417MB")
    longer = trained.assign(tokens_trained=5376 * 65536)
    assert describe.passes(longer) == "3.6"
    assert describe.passes(trained) == "", "less than one"
    assert describe.passes(longer.assign(text="another")) == ""


def test_l1_labels():
    assert [choose.l1_label(v) for v in (0, 5e-6, 1.5e-5, 2e-5, 3e-4)] == ["0", "5e-6", "1.5e-5", "2e-5", "3e-4"]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0, 3, "0"), (2.932, 3, "2.93"), (100.6, 3, "101"), (1290.4, 3, "1,290"), (5632, 4, "5,632"), (0.5, 3, "0.5")],
)
def test_significant_digits(value, digits, text):
    assert render.significant(value, digits) == text


def test_numbers_of_pages_have_a_true_minus_sign_and_no_negative_zero():
    frame = pd.DataFrame({"cross_entropy_change_pct": [-0.29, -0.001], "floor_ms": -1.5e-5, "name": "a-b"})
    assert render.texts(frame).to_numpy().tolist() == [["−0.29", "−1.500e-05", "a-b"], ["0.00", "−1.500e-05", "a-b"]]
    assert [render.signed(v) for v in (12.4, -3.2, 0.2, -0.2)] == ["+12%", "−3%", "0%", "0%"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0.001", "1e-3"), ("1e-3", "1e-3"), ("1e-08", "1e-8"), ("0.02", "0.02"), ("1.0", "1"), ("10000.0", "10000"),
        ("1048576", "1048576"),
        ("0", "0"), ("8/18/28/38", "8/18/28/38"), ("True", "true"), ("bpe", "bpe"),
    ],
)  # fmt: skip
def test_hyperparameters_have_one_form(value, text):
    assert tables.as_printed(value) == text


def test_facts_are_read_from_the_reference():
    assert paper.fact(4, r"up to (\d+)% speedup") == 30
    with pytest.raises(LookupError, match="figure 4"):
        paper.fact(4, r"(\d+) elephants")


@pytest.mark.parametrize("spec", tables.TABLES, ids=lambda spec: spec.name)
def test_every_published_number_is_in_its_table(demo, spec):
    published = paper.table(spec.name)
    frame = spec.make(demo)
    if spec.name == "table2_hyperparameters":
        assert list(frame["paper, gated"]) == list(map(tables.as_printed, published["gated"]))
        assert list(frame["paper, non-gated"]) == list(map(tables.as_printed, published["non_gated"]))
        return
    shown = frame[frame["source"] == "paper"].reset_index(drop=True)
    for name in published.columns.drop("tokens_b", errors="ignore"):
        assert list(shown[name]) == list(published[name]), name


def test_scales_shows_ours_and_what_is_missing(demo):
    frame = tables.scales(demo)
    ours = frame[frame["scale"] == "demo"].set_index("l1")
    assert ours["forward_tokens_per_ms"].isna().all(), "the reference backend is not made for speed"
    assert set(ours["sparse"]) == {""}, "quality does not depend on it"
    assert set(ours["device"]) == {DEMO.device}, "where it was trained"
    assert ours.loc[2e-5, "note"] == f"accuracy: 2 of 7 tasks; forward, energy, training, memory: {NOT_FOR_SPEED}"
    absent = frame[(frame["scale"] == "1.5B") & (frame["source"] == "ours")]
    assert list(absent["note"]) == ["not measured"]
    assert absent.select_dtypes("number").isna().all(axis=None)


def test_changes_are_against_dense_in_the_same_run(both):
    """Of the model with L1, whose fastest dense form stands below its sparse row, and not of the one without, which
    another run may have timed."""
    both_forms = tables.scales(both).query("scale == '1.5B' and source == 'ours' and l1 == 2e-5")
    assert list(both_forms["sparse"]) == ["yes", "no"]
    ours, dense = both_forms.iloc[0], both_forms.iloc[1]
    assert math.isnan(dense["forward_tokens_per_ms_vs_dense_pct"])
    timed = both.rows.query("op == 'model_forward' and l1 == 2e-5 and gated and modification == 'none'")
    timed = timed.query("metric == 'throughput' and model == '1.5b'").set_index("backend")["value"]
    assert ours["forward_tokens_per_ms"] == timed["hopper"]
    assert dense["forward_tokens_per_ms"] == timed["dense_compiled"]
    assert ours["forward_tokens_per_ms_vs_dense_pct"] == pytest.approx(
        (timed["hopper"] / timed["dense_compiled"] - 1) * 100
    )
    energy = both.rows.query("op == 'model_forward' and metric == 'energy' and l1 == 2e-5 and backend == 'hopper'")
    assert ours["energy_mj_per_token_vs_dense_pct"] == pytest.approx((1 / energy["ratio"].iloc[0] - 1) * 100)


def test_means_over_seeds_have_their_interval(sweep):
    frame = tables.tasks(sweep)
    ours = frame[frame["scale"] == "21m"].iloc[0]
    assert ours["seeds"] == 3
    assert ours["piqa"] == pytest.approx(41.0), "40, 41 and 42 by seed"
    assert ours["piqa_ci95"] == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    shown = render.markdown(frame)
    assert "| 41.0 ± 2.5 |" in shown
    assert "| a guess | – | – | chance | – | 31.4 | 25.0 | 20.0 | 50.0 |" in shown
    line = summary(sweep).query("l1 == 1e-4").iloc[0]
    assert line["seeds"] == 3
    assert line["cross_entropy"] == pytest.approx(validation_loss(Run("x", 1e-4, seed=1)))
    assert line["cross_entropy_ci95"] == pytest.approx(0.02 * 4.3027 / math.sqrt(3), rel=1e-4)
    assert "forward_ratio" not in line, "nothing was timed"


def test_one_seed_has_the_interval_of_its_items(both):
    ours = tables.tasks(both).query("scale == '1.5B' and source == 'ours'").iloc[0]
    assert ours["piqa_ci95"] == pytest.approx(1.96 * 1.5)
    assert ours["mean_ci95"] == pytest.approx(1.96 * 1.5 / math.sqrt(7))


def test_dead_neurons_by_the_number_of_tokens(sweep):
    table = dead_by_window(sweep).query("l1 == 2e-5").set_index("window")
    assert list(table.index) == [2**15, 2**17, 2**20]
    assert list(table["dead_pct"]) == pytest.approx([39.0, 29.0, 19.0])
    assert table["dead_pct_ci95"].iloc[0] == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_published_changes_against_dense(demo):
    frame = tables.scales(demo).set_index(["scale", "source", "sparse"])
    assert frame.loc[("2B", "paper", "yes"), "forward_tokens_per_ms_vs_dense_pct"] == pytest.approx(
        (106 / 87.8 - 1) * 100
    )
    assert math.isnan(frame.loc[("2B", "paper", "no"), "forward_tokens_per_ms_vs_dense_pct"])


def test_rows_of_a_paper_scale_stand_under_the_papers(both):
    frame = tables.dead_neurons(both)
    at_scale = frame[frame["scale"] == "1.5B"]
    assert list(at_scale["source"][:4]) == ["paper", "ours", "paper", "ours"]
    assert list(at_scale["modification"][:6]) == ["none"] * 4 + ["dead_neuron_reinit"] * 2
    assert list(frame["scale"].unique()) == ["demo", "1.5B"]
    assert (at_scale["note"] == "").all()


def test_the_fastest_sparse_plan_is_shown_with_its_own_energy(tmp_path):
    study, run = Study(gpu=True), Run("relu_l1", 2e-5)
    rows = loss_rows({0.0: 4.0, 2e-5: 4.0})
    for plan, speed, energy in (("dense", 10, 5), ("twell", 12, 1), ("twell_ordered", 15, 4)):
        fields = {"plan": plan, "backend": "triton"}
        rows.append(row(study, run, "bench", "model_forward", "throughput", speed, **fields))
        rows.append(row(study, run, "bench", "model_forward", "energy", energy, **fields))
    own = Variant(2e-5, sparse=True).of(results_of(tmp_path, rows).rows)
    device = study.device
    assert measure(own, "forward_throughput", Variant(2e-5, True), device).value == 15
    assert measure(own, "forward_energy", Variant(2e-5, True), device).value == 4
    assert measure(own, "forward_energy", Variant(2e-5, False), device).value == 5


@pytest.mark.slow
def test_speeds_are_those_of_the_checkpoint_that_was_trained_longest(both):
    benchmarks = both.rows["op"].isin(("model_forward", "model_training", "generate"))
    earlier = both.rows[benchmarks].assign(
        step=both.rows["step"] - 1, value=both.rows["value"] * 3, item=both.rows["item"] + "_earlier"
    )
    mixed = replace(both, rows=pd.concat([both.rows, earlier], ignore_index=True))
    for spec in tables.TABLES:
        pd.testing.assert_frame_equal(spec.make(mixed), spec.make(both))
    pd.testing.assert_frame_equal(generation(mixed), generation(both))


def test_sparse_steps_are_shown_where_no_dense_one_fits(both):
    rows = both.rows
    dense = rows["op"].eq("model_training") & rows["plan"].eq("dense")
    assert dense.any()
    reason = rows["missing"].mask(dense, "out of memory")
    failed = replace(both, rows=rows.assign(value=rows["value"].mask(dense), missing=reason))
    data = tables.scales(failed)
    sparse = data[(data["source"] == "ours") & (data["scale"] == "1.5B") & (data["l1"] == choose.RECOMMENDED_L1)]
    assert sparse["train_tokens_per_ms"].notna().any()
    assert not sparse["note"].str.contains("reference").any()


def test_a_scale_of_another_case_is_the_papers(both):
    capital = replace(both, rows=both.rows.assign(model=both.rows["model"].replace("1.5b", "1.5B")))
    assert (capital.rows["model"] == "1.5B").any()
    data = tables.scales(capital)
    ours = data[(data["source"] == "ours") & (data["scale"] == "1.5B")]
    assert ours["forward_tokens_per_ms"].notna().any()


def test_trainings_on_two_texts_have_a_line_each(sweep):
    first = sweep.rows["l1"].eq(0.0)
    other = sweep.rows[~first].assign(text="another text", item=sweep.rows["item"] + "_other")
    other["value"] = other["value"].mask(other["metric"].eq("validation_cross_entropy"), 1.0)
    mixed = replace(sweep, rows=pd.concat([sweep.rows, other], ignore_index=True))
    lines = summary(mixed)
    assert set(lines["text"]) == {"invented text", "another text"}
    assert lines.loc[lines["text"] == "another text", "cross_entropy_change_pct"].isna().all()
    kept = lines[lines["text"] == "invented text"].drop(columns="text").reset_index(drop=True)
    pd.testing.assert_frame_equal(kept, summary(sweep))


def test_activations_and_gating_list_our_variants(demo):
    activations = tables.activations(demo)
    ours = activations[activations["scale"] == "demo"]
    assert list(ours["activation"]) == ["relu", "silu", "relu"]
    assert ours["nonzeros"].iloc[1] == DEMO.intermediate
    assert ours["cross_entropy"].iloc[0] == validation_loss(Run("relu"))
    gating = tables.gating(demo)
    assert list(gating[gating["scale"] == "demo"]["gated"]) == ["yes", "yes", "no", "no"]


def test_tasks_only_have_a_mean_when_all_are_measured(both):
    frame = tables.tasks(both)
    demo = frame[frame["scale"] == "demo"].iloc[0]
    assert math.isnan(demo["mean"])
    assert demo["piqa"] == 40.0
    assert demo["sparse"] == "", "accuracies do not depend on it"
    assert "HellaSwag" in demo["note"]
    ours = frame[(frame["scale"] == "1.5B") & (frame["source"] == "ours")].iloc[0]
    assert ours["mean"] == pytest.approx(ours[list(TASKS)].astype(float).mean())


def test_hyperparameters_come_from_the_saved_config(demo):
    frame = tables.hyperparameters(demo).set_index("name")
    assert frame.loc["hidden_size", "ours, demo"] == "128"
    assert frame.loc["head_dim", "ours, demo"] == "32"
    assert frame.loc["vocab_size", "ours, demo"] == "", "not in the config: not filled in"
    assert set(frame.columns) == {"paper, gated", "paper, non-gated", "ours, demo", "ours, demo-nongated"}


def test_summary_has_one_line_for_each_training(demo):
    table = summary(demo)
    assert len(table) == len(trainings(DEMO))
    line = table.query("l1 == 1e-4 and modification == 'none'").iloc[0]
    base = validation_loss(Run("relu"))
    assert line["cross_entropy_change_pct"] == pytest.approx((validation_loss(Run("x", 1e-4)) / base - 1) * 100)
    assert line["active_pct"] == pytest.approx(line["nonzeros"] / DEMO.intermediate * 100)
    assert "forward_ratio" not in table, "the reference backend is not made for speed"


def test_summary_has_the_speed_of_the_same_run(both):
    table = summary(both).query("model == '1.5b' and modification == 'none'").set_index(["activation", "l1"])
    timed = both.rows.query("op == 'model_forward' and l1 == 2e-5 and backend == 'hopper' and metric == 'throughput'")
    assert table.loc[("relu", 2e-5), "forward_ratio"] == timed.query("gated and modification == 'none'")["ratio"].item()
    assert math.isnan(table.loc[("silu", 0.0), "forward_ratio"])


def test_a_span_of_values_that_read_alike_is_one():
    values = pd.Series([1.314, 1.29, 1.311])
    assert render.span(values, "{:.2f}".format) == "1.29 to 1.31"
    assert render.span(values, "{:.0f}".format) == "1"
    assert render.span(-values, render.signed) == "−1%"


@pytest.mark.slow
def test_the_summary_says_where_another_device_timed_a_model(both):
    rows = both.rows
    whole = rows["l1"].eq(2e-5) & rows["model"].eq("1.5b")
    for chosen, remark in (
        (whole & rows["op"].eq("model_forward"), "trained on First GPU, timed on Another GPU and First GPU"),
        (whole, "speeds on Another GPU"),
    ):
        elsewhere = replace(both, rows=rows.assign(device=rows["device"].mask(chosen, "Another GPU")))
        table = summary(elsewhere).query("model == '1.5b' and modification == 'none'").set_index("l1")
        assert table.loc[2e-5, "remark"] == remark
        assert pd.isna(table.loc[1e-5, "remark"])


def test_the_speed_of_another_checkpoint_is_not_that_of_the_training(both):
    rows = both.rows
    timed = rows["op"].eq("model_forward") & rows["l1"].eq(2e-5)
    early = rows.assign(step=rows["step"].mask(timed, 7))
    table = summary(replace(both, rows=early)).query(
        "model == '1.5b' and modification == 'none' and activation == 'relu'"
    )
    table = table.set_index("l1")
    assert math.isnan(table.loc[2e-5, "forward_ratio"])
    assert not math.isnan(table.loc[1e-5, "forward_ratio"])


@pytest.mark.slow
def test_nonzeros_that_were_not_counted_on_held_out_text_say_so(both):
    rows = both.rows
    gathered = rows["op"].eq("nonzeros") & rows["model"].eq("1.5b") & rows["l1"].eq(2e-5)
    results = replace(both, rows=rows[~gathered])
    table = summary(results).query("model == '1.5b' and activation == 'relu'").set_index("l1")["remark"]
    assert set(table.loc[[2e-5]]) == {"non-zeros are of the last training steps"}
    assert table.drop(2e-5).isna().all()
    assert "remark" not in summary(both).query("activation == 'relu'").dropna(axis=1, how="all")
    (spec,) = (spec for spec in tables.TABLES if spec.name == "table3_activations")
    assert "1.5B at L1 2e-5: non-zeros: on held-out text (shown: in the last training steps)" in render.notes(
        spec.make(results)
    )
    assert not [note for note in render.notes(spec.make(both)) if "held-out" in note]


@pytest.mark.slow
def test_nonzeros_of_fewer_seeds_than_the_line_say_so(both):
    """Beside the mean cross-entropy of two seeds, the non-zeros of one."""
    rows = both.rows
    more = rows[rows["op"].eq("train") & rows["model"].eq("1.5b")]
    more = more.assign(seed=7, item=more["item"] + "_seed_7")
    table = summary(replace(both, rows=pd.concat([rows, more], ignore_index=True)))
    table = table.query("model == '1.5b' and activation == 'relu' and l1 == 2e-5 and modification == 'none'")
    assert table[["seeds", "nonzeros_seeds"]].to_numpy().tolist() == [[2, 1]]
    assert render.texts(table)[render.COLUMNS["nonzeros"].heading].iloc[0].endswith("(one seed)")
    assert summary(both).get("nonzeros_seeds", pd.Series(dtype=float)).isna().all()


def test_layers_in_percent_and_kernels_with_their_spread(demo, both):
    table = layers(demo)
    assert len(table) == DEMO.layers * len(DEMO.l1)
    assert set(table["silent_pct"]) == {20.0}
    assert list(table.query("l1 == 0")["nonzeros"]) == pytest.approx(list(layer_nonzeros(DEMO, Run("relu"))))
    assert kernels(demo).empty, "the reference backend is not made for speed"
    timed = kernels(both)
    assert set(timed["op"]) == {"ffn_forward", "ffn_forward_graph", "ffn_training"}
    assert set(timed["device"]) == {"First GPU"}
    assert timed.query("plan != 'dense'")["check_error"].notna().all()
    assert "layer" not in timed


def test_generation_has_a_line_for_each_batch_and_alternative(both):
    table = generation(both).query("model == '1.5b' and l1 == 2e-5 and modification == 'none' and gated == 'yes'")
    assert list(table["backend"]) == ["dense_eager", "dense_compiled", "hopper", "hopper_compiled"] * 2
    assert list(table["batch"]) == [1] * 4 + [16] * 4
    assert set(table["new_tokens"]) == {128}
    assert list(table["tokens_per_s"]) == pytest.approx([50, 200, 100, 400, 800, 3200, 1600, 6400])
    assert list(table["speedup"]) == pytest.approx([0.25, 1, 0.5, 2] * 2)
    assert list(table["eager_speedup"]) == pytest.approx([1, 4, 2, 8] * 2), "over that of the same batch"
    assert table["energy_mj_per_token"].iloc[-1] == pytest.approx(900 / 16 / 8)
    assert set(table["same_tokens_pct"]) == {75.0}
    assert set(table["device_ms"]) == {40.0}
    assert "peak_memory_gb" not in table, "not measured"


def test_markdown_is_a_table_with_brackets_dashes_and_reasons(demo):
    lines = render.markdown(tables.scales(demo)).splitlines()
    assert lines[0].startswith("| scale | layers | run sparse | L1 | source | seeds |")
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "480 (+17%)" in "".join(lines)
    assert any(line.startswith("| 0.5B | – | – | – | ours | – | not measured | – |") for line in lines)
    assert "accuracy: 2 of 7 tasks" in "".join(lines), "beside cross-entropy, or in place of all numbers"


def test_rows_of_one_scale_that_lack_different_numbers_are_told_apart():
    frame = pd.DataFrame({"scale": "21m", "l1": [0.0, 2e-5], "x": [1.0, 2.0], "note": ["energy: none", "time: none"]})
    assert render.notes(frame) == ["21m at L1 0: energy: none", "21m at L1 2e-5: time: none"]


def test_texts_are_escaped():
    frame = pd.DataFrame({"name": ["<b> & |"], "x": [1.0]})
    assert "<td>&lt;b&gt; &amp; |</td>" in render.Shown(frame)._repr_html_()
    assert "\\|" in render.markdown(frame)


def test_no_rows_at_all_still_gives_the_papers_tables(nothing):
    for spec in tables.TABLES:
        frame = spec.make(nothing)
        assert len(frame) >= len(paper.table(spec.name))
        assert render.markdown(frame)
    assert all(make(nothing).empty for make in (summary, layers, kernels, dead_by_window, generation))


def test_trainings_that_figures_leave_out_are_named(sweep):
    assert left_out(sweep) == []
    one = sweep.rows["item"].eq(sweep.rows["item"].iloc[0])
    longer = sweep.rows[one].assign(tokens_trained=10**9, item="longer")
    (line,) = left_out(replace(sweep, rows=pd.concat([sweep.rows, longer], ignore_index=True)))
    model = longer["model"].iloc[0]
    assert line.startswith(f"{model}: in the summary only")
    assert line.endswith(f": {longer['study'].iloc[0]}/longer")


def test_models_that_were_trained_alike_share_a_sentence():
    lines = [
        ("21m", 1056, 17.0, 0, "b"), ("21m", 1056, 17.0, 1, "b"), ("21m-ffn704", 704, 20.0, 0, "b"),
        ("21m-ffn704", 704, 20.0, 1, "b"), ("4m", 352, float("nan"), 0, "a(TM)"),
    ]  # fmt: skip
    trained = pd.DataFrame(lines, columns=["model", "intermediate", "tokens_per_parameter", "seed", "device"])
    trained = trained.assign(layers=8, text="notes", tokens_trained=2e6)
    assert describe.by_model(trained) == [
        "21m (8 layers, N = 1,056), 21m-ffn704 (8 layers, N = 704): 2 million training tokens of notes; "
        "2 seeds (0, 1); b; tokens per parameter: 17 to 20 (the paper: 20).",
        "4m (8 layers, N = 352): 2 million training tokens of notes; one seed (0); a.",
    ]
