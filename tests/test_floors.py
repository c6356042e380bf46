"""analysis.floors: the floors of the plans by hand from measured ceilings, and NaN where one is missing."""

import math

import pytest
from synthetic_results import Study, results_of, row

from analysis import render
from analysis.floors import ceilings, floors
from analysis.summary import kernels

H200 = Study(name="h200", hidden=2048, intermediate=5632, device="A GPU", gpu=True)
# On an H200: 4.43 ms for the gate product at M = 131072, 9.3 TB/s of rows, 4.3 TB/s of copies.
M = 131072
GATE_MS = 4.43
MATMUL = 2 * M * 2048 * 5632 / (GATE_MS / 1e3) / 1e12


def ceiling_rows(study=H200, tokens=M, gated=True):
    none = {"hidden": None, "intermediate": None}
    return [
        row(study, None, "bench", "ceiling_copy", "bandwidth", 4300.0, backend="torch", **none),
        row(study, None, "bench", "ceiling_gather", "bandwidth", 9000.0, backend="a slower way", gated=gated),
        row(study, None, "bench", "ceiling_gather", "bandwidth", 9300.0, backend="triton", gated=gated),
        row(study, None, "bench", "ceiling_matmul", "rate", MATMUL, backend="torch", tokens=tokens),
    ]


def timed(op, value=8.0, study=H200, **fields):
    common = {"plan": "twell", "backend": "hopper", "tokens": M, "mean_nnz": 29.0, "gated": True}
    return row(study, None, "bench", op, "time", value, pattern="synthetic", **common | fields)


def floor_of(tmp_path, measured, machine=None):
    results = results_of(tmp_path, [*(ceiling_rows() if machine is None else machine), measured])
    own = results.rows[results.rows["metric"] == "time"]
    return floors(own, results.rows).item()


VECTOR = M * 2048 * 2


@pytest.mark.parametrize(
    ("op", "gated", "products", "rows"),
    [
        ("gate_pack", True, 1, 0), ("gated_down", True, 0, 2), ("ffn_forward", True, 1, 2),
        ("ffn_forward_stats", True, 1, 2), ("ffn_training", True, 1, 7), ("ffn_training_stack", True, 1, 7),
        ("gate_pack", False, 1, 0), ("down", False, 0, 1), ("ffn_forward", False, 1, 1), ("ffn_training", False, 1, 5),
    ],
)  # fmt: skip
def test_floors_by_hand(tmp_path, op, gated, products, rows):
    by_hand = products * GATE_MS + 29 * rows * VECTOR / 9300e9 * 1e3
    plan = "hybrid" if op == "ffn_training" else "twell"
    assert floor_of(tmp_path, timed(op, gated=gated, plan=plan), ceiling_rows(gated=gated)) == pytest.approx(by_hand)


def test_with_hardly_any_nonzeros_the_tokens_themselves_are_the_floor(tmp_path):
    assert floor_of(tmp_path, timed("gated_down", mean_nnz=0.1)) == pytest.approx(2 * VECTOR / 4300e9 * 1e3)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": "dense"},
        {"plan": "twell_ordered"},
        {"op": "generate"},
        {"mean_nnz": None},
        {"tokens": 2048},
        {"gated": False},
        {"intermediate": 8192},
        {"device": "Another GPU"},
    ],
)
def test_no_floor_without_its_ceilings(tmp_path, changes):
    measured = timed("ffn_forward")
    assert not math.isnan(floor_of(tmp_path / "with", measured))
    assert math.isnan(floor_of(tmp_path / "without", measured | changes))


def test_ceilings_of_another_study_on_the_same_kind_of_device_will_do(tmp_path):
    measured = timed("ffn_forward") | {"study": "other"}
    assert floor_of(tmp_path / "other", measured) == floor_of(tmp_path / "own", timed("ffn_forward"))


@pytest.mark.parametrize("op", ["ceiling_copy", "ceiling_gather", "ceiling_matmul"])
def test_a_ceiling_without_a_value_is_no_zero(tmp_path, op):
    gone = {"value": None, "missing": "no time"}
    machine = [line | gone if line["op"] == op else line for line in ceiling_rows()]
    assert math.isnan(floor_of(tmp_path, timed("ffn_forward"), machine))


def test_the_table_of_kernels_has_the_share_of_the_floor_and_what_was_measured_beside(tmp_path):
    beside = timed("gate_pack") | {"metric": "energy", "unit": "mJ/token", "value": 0.025}
    dense = timed("gate_pack", 5.0, plan="dense", backend="dense_eager")
    results = results_of(tmp_path, [*ceiling_rows(), timed("gate_pack", 4.6), beside, dense])
    table = kernels(results).set_index("plan")
    assert table.loc["twell", "floor_share"] == pytest.approx(GATE_MS / 4.6)
    assert table.loc["twell", "energy_mj_per_token"] == 0.025
    assert math.isnan(table.loc["dense", "floor_ms"])
    assert "host_us" not in table, "nothing measured"
    assert list(table["gated"]) == ["yes", "yes"]
    assert "floor / time" in render.markdown(kernels(results))


def test_the_table_of_ceilings(tmp_path):
    table = ceilings(results_of(tmp_path, ceiling_rows()))
    assert list(table["op"]) == ["ceiling_copy", "ceiling_gather", "ceiling_gather", "ceiling_matmul"]
    assert list(table["gated"]) == ["", "yes", "yes", ""]
    text = render.markdown(table)
    assert "| 9,300 |" in text
    assert "| TFLOP/s |" in text
    assert ceilings(results_of(tmp_path / "none", [timed("gate_pack")])).empty
