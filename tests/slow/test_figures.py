"""analysis.figures: what is drawn equals the rows, gaps say so, bytes repeat, nothing is cut off, colours print."""

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from synthetic_results import (
    DEMO,
    PAPER,
    SWEEP,
    TASKS,
    Run,
    Study,
    layer_nonzeros,
    results_of,
    row,
    sparse_speed,
    validation_loss,
    write_study,
)

from analysis import figures, schema, stats, tables
from analysis.choose import where
from analysis.figures import FIGURES, formats, style, tokens
from analysis.figures.blocks import fastest_on_synthetic
from analysis.gains import gains
from analysis.load import load, side_by_side
from analysis.measures import task_accuracies

SECOND = replace(PAPER, name="second", device="Second GPU", speed=1.5)


@pytest.fixture(scope="module")
def devices(paper, tmp_path_factory):
    return load(paper, write_study(tmp_path_factory.mktemp("runs"), SECOND))


@pytest.fixture(scope="module")
def drawn(demo, devices):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks, a layout that does not fit
        return {scale: [draw(results) for draw in FIGURES] for scale, results in (("demo", demo), ("paper", devices))}


def test_what_is_whole_and_what_is_missing(drawn):
    # The rows of others: test_figure_kernels_in_training.py, test_figure_layer_speed.py and test_coming_studies.py.
    assert {f.number for f in drawn["paper"] if not f.missing} >= {*map(str, range(1, 13)), "A", "B", "D", "E"}
    missing = {f.number: f.missing for f in drawn["demo"] if f.missing}
    assert "seven tasks" in missing["3"]
    for number in ("4", "5", "12", "B"):
        assert "the reference backend ran, which defines results and is not made for speed" in missing[number]
    assert all("GPU backend" in missing[number] for number in ("6", "10", "11", "D", "E", "I"))
    assert not {"1", "2", "7", "8", "9", "A"} & set(missing)


def test_without_rows_every_figure_but_the_diagram_is_a_placeholder(nothing):
    for draw in FIGURES[1:]:
        figure = draw(nothing)
        assert figure.is_placeholder
        assert figure.missing
        assert "python -m " in figure.caption or "make reproduce" in figure.caption
        assert "Not measured yet." in figure._repr_html_()
        assert "<img" not in figure._repr_html_()
    assert not FIGURES[0](nothing).is_placeholder


@pytest.mark.parametrize("scale", ["demo", "paper"])
def test_axes_have_names_and_nothing_is_cut_off(drawn, scale):
    for figure in drawn[scale]:
        if figure.is_placeholder:
            continue
        figure.figure.canvas.draw()
        width, height = figure.figure.get_size_inches()
        drawn_part = figure.figure.get_tightbbox(figure.figure.canvas.get_renderer())
        inside = min(drawn_part.x0, drawn_part.y0, width - drawn_part.x1, height - drawn_part.y1)
        assert inside > -0.01, (figure.name, drawn_part)
        for axes in figure.figure.axes:
            if axes.axison:
                below, beside = axes.get_shared_x_axes(), axes.get_shared_y_axes()
                assert any(sibling.get_xlabel() for sibling in below.get_siblings(axes)), figure.name
                assert any(sibling.get_ylabel() for sibling in beside.get_siblings(axes)), figure.name


def test_curves_smooth_but_keep_the_validation_as_measured(demo, drawn):
    data = drawn["demo"][1].data
    validation = data.query("split == 'validation' and l1 == 1e-4")
    measured = demo.curves.query("item == 'relu_l1_0.0001' and metric == 'validation_cross_entropy'")
    assert list(validation["value"]) == list(measured["value"])
    training = data.query("split == 'training' and l1 == 0.0")
    assert len(training) == DEMO.steps
    raw = demo.curves.query("item == 'relu' and metric == 'cross_entropy'")["value"]
    assert training["value"].diff().diff().abs().max() < raw.diff().diff().abs().max()
    assert set(data["l1"]) == set(DEMO.l1)


def test_active_neurons_are_percent_of_n(drawn):
    active = drawn["demo"][2].data.query("metric == 'nonzeros'").set_index("l1")
    for l1 in DEMO.l1:
        mean = layer_nonzeros(DEMO, Run("x", l1)).mean()
        assert active.loc[l1, "count"] == pytest.approx(mean)
        assert active.loc[l1, "value"] == pytest.approx(mean / DEMO.intermediate * 100)


def test_accuracy_is_drawn_only_where_every_task_is_measured(drawn):
    assert set(drawn["demo"][2].data["metric"]) == {"validation_cross_entropy", "nonzeros"}
    assert set(drawn["paper"][2].data["metric"]) == {"validation_cross_entropy", "accuracy", "nonzeros"}
    texts = [text.get_text() for axes in drawn["paper"][2].figure.axes for text in axes.texts]
    assert f"chance: {schema.MEAN_CHANCE:.1f}%" in texts
    losses = drawn["demo"][2].data.query("metric == 'validation_cross_entropy'")
    assert list(losses["value"]) == [validation_loss(Run("x", l1)) for l1 in DEMO.l1]


def test_error_of_the_mean_accuracy():
    rows = pd.DataFrame({"task": TASKS, "value": 40.0, "low": 37.0, "high": 43.0})
    rows = rows.assign(study="s", item="i", op="evaluate", metric="accuracy", seed=0, l1=0.0)
    mean = task_accuracies(rows)
    assert mean["value"].item() == 40
    assert mean["error"].item() == pytest.approx(3 / math.sqrt(7))
    assert task_accuracies(rows.iloc[1:]).empty, "a mean of six tasks is none"


def test_forward_gain_and_its_spread(drawn):
    data = drawn["paper"][3].data.query("metric == 'throughput'").set_index("l1")
    ratio = sparse_speed(PAPER, layer_nonzeros(PAPER, Run("x", 2e-5)).mean() / PAPER.intermediate)
    assert data.loc[2e-5, "percent"] == pytest.approx((ratio - 1) * 100)
    assert data.loc[2e-5, "percent_low"] == pytest.approx((ratio * 0.97 / 1.02 - 1) * 100)
    assert data.loc[2e-5, "percent_high"] == pytest.approx((ratio * 1.02 / 0.97 - 1) * 100)
    assert data.loc[2e-5, "eager_percent"] == pytest.approx((ratio / 0.8 - 1) * 100)
    assert "First GPU" in drawn["paper"][3].caption


def test_uncompiled_gains_compare_nothing_compiled_and_memory_with_transformers(devices):
    rows = where(devices.rows, op="model_training", metric="peak_memory").dropna(subset="ratio")
    step = where(rows, plan="hybrid").head(1)
    names = ["plan", "backend", "tokens", "value", "ratio"]

    def of(*values):
        return step.assign(**dict(zip(names, values, strict=True)))

    made = [of("dense", "dense_transformers", 8192, 30.0, 0.5), of("dense", "dense_eager", 16384, 40.0, 1.0)]
    made += [of("hybrid", "hopper", tokens, value, 1.25) for tokens, value in ((8192, 20.0), (16384, 32.0))]
    made += [of("hybrid", "hopper_compiled", 16384, 30.0, 1.3)]
    data = gains(pd.concat(made, ignore_index=True), "peak_memory").set_index("backend")
    assert data.loc["hopper", "tokens"] == 8192, "more tokens do not fit into memory with transformers"
    assert data.loc["hopper", "eager_percent"] == pytest.approx(-100 / 3)
    assert math.isnan(data.loc["hopper_compiled", "eager_percent"])
    forward = pd.concat(made, ignore_index=True).assign(op="model_forward")
    assert set(where(gains(forward, "peak_memory"), backend="hopper")["tokens"]) == {8192, 16384}


def test_each_form_of_a_whole_model_has_its_row_of_panels(devices):
    rows = devices.rows
    sparse = rows[(rows["op"] == "model_forward") & (rows["backend"] == "hopper")]
    both = pd.concat([rows, sparse.assign(backend="triton")], ignore_index=True)
    alone, beside = (figures.forward_gains(replace(devices, rows=some)) for some in (rows, both))
    assert set(alone.data["form"]) == {"the paper's method in every layer"}
    assert [title.split("\n")[1] for title in titles(alone)] == ["the paper's method in every layer"] * 2
    forms = [title.split("\n")[1] for title in titles(beside)]
    assert sorted(forms) == ["every neuron sparse (hopper)"] * 2 + ["every neuron sparse (triton)"] * 2, (
        "one plan of two backends"
    )


def test_costs_are_shown_as_changes_of_the_cost(drawn):
    memory = drawn["paper"][4].data.query("metric == 'peak_memory'")
    assert np.allclose(memory["percent"], (1 / memory["ratio"] - 1) * 100)
    assert memory.sort_values("l1")["percent"].iloc[-1] < 0


def texts_of(axes):
    return "\n".join(text.get_text() for text in axes.texts)


def test_layer_parts_sum_to_the_speedup_and_correlate(drawn):
    figure = drawn["paper"][5]
    dense, sparse = 2.0 * PAPER.layers, figure.data["time_ms"].sum()
    assert figure.data["contribution_pct"].sum() == pytest.approx((dense - sparse) / dense * 100)
    r = stats.pearson(figure.data["mean"], figure.data["contribution_pct"])
    assert r < -0.9
    assert f"r = {r:.3f}".replace("-", "−") in texts_of(figure.figure.axes[1])
    without = drawn["paper"][9].data
    assert (without["ratio"] < 1).any(), "without L1 the sparse plan is slower in some layers"
    assert (without["contribution_pct"] >= 0).all(), "which stay dense"
    assert (without["papers_pct"] < 0).any()
    assert set(drawn["paper"][10].data["l1"]) == {1e-4}


def test_layers_without_times_still_show_the_counts(demo):
    rows = demo.rows[demo.rows["op"] != "ffn_forward"]
    figure = figures.recommended(replace(demo, rows=rows))
    assert not figure.is_placeholder
    assert "time of each layer" in figure.missing
    assert len(figure.figure.axes) == 1, "no empty panel"


def test_correlation_needs_eight_layers(demo, drawn):
    """Pearson's r of four points says nothing; of twelve layers it is in the panel."""
    assert "r = " in texts_of(drawn["paper"][5].figure.axes[1])
    few = demo.rows.assign(backend=demo.rows["backend"].replace("reference", "hopper"))
    parts = figures.recommended(replace(demo, rows=few)).figure.axes[1]
    assert "all layers: " in texts_of(parts)
    assert "r = " not in texts_of(parts)


def test_the_change_against_no_l1_is_paired_by_seed(sweep):
    data = figures.curves_by_l1(sweep).data.query("split == 'change_pct' and step == 20").set_index("l1")
    change = data.loc[1e-4]
    ends = sweep.curves.query("metric == 'validation_cross_entropy' and step == 20").set_index("item")["value"]
    paired = [(ends[f"21m_l1_0.0001_seed_{s}"] / ends[f"21m_l1_0_seed_{s}"] - 1) * 100 for s in SWEEP.seeds]
    assert change["value"] == pytest.approx(np.mean(paired))
    assert change["high"] - change["low"] < 0.1, "seeds differ by far more than their pairs do"


def test_on_log_axes_intervals_end_at_the_lowest_and_the_highest_seed(sweep):
    """Symmetric ones may reach below 0."""
    layers = figures.recommended(sweep).data.set_index("layer")
    each = [layer_nonzeros(SWEEP, Run("x", 2e-5, seed=seed)) for seed in SWEEP.seeds]
    assert list(layers["low"]) == pytest.approx(list(np.min(each, axis=0)))
    assert list(layers["high"]) == pytest.approx(list(np.max(each, axis=0)))
    active = figures.by_l1(sweep).data.query("metric == 'nonzeros' and l1 == 2e-5").iloc[0]
    assert active["low"] == pytest.approx(np.mean(each, axis=1).min() / SWEEP.intermediate * 100)
    curves = figures.sparsity_by_l1(sweep).data.query("metric == 'nonzeros'")
    assert (curves["low"] > 0).all()


def test_tokens_are_those_of_the_lowest_seed(sweep):
    figure = figures.tokens_and_positions(sweep)
    shown = figure.data.query("panel == 'tokens'")["mean"].max()
    one = sweep.nonzeros["by_token"].query("item == 'nonzeros_21m_l1_2e-05_seed_0'")
    assert shown == one["mean"].max()


@pytest.mark.slow
def test_a_figure_comes_from_the_first_source_that_has_it(tmp_path):
    both = side_by_side(write_study(tmp_path, replace(PAPER, name="h200", l1=(0.0, 2e-5))), write_study(tmp_path, DEMO))
    assert figures.curves_by_l1(both).source == "demo", "two L1 values are no sweep"
    assert figures.training_gains(both).source == "h200"
    assert figures.kernels_in_training(both).source == ""


def timed_beside(sweep, devices, *l1, **columns):
    """The sweep, which was not timed, and the large model as one device timed it, at these L1 values; with other cells
    in its `columns`."""
    timed = devices.rows[devices.rows["device"].eq("First GPU") & devices.rows["l1"].isin(l1)].assign(**columns)
    return replace(sweep, rows=pd.concat([sweep.rows, timed], ignore_index=True))


def test_layers_of_two_models_where_the_sweep_was_not_timed(sweep, devices):
    figure = figures.recommended(timed_beside(sweep, devices, 0.0, 2e-5, 1e-4))
    assert list(figure.data["model"].unique()) == ["1.5b", "21m"]
    assert titles(figure) == [
        "(a) non-zeros: 1.5b, L1 2e-5", "(b) time saved, 1.5b: sorted",
        "(c) time saved, 1.5b: every neuron sparse", "(d) non-zeros: 21m, L1 2e-5",
    ]  # fmt: skip
    assert figure.data.query("model == '21m'")["contribution_pct"].isna().all()
    assert figure.missing == ""


def test_layers_that_are_slower_sparse_stay_dense_but_with_the_papers_method(sweep, devices):
    """Each layer of a tuned model is dense or sparse, as is faster."""
    rows = timed_beside(sweep, devices, 0.0, 2e-5).rows
    slow = (rows["op"] == "ffn_forward") & (rows["l1"] == 0.0) & (rows["layer"] == 2) & (rows["plan"] != "dense")
    assert slow.any()
    figure = figures.unregularised(replace(sweep, rows=rows.assign(ratio=rows["ratio"].mask(slow, 0.25))))
    own = figure.data.query("model == '1.5b'").set_index("layer")
    left = own["left_dense"].astype(bool)
    assert left[2]
    assert list(left) == list(own["ratio"] < 1)
    assert not left.all()
    assert (own.loc[2, "ratio"], own.loc[2, "contribution_pct"]) == (0.25, 0)
    assert own.loc[2, "papers_pct"] < 0
    others = own[~left]
    dense = (own["time_ms"] * own["ratio"]).sum()
    saved = (others["time_ms"] * (others["ratio"] - 1)).sum() / dense * 100
    assert own["contribution_pct"].sum() == pytest.approx(saved)
    assert f"all layers: +{saved:.0f}%" in texts_of(figure.figure.axes[1])
    assert titles(figure)[1:3] == ["(b) time saved, 1.5b: sorted or dense", "(c) time saved, 1.5b: every neuron sparse"]


def test_the_second_model_of_the_layers_is_the_first_timed_one_with_that_l1_value(sweep, devices):
    other = timed_beside(sweep, devices, 0.0, 2e-5, model="0.5b", study="other")
    results = timed_beside(other, devices, 1e-4)
    assert list(figures.recommended(results).data["model"].unique()) == ["0.5b", "21m"]
    assert list(figures.strongest(results).data["model"].unique()) == ["1.5b", "21m"]


def test_the_largest_l1_does_not_show_the_layers_of_the_recommended_one_again(sweep, devices):
    for l1, models in (((0.0, 2e-5), ["21m"]), ((0.0, 2e-5, 1e-4), ["1.5b", "21m"])):
        shown = figures.strongest(timed_beside(sweep, devices, *l1))
        assert list(shown.data["model"].unique()) == models


def test_rare_tokens_are_left_out(demo):
    table = demo.nonzeros["by_token"]
    rare = table["token_id"] == table["token_id"].max()
    changed = table.assign(frequency=table["frequency"].where(~rare, 2.0**-15), mean=table["mean"].where(~rare, 1e6))
    figure = figures.tokens_and_positions(replace(demo, nonzeros=demo.nonzeros | {"by_token": changed}))
    shown = figure.data.query("panel == 'tokens'")
    assert shown["mean"].max() < 1e6
    assert len(shown) == 2 * tokens.SHOWN


READABLE = {
    " the": "␣the",
    "\n": "\\n",
    "\n        ": "\\n␣×8",
    "$x": "$x",
    "日本": "\\u65e5\\u672c",
    "": "(empty)",
    "a" * 30: "a" * 13 + "…",
}


@pytest.mark.parametrize("text", READABLE)
def test_tokens_are_readable(text):
    assert tokens.readable(text) == READABLE[text]


def test_mitigation_compares_at_the_same_l1(drawn):
    strategies = set(drawn["demo"][7].data["strategy"])
    assert strategies == {
        "no mitigation (L1 2e-5, 1 seed)",
        "dead-neuron reinitialisation (L1 2e-5, 1 seed)",
        "L1 warm-up (L1 2e-4, 1 seed)",
    }


def test_a_mitigation_has_the_same_colour_whichever_others_were_trained(demo):
    def colours(curves):
        axes = figures.mitigation(replace(demo, curves=curves)).figure.axes[0]
        return {line.get_label(): line.get_color() for line in axes.lines}

    curves = demo.curves
    every = colours(curves)
    assert len(set(every.values())) == 3
    for left_out in ("dead_neuron_reinit", "l1_warmup"):
        fewer = colours(curves[curves["modification"] != left_out])
        assert 0 < len(fewer) < 3
        assert fewer.items() < every.items()


def test_a_model_that_only_another_device_timed_is_drawn_with_its_name(devices):
    first = devices.rows[devices.rows["device"] == "First GPU"]
    second = devices.rows[(devices.rows["device"] == "Second GPU") & devices.rows["l1"].eq(2e-5)]
    rows = pd.concat([first, second.assign(model="1b"), second], ignore_index=True)
    shown = figures.forward_gains(replace(devices, rows=rows))
    where_timed = shown.data.groupby("model")["device"].agg(set).to_dict()
    assert where_timed == {"1.5b": {"First GPU"}, "1b": {"Second GPU"}}
    labels = [label.get_text() for label in shown.figure.axes[0].get_xticklabels()]
    assert labels == ["0.5b", "1b\non Second GPU", "1.5b", "2b"]


def test_models_without_l1_are_drawn_if_there_are_no_others(devices):
    dense = devices.rows[devices.rows["l1"].eq(0)]
    alone = figures.forward_gains(replace(devices, rows=dense.assign(model="1b")))
    assert set(alone.data["model"]) == {"1b"}
    beside = pd.concat([devices.rows, dense.assign(model="1b")], ignore_index=True)
    assert set(figures.forward_gains(replace(devices, rows=beside)).data["model"]) == {"1.5b"}


def test_two_devices_are_needed(devices, drawn):
    both = drawn["paper"][11]
    assert set(both.data["device"]) == {"First GPU", "Second GPU"}
    assert both.missing == ""
    one = replace(devices, rows=devices.rows[devices.rows["device"] == "First GPU"])
    backends = figures.devices(one)
    assert backends.missing == "a second kind of GPU"
    assert set(backends.data["backend"]) == {"hopper", "triton"}
    alone = replace(one, rows=one.rows[one.rows["backend"] != "triton"])
    assert "there is First GPU" in figures.devices(alone).missing


def titles(sketch):
    return [axes.get_title(loc="left") for axes in sketch.figure.axes if axes.get_visible()]


def test_whole_models_on_two_devices_are_those_that_both_timed(devices):
    rows = devices.rows
    only_here = rows["device"].eq("Second GPU") & rows["op"].eq("model_training") & ~rows["l1"].eq(2e-5)
    shown = figures.devices(replace(devices, rows=rows[~only_here]))
    assert titles(shown)[2:] == ["(c) whole models: training step", "(d) whole models: forward"]
    steps = shown.data[shown.data["op"] == "model_training"]
    assert steps.groupby("device")["l1"].agg(tuple).to_dict() == {"First GPU": (2e-5,), "Second GPU": (2e-5,)}
    drawn = rows[(rows["op"] == "model_training") & rows["l1"].eq(2e-5) & (rows["metric"] == "throughput")]
    drawn = drawn[drawn["activation"].eq("relu") & drawn["gated"] & drawn["modification"].eq("none")]
    best = drawn[drawn["plan"] != "dense"].groupby("device")["ratio"].max()
    assert steps.set_index("device")["ratio"].to_dict() == pytest.approx(best.to_dict())
    found = [(line.get_color(), *line.get_xdata()) for line in shown.figure.axes[2].lines if line.get_marker() == "o"]
    (legend,) = shown.figure.legends
    colors = {handle.get_label(): handle.get_color() for handle in legend.legend_handles}
    assert found == [(colors[kind], best[kind]) for kind in ("Second GPU", "First GPU")]
    assert list(colors) == ["Second GPU", "First GPU", "triton", "hopper"]
    assert colors["First GPU"] in {line.get_color() for line in shown.figure.axes[0].lines}, "the same in every panel"


def test_whole_models_where_no_block_was_timed(devices):
    rows = devices.rows[devices.rows["op"].isin(("model_forward", "model_training"))]
    alone = figures.devices(replace(devices, rows=rows))
    assert titles(alone) == ["(a) whole models: training step", "(b) whole models: forward"]
    assert [handle.get_label() for handle in alone.figure.legends[0].legend_handles] == ["Second GPU", "First GPU"]
    third = rows[rows["device"].eq("Second GPU") & rows["op"].eq("model_training")].assign(device="Third GPU")
    three = figures.devices(replace(devices, rows=pd.concat([rows, third], ignore_index=True)))
    shown = three.data.groupby("op")["device"].agg(set)
    assert shown["model_training"] == {"First GPU", "Second GPU", "Third GPU"}
    assert shown["model_forward"] == {"First GPU", "Second GPU"}


def test_one_block_on_two_devices_where_no_whole_model_was_trained_on_both(devices):
    rows = devices.rows[~devices.rows["op"].isin(("model_training", "model_forward"))]
    only_here = (rows["device"] == "First GPU") & (rows["backend"] == "hopper") & (rows["op"] == "ffn_training")
    faster = rows[only_here].assign(plan="hybrid_hot", ratio=99.0)  # a plan that the second device does not have
    shown = figures.devices(replace(devices, rows=pd.concat([rows, faster], ignore_index=True)))
    assert shown.missing == "whole models on two devices"
    assert titles(shown) == ["(a) one block: forward and backward", "(b) one block: forward"]
    assert set(shown.data["device"]) == {"First GPU", "Second GPU"}
    assert set(shown.data["backend"]) == {"hopper", "triton"}
    assert "hybrid_hot" not in set(shown.data["plan"])
    points = shown.data.groupby(["op", "device", "backend"])["mean_nnz"].agg(tuple)
    assert points.groupby(["op", "backend"]).nunique().eq(1).all(), "the same non-zeros on both"


def test_unions_count_how_many_tokens_share_a_neuron(drawn):
    data = drawn["demo"][12].data.query("group == 64 and layer == 1").iloc[0]
    mean = layer_nonzeros(DEMO, Run("x", 2e-5))[1]
    assert data["tokens_per_neuron"] == pytest.approx(64 * mean / data["mean"])


@pytest.mark.filterwarnings("error::analysis.load.NotMade")
@pytest.mark.parametrize(("value", "said"), [(math.nan, "non-zeros by layer, to compare"), (0.0, "")])
def test_unions_without_the_non_zeros_of_their_layers(demo, value, said):
    """None was measured, or each is zero, which no logarithmic axis can show."""
    rows = demo.rows
    changed = rows["value"].where(~((rows["op"] == "nonzeros") & (rows["metric"] == "nonzeros")), value)
    (draw,) = (draw for draw in FIGURES if draw.number == "A")
    assert said in draw(replace(demo, rows=rows.assign(value=changed))).missing


def test_an_axis_without_a_value_above_zero_stays_linear():
    for values in ([math.nan, math.nan], [0.0, -1.0], [0.0, 2.0]):
        picture, ((axes,),) = style.panels(1, 1, 2)
        axes.plot([1, 2], values)
        style.log_axis(axes.yaxis)
        picture.draw_without_rendering()
        assert axes.get_yscale() == ("log" if max(values) > 0 else "linear")


def test_dense_rows_are_no_series(drawn):
    assert "dense" not in set(drawn["paper"][13].data["plan"])
    assert "reference" not in set(drawn["paper"][13].data["backend"])


def test_of_a_backend_with_and_without_the_rest_compiled_only_the_former_is_drawn(devices):
    """Eager sparse against compiled dense reads as slow; a backend that has no compiled form stays."""
    rows = devices.rows
    both = (rows["op"] == "model_training") & (rows["backend"] == "hopper") & (rows["l1"] == 2e-5)
    rows = rows.assign(plan=rows["plan"].mask(both, "by_layer"))
    faster = {name: rows[both][name] * 2 for name in ("value", "low", "high", "ratio")}
    twin = rows[both].assign(backend="hopper_compiled", **faster)
    shown = figures.training_gains(replace(devices, rows=pd.concat([rows, twin], ignore_index=True)))
    assert set(shown.data.query("l1 == 2e-5")["backend"]) == {"hopper_compiled"}
    assert set(shown.data.query("l1 == 1e-5")["backend"]) == {"hopper"}
    alone = figures.training_gains(replace(devices, rows=rows)).data.query("l1 == 2e-5")
    for metric in set(alone["metric"]):
        (drawn,), (plain,) = (
            data[data["metric"] == metric].to_dict("records") for data in (shown.data.query("l1 == 2e-5"), alone)
        )
        assert drawn["eager_percent"] == pytest.approx(plain["eager_percent"], nan_ok=True)  # the open points


def test_of_a_step_that_was_timed_with_fewer_tokens_too_the_most_count(devices):
    rows = devices.rows
    steps = rows[(rows["op"] == "model_training") & (rows["l1"] == 2e-5)]
    fewer = steps.assign(tokens=steps["tokens"] // 2, ratio=steps["ratio"] * 1.5, value=steps["value"] * 1.5)
    both = replace(devices, rows=pd.concat([rows, fewer], ignore_index=True))
    alone, shown = figures.training_gains(devices), figures.training_gains(both)
    pd.testing.assert_frame_equal(shown.data, alone.data)


def test_the_papers_training_plan_is_told_apart(devices):
    """Its hybrid format, with a dense backup for an eighth of the tokens, in every layer."""
    rows = devices.rows
    own = (rows["op"] == "model_training") & (rows["plan"] != "dense")
    papers = rows[own].assign(plan="hybrid", backup=1 / 8, ratio=0.5)
    ours = rows.assign(plan=rows["plan"].mask(own, "by_layer"))
    both = replace(devices, rows=pd.concat([ours, papers], ignore_index=True))
    shown = figures.training_gains(both)
    assert "the paper's method in every layer" in set(shown.data["form"])


@pytest.mark.slow
def test_a_step_that_only_a_sparse_model_fits_is_not_compared(devices):
    """Its speed would be mixed with that of the equal step, and its memory compared with that of fewer tokens."""
    rows = devices.rows
    sparse = (rows["op"] == "model_training") & (rows["backend"] == "hopper") & (rows["l1"] == 2e-5)
    more = {name: rows[sparse][name] * 3 for name in ("value", "low", "high", "ratio", "tokens")}
    both = pd.concat([rows, rows[sparse].assign(**more)], ignore_index=True)
    alone, shown = figures.training_gains(devices), figures.training_gains(replace(devices, rows=both))
    pd.testing.assert_frame_equal(shown.data, alone.data)
    pd.testing.assert_frame_equal(tables.scales(replace(devices, rows=both)), tables.scales(devices))


H200 = Study(name="h200", hidden=2048, intermediate=5632, gpu=True, device="NVIDIA H200")
DENSE_MS, COPY, GATHER, PRODUCT = 13.6, 4300.0, 9300.0, 683.0


def block_rows(op, tokens, mean_nnz, times, gated=True, study=H200):
    """Rows of one problem: a dense form and plans, `times` in ms by (plan, backend)."""
    fields = {"tokens": tokens, "mean_nnz": mean_nnz, "pattern": "synthetic", "gated": gated}
    fields |= {"intermediate": 5632 if gated else 8192, "baseline": "dense_compiled"}
    dense = DENSE_MS * tokens / 131072
    both = {("dense", "dense_compiled"): dense} | times
    return [
        row(study, None, "k", op, "time", ms, plan=plan, backend=backend, ratio=dense / ms, **fields)
        for (plan, backend), ms in both.items()
    ]


def machine_rows(tokens, study=H200):
    none = {"hidden": None, "intermediate": None}
    return [
        row(study, None, "k", "ceiling_copy", "bandwidth", COPY, **none),
        row(study, None, "k", "ceiling_gather", "bandwidth", GATHER, gated=True),
        *(row(study, None, "k", "ceiling_matmul", "rate", PRODUCT, tokens=m) for m in tokens),
    ]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    rows = machine_rows((131072, 2048))
    for mean_nnz, ms in ((9.95, 5.7), (28.84, 7.6), (119.9, 19.3)):
        plans = {("twell", "hopper"): ms, ("twell", "triton"): 1.2 * ms, ("twell_ordered", "hopper"): 6.0}
        rows += block_rows("ffn_forward", 131072, mean_nnz, plans)
    rows += block_rows("ffn_forward", 2048, 28.9, {("twell", "hopper"): 0.19})
    rows += block_rows("ffn_forward", 131072, 28.87, {("twell", "hopper"): 8.3}, gated=False)
    rows += block_rows("ffn_forward_graph", 131072, 28.9, {("twell", "hopper"): 1e-4})
    return results_of(tmp_path_factory.mktemp("runs"), rows)


def test_the_floor_is_the_best_ratio_that_the_plan_can_reach(blocks):
    data = figures.against_nonzeros(blocks).data
    ours = data[~data["published"]].set_index(["plan", "backend", "gated", "tokens", "mean_nnz"])
    floor = 2 * 131072 * 2048 * 5632 / (PRODUCT * 1e9) + 28.84 * 2 * 131072 * 2048 * 2 / (GATHER * 1e6)
    for backend in ("hopper", "triton"):
        assert ours.loc[("twell", backend, True, 131072, 28.84), "floor_ratio"] == pytest.approx(DENSE_MS / floor)
    assert math.isnan(ours.loc[("twell_ordered", "hopper", True, 131072, 28.84), "floor_ratio"])
    assert math.isnan(ours.loc[("twell", "hopper", False, 131072, 28.87), "floor_ratio"]), "no ceilings of this block"


def lines_of(axes):
    """(x, y) of everything drawn with points."""
    return [
        list(zip(*line.get_data(), strict=True)) for line in axes.lines if len(line.get_xdata()) and line.get_marker()
    ]


def test_kinds_of_blocks_and_numbers_of_tokens_have_panels_of_their_own(blocks):
    figure = figures.against_nonzeros(blocks)
    shown = {axes.get_title(loc="left"): axes for axes in figure.figure.axes if axes.get_title(loc="left")}
    gated, tokens = "(a) forward, gated, N = 5,632", "(b) forward, gated, N = 5,632"
    assert list(shown) == [gated, tokens], "one point has no panel"
    xlabels = [axes.get_xlabel() for axes in shown.values()]
    assert xlabels == ["mean non-zeros (131,072 tokens)", "tokens in one call (29 non-zeros)"]
    assert [(x, pytest.approx(DENSE_MS / ms)) for x, ms in ((9.95, 5.7), (28.84, 7.6), (119.9, 19.3))] in lines_of(
        shown[gated]
    )
    small = DENSE_MS * 2048 / 131072 / 0.19
    assert [(2048, pytest.approx(small)), (131072, pytest.approx(DENSE_MS / 7.6))] in lines_of(shown[tokens])
    assert all(x != 2048 for points in lines_of(shown[gated]) for x, _ in points)
    for axes in shown.values():
        assert any(set(line.get_ydata()) == {1} for line in axes.lines), "the line of dense"
    assert figure.missing == "rows of ffn_training"
    assert set(figure.data["op"]) == {"ffn_forward"}, "calls in a CUDA graph are another measurement"
    assert "estimate, no row reused" in [text.get_text() for text in figure.figure.legends[0].get_texts()]


def test_published_kernels_stand_beside_the_same_blocks_on_the_same_device(blocks):
    data = figures.against_nonzeros(blocks).data
    published = data[data["published"]].set_index(["tokens", "mean_nnz"])
    assert set(published.index) == {*((131072, nonzeros) for nonzeros in (10, 29, 60, 120, 200)), (2048, 29)}
    assert published.loc[(131072, 29), "ratio"] == 1.65
    assert set(published.index[published["wrong"]]) == {(131072, 120), (131072, 200)}
    other = replace(blocks, rows=blocks.rows.assign(device="Another GPU"))
    assert not figures.against_nonzeros(other).data["published"].any()


def test_blocks_of_another_size_are_not_in_the_overview(blocks):
    alone = fastest_on_synthetic(blocks)
    assert set(alone["hidden"]) == {2048}
    rows = blocks.rows
    small = rows[rows["pattern"].str.startswith("synthetic")].head(40)
    small = small.assign(hidden=512, intermediate=1056, ratio=small["ratio"] * 9, item=small["item"] + "_small")
    mixed = replace(blocks, rows=pd.concat([rows, small], ignore_index=True))
    pd.testing.assert_frame_equal(fastest_on_synthetic(mixed), alone)


def test_the_overview_has_whole_models_at_their_active_neurons(devices):
    """Those of such blocks alone. And names the L1 values that several models have."""
    first = devices.rows[devices.rows["device"] == "First GPU"]
    another = first[first["op"].eq("model_forward") & first["l1"].eq(2e-5)].assign(model="1b")
    narrow = another.assign(model="56m", intermediate=2112)
    shown = figures.overview(replace(devices, rows=pd.concat([first, another, narrow], ignore_index=True)))
    above, below = shown.figure.axes
    assert [text.get_text() for text in above.texts] == ["dense", "L1 2e-5"]
    models = shown.data.query("op == 'model_forward'").set_index(["model", "l1"])
    active = layer_nonzeros(PAPER, Run("x", 2e-5)).mean() / PAPER.intermediate * 100
    assert set(models.index.get_level_values("model")) == {"1.5b", "1b"}
    for model in ("1.5b", "1b"):
        assert models.loc[(model, 2e-5), "active"] == pytest.approx(active)
        assert models.loc[(model, 2e-5), "ratio"] == pytest.approx(sparse_speed(PAPER, active / 100))
    for axes in (above, below):
        (band,) = axes.patches
        assert band.get_x() < active < band.get_x() + band.get_width()


def test_formats_pack_every_nonzero_once():
    h_MN = formats.example()
    entries = set(zip(*(index.tolist() for index in np.nonzero(h_MN)), strict=True))
    ell = {(row, column) for row, columns in enumerate(formats.pack_ell(h_MN)) for column in columns}
    tiles = formats.pack_twell(h_MN)
    twell = {(row, column) for row, parts in enumerate(tiles) for part in parts for column in part}
    assert ell == twell == entries
    assert max(len(part) for parts in tiles for part in parts) == formats.S, "a full tile, and none beyond its slots"
    sparse, dense = formats.pack_hybrid(h_MN)
    assert sorted(sparse + dense) == list(range(formats.M))
    assert len(dense) == 1


@pytest.mark.parametrize(
    ("value", "column", "word"),
    [(1.0, 3, 0x3F800003), (1.00390625, 0, 0x3F800000), (1.01171875, 65535, 0x3F82FFFF), (-2.5, 256, 0xC0200100)],
)
def test_packed_word_rounds_to_nearest_even(value, column, word):
    assert formats.word(value, column) == word


def test_the_word_in_the_data_holds_value_and_column(drawn):
    data = drawn["demo"][0].data
    for line in data.itertuples():
        packed = int(line.word, 16)
        assert packed & 0xFFFF == line.column
        value = float(np.uint32(packed & 0xFFFF0000).view(np.float32))
        assert math.isclose(value, line.value, rel_tol=2**-8)


def lightness(colour):
    """CIE L* of a colour: what remains of it in a greyscale print."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16


def test_colours_differ_in_greyscale():
    levels = [lightness(colour) for colour in style.sequence(8)]
    assert all(after - before > 5 for before, after in itertools.pairwise(levels))
    assert all(abs(lightness(a) - lightness(b)) > 10 for a, b in itertools.combinations(style.CATEGORIES, 2)), [
        round(lightness(colour)) for colour in style.CATEGORIES
    ]
