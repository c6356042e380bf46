"""Expected gains of blocks: right between measured blocks, refused beyond them."""

import math
import shlex
from dataclasses import replace

import numpy as np
import pytest
from synthetic_results import Run, Study, results_of, row

from analysis import expect
from analysis.explorer import Absent
from experiments.bench_kernels import BenchKernelsConfig
from experiments.run.config import parse
from experiments.timing.plans import plan_of
from twell.testing import make_problem

STUDY = Study()
K, N, M = 64, 1024, 4096
DENSE_MS = 8.0


def cost(plan, nonzeros, hot_share):
    """Sparse time over dense time, of a law that is a plane in the interpolated logarithms."""
    return 0.02 * nonzeros**0.7 * (math.exp(-0.8 * hot_share) if plan == "twell_hot" else 1.0)


def block(item, plan, nonzeros, hot_share, **fields):
    """The rows of a block: dense, and sparse."""
    shape = {"tokens": M, "hidden": K, "intermediate": N, "gated": True, "mean_nnz": nonzeros, "activation": "relu"}
    shape |= {"baseline": "dense_eager", "device": "a GPU", **fields}
    op = shape.pop("op", "ffn_forward")
    sparse = DENSE_MS * cost(plan, nonzeros, hot_share)
    return [
        row(STUDY, None, item, op, "time", DENSE_MS, plan="dense", backend="dense_eager", ratio=1.0, **shape),
        row(STUDY, None, item, op, "time", sparse, plan=plan, backend="hopper", ratio=DENSE_MS / sparse, **shape),
    ]


def trained(name, l1, layers):
    """The rows of two plans in the layers of a trained model, and the hot shares that were gathered of it."""
    run = Run(name, l1)
    shares = [
        row(STUDY, run, f"nonzeros_{name}", "nonzeros", "hot_share", share, layer=layer, pattern=name)
        for layer, (_, share) in enumerate(layers)
    ]
    return shares + [
        line
        for plan in ("twell", "twell_hot")
        for layer, (nonzeros, share) in enumerate(layers)
        for line in block(f"bench_{plan}_{name}", plan, nonzeros, share, pattern=f"{name}/layer{layer}", layer=layer)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    rows = trained("first", 1e-5, [(nonzeros, share) for nonzeros in (8, 20, 50, 120) for share in (0.3, 0.5, 0.7)])
    rows += trained("second", 2e-5, [(nonzeros, share) for nonzeros in (12, 30, 80) for share in (0.35, 0.6)])
    rows += [line for plan in ("csr", "csr_hot") for nonzeros in (10.0, 40.0)
             for line in block(plan, plan, nonzeros, 0.0, pattern="synthetic", op="ffn_training")]  # fmt: skip
    return results_of(tmp_path_factory.mktemp("rows"), rows)


def expected(results, nonzeros, **arguments):
    frame = expect.expected_gain(results, K, N, nonzeros / N, **arguments)
    return {line["plan"]: line for line in frame.to_dict("records")}


@pytest.mark.parametrize(("nonzeros", "share"), [(15, 0.4), (40, 0.55), (100, 0.65), (50, 0.7)])
def test_between_measured_blocks_and_at_them_the_law_comes_back(results, nonzeros, share):
    lines = expected(results, nonzeros, hot_share=share)
    for plan in ("twell", "twell_hot"):
        assert lines[plan]["refused"] == ""
        assert lines[plan]["ratio"] == pytest.approx(1 / cost(plan, nonzeros, share), rel=0.02)
        assert lines[plan]["time_ms"] == pytest.approx(DENSE_MS * cost(plan, nonzeros, share), rel=0.02)


def test_synthetic_blocks_predict_those_between_them(results):
    """Whatever the hot share: without trained layers nothing tells what it makes of them."""
    lines = expected(results, 20, hot_share=0.9)
    for plan in ("csr", "csr_hot"):
        assert lines[plan]["op"] == "ffn_training"
        assert lines[plan]["ratio"] == pytest.approx(1 / cost("csr", 20, 0.0), rel=0.02)


@pytest.mark.parametrize("nonzeros", [4, 300])
def test_non_zeros_beyond_the_measured_ones_are_refused(results, nonzeros):
    for line in expected(results, nonzeros, hot_share=0.5).values():
        assert np.isnan(line["ratio"])
        assert np.isnan(line["time_ms"])
        assert "non-zeros from 8 to 120" in line["refused"] or line["op"] == "ffn_training"


def test_a_hot_share_far_from_all_blocks_is_refused_where_it_matters(results):
    lines = expected(results, 50, hot_share=0.05)
    assert np.isnan(lines["twell_hot"]["ratio"])
    assert "hot share from 0.3 to 0.7" in lines["twell_hot"]["refused"]
    assert lines["twell"]["ratio"] > 0


@pytest.mark.parametrize(("shape", "gated"), [((2 * K, N), True), ((K, N), False)])
def test_other_shapes_are_refused_with_the_command_that_measures_them(results, shape, gated):
    absent = expect.expected_gain(results, *shape, 0.01, 0.7, gated=gated)
    assert isinstance(absent, Absent)
    assert f"gated blocks with K = {shape[0]} and N = 1,024" in absent.sentence
    measure, _, look = absent.command.partition(" && ")
    program, *options = shlex.split(measure.removeprefix("python -m experiments."))
    asked = parse(BenchKernelsConfig, options)
    assert program == "bench_kernels"
    assert (asked.hidden, asked.intermediate, asked.gated) == (shape[0], N, gated)
    assert asked.ops == ["ffn_forward", "ffn_training_stack"]
    assert asked.mean_nnz[0] < 0.01 * N < asked.mean_nnz[1]
    assert {plan_of(name, training=False) for name in asked.backends} == {"twell", "twell_hot", "twell_ordered"}
    assert look.startswith(f"TWELL_RESULTS={asked.run.folder(program)} ")


def test_without_any_timed_block_nothing_is_expected(nothing):
    assert isinstance(expect.expected_gain(nothing, K, N, 0.01, 0.7), Absent)
    with pytest.raises(ValueError, match="active is a share, above 0 and at most 1, got 2"):
        expect.expected_gain(nothing, K, N, 2, 0.7)
    assert expect.held_out_errors(nothing).empty


def test_errors_are_of_predictions_that_do_not_know_the_model(results):
    errors = expect.held_out_errors(results).set_index("plan")
    assert set(errors.index) == {"twell", "twell_hot"}, "no trained model was timed in training"
    assert (errors["models"] == 2).all()
    assert (errors["layers"] == 18).all()
    # Of the first model, 8 and 120 non-zeros, and hot shares of 0.3 and 0.7, lie beyond those of the second.
    assert dict(errors["refused"]) == {"twell": 6, "twell_hot": 10}
    assert (errors["max_pct"] < 1).all()
    faster = results.rows["pattern"].str.startswith("second/") & results.rows["plan"].eq("twell")
    rows = results.rows.assign(ratio=results.rows["ratio"].where(~faster, results.rows["ratio"] * 1.25))
    unlike = replace(results, rows=rows)
    errors = expect.held_out_errors(unlike).set_index("plan")
    assert errors.loc["twell", "max_pct"] == pytest.approx(25, abs=1)
    assert 20 <= errors.loc["twell", "median_pct"] <= 25, "1 - 1 / 1.25 of the second model, 0.25 of the first"
    assert errors.loc["twell_hot", "max_pct"] < 1
    lines = expected(unlike, 50, hot_share=0.6)
    assert "with a median error of 2" in lines["twell"]["refused"]
    assert np.isnan(lines["twell"]["time_ms"])
    assert lines["twell_hot"]["refused"] == ""


@pytest.mark.parametrize("nonzeros", [20.0, 60.0])
def test_hot_share_of_synthetic_patterns(nonzeros):
    problem = make_problem(4096, 64, N, nonzeros, seed=0)
    rates = (problem.x.float() @ problem.w_gate.float().T > 0).float().mean(0).sort(descending=True).values
    measured = float(rates[: N // 10].sum() / rates.sum())
    assert expect.synthetic_hot_share(nonzeros, N) == pytest.approx(measured, abs=0.03)
