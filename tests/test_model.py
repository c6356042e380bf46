"""Our Llama equals transformers', and models from elsewhere load: the published layouts, old and new."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.data.tokenizer import train_bpe, wrap
from experiments.models.llama import (
    ReluFeedForward,
    SiluFeedForward,
    build_model,
    check_backend,
    feed_forward_blocks,
)
from experiments.models.pretrained import load_pretrained
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.train_config import ModelConfig
from twell import SparseFeedForward, autotune, from_released, released, sparsify

K, N = 16, 24
IDS = torch.arange(40).reshape(2, 20)


def config(**changes):
    sizes = {"layers": 2, "hidden_size": K, "intermediate_size": N, "attention_heads": 2, "key_value_heads": 1}
    return ModelConfig(**{"name": "tiny", "vocab_size": 50, "max_positions": 32, **sizes, **changes})


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_is_transformers_llama(activation, tied):
    ours = build_model(config(activation=activation, tied_embeddings=tied, rope_theta=500.0))
    plain = LlamaForCausalLM(ours.config)
    plain.load_state_dict(ours.state_dict())
    assert plain.config.rope_parameters["rope_theta"] == 500.0
    torch.testing.assert_close(logits(ours), logits(plain))
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_without_a_gate(activation):
    model = build_model(config(gated=False, activation=activation))
    block = feed_forward_blocks(model)[0]
    assert (block.gated, block.gate_proj) == (False, None)
    assert not [name for name, _ in model.named_parameters() if "gate" in name]
    x = torch.randn(3, K)
    act = getattr(torch.nn.functional, activation)
    torch.testing.assert_close(block(x), act(x @ block.up_proj.weight.T) @ block.down_proj.weight.T)


def test_initial_weights():
    def initial(seed):
        model = build_model(config(vocab_size=2000, initializer_range=0.05), seed=seed)
        return {name: weight.detach() for name, weight in model.named_parameters()}

    weights = initial(1)
    for name, weight in weights.items():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert weight.mean().abs() < 0.01, name
            assert weight.std().item() == pytest.approx(0.05, rel=0.2), name
    assert all(torch.equal(weights[name], weight) for name, weight in initial(1).items())
    assert not any(torch.equal(weights[name], weight) for name, weight in initial(2).items() if weight.ndim > 1)


@pytest.mark.parametrize(("activation", "kind"), [("relu", ReluFeedForward), ("silu", SiluFeedForward)])
def test_statistics(activation, kind):
    model = build_model(config(activation=activation))
    blocks = feed_forward_blocks(model)
    assert [type(block) for block in blocks] == [kind, kind]
    inputs = []
    blocks[1].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    model(IDS)
    stats, [x] = blocks[1].stats, inputs
    gate = getattr(torch.nn.functional, activation)(x @ blocks[1].gate_proj.weight.T)
    h = gate * (x @ blocks[1].up_proj.weight.T)
    assert torch.equal(stats.nonzeros, (gate != 0).sum(-1, dtype=torch.int32))
    assert torch.equal(stats.fired, (gate != 0).any(0).any(0))
    torch.testing.assert_close(stats.l1, h.abs().sum(-1).mean())
    assert (stats.backend, stats.overflow.item()) == ("dense", 0)
    [ours] = torch.autograd.grad(stats.l1, blocks[1].up_proj.weight, retain_graph=True)
    [expected] = torch.autograd.grad(h.abs().sum(-1).mean(), blocks[1].up_proj.weight)
    torch.testing.assert_close(ours, expected)
    blocks[1].keep_stats = False
    model(IDS)
    assert blocks[1].stats is None


def test_saved_models_are_plain_hugging_face_models(tmp_path):
    ours = build_model(config())
    ours.save_pretrained(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.hidden_act == "relu"
    torch.testing.assert_close(logits(theirs), logits(ours))
    loaded = load_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded.model), logits(ours))
    assert loaded.config == config(name=tmp_path.name)
    assert (loaded.tokenizer, loaded.step, loaded.training) == (None, None, None)


def test_backends_are_checked_before_training():
    rest = (ModelConfig(), torch.float32, torch.device("cpu"))
    for name in ("auto", "dense", "reference"):
        check_backend(name, *rest)
    with pytest.raises(ConfigError, match=r"backend=fast: backend must be one of auto, dense, .*, got 'fast'"):
        check_backend("fast", *rest)
    with pytest.raises(ConfigError, match=r"backend=reference: .* intermediate size at most 65536, got 70000"):
        check_backend("reference", ModelConfig(intermediate_size=70000), *rest[1:])


# --- the published checkpoints ----------------------------------------------------------------------------------------

TRAINING_SETTINGS = {"sparsity_l1_coefficient": 2e-5, "sparsity_track_dead_neurons": True}
TRACKED = ("tracker.steps", "model.layers.0.mlp.tracker.fired", "metrics_accumulator.loss")


def published_config(gated, size_field, **changes):
    content = {
        "architectures": ["SparseLlamaForCausalLM"],
        "model_type": "llama_sparse_relu",
        "hidden_act": "silu",
        "hidden_size": K,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "max_position_embeddings": 32,
        "rope_theta": 300.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "code.SparseConfig", "AutoModelForCausalLM": "code.SparseLlamaForCausalLM"},
        "intermediate_size": 8 if size_field == "sparsity_new_intermediate_size" else N,
        size_field: N,
        "sparsity_gated_mlp": gated,
        **TRAINING_SETTINGS,
    }
    return {**content, **changes}


def old_names(tensors, gated):
    """The layout of the older checkpoints: gate and down transposed, up transposed unless there is a gate."""
    renamed = {}
    for name, tensor in tensors.items():
        old = re.sub(r"(gate|up|down)_proj\.weight$", r"\1_weight", name)
        as_it_is = old == name or (gated and old.endswith("up_weight"))
        renamed[old] = tensor if as_it_is else tensor.T.contiguous()
    return renamed


def publish(folder, *, gated=True, old=False, shards=1, size_field="intermediate_size", **changes):
    """A folder as published, of a model of ours, which is returned."""
    model = build_model(config(gated=gated, rope_theta=300.0), seed=5, dtype=torch.bfloat16)
    tensors = {
        name: weight.detach().clone(memory_format=torch.contiguous_format) for name, weight in model.named_parameters()
    }
    tensors = old_names(tensors, gated) if old else tensors
    tensors |= {name: torch.ones(3) for name in TRACKED}
    names = sorted(tensors)
    for shard in range(shards):
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / ("model.safetensors" if shards == 1 else f"model-{shard}.safetensors"))
    if shards > 1:
        weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(published_config(gated, size_field, **changes)))
    return model


@pytest.mark.parametrize("size_field", ["intermediate_size", "sparsity_new_intermediate_size"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_every_published_layout_is_read(gated, old, shards, size_field, tmp_path):
    model = publish(tmp_path, gated=gated, old=old, shards=shards, size_field=size_field)
    loaded = load_pretrained(tmp_path)
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.config == config(name=tmp_path.name, gated=gated, rope_theta=300.0)
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    assert all(isinstance(block, SparseFeedForward) for block in feed_forward_blocks(loaded.model))
    assert loaded.model.config.hidden_act == "relu"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_the_package_alone_loads_and_tunes_a_published_model(gated, old, tmp_path):
    wanted = publish(tmp_path, gated=gated, old=old)
    model = from_released(tmp_path)
    assert torch.equal(logits(model), logits(wanted))
    assert (model.training, model.config.hidden_act, model.lm_head.weight.dtype) == (False, "relu", torch.bfloat16)
    tuning = autotune(model, IDS)
    assert [choice.plan.backend for choice in tuning] == ["dense"] * 2
    assert f"{tuning[0].mean_nonzeros:.1f}" in str(tuning)
    assert from_released(tmp_path, dtype=torch.float64).lm_head.weight.dtype == torch.float64
    if gated:
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "saved")), logits(wanted))


def test_a_published_model_that_was_loaded_as_an_ordinary_llama_is_noticed(tmp_path):
    publish(tmp_path)
    silu = LlamaForCausalLM.from_pretrained(tmp_path)
    assert silu.config.hidden_act == "silu"
    for activation in (None, "relu"):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM is of a checkpoint .* use twell.from_released\(path\)"):
            sparsify(silu, activation=activation)
    build_model(config()).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="must have model_type 'llama_sparse_relu', got 'llama': use from_pretrained"):
        from_released(tmp_path / "ours")
    change(tmp_path, mlp_bias=True)
    with pytest.raises(ValueError, match="mlp_bias"):
        from_released(tmp_path)


def rewrite(folder, change):
    path = folder / "model.safetensors"
    save_file({new: tensor for key, old in load_file(path).items() for new, tensor in change(key, old)}, path)


def transposed_down(key, tensor):
    return [(key, tensor.T.contiguous() if key.endswith("down_proj.weight") else tensor)]


@pytest.mark.parametrize("gated", [True, False])
def test_what_hybrid_training_wrote_is_read_by_its_shape(gated, tmp_path):
    model = publish(tmp_path, gated=gated, sparsity_use_hybrid_kernel=True)
    assert torch.equal(logits(load_pretrained(tmp_path).model), logits(model)), "laid out anew when it was published"
    rewrite(tmp_path, transposed_down)
    assert torch.equal(logits(load_pretrained(tmp_path).model), logits(model))


def test_where_the_shape_does_not_tell_the_layout_the_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "N", K)
    model = publish(tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path).model), logits(model))
    change(tmp_path, sparsity_use_hybrid_kernel=True)
    with pytest.raises(CheckpointError, match=r'are both 16, .* set "sparsity_use_hybrid_kernel": false'):
        load_pretrained(tmp_path)


def test_an_ordinary_llama_is_not_transposed(tmp_path):
    build_model(config()).save_pretrained(tmp_path)
    rewrite(tmp_path, transposed_down)
    with pytest.raises(
        CheckpointError, match=r"do not fit the configuration: .*down_proj.weight is .24, 16., wanted .16, 24"
    ):
        load_pretrained(tmp_path)


def test_a_weight_that_is_there_twice_is_refused(tmp_path):
    publish(tmp_path, old=True)
    rewrite(tmp_path, lambda key, old: [(key, old), (key.replace("gate_weight", "gate_proj.weight"), old.clone())])
    with pytest.raises(CheckpointError, match=r"\S+gate_proj.weight is there twice, under its old and its new name"):
        load_pretrained(tmp_path)
    publish(tmp_path)
    save_file({"model.norm.weight": torch.ones(K)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"the weight model.norm.weight is in more than one file"):
        load_pretrained(tmp_path)


def test_a_published_model_in_float32_generates(tmp_path):
    publish(tmp_path)
    wrap(train_bpe(["a"], 257)).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, dtype=torch.float32)
    for block in feed_forward_blocks(loaded.model):
        block.plan = "reference"
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert len(loaded.tokenizer) == 257
    assert loaded.model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 22)


def test_the_hub_is_asked_for_names_that_are_no_folder(tmp_path, monkeypatch):
    model = publish(tmp_path)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(released.huggingface_hub, "snapshot_download", snapshot_download)
    assert torch.equal(logits(load_pretrained("SakanaAI/SparseLM0.5B").model), logits(model))
    [(name, patterns)] = asked
    assert name == "SakanaAI/SparseLM0.5B"
    assert "*.safetensors" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".pt", ".py"))]


# --- ordinary checkpoints ---------------------------------------------------------------------------------------------


def test_an_ordinary_llama_keeps_its_silu(tmp_path):
    rope = {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    }
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, tie_word_embeddings=False))
    theirs.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded.model), logits(theirs))
    assert (loaded.config.activation, loaded.config.tied_embeddings) == ("silu", False)
    assert all(isinstance(block, SiluFeedForward) for block in feed_forward_blocks(loaded.model))


@pytest.mark.parametrize(
    ("kind", "activation", "block"),
    [
        ("qwen2", {"hidden_act": "relu"}, SparseFeedForward),
        ("qwen2", {}, SiluFeedForward),
        ("gemma3_text", {"hidden_activation": "relu"}, SparseFeedForward),
    ],
)
def test_a_model_of_another_type_gets_our_blocks(kind, activation, block, tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **activation)).eval()
    theirs.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded.model), logits(theirs))
    blocks = feed_forward_blocks(loaded.model)
    assert [type(one) for one in blocks] == [block] * 2
    assert all(one.stats.nonzeros.shape == IDS.shape for one in blocks)
    wanted = ("relu" if activation else "silu", True, 32, 48, 2, 60, 64)
    shape = loaded.config
    assert wanted == (
        *(shape.activation, shape.gated, shape.hidden_size, shape.intermediate_size),
        *(shape.layers, shape.vocab_size, shape.max_positions),
    )
    assert load_pretrained(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_model_with_other_blocks_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma3_text"](**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has the activation GELUTanh, .* pass activation=\"relu\""):
        load_pretrained(tmp_path)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel has no MLP to replace"):
        load_pretrained(tmp_path)


def change(folder, **values):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"do not fit the configuration: .* is \[\d+.*, wanted \["),
        ({"num_hidden_layers": 1}, "not fit the configuration: model.layers.1.* wanted not there"),
        ({"sparsity_gated_mlp": False}, "sparsity_gated_mlp=False, but the weights have a gate"),
        ({"model_type": "qwen2"}, "do not fit the configuration: missing_keys: .*bias"),
        ({"model_type": "sparrow"}, "has no model type 'sparrow', and a model's own code"),
        ({"model_type": ["llama"]}, r"has no model type \['llama'\]"),
        ({"mlp_bias": True}, "no biases"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "must be relu, relu2 or silu, got 'gelu'"),
        ({"hidden_size": "16"}, "config.json has an invalid value"),
        ({"num_attention_heads": 0}, "config.json has an invalid value"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but there are"),
        ({"rms_norm_eps": -1.0}, "model.rms_norm_eps|rms_norm_eps must be at least 0"),
        ({"rope_theta": {}}, "config.json has an invalid value"),
        ({"dtype": []}, "config.json has an invalid value"),
        ({"dtype": [], "model_type": "qwen2"}, "cannot be loaded: "),
        ({"pad_token_id": 10**9}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_a_configuration_that_cannot_be_loaded_says_why(changes, message, tmp_path):
    publish(tmp_path)
    change(tmp_path, **changes)
    assert_refused(tmp_path, message)


def assert_refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        load_pretrained(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (WEIGHTS, b"\xff" * 8 + b"{}", "model.safetensors is missing or damaged"),
        (CONFIG, b"[]", "config.json must hold an object, got list"),
        (CONFIG, b"[" * 100_000, "config.json cannot be read"),
        (CONFIG, None, "config.json cannot be read"),
        (WEIGHTS, None, "has no safetensors"),
        (INDEX, b'{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing or damaged"),
        (INDEX, b"[]", "index.json must hold an object, got list"),
        (INDEX, b'{"weight_map": {"a": 1}}', "index.json is not an index"),
        (INDEX, b'{"weight_map": {"a": "../../b.safetensors"}}', "index.json is not an index"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named(name, content, message, tmp_path):
    publish(tmp_path)
    if content is None:
        (tmp_path / name).rename(tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / name).write_bytes(content)
    assert_refused(tmp_path, message)


def test_weights_that_cannot_be_loaded_say_why(tmp_path):
    publish(tmp_path)
    rewrite(tmp_path, lambda key, tensor: [(key, tensor)] * (key != "model.norm.weight"))
    assert_refused(tmp_path, "do not fit the configuration.*model.norm.weight")
    rewrite(tmp_path, lambda key, tensor: [(key, tensor.to(torch.int64))])
    assert_refused(tmp_path, "is torch.int64, not a weight")
    publish(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-10])
    assert_refused(tmp_path, "model.safetensors is missing or damaged")


def test_an_unknown_name(monkeypatch):
    monkeypatch.setattr(released.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="neither a local folder nor a model on the hub"):
        load_pretrained("nobody/nothing")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_parameters_is_that_of_the_model(gated, tied):
    shape = config(gated=gated, tied_embeddings=tied)
    model = build_model(shape)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
