"""Reordering neurons keeps the function; hot neurons are a prefix and silent ones a suffix."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from twell import SparseFeedForward, feed_forward_blocks, order_neurons, restore_order, sparse_ffn
from twell.firing_order import firing_order, first_neurons
from twell.ordering import can_be_ordered, neuron_order
from twell.testing import Problem, check, make_problem, plain_ffn, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make(gated: bool = True, dtype: torch.dtype = torch.float64) -> Problem:
    return make_problem(30, 16, 40, 8, gated=gated, dtype=dtype)


def a_block(problem: Problem, **settings) -> SparseFeedForward:
    gated = problem.w_gate is not None
    block = SparseFeedForward(16, 40, gated=gated, backend="reference", dtype=problem.x.dtype, **settings).eval()
    names = ("gate", "up", "down") if gated else ("up", "down")
    block.load_state_dict({f"{name}_proj.weight": getattr(problem, f"w_{name}") for name in names})
    return block


def by_firing(problem: Problem) -> torch.Tensor:
    pattern = problem.w_up if problem.w_gate is None else problem.w_gate
    return (problem.x @ pattern.t() > 0).sum(0).argsort(descending=True, stable=True)


# A prefix of hot neurons


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("count", [0, 1, 17, 39, 40])
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_every_result_and_gradient_with_a_prefix(backend, count, gated, activation):
    problem = make(gated)

    def run(*operands):
        y, stats = sparse_ffn(*operands, backend=backend, hot_prefix=count, activation=activation)
        return y, stats.l1

    dy = torch.randn(problem.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(run, problem, dy, 0.3, activation)
    with torch.no_grad():
        check(run, problem, None, 0.3, activation)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_statistics_with_a_prefix_are_those_of_the_whole(gated):
    x, *weights = make(gated)
    x = x.view(3, 10, 16)
    for count in (1, 12):
        y, whole = sparse_ffn(x, *weights, backend="reference")
        got, parts = sparse_ffn(x, *weights, backend="reference", hot_prefix=count)
        assert got.shape == x.shape
        assert torch.equal(parts.nonzeros, whole.nonzeros)
        assert parts.nonzeros.dtype == torch.int32
        assert torch.equal(parts.fired, whole.fired)
        assert (parts.overflow.dtype, parts.backend) == (torch.int64, "reference")
        torch.testing.assert_close((got, parts.l1), (y, whole.l1))
        bare, none = sparse_ffn(x, *weights, backend="reference", hot_prefix=count, stats="none")
        assert torch.equal(bare, got)
        assert none.nonzeros is None


@torch.no_grad()
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["x", "w_gate", "w_up", "w_down"])
@pytest.mark.parametrize("row", [2, 20])
def test_nan_and_inf_with_a_prefix_are_where_plain_torch_has_them(row, where, bad):
    """In a hot neuron (2) and in another one (20), or in a token."""
    problem = make()
    at = (5, row) if where == "w_down" else (row, 5)
    getattr(problem, where)[at] = bad
    y, stats = sparse_ffn(*problem, backend="reference", hot_prefix=12)
    assert relative_error(y, plain_ffn(*problem)[0]) < 1e-13
    assert torch.equal(stats.nonzeros, sparse_ffn(*problem, backend="dense")[1].nonzeros)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nan_and_inf_in_x_with_a_prefix_in_training(bad, gated):
    problem = make(gated=gated)
    problem.x[2, 5] = bad
    wanted = plain_ffn(*problem)[0]
    leaves = [None if t is None else t.requires_grad_() for t in problem]
    y, _ = sparse_ffn(*leaves, backend="reference", hot_prefix=12)
    torch.testing.assert_close(y, wanted, equal_nan=True)
    with torch.no_grad():
        y, _ = sparse_ffn(*problem, backend="reference", hot_prefix=len(problem.w_up))
    torch.testing.assert_close(y, wanted, equal_nan=True)


@torch.no_grad()
def test_a_prefix_under_compile_autocast_and_with_zero_tokens():
    x, *weights = make(dtype=torch.float32)
    wanted, _ = sparse_ffn(x, *weights, backend="reference")
    compiled = torch.compile(sparse_ffn, backend="aot_eager", fullgraph=True)
    got, stats = compiled(x, *weights, backend="reference", hot_prefix=12)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(stats.fired, sparse_ffn(x, *weights, backend="dense")[1].fired)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = sparse_ffn(x, *weights, backend="reference", hot_prefix=12)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, wanted) < 0.02
    y, stats = sparse_ffn(x[:0], *weights, backend="reference", hot_prefix=12)
    assert (y.shape, float(stats.l1), stats.nonzeros.shape) == ((0, 16), 0.0, (0,))


def test_bad_prefixes_are_refused():
    problem = make()
    for count in (-1, 41, 2.0, True):
        with pytest.raises(ValueError, match="hot_prefix must be a whole number of neurons from 0 to 40, got"):
            sparse_ffn(*problem, hot_prefix=count)
    with pytest.raises(ValueError, match="by hot or by hot_prefix, not by both"):
        sparse_ffn(*problem, hot=torch.tensor([1]), hot_prefix=2)


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
        block.hot_prefix = 12
        torch.testing.assert_close(block(problem.x), wanted)
        state = block.state_dict()
        assert set(state) == set(before)
        torch.testing.assert_close(a_block(problem._replace(**_weights(state)))(problem.x), wanted)
    assert [id(p) for p in block.parameters()] == parameters
    assert block.down_proj.weight.stride() == (1, 16)
    copied = copy.deepcopy(block)
    restore_order(block)
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert block.hot_prefix == 0
    restore_order(block)  # nothing is left to undo
    assert torch.equal(block.up_proj.weight, before["up_proj.weight"])
    restore_order(copied)
    assert torch.equal(copied.up_proj.weight, before["up_proj.weight"])


def _weights(state):
    return {f"w_{name[:-12]}": value for name, value in state.items()}


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
    kept = first_neurons((None, up, down), order.kept)
    assert kept[1].data_ptr() == up.data_ptr()
    assert kept[2].shape == (2, 192)


def test_what_is_no_order_is_refused():
    block = a_block(make())
    for order in (torch.arange(39), torch.zeros(40, dtype=torch.int64), torch.arange(1, 41)):
        with pytest.raises(ValueError, match="order must be a permutation of the 40 neurons"):
            order_neurons(block, order)
    block(make().x).sum().backward()
    with pytest.raises(ValueError, match="have gradients"):
        order_neurons(block, torch.arange(40))


def test_blocks_whose_order_others_depend_on():
    first, second = a_block(make()), a_block(make())
    model = nn.Sequential(first, second)
    assert can_be_ordered(model, first)
    second.up_proj.weight = first.up_proj.weight
    assert not can_be_ordered(model, first)
    assert not can_be_ordered(second.train(), second)
    assert feed_forward_blocks(model) == [first, second]


def test_hot_neurons_by_indices_or_by_a_prefix():
    block = a_block(make())
    block.hot = torch.tensor([3, 4])
    block.hot_prefix = 5
    assert block.hot is None
    block.hot = torch.tensor([3, 4])
    assert block.hot_prefix == 0
    with pytest.raises(ValueError, match="hot_prefix must be a whole number of neurons from 0 to 40, got 41"):
        block.hot_prefix = 41


@pytest.mark.parametrize("through", [None, "meta"])
def test_indices_survive_what_empties_the_weights(through):
    block, hot, order = a_block(make()), torch.tensor([3, 4]), torch.randperm(40)
    order_neurons(block, order)
    block.hot, state = hot, {name: value.clone() for name, value in block.state_dict().items()}
    wanted = block(make().x)
    if through is not None:
        block.to(through)
        assert torch.equal(block.hot, hot), "where they were"
    block.to_empty(device="cpu")
    assert torch.equal(block.hot, hot)
    assert torch.equal(neuron_order(block), order)
    block.load_state_dict(state)
    torch.testing.assert_close(block(make().x), wanted)
    block.float()
    assert block.hot.dtype == torch.int64


@pytest.mark.gpu
def test_indices_follow_the_weights_to_another_device():
    block = a_block(make())
    order_neurons(block, torch.randperm(40))
    block.hot = torch.tensor([3, 4])
    block.cuda()
    assert block.hot.is_cuda
    assert neuron_order(block).is_cuda


# Silent neurons


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("gated", [True, False])
def test_neurons_that_are_left_out_are_as_if_they_never_fired(gated, backend):
    problem = make(gated)
    block = a_block(problem)
    block.backend = backend
    order_neurons(block, by_firing(problem))
    silent = int((~sparse_ffn(*problem, backend="dense")[1].fired).sum())
    assert silent > 5
    wanted, stats = block(problem.x), block.stats
    block.silent_suffix, block.hot_prefix = silent, 3
    with torch.no_grad():
        torch.testing.assert_close(block(problem.x), wanted)
    assert torch.equal(block.stats.fired, stats.fired)
    assert torch.equal(block.stats.nonzeros, stats.nonzeros)
    block.hot_prefix, block.silent_suffix = 0, 39
    kept = block(problem.x)
    (kept.sum() + block.stats.l1).backward()
    assert not block.up_proj.weight.grad[1:].any()
    assert not torch.allclose(kept, wanted)
    block.silent_suffix = 0
    torch.testing.assert_close(block(problem.x), wanted)


def test_what_cannot_be_left_out_is_refused():
    block = a_block(make())
    for count in (-1, 40, 1.0):
        with pytest.raises(ValueError, match="silent_suffix must be a whole number of neurons from 0 to 39, got"):
            block.silent_suffix = count
    block.hot_prefix = 30
    with pytest.raises(ValueError, match="from 0 to 10, got 11"):
        block.silent_suffix = 11
    block.silent_suffix = 10
    with pytest.raises(ValueError, match="from 0 to 30, got 31"):
        block.hot_prefix = 31
    with pytest.raises(ValueError, match="takes its hot neurons by hot_prefix"):
        block.hot = torch.tensor([1])


def test_loading_a_state_dict_brings_them_back(caplog):
    problem = make()
    block = a_block(problem)
    wanted, state = block(problem.x), block.state_dict()
    block.silent_suffix = 30
    with caplog.at_level(logging.WARNING):
        nn.Sequential(block).load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert "30 neurons that were left out are restored" in caplog.text
    torch.testing.assert_close(block(problem.x), wanted)


# What cannot be reordered


@pytest.mark.parametrize("how", ["tied", "parametrized"])
def test_weights_that_cannot_be_reordered_in_place_are_refused(how):
    block = SparseFeedForward(8, 24)
    if how == "tied":
        block.gate_proj.weight = block.up_proj.weight
    else:
        parametrizations.weight_norm(block.gate_proj)
    x = torch.randn(5, 8)
    before = block(x)
    with pytest.raises(ValueError, match="separate, plain parameters, got tied or parametrized"):
        order_neurons(block, torch.randperm(24))
    assert torch.equal(block(x), before)


def test_an_order_of_floats_is_refused_before_anything_changes():
    block = SparseFeedForward(8, 24)
    block.hot_prefix = 8
    with pytest.raises(ValueError, match=r"order must be an int64 tensor, got torch\.float32"):
        order_neurons(block, torch.randperm(24).float())
    with pytest.raises(ValueError, match="order must be an int64 tensor, got list"):
        order_neurons(block, list(range(24)))
    assert block.hot_prefix == 8


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
