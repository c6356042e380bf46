"""`autotune_training`: every block gets what is fastest forward and backward, and the training stays the same."""

import logging

import pytest
import torch
from torch import nn

from kernels import (
    Alternative,
    BackendUnavailable,
    SparseFeedForward,
    autotune_training,
    feed_forward_blocks,
    training_tuning,
)
from kernels.timing import quick_times
from kernels.training_tuning import _capacity_for, _forward_backward

HIDDEN, NEURONS = 16, 512
DENSE, SPARSE, HOT = Alternative("dense"), Alternative("reference"), Alternative("reference", hot=True)


@pytest.fixture
def times(monkeypatch):
    """Sets how long each alternative takes; each is called once all the same."""
    known = {DENSE: 3.0, SPARSE: 2.0, HOT: 1.0}

    def measured(calls, device):
        for call in calls.values():
            call()
        return {name: known[name] for name in calls}

    monkeypatch.setattr(training_tuning, "quick_times", measured)
    return known


class Layers(nn.Module):
    """Blocks one after another, with dropout between them, that many of their neurons fire for."""

    def __init__(self, count=2, hot=0, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(SparseFeedForward(HIDDEN, NEURONS, **settings) for _ in range(count))
        self.dropout = nn.Dropout(0.5)
        for block in self.blocks:
            with torch.no_grad():
                pattern = block.up_proj.weight if block.gate_proj is None else block.gate_proj.weight
                pattern[:, 0] = -100.0
                pattern[:hot, 0] = 100.0

    def forward(self, x):
        for block in self.blocks:
            x = torch.cat((torch.ones_like(x[..., :1]), self.dropout(block(x))[..., 1:]), -1)
        return x


def tokens(count=200):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1
    return x


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_block_gets_what_is_fastest(times, gated, activation):
    model = Layers(hot=128, gated=gated, activation=activation)
    first, second = autotune_training(model, tokens(), backends=["reference"])
    assert first.milliseconds == second.milliseconds == {DENSE: 3.0, SPARSE: 2.0, HOT: 1.0}
    assert (first.backend, first.hot_neurons) == ("reference", 128)
    assert first.mean_nonzeros == pytest.approx(128)
    assert [block.backend for block in model.blocks] == ["reference"] * 2
    assert model.blocks[0].hot.tolist() == list(range(128))
    times[HOT] = 2.5
    autotune_training(model, tokens(), backends=["reference"])
    assert [(block.backend, block.hot) for block in model.blocks] == [("reference", None)] * 2
    times[DENSE] = 1.0
    choices = autotune_training(model, tokens(), backends=["reference"])
    assert [block.backend for block in model.blocks] == ["dense"] * 2
    assert "dense  reference  reference + hot  choice" in str(choices).splitlines()[0]


def test_without_hot_neurons_there_is_no_such_alternative(times):
    (choice,) = autotune_training(Layers(1), tokens(), backends=["reference"])
    assert choice.milliseconds == {DENSE: 3.0, SPARSE: 2.0}
    assert (choice.backend, choice.hot_neurons, choice.mean_nonzeros) == ("reference", 0, 0.0)


def test_the_present_choice_stays_unless_another_is_clearly_faster(times, caplog):
    caplog.set_level(logging.INFO)
    model = Layers(1)
    times[SPARSE] = 0.97 * times[DENSE]
    assert autotune_training(model, tokens(), backends=["reference"])[0].backend == "dense"
    assert "from now on" not in caplog.text
    times[SPARSE] = 0.9 * times[DENSE]
    assert autotune_training(model, tokens(), backends=["reference"])[0].backend == "reference"
    assert "runs reference instead of dense from now on" in caplog.text
    times[SPARSE] = times[DENSE] / 0.97
    assert autotune_training(model, tokens(), backends=["reference"])[0].backend == "reference"
    times[SPARSE] = times[DENSE] / 0.9
    assert autotune_training(model, tokens(), backends=["reference"])[0].backend == "dense"


def test_whatever_was_asked_for_before_is_replaced_by_what_was_measured(times):
    model = Layers(1, backend="auto")
    times[SPARSE] = 10.0
    assert autotune_training(model, tokens(), backends=["reference"])[0].backend == "dense"
    assert model.blocks[0].backend == "dense"


def test_the_training_goes_on_as_if_nothing_had_been_measured():
    """With the real times, the random numbers of dropout, the gradients accumulated so far, and the weights."""
    losses = []
    for tuned in (False, True):
        model, x = Layers(hot=32), tokens()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(5)
        model(x).square().mean().backward()
        if tuned:
            before = [weight.grad.clone() for weight in model.parameters()]
            assert len(autotune_training(model, x)) == 2
            assert all(torch.equal(weight.grad, old) for weight, old in zip(model.parameters(), before, strict=True))
        assert not any(block._forward_pre_hooks for block in model.blocks)
        model(x).square().mean().backward()
        optimizer.step()
        losses.append(model(x).square().mean().item())
    assert losses[0] == losses[1]


def test_gradients_are_those_of_dense_products_after_it(times):
    model, x = Layers(hot=128), tokens()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        (model(x).square().mean() + 0.1 * sum(block.stats.l1 for block in model.blocks)).backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        autotune_training(model, x, backends=["reference"])
    assert [block.backend for block in model.blocks] == ["reference"] * 2
    for dense, sparse in zip(*gradients, strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-6)


def test_what_is_timed_is_what_the_training_needs(monkeypatch):
    """All gradients that are wanted, those of frozen weights not; the statistics if the block keeps them."""
    asked = []
    real = torch.autograd.grad

    def grad(outputs, inputs, gradients):
        found = real(outputs, inputs, gradients)
        asked.append((len(outputs), [tuple(gradient.shape) for gradient in found]))
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    block, x = SparseFeedForward(HIDDEN, NEURONS), tokens()
    _forward_backward(block, x, DENSE, torch.empty(0, dtype=torch.int64), 64)()
    block.gate_proj.weight.requires_grad_(False)
    block.stats_mode = "none"
    _forward_backward(block, x, DENSE, torch.empty(0, dtype=torch.int64), 64)()
    up = (NEURONS, HIDDEN)
    assert asked == [(2, [(200, HIDDEN), up, up, up[::-1]]), (1, [(200, HIDDEN), up, up[::-1]])]


def test_capacity_follows_the_non_zeros(times):
    assert [_capacity_for(count, NEURONS) for count in (0.0, 10.0, 33.0, 100.0, 500.0)] == [64, 64, 128, 256, NEURONS]
    model = Layers(1, hot=100, capacity=64)
    block = model.blocks[0]
    autotune_training(model, tokens(), backends=["reference"])
    assert block.capacity == 256
    block.capacity = 512
    autotune_training(model, tokens(), backends=["reference"])
    assert block.capacity == 512, "twice as much as needed is kept"
    model.blocks[0].gate_proj.weight.data[:, 0] = -100.0
    autotune_training(model, tokens(), backends=["reference"])
    assert block.capacity == 64
    block.capacity_grows, block.capacity = False, 7
    autotune_training(model, tokens(), backends=["reference"])
    assert block.capacity == 7, "the user's own"


def test_neurons_that_inference_left_out_are_restored(times):
    model = Layers(1)
    block = model.blocks[0]
    block.hot_prefix, block.silent_suffix = 128, 256
    autotune_training(model, tokens(), backends=["reference"])
    assert (block.hot_prefix, block.silent_suffix) == (0, 0)


def test_dense_where_nothing_else_can_and_with_real_times():
    model = Layers(1)
    (choice,) = autotune_training(model, tokens(20))
    assert set(choice.milliseconds) == {DENSE}
    assert choice.milliseconds[DENSE] > 0
    assert training_tuning.quick_times is quick_times


def test_what_cannot_be_measured_is_reported():
    with pytest.raises(ValueError, match="Linear has no SparseFeedForward to tune"):
        autotune_training(nn.Linear(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="backend must be one of"):
        autotune_training(Layers(), tokens(), backends=["quickest"])
    with pytest.raises(ValueError, match="one by one"):
        autotune_training(Layers(), tokens(), backends=["auto"])
    with pytest.raises(BackendUnavailable, match="hopper"):
        autotune_training(Layers(), tokens(), backends=["hopper"])
    with pytest.raises(ValueError, match="at least one token"):
        autotune_training(Layers(), tokens()[:0])
    model = Layers()
    model.forward = lambda x: model.blocks[0](x)
    with pytest.raises(ValueError, match="ran 1 of its 2 blocks"):
        autotune_training(model, tokens())
    assert not any(block._forward_pre_hooks for block in feed_forward_blocks(model))
