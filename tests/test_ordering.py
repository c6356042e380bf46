"""Reordering neurons keeps the function; hot neurons are then leading ones."""

import copy

import pytest
import torch
from calls import change, make, make_block, run_ffn
from torch import nn
from torch.nn.utils import parametrizations

from twell import Plan, SparseFeedForward, feed_forward_blocks, sparse_ffn
from twell.testing import Problem, relative_error
from twell.tuning.order import can_be_ordered, firing_order, neuron_order, order_neurons, restore_order

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def a_block(problem: Problem, **settings) -> SparseFeedForward:
    gated = problem.w_gate is not None
    block = make_block(16, 40, gated=gated, backend="reference", dtype=problem.x.dtype, **settings).eval()
    names = ("gate", "up", "down") if gated else ("up", "down")
    block.load_state_dict({f"{name}_proj.weight": getattr(problem, f"w_{name}") for name in names})
    return block


def by_firing(problem: Problem) -> torch.Tensor:
    pattern = problem.w_up if problem.w_gate is None else problem.w_gate
    return (problem.x @ pattern.t() > 0).sum(0).argsort(descending=True, stable=True)


# A prefix of hot neurons


@torch.no_grad()
def test_a_prefix_under_compile_autocast_and_with_zero_tokens():
    x, *weights = make(dtype=torch.float32)
    wanted, _ = run_ffn(x, *weights, backend="reference")
    compiled = torch.compile(sparse_ffn, backend="aot_eager", fullgraph=True)
    got, stats = compiled(x, *weights, plan=Plan("reference", 12), return_stats=True)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(stats.fired, run_ffn(x, *weights, backend="dense")[1].fired)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run_ffn(x, *weights, backend="reference", hot=12)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, wanted) < 0.02
    y, stats = run_ffn(x[:0], *weights, backend="reference", hot=12)
    assert (y.shape, float(stats.l1), stats.nonzeros.shape) == ((0, 16), 0.0, (0,))


# The order


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_a_block_in_another_order_is_the_same_function(gated):
    problem = make(gated)
    block, state = a_block(problem), None
    wanted, before = block(problem.x), {name: value.clone() for name, value in block.state_dict().items()}
    parameters = [id(p) for p in block.parameters()]
    for order in (by_firing(problem), torch.randperm(40)):
        order_neurons(block, order)
        change(block, hot=12)
        torch.testing.assert_close(block(problem.x), wanted)
        state = block.state_dict()
        assert set(state) == set(before)
        torch.testing.assert_close(a_block(problem._replace(**_weights(state)))(problem.x), wanted)
    assert [id(p) for p in block.parameters()] == parameters
    assert block.down_proj.weight.stride() == (1, 16)
    copied = copy.deepcopy(block)
    restore_order(block)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert block.plan.hot == 0
    restore_order(block)  # nothing is left to undo
    assert torch.equal(block.up_proj.weight, before["up_proj.weight"])
    restore_order(copied)
    assert torch.equal(copied.up_proj.weight, before["up_proj.weight"])


def _weights(state):
    return {f"w_{name[:-12]}": value for name, value in state.items()}


def test_all_neurons_above_a_rate_are_tried_as_hot():
    """Rates with a step, as L1 with hot neurons exempt leaves them: 160 neurons fire for each token, others never."""
    w_gate = torch.ones(1024, 2)
    w_gate[160:] = -1
    x = torch.ones(64, 2)
    order = firing_order(x, w_gate, (x @ w_gate.t() > 0).any(0))
    assert order.prefixes == (256,), "rounded down, 32 of them would be gathered for each token"
    assert firing_order(x, w_gate[:256], torch.ones(256, dtype=torch.bool)).prefixes == (), "none would stay behind"


def test_the_order_of_firing():
    """Most active first; a neuron that fired outside the sample of the rates is rare, and no silent one."""
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [1.0, -1.0], [1.0, -1.0]])
    w_gate = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [1.0, 0.0]]).repeat(64, 1)
    rare = torch.arange(256) % 4 == 2
    fired = (x @ w_gate.t() > 0).any(0) | rare
    order = firing_order(x, w_gate, fired)
    assert [int(neuron) % 4 for neuron in order.neurons] == [3] * 64 + [1] * 64 + [2] * 64 + [0] * 64
    assert (order.prefixes, order.kept) == ((128,), 192)
    _, up, down = order.reordered((None, w_gate, torch.arange(512.0).view(2, 256)))
    assert torch.equal(up, w_gate[order.neurons])
    assert torch.equal(down[0], order.neurons.float())
    assert down.stride() == (1, 2)


def test_what_is_no_order_is_refused_before_anything_changes():
    block = a_block(make())
    change(block, hot=8)
    for order, message in (
        *((order, "be a permutation of the 40 neurons") for order in (torch.arange(39), torch.arange(40) // 2)),
        (torch.arange(1, 41), "be a permutation of the 40 neurons"),
        (torch.randperm(40).float(), r"be an int64 tensor, got torch\.float32"),
        (list(range(40)), "be an int64 tensor, got list"),
    ):
        with pytest.raises(ValueError, match=f"order must {message}"):
            order_neurons(block, order)
    assert block.plan.hot == 8
    block(make().x).sum().backward()
    with pytest.raises(ValueError, match="have gradients"):
        order_neurons(block, torch.arange(40))


def test_blocks_whose_order_others_depend_on():
    first, second = a_block(make()), a_block(make())
    model = nn.Sequential(first, second)
    assert can_be_ordered(model, first)
    second.up_proj.weight = first.up_proj.weight
    assert not can_be_ordered(model, first)
    second.l1_weight = torch.ones(len(second.up_proj.weight))
    assert not can_be_ordered(second, second)
    second.l1_weight = None
    assert can_be_ordered(second, second)
    assert not can_be_ordered(second.train(), second)
    assert feed_forward_blocks(model) == [first, second]


@pytest.mark.parametrize("through", [None, "meta"])
def test_indices_survive_what_empties_the_weights(through):
    block, order = a_block(make()), torch.randperm(40)
    order_neurons(block, order)
    change(block, hot=(3, 4))
    state = {name: value.clone() for name, value in block.state_dict().items()}
    wanted = block(make().x)
    if through is not None:
        block.to(through)
        assert block._hot.tolist() == [3, 4], "where they were"
    block.to_empty(device="cpu")
    assert block._hot.tolist() == [3, 4]
    assert torch.equal(neuron_order(block), order)
    block.load_state_dict(state)
    torch.testing.assert_close(block(make().x), wanted)
    block.float()
    assert block._hot.dtype == torch.int64


@pytest.mark.gpu
def test_indices_follow_the_weights_to_another_device():
    block = a_block(make())
    order_neurons(block, torch.randperm(40))
    change(block, hot=torch.tensor([3, 4]))
    block.cuda()
    assert block._hot.is_cuda
    assert neuron_order(block).is_cuda


# What cannot be reordered


@pytest.mark.parametrize("how", ["tied", "parametrized"])
def test_weights_that_cannot_be_reordered_in_place_are_refused(how):
    block = make_block(8, 24)
    if how == "tied":
        block.gate_proj.weight = block.up_proj.weight
    else:
        parametrizations.weight_norm(block.gate_proj)
    x = torch.randn(5, 8)
    before = block(x)
    with pytest.raises(ValueError, match="separate, plain parameters, got tied or parametrized"):
        order_neurons(block, torch.randperm(24))
    assert torch.equal(block(x), before)


@torch.no_grad()
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_block_is_unchanged_if_memory_runs_out(calls, monkeypatch):
    problem = make()
    block = a_block(problem)
    before, select, done = block(problem.x), torch.Tensor.index_select, []

    def index_select(*arguments):
        if len(done) == calls:
            raise torch.OutOfMemoryError("a test")
        done.append(1)
        return select(*arguments)

    monkeypatch.setattr(torch.Tensor, "index_select", index_select)
    with pytest.raises(torch.OutOfMemoryError):
        order_neurons(block, torch.arange(40).flip(0))
    monkeypatch.undo()
    torch.testing.assert_close(block(problem.x), before, rtol=0, atol=0)
    restore_order(block)
    torch.testing.assert_close(block(problem.x), before, rtol=0, atol=0)
