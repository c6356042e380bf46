"""`sparsify` on models of many types: what it replaces computes the same, and what it cannot replace is refused."""

import copy
import re
from pathlib import Path

import pytest
import torch
from calls import change, make_block
from tiny_models import SIZES, TOKENS, logits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from twell import Plan, SparseFeedForward, feed_forward_blocks, prune_silent, sparsify
from twell.tuning.order import neuron_order, order_neurons

README = Path(__file__).parents[1] / "kernels" / "README.md"
LATENT = {"head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 16}
# Model types of transformers that sparsify takes: the table of kernels/README.md.
TYPES = (
    "arcee cohere cohere2 cwm deepseek_v3 diffllama doge ernie4_5 exaone4 gemma gemma2 gemma3_text granite helium "
    "hunyuan_v1_dense llama minicpm3 ministral ministral3 mistral nanochat nemotron olmo olmo2 olmo3 qwen2 qwen3 "
    "seed_oss smollm3 stablelm vaultgemma"
)
# What the tiny models of some of them need.
NEEDED = {
    "deepseek_v3": {**LATENT, "kv_lora_rank": 16, "first_k_dense_replace": 2},
    "minicpm3": LATENT,
    "seed_oss": {"residual_dropout": 0.0},
}
REPLACED = {kind: NEEDED.get(kind, {}) for kind in TYPES.split()}
EXPERTS, SHARED = "is a mixture of experts", "the activation of the MLPs is also that of"
# Model types that it refuses, and why.
REFUSED = {
    "apertus": (r"mlp.act_fn \(XIELUActivation\) has alpha_p", {}),
    "bitnet": (r"mlp \(BitNetMLP\) has ffn_sub_norm", {}),
    "bloom": ("mlp.dense_h_to_4h has a bias", {"n_embd": 32, "hidden_size": 32}),
    "falcon_h1": (f"{SHARED} model.layers.0.mamba", {}),
    "gemma4_text": (
        f"{SHARED} model.layers.0.act_fn",
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60},
    ),
    "glm": (r"GlmMLP\) has another structure \(gate_up_proj: Linear, down_proj: Linear, .*\). It is one matrix", {}),
    "gpt2": (
        r"GPT2MLP\) has another structure \(c_fc: Conv1D with a bias, c_proj: Conv1D with a bias, .*\). The",
        {"n_embd": 32, "hidden_size": 32},
    ),
    "gpt_neox": ("mlp.dense_h_to_4h has a bias; the sparse block has none", {}),
    "gpt_oss": (EXPERTS, {}),
    "jais2": ("mlp.up_proj has a bias", {}),
    "jamba": (EXPERTS, {}),
    "mamba": ("has no MLP to replace", {}),
    "mixtral": (EXPERTS, {}),
    "olmo_hybrid": (f"{SHARED} model.layers.0.linear_attn", {}),
    "olmoe": (EXPERTS, {}),
    "opt": (r"OPTDecoderLayer\) has another structure \(fc1: Linear with a bias, fc2: Linear with a bias, ", {}),
    "phi": ("mlp.fc1 has a bias", {}),
    "phi3": (r"Phi3MLP\) has another structure \(gate_up_proj", {}),
    "qwen2_moe": (EXPERTS, {}),
    "qwen3_5_text": (f"{SHARED} model.layers.0.linear_attn", {}),
    "qwen3_moe": (EXPERTS, {}),
    "recurrent_gemma": ("mlp_block.gate_proj has a bias", {}),
    "starcoder2": ("mlp.c_fc has a bias", {}),
}


def tiny(kind: str = "llama", device: str = "cpu", **changes) -> nn.Module:
    """A random model of a type of transformers; skips where the installed version has no such type."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **changes})).eval()


@pytest.mark.parametrize("kind", REPLACED)
def test_models_of_this_type_compute_the_same_and_are_saved_with_a_relu(kind):
    model = tiny(kind, **REPLACED[kind])
    weights, before = model.state_dict(), logits(model)
    sparsify(model, activation="relu", keep_stats=True)
    assert len(feed_forward_blocks(model)) == SIZES["num_hidden_layers"]
    assert list(model.state_dict()) == list(weights)
    after = logits(model)
    assert not torch.equal(after, before), "a ReLU in place of another activation"
    assert all(block.stats.nonzeros.shape == TOKENS.shape for block in feed_forward_blocks(model))
    plain = type(model)(copy.deepcopy(model.config)).eval()
    plain.load_state_dict(weights)
    assert not feed_forward_blocks(plain)
    assert (logits(plain) - after).abs().max() <= 1e-6 * after.abs().max()
    sparsify(plain)  # it has a ReLU now
    torch.testing.assert_close(logits(plain), after)


@pytest.mark.parametrize("kind", ["arcee", "nanochat", "nemotron"])
def test_a_square_is_kept_where_a_model_has_it(kind):
    model = tiny(kind)
    assert model.config.hidden_act == "relu2"
    wanted = logits(model)
    assert {block.activation for block in feed_forward_blocks(sparsify(model))} == {"relu2"}
    torch.testing.assert_close(logits(model), wanted)
    torch.testing.assert_close(logits(sparsify(model, plan="reference")), wanted)
    assert model.config.hidden_act == "relu2"
    with pytest.raises(ValueError, match="blocks with activation 'relu2', which is fixed; got 'relu'"):
        sparsify(model, activation="relu")


@pytest.mark.parametrize("kind", REFUSED)
def test_models_of_this_type_are_refused_and_left_alone(kind):
    message, changes = REFUSED[kind]
    model = tiny(kind, "meta", **changes)
    config = copy.deepcopy(model.config)
    with pytest.raises(ValueError, match=message):
        sparsify(model, activation="relu")
    assert model.config.to_dict() == config.to_dict()
    assert not feed_forward_blocks(model)


def test_the_readme_lists_the_types_that_are_tested():
    text = README.read_text()
    for heading, kinds in (("replaced", REPLACED), ("refused", REFUSED)):
        listed = re.search(rf"<!-- {heading} -->(.*?)<!-- end -->", text, re.DOTALL)[1]
        assert re.findall(r"`(\w+)`", listed) == list(kinds)


# Nothing that the block would skip


class Louder(type(tiny().model.layers[0].mlp)):
    def forward(self, x):
        return 2 * super().forward(x)


class ShiftedReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x - 0.1)


class MLP(nn.Module):
    """A user's own block; `forward` is what a variant overrides."""

    def __init__(self, hidden: int = 8, intermediate: int = 16, compute=None):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(intermediate, hidden, bias=False), nn.ReLU()
        self.compute = compute or (lambda mlp, x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)))

    def forward(self, x):
        return self.compute(self, x)


def _gate(mlp, x):
    return mlp.act_fn(mlp.gate_proj(x))


VARIATIONS = {
    "a scale": lambda mlp, x: 1.01 * mlp.down_proj(_gate(mlp, x) * mlp.up_proj(x)),
    "a clamp": lambda mlp, x: mlp.down_proj(_gate(mlp, x).clamp(max=7) * mlp.up_proj(x)),
    "a shift": lambda mlp, x: mlp.down_proj(_gate(mlp, x) * (mlp.up_proj(x) + 1)),
    "another activation": lambda mlp, x: mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)),
    "the other one activated": lambda mlp, x: mlp.down_proj(mlp.gate_proj(x) * mlp.act_fn(mlp.up_proj(x))),
    "a residual": lambda mlp, x: x + mlp.down_proj(_gate(mlp, x) * mlp.up_proj(x)),
    "a shift along the sequence": lambda mlp, x: mlp.down_proj(_gate(mlp, x.roll(1, 1)) * mlp.up_proj(x)),
    "the top half of the neurons": lambda mlp, x: mlp.down_proj(
        torch.where(_gate(mlp, x) >= _gate(mlp, x).mean(-1, True), _gate(mlp, x), 0) * mlp.up_proj(x)
    ),
    "dropout in training": lambda mlp, x: mlp.down_proj(F.dropout(_gate(mlp, x), 0.5, mlp.training) * mlp.up_proj(x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_a_forward_that_does_more_is_refused(variation, dtype):
    model = nn.Sequential(MLP(compute=VARIATIONS[variation])).to(dtype)
    if dtype is torch.bfloat16 and variation == "a scale":
        pytest.skip("less than the rounding")
    with pytest.raises(ValueError, match=r"0 \(MLP\) does not compute .* off, relative"):
        sparsify(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_block_in_a_plain_model_is_replaced(dtype):
    model = nn.Sequential(nn.Linear(6, 8), MLP(), MLP(8, 12)).to(dtype)
    x = torch.randn(5, 6, dtype=dtype)
    wanted = model(x)
    squared = sparsify(copy.deepcopy(model), activation="relu2")
    blocks = feed_forward_blocks(sparsify(model, plan="dense"))
    assert blocks == list(model)[1:]
    assert all(block.training for block in blocks)
    torch.testing.assert_close(model(x), wanted)
    assert not torch.allclose(squared(x), wanted)


def test_blocks_keep_what_a_second_call_does_not_give():
    model = sparsify(nn.Sequential(MLP()), plan="reference", keep_stats=True)
    (block,) = feed_forward_blocks(model)
    change(block, up_to=[(4, "dense")])
    sparsify(model)
    assert (block.plan, block.keep_stats) == (Plan("reference", up_to=((4, "dense"),)), True)
    sparsify(model, keep_stats=False)
    assert (block.plan.backend, block.keep_stats) == ("reference", False)
    sparsify(model, plan="dense")
    assert (block.plan, block.keep_stats) == (Plan(), False)


def test_a_module_in_two_places_is_replaced_in_both():
    mlp = MLP()
    model = sparsify(nn.Sequential(mlp, nn.Identity(), mlp))
    assert model[0] is model[2]
    assert isinstance(model[0], SparseFeedForward)


def test_a_model_without_memory_is_replaced():
    model = tiny(device="meta", hidden_act="relu")
    assert len(feed_forward_blocks(sparsify(model))) == 2
    assert all(weight.is_meta for weight in model.parameters())


class Squared(nn.Module):
    """As in modded-nanogpt: no module activates."""

    def __init__(self, hidden: int = 8, intermediate: int = 32, activate=F.relu):
        super().__init__()
        self.c_fc = nn.Linear(hidden, intermediate, bias=False)
        self.c_proj = nn.Linear(intermediate, hidden, bias=False)
        self.activate = activate
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x):
        return self.c_proj(self.activate(self.c_fc(x)).square())


class Gated(nn.Module):
    """As in Meta's Llama, with a ReLU."""

    def __init__(self, compute=lambda a, b: F.relu(a) * b):
        super().__init__()
        self.w1, self.w2 = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.w3, self.compute = nn.Linear(8, 24, bias=False), compute

    def forward(self, x):
        return self.w2(self.compute(self.w1(x), self.w3(x)))


def test_dropout_is_named_where_it_is_why_an_mlp_is_refused():
    mlp = nn.Sequential(*between())
    mlp[2].p = 0.1
    with pytest.raises(ValueError, match=r"another structure \(0: Linear, 3: Linear, 1: ReLU, 2: Dropout\)"):
        sparsify(nn.Sequential(mlp))


def between() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24, bias=False), nn.ReLU(), nn.Dropout(0.0), nn.Linear(24, 8, bias=False))


@pytest.mark.parametrize(
    ("make", "activation", "gate"),
    [
        (Squared, "relu2", None),
        (Gated, "relu", "w1"),
        (lambda: Gated(lambda a, b: a * F.relu(b).square()), "relu2", "w3"),
        (between, "relu", None),
    ],
)
def test_an_mlp_is_known_by_what_it_computes(make, activation, gate):
    model = nn.Sequential(nn.Linear(8, 8), make(), make())
    x, names = torch.randn(5, 8), model.state_dict().keys()
    wanted = model(x)
    block, other = feed_forward_blocks(sparsify(model))
    assert (block.activation, block.gated) == (activation, gate is not None)
    assert gate is None or block.gate_proj is getattr(block, gate)
    assert model.state_dict().keys() == names
    torch.testing.assert_close(model(x), wanted)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), wanted)
    assert torch.equal(copy.deepcopy(block)(x), block(x))
    block.up_proj = nn.Linear(8, block.up_proj.out_features, bias=False)
    assert model.state_dict().keys() == names
    with pytest.raises(ValueError, match=r"must be a plain torch.nn.Linear, .* got .*Bilinear"):
        setattr(other, next(other.named_children())[0], nn.Bilinear(1, 1, 1))


class Casted(nn.Linear):
    """As in modded-nanogpt: a weight that is cast to the dtype of x."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


def test_layers_that_only_cast_their_weight_become_plain_ones_of_the_same_parameters():
    model, x = nn.Sequential(Squared(), Squared()), torch.randn(5, 8)
    for mlp in model:
        mlp.c_fc, mlp.c_proj = Casted(8, 32), Casted(32, 8)
    wanted, parameters = model(x), dict(model.named_parameters())
    (block, _) = feed_forward_blocks(sparsify(model))
    assert (block.activation, type(block.c_fc)) == ("relu2", nn.Linear)
    assert {name: id(value) for name, value in model.named_parameters()} == {n: id(v) for n, v in parameters.items()}
    torch.testing.assert_close(model(x), wanted)
    with pytest.raises(ValueError, match=r"same dtype, .*torch.bfloat16.*torch.float32: cast them, or .*autocast"):
        block(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert block(x.bfloat16()).dtype == torch.bfloat16


class WithParameter(Casted):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.offset = nn.Parameter(torch.zeros(1))  # what it adds may come later


class NoisyInTraining(Casted):
    def forward(self, x):
        y = super().forward(x)
        return y + 1e-3 * torch.randn_like(y) if x.requires_grad and x.ndim == 3 else y


class HalfFrozen(Casted):
    def forward(self, x):
        return F.linear(x, 0.5 * self.weight + (0.5 * self.weight).detach())


@pytest.mark.parametrize("kind", [WithParameter, NoisyInTraining, HalfFrozen])
def test_layers_that_give_more_than_a_product_and_its_gradients_are_refused(kind):
    block, layer = make_block(8, 32), kind(8, 32)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"up_proj must be .* got .*{kind.__name__}.* without quantization, noise or"):
        block.up_proj = layer
    assert torch.equal(torch.get_rng_state(), state)


def test_other_layers_that_expand_and_contract_are_left_alone():
    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x):
            return x + self.up(F.relu(self.down(x)))

    model = nn.ModuleList([Bottleneck(), Squared(), Gated(lambda a, b: F.silu(a) * b)])
    assert feed_forward_blocks(sparsify(model)) == [model[1]]
    with pytest.raises(ValueError, match=r"1 \(Squared\) does not compute relu\(c_fc\(x\)\) c_proj"):
        sparsify(nn.ModuleList([Squared(), Squared(activate=F.gelu)]))
    head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    for mlp in (MLP(), Squared()):
        model = sparsify(nn.ModuleList([mlp, head]))
        assert len(feed_forward_blocks(sparsify(model, keep_stats=True))) == 1
    with pytest.raises(ValueError, match=r"0 \(Bottleneck\) cannot be called with x alone"):
        sparsify(nn.ModuleList([Bottleneck()]))


def test_names_that_are_kept_are_saved_and_pruned(tmp_path):
    model = sparsify(tiny("nanochat", intermediate_size=256))
    with torch.no_grad():
        for block in feed_forward_blocks(model):
            block.fc1.weight[5:] = 0
    wanted = logits(model)
    assert prune_silent(model, TOKENS).neurons == (128, 128)
    assert (logits(model) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not feed_forward_blocks(plain)
    torch.testing.assert_close(logits(plain.eval()), logits(model))


def _in_float8(weight):
    return nn.Parameter(weight.detach().to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda mlp: setattr(mlp, "__class__", Louder), "layers.1.mlp: Louder overrides the forward of LlamaMLP"),
        (lambda mlp: setattr(mlp, "forward", abs), "layers.1.mlp has a patched forward"),
        (lambda mlp: setattr(mlp.down_proj, "forward", abs), "layers.1.mlp.down_proj has a patched forward"),
        (lambda mlp: mlp.up_proj.register_forward_hook(abs), "layers.1.mlp.up_proj has hooks"),
        (lambda mlp: mlp.up_proj.register_forward_pre_hook(abs), "layers.1.mlp.up_proj has hooks"),
        (lambda mlp: mlp.up_proj.register_full_backward_hook(abs), "layers.1.mlp.up_proj has hooks"),
        (
            lambda mlp: setattr(mlp.up_proj, "weight", _in_float8(mlp.up_proj.weight)),
            "layers.1.mlp.up_proj.weight must be a plain floating parameter, .*float8_e4m3fn",
        ),
        (lambda mlp: setattr(mlp, "act_fn", ShiftedReLU()), "ShiftedReLU, a subclass of ReLU"),
        (lambda mlp: setattr(mlp, "norm", nn.RMSNorm(48)), r"has norm \(RMSNorm\)"),
        (lambda mlp: mlp.register_buffer("scale", torch.ones(1)), r"layers.1.mlp \(LlamaMLP\) has scale"),
        (
            lambda mlp: nn.utils.parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity()),
            "up_proj must be a plain torch.nn.Linear, .* got .*ParametrizedLinear",
        ),
    ],
)
def test_what_the_block_would_skip_is_refused(harm, message):
    model = tiny(hidden_act="relu")
    harm(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=message):
        sparsify(model)
    assert not feed_forward_blocks(model)


def test_a_subclass_of_relu_may_be_replaced_explicitly():
    model = tiny(hidden_act="relu")
    model.model.layers[1].mlp.act_fn = ShiftedReLU()
    assert len(feed_forward_blocks(sparsify(model, activation="relu"))) == 2


def test_an_activation_that_was_set_by_hand_reaches_the_configuration():
    model = tiny()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    assert sparsify(model).config.hidden_act == "relu"


def test_a_model_inside_of_another_module_has_its_configuration_set():
    inner = tiny()
    assert feed_forward_blocks(sparsify(nn.ModuleDict({"policy": inner}), activation="relu"))
    assert inner.config.hidden_act == "relu"


def test_models_without_an_mlp_are_refused():
    for model in (nn.Linear(2, 2), nn.Sequential(), tiny(num_hidden_layers=0)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no MLP to replace"):
            sparsify(model)
    with pytest.raises(ValueError, match="MLP is an MLP itself"):
        sparsify(MLP())


# The block itself


def test_from_linears_refuses_what_it_would_skip():
    gate, up, down, _ = MLP().children()
    with pytest.raises(ValueError, match="gate_proj has a bias"):
        SparseFeedForward.from_linears(nn.Linear(8, 16), up, down)
    with pytest.raises(ValueError, match=r"gate_proj.weight must have shape \[16, 8\] .* got \[8, 16\]"):
        SparseFeedForward.from_linears(down, up, down)
    with pytest.raises(ValueError, match=r"down_proj.weight must have shape \[8, 16\] .* got \[16, 8\]"):
        SparseFeedForward.from_linears(None, up, gate)
    for names in (("a", "a", "b"), ("a", "b", "plan"), (None, "gate_proj", "down_proj")):
        with pytest.raises(ValueError, match="names must differ from each other and from a block's attributes"):
            SparseFeedForward.from_linears(gate, up, down, names=names)
    with pytest.raises(ValueError, match=r"up_proj must be a plain torch.nn.Linear, .* got .*LazyLinear"):
        SparseFeedForward.from_linears(gate, nn.LazyLinear(3, bias=False), down)


def test_layers_of_a_block_may_be_parametrized_and_get_no_pre_hooks():
    block, x = make_block(8, 16), torch.randn(2, 8)
    wanted = block(x)
    nn.utils.parametrize.register_parametrization(block.up_proj, "weight", nn.Identity())
    assert torch.equal(block(x), wanted)
    prune.random_unstructured(block.gate_proj, "weight", 0.5)
    with pytest.raises(ValueError, match="a layer of a sparse block has hooks"):
        block(x)


def test_a_layer_that_becomes_more_than_its_weight_is_refused():
    block, x = make_block(8, 16), torch.randn(2, 8)
    wanted = block(x)
    for register in (block.up_proj.register_full_backward_hook, block.down_proj.register_full_backward_pre_hook):
        handle = register(lambda *_: None)
        with pytest.raises(ValueError, match="a layer of a sparse block has hooks"):
            block(x)
        handle.remove()
    block.gate_proj.forward = lambda x: x
    with pytest.raises(ValueError, match=r"has hooks .* or a patched forward"):
        block(x)
    del block.gate_proj.forward
    block.down_proj.bias = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match=r"has hooks .* a bias"):
        block(x)
    block.down_proj.bias = None
    assert torch.equal(block(x), wanted)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Wrapped(nn.Module):
    """As adapters are made that do not subclass nn.Linear."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    @property
    def weight(self):
        return self.linear.weight


def _put(block, layer):
    block._modules["up_proj"] = layer  # as torch.ao.quantization and some adapters do


def _change_class(block, kind):
    block.up_proj.__class__ = kind
    torch.compiler.reset()  # torch 2.11 does not notice this of a module that it has compiled


def _put_parametrized(block, layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    _put(block, layer)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("swap", "name"),
    [
        (lambda block: _put(block, Doubled(8, 16, bias=False)), "Doubled"),
        (lambda block: _put(block, Wrapped(block.up_proj)), "Wrapped"),
        (lambda block: _change_class(block, Doubled), "Doubled"),
        (lambda block: _put_parametrized(block, Doubled(8, 16, bias=False)), "ParametrizedDoubled"),
    ],
)
def test_a_layer_that_another_module_replaces_unseen_is_refused(swap, name, compiled):
    torch.compiler.reset()
    block, x = make_block(8, 16), torch.randn(2, 8)
    run = torch.compile(block, backend="eager", fullgraph=True) if compiled else block
    torch.testing.assert_close(run(x), block(x))
    swap(block)
    if compiled:  # by Dynamo, in its words around ours
        with pytest.raises(Exception, match=r"torch\.nn\.utils\.parametrize works on layers"):
            run(x)
    else:
        with pytest.raises(ValueError, match=rf"is another module than a plain torch.nn.Linear .* got a \S+\.{name}"):
            run(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_block_takes_parametrized_layers(backend):
    torch.compiler.reset()
    block, x = make_block(8, 16), torch.randn(2, 8)
    nn.utils.parametrizations.weight_norm(block.up_proj)
    nn.utils.parametrize.register_parametrization(block.down_proj, "weight", nn.Identity())
    torch.testing.assert_close(torch.compile(block, backend=backend, fullgraph=True)(x), block(x))


def test_hooks_of_accelerate_are_named():
    hooks = pytest.importorskip("accelerate.hooks")
    model, block = tiny(), make_block(8, 16)
    hooks.add_hook_to_module(model.model.layers[1].mlp.up_proj, hooks.AlignDevicesHook("cpu"))
    named = r"hooks of accelerate \(device_map over several devices, or offloading\)"
    with pytest.raises(ValueError, match=f"layers.1.mlp.up_proj has {named}"):
        sparsify(model, activation="relu")
    hooks.add_hook_to_module(block.down_proj, hooks.AlignDevicesHook("cpu"))
    with pytest.raises(ValueError, match=f"a layer of a sparse block has {named}"):
        block(torch.randn(2, 8))
    hooks.attach_align_device_hook_on_blocks(block, execution_device={"": "cpu"})
    with pytest.raises(ValueError, match=f"the block has {named}"):
        feed_forward_blocks(block)


def test_other_weights_reset_what_was_chosen_for_the_first_ones():
    block, other, x = make_block(8, 16), make_block(8, 24), torch.randn(5, 8)
    order_neurons(block, torch.randperm(16))
    change(block, hot=4)
    block.gate_proj, block.up_proj, block.down_proj = other.gate_proj, other.up_proj, other.down_proj
    assert (block.plan.hot, neuron_order(block)) == (0, None)
    assert torch.equal(block(x), other(x))
