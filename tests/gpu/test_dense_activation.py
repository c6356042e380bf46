"""Inference by dense products: the activation in one kernel, with the roundings of plain torch."""

import copy

import pytest
import torch
from calls import run_ffn
from torch.nn import functional as F

from experiments.models.llama import SiluFeedForward
from twell import sparse_ffn
from twell.backends import dense, hopper
from twell.hopper import hot_steps
from twell.launch_cache import LAUNCHES
from twell.testing import make_problem, plain_ffn, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 8), (3, 1000), (300, 5632), (70000, 32768)])
def test_as_plain_torch(tokens, intermediate, gated, activation):
    p = make_problem(tokens, 64, intermediate, min(20.0, intermediate / 4), gated=gated, device="cuda")
    y = run_ffn(*p, activation=activation, backend="dense", stats=False)[0]
    assert torch.equal(y, plain_ffn(*p, activation)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["x", "w_gate", "w_up", "w_down"])
def test_nonfinite_as_in_plain_torch(which, bad):
    p = make_problem(100, 64, 256, 20.0, device="cuda")
    getattr(p, which)[3, 5] = bad
    y = run_ffn(*p, backend="dense", stats=False)[0]
    assert torch.equal(y.nan_to_num(1e9), plain_ffn(*p)[0].nan_to_num(1e9))


def test_in_a_graph_and_on_a_side_stream():
    p = make_problem(100, 64, 256, 20.0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        y = run_ffn(*p, backend="dense", stats=False)[0]
    side.synchronize()
    assert torch.equal(y, plain_ffn(*p)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_ffn(*p, backend="dense", stats=False)[0]
    p.x.mul_(-0.5)
    graph.replay()
    assert torch.equal(y, plain_ffn(*p)[0])


@pytest.mark.usefixtures("needs_hopper")
@pytest.mark.parametrize("compiled", [False, True])
def test_silu_of_many_tokens_takes_h_from_one_kernel(monkeypatch, compiled):
    taken = []

    def h_at_once(*operands):
        taken.append(hot_steps.hidden(*operands))
        return taken[-1]

    monkeypatch.setattr(hopper, "h_at_once", h_at_once)
    torch.manual_seed(0)
    block = SiluFeedForward(256, 1000, gated=True).cuda().bfloat16()
    block.keep_stats = False
    x = 6 * torch.randn(2, 4100, 256, device="cuda").bfloat16()
    x[0, 0] *= 1e4  # gates of which exp is 0 or Inf
    wide = copy.deepcopy(block).double()
    with torch.no_grad():
        expected = wide.down_proj(F.silu(wide.gate_proj(x.double())) * wide.up_proj(x.double()))
        y = (torch.compile(block) if compiled else block)(x)
    assert len(taken) == 1
    assert relative_error(y[0, 0], expected[0, 0]) < 2**-7
    assert relative_error(y.flatten(0, 1)[1:], expected.flatten(0, 1)[1:]) < 2**-7
    block(x).sum().backward()
    assert len(taken) == 1, "training keeps what the backward needs"


@pytest.mark.usefixtures("needs_hopper")
def test_many_tokens_take_h_from_one_kernel(monkeypatch):
    taken = []

    def h_at_once(*operands):
        taken.append(hot_steps.hidden(*operands))
        return taken[-1]

    monkeypatch.setattr(hopper, "h_at_once", h_at_once)
    p = make_problem(dense.H_AT_ONCE, 256, 1000, 20.0, device="cuda")
    p.x[77, 5] = float("nan")
    y = run_ffn(p.x.view(2, -1, 256), *p[1:], backend="dense", stats=False)[0].view(-1, 256)
    assert len(taken) == 1
    plain = plain_ffn(*p)[0]
    assert torch.equal(y.isnan(), plain.isnan())
    assert relative_error(y.nan_to_num(), plain.nan_to_num()) < 2**-8
    for loaded in (True, False):
        if not loaded:  # no kernel can be while a graph is captured
            LAUNCHES.clear()
            hot_steps.hidden_kernel.cache_clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run_ffn(*p, backend="dense", stats=False)[0]
        graph.replay()
        assert len(taken) == 2
        assert torch.equal(y.isnan(), plain.isnan())
        assert relative_error(y.nan_to_num(), plain.nan_to_num()) < 2**-8


@pytest.mark.usefixtures("needs_hopper")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_so_does_a_compiled_program_in_inference(mode, monkeypatch):
    """The second mode runs once, captures a graph, and then replays it."""
    taken = []
    monkeypatch.setattr(hopper, "h_at_once", lambda *operands: taken.append(1) or hot_steps.hidden(*operands))
    torch.compiler.reset()
    p = make_problem(dense.H_AT_ONCE, 256, 1000, 20.0, device="cuda")
    run = torch.compile(lambda *problem: sparse_ffn(*problem, plan="dense"), fullgraph=True, mode=mode)
    plain = plain_ffn(*p)[0]
    with torch.no_grad():
        for _ in range(4):
            assert relative_error(run(*p), plain) < 2**-8
        many = len(taken)
        assert many == 4 if mode is None else 2 <= many < 4
        run(p.x[:100], *p[1:])
    run(p.x.clone().requires_grad_(), *p[1:]).sum().backward()
    assert len(taken) == many


def test_a_graph_needs_no_call_before_its_capture():
    """A kernel cannot be compiled then: the graph has torch's."""
    p = make_problem(37, 64, 264, 20.0, device="cuda")
    wanted = plain_ffn(*p)[0]
    LAUNCHES.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_ffn(*p, backend="dense", stats=False)[0]
    graph.replay()
    assert torch.equal(y, wanted)


def test_gradients_and_statistics_are_those_of_plain_torch():
    p = make_problem(100, 64, 256, 20.0, device="cuda")
    x = p.x.clone().requires_grad_()
    y, stats = run_ffn(x, *p[1:], backend="dense", stats=True)
    assert torch.equal(stats.nonzeros, (F.linear(p.x, p.w_gate) > 0).sum(1))
    (ours,) = torch.autograd.grad(y, x, torch.ones_like(y))
    (alone,) = torch.autograd.grad(run_ffn(x, *p[1:], backend="dense", stats=False)[0], x, torch.ones_like(y))
    assert torch.equal(ours, alone)
