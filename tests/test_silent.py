"""`autotune` with neurons sorted by firing rate and with silent neurons left out, and what of it is saved with a model.
With backends that take as long as they are told, in place of a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twell import (
    Alternative,
    BackendUnavailable,
    SparseFeedForward,
    autotune,
    feed_forward_blocks,
    hot_neurons,
    keep_silent,
    order_neurons,
    registry,
    restore_order,
    restore_tuning,
    sparse_ffn,
    sparsify,
    tuning,
    tuning_settings,
)
from twell.saved_tuning import remember
from twell.silent import HeldOut, Silent

HIDDEN, NEURONS = 16, 512


class Model(nn.Module):
    """One block whose neurons fire at these rates on `tokens()`, with outputs like those of a language model."""

    def __init__(self, rates):
        super().__init__()
        torch.manual_seed(0)
        self.block = SparseFeedForward(HIDDEN, NEURONS)
        self.calls = 1
        with torch.no_grad():
            self.block.gate_proj.weight.zero_()
            self.block.gate_proj.weight[:, 0] = 1
            self.block.gate_proj.weight[:, 1] = torch.as_tensor(rates) - 1
        self.eval()

    def forward(self, x):
        for _ in range(self.calls):
            logits = x + self.block(x)
        return SimpleNamespace(logits=logits, loss=logits.square().mean())


def tokens(shift: float = 0.0) -> torch.Tensor:
    """[2, 500, K]: the first column rises from `shift` to 1 + `shift`, the second is 1."""
    x = torch.zeros(1000, HIDDEN)
    x[:, 0], x[:, 1] = torch.arange(1000) / 1000 + shift, 1
    return x.view(2, 500, HIDDEN)


def mixed(*parts) -> torch.Tensor:
    """Rates [N], shuffled: (count, rate), ..."""
    rates = torch.cat([torch.full((count,), rate) for count, rate in parts])
    return rates[torch.randperm(NEURONS, generator=torch.Generator().manual_seed(0))]


def test_neurons_are_put_in_order_where_that_is_fastest(backends):
    backends(dense=lambda nonzeros, neurons: 50.0, quick=lambda nonzeros, neurons: min(20 * nonzeros, 70))
    rates = mixed((128, 0.6), (256, 0.0125), (128, 0.0005))
    model = Model(rates)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (choice,) = autotune(model, tokens())
    # By indices 128 are hot, since 0.0125 is too rare for that; from half of that rate on it is 384, in order.
    assert (choice.backend, choice.hot_neurons, choice.ordered, choice.silent_neurons) == ("quick", 384, True, 0)
    assert set(choice.milliseconds) == {
        Alternative("dense"),
        Alternative("quick"),
        Alternative("quick", hot=True),
        Alternative("quick", ordered=True),
    }
    assert choice.alternative == Alternative("quick", ordered=True)
    assert (model.block.hot, model.block.hot_prefix, model.block.silent_suffix) == (None, 384, 0)
    fired = model.block.gate_proj.weight[:, 1]
    assert bool((fired[:-1] >= fired[1:]).all()), "most active first"
    with torch.no_grad():
        got = model(tokens()).logits
        restore_order(model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        torch.testing.assert_close(got, model(tokens()).logits)


def test_a_block_in_training_keeps_its_order(backends):
    backends(dense=lambda nonzeros, neurons: 50.0, quick=lambda nonzeros, neurons: min(20 * nonzeros, 70))
    model = Model(mixed((128, 0.6), (256, 0.0125), (128, 0.0005))).train()
    before = model.block.gate_proj.weight.clone()
    (choice,) = autotune(model, tokens())
    assert not any(alternative.ordered for alternative in choice.milliseconds)
    assert torch.equal(model.block.gate_proj.weight, before)
    with pytest.raises(ValueError, match=r"1 of 1 blocks are in training mode.*call model.eval\(\) first"):
        autotune(model, tokens(), drop_silent=True)


def silent_model(backends) -> Model:
    """128 neurons that never fire on `tokens()`; whatever computes fewer neurons is faster."""
    backends(dense=lambda nonzeros, neurons: neurons * 0.03, quick=lambda nonzeros, neurons: 40.0)
    return Model(mixed((100, 0.0), (28, -0.3), (384, 0.002)))


def test_silent_neurons_are_left_out_on_request(backends):
    model = silent_model(backends)
    with torch.no_grad():
        whole, other = model(tokens()), model(tokens(0.2))
    tuning = autotune(model, tokens(), drop_silent=True, held_out=(tokens(0.2),))
    (choice,) = tuning
    assert (choice.backend, choice.silent_neurons) == ("dense", 128)
    assert choice.alternative == Alternative("dense", silent_out=True)
    assert model.block.silent_suffix == 128
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, whole.logits)
        without = model(tokens(0.2))
    found = tuning.silent
    assert (found.neurons, found.of, found.tokens, found.bound) == (128, NEURONS, 1000, 0.003)
    # With the first column up to 1.199, those at a rate of 0 fire where it is over 1, and those at -0.3 do not.
    held = found.held_out
    assert (held.tokens, held.neurons, held.firings) == (1000, 100, 100 * 199)
    error = (without.logits - other.logits).norm() / other.logits.norm()
    assert held.logits_error == pytest.approx(error.item(), rel=1e-5)
    assert (held.loss, held.loss_without) == (pytest.approx(other.loss.item()), pytest.approx(without.loss.item()))
    assert held.loss != held.loss_without
    assert "none of them fired for 1000 tokens, so each fires for less than 0.003" in str(tuning)
    assert "on 1000 held-out tokens: 100 of them fired, 19900 times in total" in str(tuning)
    keep_silent(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0.2)).logits, other.logits)


def test_silent_neurons_stay_unless_asked_for(backends):
    model = silent_model(backends)
    tuning = autotune(model, tokens())
    assert tuning.silent is None
    assert (tuning[0].silent_neurons, model.block.silent_suffix) == (0, 0)
    with pytest.raises(ValueError, match="needs drop_silent=True"):
        autotune(model, tokens(), held_out=tokens())
    model.calls = 2
    with pytest.raises(ValueError, match="in a block that runs more than once"):
        autotune(model, tokens(), drop_silent=True)


class Two(nn.Module):
    """Two blocks, of which the second fails, or does not run."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.fails = first.block, second.block, False

    def forward(self, x):
        logits = x + self.first(x)
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        return SimpleNamespace(logits=logits, loss=None)


@pytest.mark.parametrize("fails", [False, True])
def test_after_an_error_no_neuron_is_left_out(backends, fails):
    model = Two(silent_model(backends), silent_model(backends)).eval()
    with torch.no_grad():
        wanted = model(tokens(0.2)).logits
    model.second.hot_prefix, model.second.silent_suffix, model.second.backend_up_to = 64, 128, ((4, "dense"),)
    model.fails = fails
    with pytest.raises(
        torch.OutOfMemoryError if fails else ValueError, match="no memory" if fails else "ran 1 of its 2"
    ):
        autotune(model, tokens(), drop_silent=True)
    model.fails = False
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0.2)).logits, wanted)
    assert model.first.silent_suffix == 0
    second = model.second
    assert (second.hot_prefix, second.silent_suffix, second.backend_up_to) == (64, 128, ((4, "dense"),)), "as before"


@pytest.mark.parametrize(
    "what",
    [
        lambda model: autotune(model, tokens()),
        lambda model: order_neurons(model.block, torch.arange(NEURONS).flip(0)),
        lambda model: setattr(model.block, "hot", torch.arange(64)),
    ],
)
def test_what_is_tuned_in_inference_mode_can_be_trained(what):
    """Only a tensor made outside of it can be saved for a backward."""
    model = Model(mixed((32, 0.9), (96, 0.5), (384, -0.5)))
    with torch.inference_mode():
        what(model)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    model.block.backend = "reference"
    model.train()(tokens()).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_tuning_again_brings_them_back_first(backends):
    model = silent_model(backends)
    autotune(model, tokens(), drop_silent=True)
    (choice,) = autotune(model, tokens(0.4), drop_silent=True)
    assert choice.silent_neurons == 0, "on this text all of them fire"
    with torch.no_grad():
        y, _ = sparse_ffn(tokens(0.4), *(linear.weight for linear in model.block.children()), backend="dense")
        torch.testing.assert_close(model.block(tokens(0.4)), y)


def test_what_the_tables_say():
    assert str(Alternative("hopper", ordered=True, silent_out=True)) == "hopper + ordered - silent"
    assert str(Silent(3, 10, 300)).endswith("less than 0.01 of all tokens (rule of three, 95%)\nnot measured on other "
                                            "inputs: give held_out")  # fmt: skip
    assert str(HeldOut(100, 7, 2, 0.0123, 0.995, 2.5, 2.50001)) == (
        "on 100 held-out tokens: 2 of them fired, 7 times in total; logits differ by 0.012 (2-norm, relative); the "
        "largest is the same at 99.50% of positions; loss 2.50000 with them, 2.50001 without"
    )


# Saved with a model


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return sparsify(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, hidden_act="relu")).eval())


TOKENS = torch.arange(3, 25).view(2, 11)


def tuned() -> LlamaForCausalLM:
    """One block in order with a hot prefix and silent neurons, another with hot neurons by indices."""
    model = tiny()
    first, second = feed_forward_blocks(model)
    order_neurons(first, torch.randperm(48))
    first.backend, first.hot_prefix, first.silent_suffix = "reference", 16, 8
    second.backend, second.hot = "reference", torch.tensor([3, 7])
    remember(model)
    return model


@torch.no_grad()
def test_what_was_chosen_is_saved_and_chosen_again(tmp_path):
    model = tuned()
    wanted = model(TOKENS).logits
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    whole = plain(TOKENS).logits
    assert not torch.equal(whole, wanted), "transformers knows nothing of what is left out"
    again = sparsify(plain)
    torch.testing.assert_close(again(TOKENS).logits, whole)
    restore_tuning(again)
    torch.testing.assert_close(again(TOKENS).logits, wanted)
    first, second = feed_forward_blocks(again)
    assert (first.backend, first.hot_prefix, first.silent_suffix, first.hot) == ("reference", 16, 8, None)
    assert (second.hot.tolist(), second.hot_prefix) == ([3, 7], 0)
    assert tuning_settings(again) == tuning_settings(model) == again.config.twell_tuning
    keep_silent(again)
    torch.testing.assert_close(again(TOKENS).logits, whole)
    assert again.config.twell_tuning[0]["silent_suffix"] == 0
    half = sparsify(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    restore_tuning(half)
    assert feed_forward_blocks(half)[0].silent_suffix == 8


def test_a_tuning_of_other_weights_is_refused():
    model, settings = tiny(), tuning_settings(tuned())
    with pytest.raises(ValueError, match="layer 0 has other weights than those whose 8 silent neurons"):
        restore_tuning(model, settings)
    with pytest.raises(ValueError, match="holds no tuning"):
        restore_tuning(model)
    with pytest.raises(ValueError, match="the tuning is for 1 blocks"):
        restore_tuning(model, settings[:1])
    with pytest.raises(ValueError, match="for another number of neurons than 48"):
        restore_tuning(model, [{**settings[0], "hot_prefix": 47}, settings[1]])
    with pytest.raises(
        BackendUnavailable, match="backend 'hopper', chosen for layer 1, cannot run here: it needs a CUDA"
    ):
        restore_tuning(model, [{**settings[0], "silent_suffix": 0}, {**settings[1], "backend": "hopper"}])
    assert all(block.backend == "dense" and block.hot is None for block in feed_forward_blocks(model))
    other = tuned()
    restore_order(other)
    assert not hasattr(other.config, "twell_tuning"), "it was for the other order"


# Inputs and settings that are refused


class Named(nn.Module):
    """Calls its blocks by keyword."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(SparseFeedForward(8, 256) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x=x)
        return x


def test_blocks_that_are_called_by_keyword_are_tuned():
    assert len(autotune(Named().eval(), torch.randn(16, 8), drop_silent=True, held_out=torch.randn(16, 8))) == 2


def test_without_tokens_nothing_can_be_tuned():
    with pytest.raises(ValueError, match="at least one token"):
        autotune(Named().eval(), torch.zeros(0, 8), drop_silent=True)
    with pytest.raises(ValueError, match="held_out has no tokens"):
        autotune(Named().eval(), torch.randn(16, 8), drop_silent=True, held_out=torch.zeros(0, 8))


def test_what_cannot_be_measured_on_other_text_leaves_no_neuron_out(monkeypatch):
    def fails(model, blocks, held_out):
        for block in blocks:
            block.silent_suffix = 64
        raise ValueError("no logits")

    monkeypatch.setattr(tuning, "measure_held_out", fails)
    model = Named().eval()
    with pytest.raises(ValueError, match="no logits"):
        autotune(model, torch.randn(16, 8), drop_silent=True, held_out=torch.randn(16, 8))
    assert [block.silent_suffix for block in feed_forward_blocks(model)] == [0, 0]


def test_a_tuning_without_hot_neurons_is_restored_and_a_wrong_one_changes_nothing():
    model, other = Named(), Named()
    blocks, others = feed_forward_blocks(model), feed_forward_blocks(other)
    blocks[0].hot = torch.tensor([3])
    blocks[1].hot = hot_neurons(-torch.ones(4, 8), torch.ones(256, 8))
    assert blocks[1].hot.shape == (0,)
    settings = tuning_settings(model)
    restore_tuning(other, settings)
    assert [block.hot.tolist() for block in others] == [[3], []]
    for wrong, said in (
        ({"hot": [5, 5]}, "layer 1 names a hot neuron twice"),
        ({"hot_prefix": -1}, "another number"),
        ({"silent_suffix": 256}, "another number"),
        ({"hot": [5], "silent_suffix": 8}, "layer 1 has hot neurons by index and leaves neurons out"),
    ):
        with pytest.raises(ValueError, match=said):
            restore_tuning(other, [settings[0] | {"hot": [7]}, settings[1] | wrong])
    with pytest.raises(ValueError, match="layer 1 has no backend"):
        restore_tuning(other, [settings[0] | {"hot": [7]}, {k: v for k, v in settings[1].items() if k != "backend"}])
    assert [block.hot.tolist() for block in others] == [[3], []]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": 3}, "backend of the tuning of layer 1 must be the name of a backend, got 3"),
        ({"backend": "quick"}, "the tuning of layer 1 cannot be restored: backend must be one of .* got 'quick'"),
        ({"backend_up_to": None}, "backend_up_to of the tuning of layer 1 must be a list of pairs"),
        ({"backend_up_to": [[4]]}, r"the tuning of layer 1 cannot be restored: .* pairs \(tokens, backend\)"),
        ({"hot": [0.5]}, r"hot of the tuning of layer 1 must be None or a list of neurons, got \[0\.5\]"),
        ({"hot": "12"}, "hot of the tuning of layer 1 must be None or a list"),
        ({"hot_prefix": "3"}, "hot_prefix of the tuning of layer 1 must be a whole number of neurons, got '3'"),
        ({"silent_suffix": True}, "silent_suffix of the tuning of layer 1 must be a whole number of neurons, got True"),
        ({"silent_suffix": 8, "silent_sha256": 0}, "silent_sha256 of the tuning of layer 1 must be None or a digest"),
    ],
)
def test_a_malformed_tuning_is_refused_and_named(wrong, said):
    model = Named()
    settings = tuning_settings(model)
    with pytest.raises(ValueError, match=said):
        restore_tuning(model, [settings[0] | {"hot_prefix": 4}, settings[1] | wrong])
    with pytest.raises(ValueError, match=r"the tuning of layer 0 must be a mapping, got \['a'\]"):
        restore_tuning(model, [["a"], settings[1]])
    assert tuning_settings(model) == settings


def test_a_tuning_is_restored_on_loaded_weights_only():
    model = Named()
    settings = tuning_settings(model)
    with pytest.raises(ValueError, match="the weights of layer 0 are on the meta device: load them before restore_tun"):
        restore_tuning(model.to("meta"), settings)


def test_a_tuning_under_autocast_is_restored_under_autocast(monkeypatch):
    model, asked = Named(), []
    settings = tuning_settings(model)
    monkeypatch.setattr(registry, "why_not", lambda name, **about: asked.append(about["dtype"]))
    restore_tuning(model, settings)
    with torch.autocast("cpu", torch.bfloat16):
        restore_tuning(model, settings)
    assert set(asked[: len(settings)]) == {torch.float32}
    assert set(asked[len(settings) :]) == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("prefix", [0, 128])
def test_compiled_blocks_leave_neurons_out_and_count_them_as_silent(prefix):
    block = Model(torch.linspace(0.5, -0.5, NEURONS)).block
    block.backend, block.hot_prefix, block.silent_suffix = "reference", prefix, NEURONS // 4
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.compiler.reset()
    torch.testing.assert_close(compiled(tokens()), block(tokens()))
    wanted, found = block.stats, (compiled(tokens()), block.stats)[1]
    assert found.fired.shape == (NEURONS,)
    assert torch.equal(found.fired, wanted.fired)
    assert torch.equal(found.nonzeros, wanted.nonzeros)


@pytest.mark.parametrize("how", ["copied into", "replaced", "trained"])
def test_silent_neurons_of_weights_that_change_are_restored(how, caplog):
    block = SparseFeedForward(8, 24).requires_grad_(how == "trained")
    block.silent_suffix = 4
    x = torch.randn(5, 8)
    block(x)
    assert block.silent_suffix == 4
    weight, other = block.gate_proj.weight, torch.randn(24, 8)
    if how == "copied into":
        with torch.no_grad():
            weight.copy_(other)
    elif how == "replaced":
        block.gate_proj.weight = nn.Parameter(other)
    else:
        block(x).sum().backward()
        torch.optim.SGD(block.parameters(), lr=0.1).step()
    y = block(x)
    assert block.silent_suffix == 0
    assert "the weights have changed: 4 neurons that were left out are restored" in caplog.text
    wanted = sparse_ffn(x, *(linear.weight for linear in (block.gate_proj, block.up_proj, block.down_proj)))[0]
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize(
    "moved",
    [copy.deepcopy, lambda block: block.double(), nn.Module.cpu],
)
def test_silent_neurons_stay_where_only_the_place_of_weights_changes(moved, caplog):
    block = SparseFeedForward(8, 24)
    block.silent_suffix = 4
    other = moved(block)
    other(torch.randn(5, 8).to(other.up_proj.weight.dtype))
    assert other.silent_suffix == 4
    assert not caplog.text


def test_silent_neurons_stay_when_a_process_group_begins(caplog):
    """There, FSDP gathers weights anew, so that a change cannot be told."""
    block = SparseFeedForward(8, 24)
    block.silent_suffix = 4
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        block(torch.randn(5, 8))
        block.double()
    finally:
        dist.destroy_process_group()
    block(torch.randn(5, 8).double())
    assert block.silent_suffix == 4
    assert not caplog.text


@pytest.mark.parametrize("moved", [copy.deepcopy, lambda block: block.double()])
def test_a_change_before_a_move_is_not_forgotten(moved):
    block = SparseFeedForward(8, 24)
    block.silent_suffix = 4
    with torch.no_grad():
        block.gate_proj.weight.neg_()
    assert moved(block).silent_suffix == 0


def test_the_tuning_of_a_wrapped_model_is_stored_and_forgotten():
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, hidden_act="relu"))
    sparsify(model)
    wrapped = nn.Module()
    wrapped.module = model
    remember(wrapped)
    assert model.config.twell_tuning == tuning_settings(model)
    restore_tuning(wrapped)
    restore_order(wrapped)
    assert not hasattr(model.config, "twell_tuning")
    keep_silent(wrapped)
    assert not hasattr(model.config, "twell_tuning"), "the model was not tuned"
