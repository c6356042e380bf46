"""`prune_silent`: an ordinary, smaller model, and what it says about the neurons that are gone."""

import math

import pytest
import torch
from calls import change
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from twell import Plan, SparseFeedForward, feed_forward_blocks, load_plans, prune_silent, save_plans, sparsify
from twell.prune import Pruned

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 2}
TOKENS = torch.randint(3, 60, (4, 50), generator=torch.Generator().manual_seed(0))


def tiny(**config) -> LlamaForCausalLM:
    """In the first layer neurons 0, 4, 8, ... never fire, 128 of them; in the second all but 0, 2, 4, ..., 256."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_attention_heads": 2, "hidden_act": "relu", **config}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for layer, every in zip(model.model.layers, (4, 2), strict=True):
            # Inputs are normed: of these one half is as positive as the other is negative.
            layer.mlp.gate_proj.weight[::every] = 0
    return sparsify(model)


def silent_in_all(model) -> None:
    """No gate can fire but 75 of the first 100 neurons of the first layer, and 200 of the last 400 of the second."""
    with torch.no_grad():
        first, second = feed_forward_blocks(model)
        first.gate_proj.weight[100:], second.gate_proj.weight[:-400] = 0, 0


@torch.no_grad()
def test_the_model_is_smaller_and_computes_the_same(tmp_path):
    model = tiny()
    silent_in_all(model)
    feed_forward_blocks(model)[1].plan = Plan("reference", (2, 321, 511))
    wanted, before = model(TOKENS).logits, model.state_dict()
    report = prune_silent(model, TOKENS, held_out={"input_ids": TOKENS, "labels": TOKENS})
    assert report.neurons == (256, 256), "both have the width of the wider one, a multiple of 128"
    assert report.of == (512, 512)
    assert report.tokens == 200
    assert report.bound == math.log(20 * 1024) / 200
    assert (report.held_out.firings, report.held_out.same_top) == (0, 1.0)
    assert report.held_out.loss == pytest.approx(report.held_out.loss_after)
    assert "512 of 1024 neurons are removed" in str(report)
    assert str(report._replace(silent=(0, 0))) == "each of 1024 neurons fired for some of 200 tokens: none is removed"
    torch.testing.assert_close(model(TOKENS).logits, wanted)
    state = model.state_dict()
    assert list(state) == list(before)
    assert state["model.layers.1.mlp.gate_proj.weight"].shape == (256, 32)
    assert state["model.layers.1.mlp.down_proj.weight"].shape == (32, 256)
    assert model.config.intermediate_size == 256
    hot = feed_forward_blocks(model)[1].plan.indices
    assert hot == (2, 160, 255), "56 silent ones in front, then the 200 that fire"
    # Saved and loaded by plain transformers, by our block, and generating.
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain(TOKENS).logits, wanted)
    again = sparsify(plain)
    assert all(block.up_proj.out_features == 256 for block in feed_forward_blocks(again))
    greedy = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(again.generate(TOKENS[:, :5], greedy), model.generate(TOKENS[:, :5], greedy))
    exported = torch.export.export(feed_forward_blocks(model)[0], (torch.randn(3, 32),)).module()
    x = torch.randn(3, 32)
    torch.testing.assert_close(exported(x), feed_forward_blocks(model)[0](x))


def test_it_can_be_trained_and_its_plans_follow():
    model = tiny()
    silent_in_all(model)
    save_plans(model)
    with torch.inference_mode():
        prune_silent(model, TOKENS)
    assert model.config.twell_plans == [{"backend": "dense"}] * 2
    load_plans(model)
    model.train()(TOKENS, labels=TOKENS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_blocks_without_a_configuration_each_have_their_own_width():
    torch.manual_seed(0)
    blocks = [SparseFeedForward(8, 512, gated=gated) for gated in (True, False, True)]
    with torch.no_grad():
        for block, silent in zip(blocks, (500, 300, 0), strict=True):
            (block.up_proj if block.gate_proj is None else block.gate_proj).weight[:silent] = 0
    model, x = nn.Sequential(*blocks), torch.randn(300, 8)
    change(blocks[1], hot=310)
    blocks[1].l1_weight = torch.arange(512.0)
    wanted = model(x)
    report = prune_silent(model, x)
    assert report.neurons == (128, 256, 512)
    assert report.silent[0] >= 500
    torch.testing.assert_close(model(x), wanted)
    assert (blocks[1].gate_proj, blocks[1].up_proj.out_features, blocks[1].down_proj.in_features) == (None, 256, 256)
    assert blocks[1].plan.hot == 54, "of the first 310, 10 fire, and 44 silent ones stay"
    assert blocks[1].l1_weight[-1] == 511


def test_neurons_that_fire_on_other_text_are_counted():
    torch.manual_seed(0)
    block = SparseFeedForward(4, 256)
    with torch.no_grad():
        block.gate_proj.weight.zero_()
        block.gate_proj.weight[:100, 0], block.gate_proj.weight[100:, 1] = 1, 1
    x, other = torch.zeros(50, 4), torch.zeros(30, 4)
    x[:, 0], other[:10, 1] = 1, 1
    report = prune_silent(nn.Sequential(block), x, held_out=other)
    assert (report.neurons, report.silent) == ((128,), (156,))
    assert (report.held_out.neurons, report.held_out.firings, report.held_out.tokens) == (128, 1280, 30)
    assert report.held_out.logits_error > 0.1


def test_what_cannot_be_pruned_is_refused_and_unchanged():
    def refused(model, message, *inputs, **named):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            prune_silent(model, *inputs, **named)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    x = torch.randn(5, 8)
    refused(nn.Linear(2, 2), "has no SparseFeedForward to prune", torch.zeros(2))
    refused(nn.Sequential(SparseFeedForward(8, 256)), "at least one token", x[:0])
    refused(nn.Sequential(SparseFeedForward(8, 256)), "inputs that are finite in each block", x / 0)
    refused(nn.Sequential(SparseFeedForward(8, 256)), "held_out needs inputs", x, held_out=x[:0])
    first, second = SparseFeedForward(8, 256), SparseFeedForward(8, 256)
    second.up_proj.weight = first.up_proj.weight
    refused(nn.Sequential(first, second), "belong to another module too", x)
    parametrized = SparseFeedForward(8, 256)
    parametrizations.weight_norm(parametrized.gate_proj)
    refused(nn.Sequential(parametrized), "no plain parameters", x)
    trained = SparseFeedForward(8, 256)
    trained(x).sum().backward()
    refused(nn.Sequential(trained), "have gradients", x)
    model = tiny()
    silent_in_all(model)
    model.config.intermediate_size = 511
    refused(model, "has intermediate_size=511, and the block 512 neurons", TOKENS)


def test_a_misspelled_setting_is_refused_and_much_text_goes_through_a_module():
    class Many(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

        def forward(self, batches):
            for tokens in batches:
                self.module(input_ids=tokens, logits_to_keep=1)

    model = tiny()
    silent_in_all(model)
    with pytest.raises(TypeError, match="has no setting 'heldout'; did you mean 'held_out'"):
        prune_silent(model, TOKENS, heldout=TOKENS)
    assert prune_silent(Many(model), [TOKENS, TOKENS]).tokens == 400
    assert model.config.intermediate_size == 256


def test_the_bound_holds_for_all_silent_neurons_together():
    """The rule of three, 3/n, fails in most trials."""
    torch.manual_seed(0)
    neurons, tokens, trials = 2000, 1000, 200
    rates = 10 ** (torch.rand(neurons) * 6 - 7)
    bound = Pruned((0,), (neurons,), (neurons,), tokens).bound
    silent = torch.distributions.Binomial(tokens, rates).sample((trials,)) == 0
    most = torch.where(silent, rates, 0).amax(1)
    assert (most >= bound).float().mean() <= 0.05
    assert (most >= 3 / tokens).float().mean() > 0.9


def test_one_configuration_of_more_than_the_blocks_is_refused():
    model = tiny()
    silent_in_all(model)
    model.model.layers[0].mlp = LlamaForCausalLM(model.config).model.layers[0].mlp  # a plain MLP of the same width
    with pytest.raises(ValueError, match="is also that of other modules"):
        prune_silent(model, TOKENS)
    assert model.config.intermediate_size == 512
