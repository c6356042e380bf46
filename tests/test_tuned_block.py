"""A tuned block in the kernel benchmark: with all its tokens and with fewer, eagerly and in a CUDA graph that the CPU
can replay in place of a real one."""

from dataclasses import replace

import pytest
import test_bench
import torch
from test_graph_forward import graphs_on_the_host  # noqa: F401

from experiments import bench_kernels
from experiments.bench import tuned_block
from experiments.bench.feedforward import mean_nonzeros
from experiments.bench.tuned_block import TunedBlock
from experiments.timing.compare import CheckFailed
from twell import Plan, SparseFeedForward
from twell.testing import make_problem, plain_ffn
from twell.tuning.order import order_neurons

SIZES = ["hidden=32", "intermediate=64", "mean_nnz=[8]", "tokens=[1,4,300]", "dense=[dense_eager]"]
TOKENS = 300


@pytest.fixture
def chosen(monkeypatch):
    """Makes `autotune` choose this, whatever is fastest here."""
    real = tuned_block.autotune

    def choose(backend, ranges):
        def autotune(block, x, backends):
            assert len(x) == TOKENS
            tuning = real(block, x, backends=backends)
            block.plan = Plan(backend, up_to=ranges)
            return tuning

        monkeypatch.setattr(tuned_block, "autotune", autotune)

    return choose


def rows_of(op, folder, *options):
    return test_bench.rows_of(bench_kernels, folder, *SIZES, f"ops=[{op}]", *options)


@pytest.mark.usefixtures("graphs_on_the_host")
@pytest.mark.parametrize("op", ["ffn_tuned", "ffn_tuned_graph"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_for_each_number_of_tokens_with_the_backend_that_ran(op, gated, chosen, tmp_path):
    chosen("reference", [(1, "reference"), (299, "dense")])
    rows = rows_of(op, tmp_path, "metrics=[time]", f"gated={str(gated).lower()}")
    assert [(row["tokens"], row["backend"], row["plan"]) for row in rows] == [
        (tokens, *form)
        for tokens, backend in ((1, "reference"), (4, "dense"), (300, "reference"))
        for form in (("dense_eager", "dense"), (backend, "by_layer"))
    ]
    assert all(row["op"] == op and row["value"] > 0 and row["ratio"] > 0 and row["check_error"] < 0.01 for row in rows)
    assert {row["baseline"] for row in rows} == {"dense_eager"}


@pytest.mark.parametrize("in_graph", [True, False])
def test_the_block_has_its_own_weights_in_its_own_order(in_graph, chosen):
    problem = make_problem(TOKENS, 32, 64, 8.0, seed=3)
    before = [t.clone() for t in problem]
    chosen("reference", [(1, "dense")])
    block = TunedBlock(problem, ["reference"])
    order = torch.randperm(64)
    order_neurons(block._block, order)
    block._block.plan = replace(block._block.plan, hot=16)
    part = block.problem(40)
    form = block.form(part, in_graph=in_graph)
    x, *weights = form.prepare(part)
    y, _ = form.run(x, *weights)
    torch.testing.assert_close(y, plain_ffn(*part)[0], rtol=0.05, atol=0.05)
    if in_graph:
        assert torch.equal(weights[1], before[2][order])
        doubled, _ = form.run(x, weights[0], weights[1], 2 * weights[2])
        torch.testing.assert_close(doubled, 2 * y)
    assert all(torch.equal(one, other) for one, other in zip(problem, before, strict=True))


@pytest.mark.parametrize("in_graph", [True, False])
def test_the_block_is_timed_as_inference(in_graph, chosen):
    chosen("reference", [])
    problem = make_problem(TOKENS, 32, 64, 8.0, seed=3)
    form = TunedBlock(problem, ["reference"]).form(problem, in_graph=in_graph)
    with torch.enable_grad():  # as a benchmark calls it
        y, _ = form(*problem)
    assert not y.requires_grad


def test_fewer_tokens_have_about_the_same_mean_of_nonzeros():
    problem = make_problem(TOKENS, 32, 64, 8.0, seed=3)
    block = TunedBlock(problem, ["reference"])
    means = [mean_nonzeros(block.problem(tokens)) for tokens in (1, 4, 30)]
    assert means == pytest.approx([mean_nonzeros(problem)] * 3, rel=0.25)
    assert len(block.problem(TOKENS).x) == TOKENS


def test_a_wrong_result_is_refused(chosen, tmp_path, monkeypatch):
    real = SparseFeedForward.forward

    def wrong(block, x):
        y = real(block, x)
        return y if len(x) == TOKENS else y * 1.1

    monkeypatch.setattr(SparseFeedForward, "forward", wrong)
    with pytest.raises(CheckFailed, match="y: relative error"):
        rows_of("ffn_tuned", tmp_path, "metrics=[time]")


def test_a_block_that_no_backend_can_run_is_absent():
    """As on a GPU; on a CPU they are refused before."""
    options = [*SIZES, "metrics=[time]", "backends=[hopper,triton+hot]"]
    config, device = test_bench.configured(bench_kernels, *options), torch.device("cpu")
    *_, pattern = bench_kernels.patterns(config, device)
    (row,) = bench_kernels.measure(pattern, "ffn_tuned", config, device)
    assert (row["tokens"], row["backend"], row["plan"], row["value"]) == (300, "hopper", "by_layer", None)
    assert "CUDA" in row["missing"]


def test_a_backend_that_cannot_run_is_left_out(tmp_path):
    rows = rows_of("ffn_tuned", tmp_path, "metrics=[time]", "backends=[reference,hopper]")
    assert [row["tokens"] for row in rows if row["plan"] == "by_layer"] == [1, 4, 300]


def test_with_all_backends_a_block_on_a_cpu_is_dense(tmp_path):
    rows = rows_of("ffn_tuned", tmp_path, "metrics=[time]", "backends=[]")
    assert [row["backend"] for row in rows] == ["dense_eager", "dense"] * 3
