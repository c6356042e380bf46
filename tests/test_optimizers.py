"""torch's fused optimizers are noticed, and follow when a weight's memory layout changes."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import optimizer as torch_optimizer

from twell import SparseFeedForward, make_neuron_major, optimizers, order_neurons
from twell.finiteness import WeightFiniteness

FUSED = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
}


def optimizer(name, parameters, *, fused=True):
    return getattr(torch.optim, name)(parameters, lr=0.05, fused=fused, **FUSED[name])


def a_block(**settings) -> SparseFeedForward:
    torch.manual_seed(0)
    return SparseFeedForward(16, 40, **settings)


def train(block, steps, optimizer, change=None, at=2):
    """So many steps on one batch; `change(block)` before that one."""
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        if step == at and change is not None:
            change(block)
        optimizer.zero_grad()
        (block(x) - 1).square().mean().backward()
        optimizer.step()
    return list(block.parameters())


# Versions


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_raises_the_versions_of_what_it_changes(name):
    changed, idle = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    changed.grad = torch.ones(3, 2)
    before = changed._version, idle._version
    optimizer(name, [changed, idle]).step()
    assert changed._version > before[0]
    assert idle._version == before[1]


@pytest.mark.parametrize("name", FUSED)
def test_silent_neurons_come_back_after_a_fused_step(name, caplog):
    block = a_block(stats="none")
    block.silent_suffix = 8
    with caplog.at_level(logging.WARNING):
        train(block, 2, optimizer(name, block.parameters()))
    assert block.silent_suffix == 0
    assert "the weights have changed: 8 neurons that were left out are restored" in caplog.text


@pytest.mark.parametrize("name", FUSED)
def test_weights_are_scanned_again_after_a_fused_step(name):
    weight, known = nn.Parameter(torch.ones(3, 2)), WeightFiniteness()
    assert [known.known((weight,)) for _ in range(3)] == [False, True, True]
    weight.grad = torch.full((3, 2), torch.inf)
    optimizer(name, [weight]).step()
    assert not weight.isfinite().any()
    assert not any(known.known((weight,)) for _ in range(3))


def test_steps_without_gradients_and_of_inference_tensors_pass():
    with torch.inference_mode():
        made = torch.ones(2)
    for weight in (nn.Parameter(torch.ones(2)), made):
        torch.optim.AdamW([weight], fused=True).step()
    made.grad = torch.ones(2)
    optimizers.raise_versions(torch.optim.AdamW([made], fused=True))


# Layouts


def reordered(block):
    order_neurons(block.zero_grad() or block, torch.arange(40))


def as_before(block):
    block.down_proj.weight.data = block.down_proj.weight.data.contiguous()


@pytest.mark.parametrize("change", [make_neuron_major, reordered])
@pytest.mark.parametrize("name", FUSED)
def test_the_state_follows_a_layout_that_changes_in_training(name, change):
    plain, ours = a_block(), a_block()
    wanted = train(plain, 5, optimizer(name, plain.parameters(), fused=False))
    running = optimizer(name, ours.parameters())
    for weight, other in zip(train(ours, 5, running, change), wanted, strict=True):
        torch.testing.assert_close(weight, other)
    down = ours.down_proj.weight
    assert down.t().is_contiguous()
    shaped = [value for value in running.state[down].values() if value.shape == down.shape]
    assert shaped
    assert all(value.stride() == down.stride() for value in shaped)


@pytest.mark.parametrize("name", FUSED)
def test_the_state_follows_back_to_contiguous_weights(name):
    plain, ours = a_block(), make_neuron_major(a_block())
    wanted = train(plain, 5, optimizer(name, plain.parameters(), fused=False))
    for weight, other in zip(train(ours, 5, optimizer(name, ours.parameters()), as_before), wanted, strict=True):
        torch.testing.assert_close(weight, other)
    assert ours.down_proj.weight.is_contiguous()


@pytest.mark.parametrize("saved_in", [make_neuron_major, lambda block: block])
@pytest.mark.parametrize("loaded_in", [make_neuron_major, lambda block: block])
@pytest.mark.parametrize("name", FUSED)
def test_a_loaded_state_may_have_another_layout(name, loaded_in, saved_in):
    first, plain = saved_in(a_block()), a_block()
    wanted = train(plain, 4, optimizer(name, plain.parameters(), fused=False))
    saved = optimizer(name, first.parameters())
    train(first, 2, saved)
    second = loaded_in(a_block())
    second.load_state_dict(first.state_dict())
    loaded = optimizer(name, second.parameters())
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for weight, other in zip(train(second, 2, loaded), wanted, strict=True):
        torch.testing.assert_close(weight, other)


@pytest.mark.parametrize("name", FUSED)
def test_gradients_from_before_the_change_are_used_as_they_are(name):
    steps = []
    for fused in (False, True):
        block = a_block()
        block(torch.randn(20, 16, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        make_neuron_major(block)
        optimizer(name, block.parameters(), fused=fused).step()
        steps.append(list(block.parameters()))
    for weight, other in zip(*steps, strict=True):
        torch.testing.assert_close(weight, other)


def test_a_state_in_the_right_layout_stays_the_same_tensor():
    block = a_block()
    running = optimizer("AdamW", block.parameters())
    train(block, 1, running)
    before = {weight: dict(state) for weight, state in running.state.items()}
    train(block, 2, running)
    assert all(running.state[weight][key] is value for weight, own in before.items() for key, value in own.items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_sharded_optimizer_whose_other_shares_are_elsewhere():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    plain, ours = a_block(), a_block()
    wanted = train(plain, 5, optimizer("AdamW", plain.parameters(), fused=False))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, lr=0.05, fused=True)
        sharded.state[ours.up_proj.weight] = None  # as load_state_dict leaves another process's share
        for weight, other in zip(train(ours, 5, sharded, make_neuron_major), wanted, strict=True):
            torch.testing.assert_close(weight, other)
    finally:
        torch.distributed.destroy_process_group()


def test_a_state_cannot_follow_while_a_graph_is_captured(monkeypatch):
    block = a_block()
    running = optimizer("AdamW", block.parameters())
    train(block, 1, running)
    monkeypatch.setattr(optimizers, "is_capturing", lambda tensor: True)
    train(block, 1, running)
    with pytest.raises(RuntimeError, match=r"has strides \(40, 1\) and its parameter \(1, 16\): run a step after"):
        train(block, 1, running, make_neuron_major, at=0)


# Compiled steps


@pytest.mark.parametrize(
    ("fused", "whole", "backend"),
    [(True, True, "eager"), (True, False, "aot_eager"), (False, True, "aot_eager"), (False, False, "eager")],
)
@pytest.mark.parametrize("name", FUSED)
def test_compiled_steps_have_the_graphs_that_they_have_without_the_hooks(name, fused, whole, backend, monkeypatch):
    def compiled():
        torch.compiler.reset()
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
        own, counter = optimizer(name, weights, fused=fused), CompileCounterWithBackend(backend)
        step = torch.compile(own.step if whole else lambda: own.step(), backend=counter)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(4, 6)
            before = weights[0]._version
            step()
        return weights, (counter.frame_count, counter.op_count), weights[0]._version > before

    weights, graphs, raised = compiled()
    assert raised
    for hooks in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(torch_optimizer, hooks, {})
    assert torch_optimizer.Optimizer.profile_hook_step.__globals__["_global_optimizer_pre_hooks"] == {}
    others, without, raised = compiled()
    assert raised != fused
    assert graphs == without
    assert all(torch.equal(weight, other) for weight, other in zip(weights, others, strict=True))
