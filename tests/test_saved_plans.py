"""`autotune` with neurons sorted by firing rate, and plans that are saved with a model and loaded again. With backends
that take as long as they are told, in place of a GPU."""

from dataclasses import replace

import pytest
import torch
from calls import change, firing_block, rising_tokens
from tiny_models import TOKENS, llama
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from twell import Plan, SparseFeedForward, autotune, feed_forward_blocks, load_plans, registry, save_plans, sparsify
from twell.registry import BackendUnavailable
from twell.tuning import Form
from twell.tuning.order import neuron_order, order_neurons, restore_order

NEURONS = 512


class Model(nn.Module):
    """One block whose neurons fire at these rates on `tokens()`."""

    def __init__(self, rates):
        super().__init__()
        self.block = firing_block(rates)
        self.eval()

    def forward(self, x):
        return x + self.block(x)


def tokens() -> torch.Tensor:
    return rising_tokens().view(2, 500, -1)


def mixed(*parts) -> torch.Tensor:
    """Rates [N], shuffled: (count, rate), ..."""
    rates = torch.cat([torch.full((count,), rate) for count, rate in parts])
    return rates[torch.randperm(NEURONS, generator=torch.Generator().manual_seed(0))]


def test_neurons_are_put_in_order_where_that_is_fastest(backends, caplog):
    backends(dense=lambda nonzeros, neurons: 50.0, quick=lambda nonzeros, neurons: min(20 * nonzeros, 70))
    model = Model(mixed((128, 0.6), (256, 0.0125), (128, 0.0005)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level("INFO"):
        (choice,) = autotune(model, tokens())
    assert any("layer 0: its neurons are sorted; the state of an earlier optimizer" in text for text in caplog.messages)
    # By indices 128 are hot, since 0.0125 is too rare for that; from half of that rate on it is 384, in order.
    assert (choice.plan.backend, choice.plan.hot) == ("quick", 384)
    hot, in_front = Form("quick", hot=True), Form("quick", in_front=True)
    assert set(choice.milliseconds) == {Form("dense"), Form("quick"), hot, in_front}
    assert model.block.plan == choice.plan
    rates = model.block.gate_proj.weight[:, 1]
    assert bool((rates[:-1] >= rates[1:]).all()), "most active first"
    with torch.no_grad():
        got = model(tokens())
        restore_order(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        torch.testing.assert_close(got, model(tokens()))


def test_a_block_in_training_keeps_its_order(backends):
    backends(dense=lambda nonzeros, neurons: 50.0, quick=lambda nonzeros, neurons: min(20 * nonzeros, 70))
    model = Model(mixed((128, 0.6), (256, 0.0125), (128, 0.0005)))
    model.block.train()
    before = model.block.gate_proj.weight.clone()
    (choice,) = autotune(model, tokens())
    assert not any(form.in_front for form in choice.milliseconds)
    assert torch.equal(model.block.gate_proj.weight, before)


@pytest.mark.parametrize(
    "change_block",
    [
        lambda model: autotune(model, tokens()),
        lambda model: order_neurons(model.block, torch.arange(NEURONS).flip(0)),
        lambda model: change(model.block, hot=tuple(range(64))),
    ],
)
def test_what_is_planned_in_inference_mode_can_be_trained(change_block):
    """Only a tensor made outside of it can be saved for a backward."""
    model = Model(mixed((32, 0.9), (96, 0.5), (384, -0.5)))
    with torch.inference_mode():
        change_block(model)
    by_neuron = [tensor for tensor in (model.block._hot, neuron_order(model.block)) if tensor is not None]
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *by_neuron))
    change(model.block, backend="reference")
    model.train()(tokens()).square().mean().backward()
    assert all(weight.grad is not None for weight in model.parameters())


class Two(nn.Module):
    """Two blocks, called by keyword; fails between them if it is told to."""

    def __init__(self):
        super().__init__()
        self.blocks, self.fails = nn.ModuleList(SparseFeedForward(8, 256) for _ in range(2)), False

    def forward(self, x):
        x = self.blocks[0](x=x)
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        return self.blocks[1](x=x)


def test_after_an_error_all_blocks_have_their_plans():
    model = Two().eval()
    assert len(autotune(model, torch.randn(16, 8))) == 2
    plans = [Plan("reference"), Plan("reference", 64, ((4, "dense"),))]
    for block, plan in zip(model.blocks, plans, strict=True):
        block.plan = plan
    model.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        autotune(model, torch.randn(16, 8))
    assert [block.plan for block in model.blocks] == plans
    with pytest.raises(ValueError, match="at least one token"):
        autotune(model, torch.zeros(0, 8))


# Saved with a model


def planned() -> LlamaForCausalLM:
    """One block in order with leading hot neurons, another with hot neurons by indices."""
    model = sparsify(llama())
    first, second = feed_forward_blocks(model)
    order_neurons(first, torch.randperm(48))
    first.plan, second.plan = Plan("reference", 16, ((4, "dense"),)), Plan("reference", (3, 7), capacity=20)
    save_plans(model)
    return model


@torch.no_grad()
def test_plans_are_saved_with_a_model_and_loaded_again(tmp_path):
    model = planned()
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits)
    again = sparsify(plain)
    load_plans(again)
    torch.testing.assert_close(again(TOKENS).logits, model(TOKENS).logits)
    plans = [block.plan for block in feed_forward_blocks(again)]
    assert plans == [block.plan for block in feed_forward_blocks(model)]
    assert save_plans(again) == save_plans(model) == again.config.twell_plans
    restore_order(model)
    assert not hasattr(model.config, "twell_plans"), "they were for the other order"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"backend": 3}, "the plan of layer 1 cannot be used: backend must be one of .* got 3"),
        ({"backend": "quick"}, "the plan of layer 1 cannot be used: backend must be one of .* got 'quick'"),
        ({"up_to": None}, r"layer 1 cannot be used: up_to must hold pairs \(tokens, backend\), got None"),
        ({"up_to": [[4]]}, r"layer 1 cannot be used: up_to must hold pairs"),
        ({"hot": [5, 5]}, "layer 1 cannot be used: hot must be"),
        ({"hot": "12"}, "layer 1 cannot be used: hot must be"),
        ({"hot": 49}, "layer 1 cannot be used: .* 48 neurons, got 49"),
        ({"silent_suffix": 8}, "layer 1 cannot be used: a plan has the fields .* got 'silent_suffix'"),
    ],
)
def test_plans_that_do_not_fit_change_nothing(wrong, message):
    model, plans = sparsify(llama()), save_plans(planned())
    with pytest.raises(ValueError, match=message):
        load_plans(model, [plans[0], plans[1] | wrong])
    with pytest.raises(ValueError, match=r"layer 0 cannot be used: plan must be a Plan or .*, got \['a'\]"):
        load_plans(model, [["a"], plans[1]])
    assert [block.plan for block in feed_forward_blocks(model)] == [Plan(), Plan()]


def test_plans_that_are_not_there_or_cannot_run_here_are_refused():
    model, plans = sparsify(llama()), save_plans(planned())
    with pytest.raises(ValueError, match="no configuration that holds plans"):
        load_plans(model)
    with pytest.raises(ValueError, match="no SparseFeedForward to give plans"):
        load_plans(llama(), plans)
    with pytest.raises(ValueError, match=r"plans must be a list .* json\.loads"):
        load_plans(model, "[]")
    with pytest.raises(ValueError, match="there are plans for 1 blocks"):
        load_plans(model, plans[:1])
    with pytest.raises(BackendUnavailable, match="'hopper', planned for layer 1, cannot run here: it needs a CUDA"):
        load_plans(model, [plans[0], {"backend": "hopper"}])
    assert [block.plan for block in feed_forward_blocks(model)] == [Plan(), Plan()]
    with pytest.raises(ValueError, match="the weights of layer 0 are on the meta device: load them before load_plans"):
        load_plans(model.to("meta"), plans)


def test_plans_are_checked_in_the_dtype_of_autocast(monkeypatch):
    model, asked = Two(), []
    monkeypatch.setattr(registry, "why_not", lambda name, **about: asked.append(about["dtype"]))
    load_plans(model, [{}, {}])
    with torch.autocast("cpu", torch.bfloat16):
        load_plans(model, [{}, {}])
    assert asked == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("training", [False, True])
def test_kernels_are_loaded_before_calls_once_for_equal_blocks(training, monkeypatch):
    model, loaded = Two().train(training), []

    def kernels(request, screened):
        assert not request.training
        return {(request.hidden, request.intermediate, screened): lambda: loaded.append(request.device.type)}

    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: replace(get(name), kernels=kernels))
    load_plans(model, [{"backend": "reference"}] * 2)
    assert loaded == ([] if training else ["cpu"])
    load_plans(model, [{"backend": "reference"}, {"backend": "reference", "screened": 3}])
    assert loaded == ([] if training else ["cpu"] * 3)
    if not training:
        autotune(model, torch.randn(5, 8), backends=["reference"])
        assert loaded == ["cpu"] * 5


def test_the_plans_of_a_wrapped_model_are_stored_and_forgotten():
    model, wrapped = sparsify(llama()), nn.Module()
    wrapped.module = model
    assert save_plans(wrapped) == model.config.twell_plans == [{"backend": "dense"}] * 2
    load_plans(wrapped)
    restore_order(wrapped)
    assert not hasattr(model.config, "twell_plans")
