"""Figures E, F and I: layers of trained models with every treatment of the neurons, from rows of both benchmarks."""

from dataclasses import replace

import pandas as pd
import pytest
from synthetic_results import (
    LAYER_PLANS,
    LAYER_TOKENS,
    Run,
    Study,
    ceiling_rows,
    layer_nonzeros,
    results_of,
    row,
    write_study,
)

from analysis import claims, figures, schema
from analysis.claims.evidence import Evidence
from analysis.figures.layer_speed import FEWEST_LAYERS, FORWARD
from analysis.load import load

pytestmark = pytest.mark.filterwarnings("error::analysis.load.NotMade")

GPU = Study(
    name="full", model="1.5b", layers=9, hidden=2048, intermediate=5632, steps=3, gpu=True, device="A GPU", speed=1.2,
    tasks=(), l1=(0.0, 2e-5, 1e-4),
)  # fmt: skip
SMALL = replace(GPU, name="small", model="0.5b", layers=5, l1=(0.0, 1e-4))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return load(write_study(root / "large", GPU), write_study(root / "small", SMALL))


@pytest.fixture(scope="module")
def drawn(results):
    return figures.layer_speed(results)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.figure.axes if axes.get_title(loc="left")]


def test_one_panel_for_each_model_at_its_recommended_or_largest_l1(drawn):
    assert titles(drawn) == [
        "(a) 1.5b, L1 2e-5, after 3 steps",
        "(b) 0.5b, L1 1e-4, after 3 steps",
        "(c) 0.5b-nongated, L1 1e-4, after 3 steps",
        "(d) 1.5b-nongated, L1 2e-5, after 3 steps",
    ]
    assert drawn.missing == ""


def test_every_layer_has_its_ratio_with_every_plan(drawn):
    own = drawn.data.query("model == '1.5b'").set_index(["plan", "layer"])
    assert len(own) == len(LAYER_PLANS) * GPU.layers
    for plan, (faster, counts) in LAYER_PLANS.items():
        ratio = own.loc[(plan, 4), "ratio"]
        assert ratio == pytest.approx(faster * own.loc[("twell", 4), "ratio"])
        assert own.loc[(plan, 4), "ratio_low"] == pytest.approx(ratio / 1.05)
        assert own.loc[(plan, 4), "dense_ms"] == pytest.approx(2.0)
        for column in ("hot", "silent", "screened"):
            found = own.loc[(plan, 4), column]
            assert pd.isna(found) if column not in counts else found == counts[column]
    lines = [list(line.get_ydata()) for line in drawn.figure.axes[0].lines]
    assert [list(own.loc[plan, "ratio"]) for plan in FORWARD.series] == lines[: len(LAYER_PLANS)]


def test_the_legend_of_a_panel_has_the_speed_of_all_layers_together(drawn):
    own = drawn.data.query("model == '1.5b'").groupby("plan")[["dense_ms", "time_ms"]].sum()
    together = [f"{own.loc[plan, 'dense_ms'] / own.loc[plan, 'time_ms']:.2f}" for plan in FORWARD.series]
    assert [text.get_text() for text in drawn.figure.axes[0].get_legend().get_texts()] == together


def test_the_floor_of_a_layer_by_hand(drawn):
    """The gate product, and two rows of 2 K bytes for each non-zero. None where the ceilings were not measured."""
    mean = layer_nonzeros(GPU, Run("x", 2e-5))[3]
    product = 2 * LAYER_TOKENS * 2048 * 5632 / 680e12
    floor = (product + LAYER_TOKENS * mean * 2 * 2 * 2048 / 9300e9) * 1e3
    own = drawn.data.query("model == '1.5b' and layer == 3")
    assert list(own["floor_ms"]) == [pytest.approx(floor)] * len(LAYER_PLANS)
    assert list(own["floor_ratio"]) == [pytest.approx(2.0 / floor)] * len(LAYER_PLANS)
    assert drawn.data.query("model == '1.5b-nongated'")["floor_ms"].isna().all()
    assert pytest.approx(2.0 / floor) in [line.get_ydata()[3] for line in drawn.figure.axes[0].lines[:-1]]


def test_plans_that_leave_neurons_out_are_in_no_other_result(results):
    """They compute another function elsewhere: the layers' share of the speedup, figure B and the claims go without."""
    assert set(figures.recommended(results).data["plan"].dropna()) == {"twell_ordered"}
    left_out = set(schema.LIVE_PLANS.values())
    assert left_out.isdisjoint(figures.layers_against_nonzeros(results).data["plan"])
    evidence = Evidence.of(results)
    for name in ("correlation", "slower-without"):
        assert "twell_" not in " ".join(claims.check(name, evidence).details), "the claims are about the paper's method"


def mask_rows(
    plans,
    item="bench_masks",
    trained="nonzeros_relu_l1_2e-05",
    tokens=LAYER_TOKENS,
    study=GPU,
    op="ffn_forward",
    ratio=2.0,
):
    """As bench_kernels writes them for masks: the pattern alone says which model and layer it is."""
    fields = {"tokens": tokens, "gated": True, "activation": "relu", "baseline": "dense_fused"}
    rows = []
    for layer in range(3):
        named = fields | {"pattern": f"{trained}/layer{layer}", "mean_nnz": 20.0 + layer}
        rows.append(row(study, None, item, op, "time", 2.0, plan="dense", backend="dense_fused", **named))
        rows += [
            row(
                *(study, None, item, op, "time", 2.0 / ratio),
                **named | {"plan": plan, "backend": "dense" if plan == "dense_live" else "hopper", "ratio": ratio},
            )
            for plan in plans
        ]
    return rows


def loaded(folder, *rows):
    return results_of(folder, [one for part in rows for one in part])


def test_a_model_with_the_control_alone_is_left_out(tmp_path):
    other = mask_rows(["dense_live"], "second", trained="other")
    found = figures.layer_speed(loaded(tmp_path / "both", mask_rows(LAYER_PLANS), other))
    assert titles(found) == ["layers of a trained model (nonzeros_relu_l1_2e-05)"]
    assert figures.layer_speed(loaded(tmp_path / "alone", other)).missing.startswith("rows of ffn_forward with a ratio")


def test_each_length_of_training_has_its_panel(tmp_path):
    runs = [Run("short", 2e-5), Run("long", 2e-5)]
    gathered = [
        row(GPU, run, run.item, "nonzeros", "nonzeros", 21.0, layer=0) | {"step": steps, "tokens_trained": steps * 1024}
        for run, steps in zip(runs, (400, 800), strict=True)
    ]
    rows = [line for run in runs for line in mask_rows(LAYER_PLANS, f"bench_{run.item}", trained=run.item)]
    found = figures.layer_speed(loaded(tmp_path / "known", rows, gathered))
    assert titles(found) == [f"({a}) 1.5b, L1 2e-5, after {steps} steps" for a, steps in (("a", 400), ("b", 800))]


def test_masks_are_of_the_model_that_they_were_gathered_from(tmp_path):
    run = Run("relu_l1_2e-05", 2e-5)
    gathered = [row(GPU, run, "nonzeros_relu_l1_2e-05", "nonzeros", "nonzeros", 21.0, layer=0)]
    known = figures.layer_speed(loaded(tmp_path / "known", mask_rows(LAYER_PLANS), gathered))
    assert titles(known) == ["1.5b, L1 2e-5, after 3 steps"]
    unknown = figures.layer_speed(loaded(tmp_path / "unknown", mask_rows(["twell"]), ceiling_rows(GPU, "k")))
    assert titles(unknown) == ["layers of a trained model (nonzeros_relu_l1_2e-05)"]
    assert unknown.missing == ", ".join(label for plan, label in FORWARD.series.items() if plan != "twell")
    assert known.missing == "the machine's ceilings, of which the floors are made"


def test_of_several_comparisons_the_one_with_the_most_plans_is_drawn(tmp_path):
    rows = [
        mask_rows(["twell"], "first", tokens=10**6),
        mask_rows(LAYER_PLANS, "second"),
        mask_rows(["twell"], "third"),
    ]
    assert set(figures.layer_speed(loaded(tmp_path, *rows)).data["item"]) == {"second"}


def test_forward_and_backward_by_layer_is_that_of_a_model_where_it_was_timed(tmp_path):
    alone = mask_rows(["csr", "csr_hot"], "alone", op="ffn_training", ratio=2.0)
    stack = mask_rows(["csr", "csr_hot"], "stack", op="ffn_training_stack", ratio=2.5)
    forward = mask_rows(LAYER_PLANS)
    drawn = figures.layer_training_speed(loaded(tmp_path / "alone", alone, forward))
    assert set(drawn.data["op"]) == {"ffn_training"}
    assert set(drawn.data["ratio"]) == {2.0}
    assert "one block alone" in drawn.caption
    drawn = figures.layer_training_speed(loaded(tmp_path / "both", alone, stack, forward))
    assert set(drawn.data["op"]) == {"ffn_training_stack"}
    assert set(drawn.data["plan"]) == {"csr", "csr_hot"}
    assert set(drawn.data["ratio"]) == {2.5}
    assert "as in a model" in drawn.caption
    assert "alone" not in drawn.caption
    assert (
        "ffn_training_stack or ffn_training" in figures.layer_training_speed(loaded(tmp_path / "no", forward)).missing
    )


def test_every_layer_stands_at_its_non_zeros(results, tmp_path):
    drawn = figures.layers_against_nonzeros(results)
    assert drawn.missing == f"forward and backward of {FEWEST_LAYERS} layers"
    points = {line.get_label(): line.get_xydata().tolist() for line in drawn.figure.axes[0].lines}
    for plan in ("twell", "twell_hot", "twell_ordered"):
        layers = drawn.data[drawn.data["plan"] == plan]
        assert sorted(points[FORWARD.series[plan]]) == sorted(layers[["mean_nnz", "ratio"]].to_numpy().tolist())
        assert set(layers["l1"]) == set(GPU.l1), "not only the recommended L1 value"
    few = loaded(tmp_path, mask_rows(["twell"]))
    assert figures.layers_against_nonzeros(few).is_placeholder


def test_the_reference_backend_says_nothing_about_speed(tmp_path):
    slow = [one | {"backend": one["backend"].replace("hopper", "reference")} for one in mask_rows(["twell"])]
    assert "only the reference backend ran" in figures.layer_speed(loaded(tmp_path, slow)).missing
