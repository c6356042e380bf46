"""Inference with few tokens, for which the sparse backends have their own kernels: against plain torch in float64."""

import os

import pytest
import torch
from calls import run_ffn

from twell import registry
from twell.launch_cache import LAUNCHES
from twell.memory import neuron_major
from twell.testing import Problem, evaluate_exactly, make_problem, plain_ffn, relative_error, tolerance
from twell.tuning.timing import cold_costs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CUDA = "cuda"
TOKENS = [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 200]
NOW = {}


@pytest.fixture(autouse=True)
def _backend(backend, monkeypatch):
    """The one that `run` takes."""
    monkeypatch.setitem(NOW, "backend", backend)


def problem(tokens, hidden=256, intermediate=1024, nnz=20.0, **kwargs) -> Problem:
    p = make_problem(tokens, hidden, intermediate, nnz, device=CUDA, **kwargs)
    return p._replace(w_down=neuron_major(p.w_down))


def run(p, **options):
    with torch.no_grad():
        return run_ffn(*p, backend=NOW["backend"], stats=False, **options)[0]


def check(p, activation="relu", **options):
    assert p.x.shape[0] > 16 or registry.has_few_tokens(NOW["backend"], *p.x.shape)
    return check_result(p, activation, **options)


def check_result(p, activation="relu", **options):
    y = run(p, activation=activation, **options)
    exact = evaluate_exactly(p, None, 0.0, activation)["y"]
    allowed = tolerance(relative_error(plain_ffn(*p, activation)[0], exact), p.x.dtype)
    assert relative_error(y, exact) <= allowed
    return y


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(tokens, gated, activation):
    p = problem(tokens, gated=gated)
    check(p, activation)


@pytest.mark.parametrize("hidden", [64, 192, 448, 2048, 2112, 4096, 5120])
@pytest.mark.parametrize("tokens", [1, 16])
def test_any_hidden_size(tokens, hidden):
    check(problem(tokens, hidden, 520))


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_hidden_size_beyond_shared_memory_is_left_to_the_kernels_for_any_number_of_tokens(tokens):
    assert not registry.has_few_tokens("hopper", tokens, 7168)
    check_result(problem(tokens, 7168, 520))


@pytest.mark.parametrize("intermediate", [8, 16, 40, 250, 257, 1000, 5632, 65536])
@pytest.mark.parametrize("tokens", [1, 12])
def test_any_intermediate_size(tokens, intermediate):
    check(problem(tokens, 128, intermediate, min(20.0, intermediate / 4)))


@pytest.mark.parametrize("nnz", [0.0, 1.0, 400.0, 5000.0])
@pytest.mark.parametrize("tokens", [3, 16])
def test_any_density(tokens, nnz):
    p = problem(tokens, 128, 6000, min(nnz, 1500.0))
    if nnz > 1500:
        p = p._replace(
            w_gate=torch.randn_like(p.w_gate).abs(), x=p.x.abs()
        )  # every neuron, for the list of active ones
    check(p)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("gated", "which"), [(True, "w_gate"), (True, "x"), (False, "x"), (False, "w_up")])
@pytest.mark.parametrize("tokens", [1, 16])
def test_not_finite_as_in_plain_torch(tokens, which, bad, gated):
    p = problem(tokens, gated=gated)
    getattr(p, which)[0 if which == "x" else 5, 3] = bad
    y, plain = run(p), plain_ffn(*p)[0]
    assert torch.equal(y.isnan(), plain.isnan())
    assert torch.equal(y.isinf(), plain.isinf())


@pytest.mark.parametrize("which", ["w_up", "w_down"])
def test_a_weight_that_is_not_finite_shows_where_its_neuron_fires(which):
    p = problem(16)
    fires = torch.nn.functional.linear(p.x, p.w_gate) > 0
    neuron = int(fires.sum(0).argmax())
    (p.w_up if which == "w_up" else p.w_down.t())[neuron, 3] = float("nan")
    y, plain = run(p)[fires[:, neuron]], plain_ffn(*p)[0][fires[:, neuron]]
    assert len(y)
    assert torch.equal(y.isnan(), plain.isnan())


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 65])
def test_repeated_calls_have_the_same_bits(tokens):
    p = problem(tokens, 2048, 5632, 29.0)
    LAUNCHES.clear()
    first = run(p)
    for _ in range(3):
        torch.cuda.synchronize()
        assert torch.equal(run(p), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(p)
    for _ in range(2):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, first)


def test_inputs_and_weights_that_are_views():
    p = problem(12, 320, 512)
    wide = torch.zeros(12, 640, device=CUDA, dtype=torch.bfloat16)
    wide[:, :320] = p.x
    wanted = run(p)
    assert torch.equal(run(p._replace(x=wide[:, :320])), wanted)
    assert torch.equal(run(p._replace(x=p.x.view(3, 4, 320))), wanted.view(3, 4, 320))
    assert torch.equal(run(p._replace(w_down=p.w_down.contiguous())), wanted)
    half = Problem(p.x, p.w_gate[:256], p.w_up[:256], p.w_down[:, :256])
    check(half)
    for given in ({"hot": 64}, {"hot": 256}, {"hot": torch.arange(9, device=CUDA)}):
        for _ in range(2):
            assert torch.equal(run(p, **given), wanted)


def test_compiled():
    p = problem(3)

    def block(x, gate, up, down):
        return run_ffn(x, gate, up, down, backend=NOW["backend"], stats=False)[0]

    wanted = run(p)
    with torch.no_grad():
        assert torch.equal(torch.compile(block, fullgraph=True)(*p), wanted)
        reduced = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            assert torch.equal(reduced(*p).clone(), wanted)


@pytest.mark.skipif("PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ, reason="allocations take longer than the call")
def test_the_cost_of_a_call_is_that_with_weights_in_device_memory():
    weight, x = torch.randn(5632, 2048, device=CUDA).to(torch.bfloat16), torch.randn(1, 2048, device=CUDA).bfloat16()
    calls = {"product": lambda: torch.nn.functional.linear(x, weight)}
    cost = cold_costs(calls, x.device)["product"]
    bandwidth = weight.nbytes / (cost.device * 1e-3)
    assert 0.5e12 < bandwidth < 5e12, "the L2 cache would be faster, and a host that is waited for slower"
    assert cost.eager >= cost.device
