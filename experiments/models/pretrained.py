"""Loads models that were not trained here: the paper's published checkpoints, Hugging Face's Llama checkpoints, and
models of every other type that `twell.sparsify` supports.

They are read from a local folder or the hub. Weights are read from safetensors only, so nothing is unpickled. The
published checkpoints have the model type `llama_sparse_relu`. Their gate is a ReLU regardless of `hidden_act`, and
their feed-forward weights have Hugging Face's names, or older names with another layout (see `_OLD_NAMES`). In
checkpoints trained with the hybrid kernels, `down_proj.weight` may be [N, K] (see `_down_proj`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.data.tokenizer import named_tokenizer
from experiments.models.llama import EMBEDDING, HEAD, SiluFeedForward, feed_forward_blocks, materialize, skeleton
from experiments.run.config import check_ranges
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.train_config import ModelConfig, TrainConfig
from experiments.run.values import in_one_line, name_shown
from twell import feed_forward_blocks as all_blocks
from twell import sparsify
from twell.huggingface import replaceable

PUBLISHED_TYPE = "llama_sparse_relu"
SILU = ("SiLU", "SiLUActivation")  # torch's, and that of newer transformers
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
CONFIG = "config.json"
# What transformers and torch raise for values of the wrong type or size in a configuration.
_WRONG_VALUES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, StrictDataclassError,
)  # fmt: skip
_IGNORED_PARTS = {"tracker", "metrics_accumulator", "rotary_emb"}
# A key of config.json: "KN" (as in nn.Linear) or "NK", for a down_proj.weight whose shape is ambiguous.
DOWN_LAYOUT = "sparsity_down_proj_layout"
_OLD_NAMES = {"gate_weight": "gate_proj.weight", "up_weight": "up_proj.weight", "down_weight": "down_proj.weight"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelShape:
    """The fields of a `ModelConfig` that result rows use, for a model that is not a Llama."""

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    activation: Literal["relu", "relu2", "silu"]
    gated: bool
    vocab_size: int
    max_positions: int | None  # None: any number


@dataclass
class LoadedModel:
    """A model ready to use. `step` and `training` are None for a model that was not trained here.

    `tokenizer` is None when the checkpoint has none; `source`, the key of the text that it was trained on, where
    nothing says which it was.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast | None
    config: ModelConfig | ModelShape
    step: int | None = None
    training: TrainConfig | None = None
    source: str | None = None


def load_pretrained(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    plan: str = "dense",
    keep_stats: bool = True,
) -> LoadedModel:
    """A model from a local folder or by its name on the hub; `dtype=None` keeps the dtype of the files.

    Its MLPs become our feed-forward blocks: those that `twell.sparsify` supports, and those with SiLU instead of
    ReLU. Raises `CheckpointError` for a missing, damaged or incomplete checkpoint, or one with other blocks.
    """
    folder = _folder(str(name))
    content = _read_json(folder / CONFIG)
    if content.get("model_type") not in ("llama", PUBLISHED_TYPE):
        return _load_other(content, folder, Path(name).name, device, dtype, plan, keep_stats)
    tensors = _once(_tensors(folder, device, dtype), folder)
    gated = _is_gated(content, tensors, folder)
    config = _llama_config(content, tensors, folder)
    activation = "relu" if content.get("model_type") == PUBLISHED_TYPE else config.hidden_act
    tensors = _todays(tensors, content, gated, config, folder)
    config.hidden_act = activation
    try:
        model = skeleton(config, activation=activation, gated=gated, plan=plan, keep_stats=keep_stats)
    except (*_WRONG_VALUES, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {in_one_line(error)}") from error
    fill(model, tensors, device, str(folder))
    tokenizer = _tokenizer_beside(folder)
    return LoadedModel(model.eval(), tokenizer, _describe(Path(name).name, config, activation, gated))


def fill(model: LlamaForCausalLM, tensors: dict[str, Tensor], device: torch.device | str, where: str) -> None:
    """Load the weights into a skeleton. Raises `CheckpointError` if names or shapes do not match."""
    if model.config.tie_word_embeddings and EMBEDDING in tensors:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if different := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        first = different[0]
        said = f"{name_shown(first)} is {_shape(found.get(first))}, wanted {_shape(wanted.get(first))}"
        others = f", and {len(different) - 1} others" if len(different) > 1 else ""
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {said}{others}")
    model.load_state_dict(tensors, assign=True)
    materialize(model, device)


def _shape(shape: torch.Size | None) -> str:
    return "not there" if shape is None else str([*shape])


def _folder(name: str) -> Path:
    if os.path.isdir(name):  # noqa: PTH112 (of a name that is too long, Path raises)
        return Path(name)
    if os.path.lexists(name):
        raise CheckpointError(f"{name} is a file: name the folder of the checkpoint")
    return _download(name)


# --- models of other types --------------------------------------------------------------------------------------------


def _load_other(
    content: dict[str, Any],
    folder: Path,
    name: str,
    device: torch.device | str,
    dtype: torch.dtype | None,
    plan: str,
    keep_stats: bool,
) -> LoadedModel:
    _weight_files(folder)  # raises if there are only pickles
    if (kind := content.get("model_type")) not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder}: the installed transformers has no model type {kind!r}, and a model's own code is not run"
        )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError, *_WRONG_VALUES) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {in_one_line(error)}") from error
    model, info = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if wrong := sorted(map(str, info[what])):
            raise CheckpointError(f"{folder}: the weights do not fit the configuration: {what}: {', '.join(wrong[:5])}")
    try:
        activation = _put_blocks(model, plan, keep_stats)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    model.to(device)
    shape = _shape_of(name, model, activation)
    return LoadedModel(model.eval(), _tokenizer_beside(folder), shape)


def _put_blocks(model: PreTrainedModel, plan: str, keep_stats: bool) -> Literal["relu", "relu2", "silu"]:
    """Put our blocks in place of the MLPs, and return the name of their activation. Raises ValueError if they do not
    fit."""
    has_silu = any(type(module).__name__ in SILU for module in model.modules())
    mlps = replaceable(model, "relu") if has_silu else {}
    activations = {type(getattr(mlp.module, str(mlp.act), None)).__name__ for mlp in mlps.values()}
    if not mlps or not activations <= {*SILU}:
        sparsify(model, plan=plan, keep_stats=keep_stats)
        return "relu" if all_blocks(model)[0].activation == "relu" else "relu2"
    for name, mlp in mlps.items():
        block = SiluFeedForward.from_linears(*mlp.linears)
        block.keep_stats = keep_stats
        model.set_submodule(name, block)
    return "silu"


def _shape_of(name: str, model: PreTrainedModel, activation: Literal["relu", "relu2", "silu"]) -> ModelShape:
    blocks, config = feed_forward_blocks(model), model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    return ModelShape(
        name=name,
        layers=len(blocks),
        hidden_size=blocks[0].up_proj.in_features,
        intermediate_size=max(block.up_proj.out_features for block in blocks),
        activation=activation,
        gated=blocks[0].gated,
        vocab_size=embedding.weight.shape[0],
        max_positions=getattr(config, "max_position_embeddings", None) or None,
    )


def _download(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        there = f"{name_shown(name)} is neither a local folder nor a model on the hub"
        raise CheckpointError(f"{there}: {in_one_line(error)}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(content).__name__}")
    return content


# --- weights ----------------------------------------------------------------------------------------------------------


def _tensors(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for key in file.keys():  # noqa: SIM118 (not a dictionary)
                    if _IGNORED_PARTS.isdisjoint(key.split(".")):
                        tensor = file.get_tensor(key)
                        if not tensor.is_floating_point():
                            raise CheckpointError(f"{path}: {name_shown(key)} is {tensor.dtype}, not a weight")
                        yield key, tensor if dtype is None else tensor.to(dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(map(_is_file_name, names.values())):
            raise CheckpointError(
                f"{index} is not an index: its weight_map must give the name of a file for each weight"
            )
        return [folder / name for name in sorted(set(names.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no safetensors; other formats are not read, since they can run code")
    return files


def _is_file_name(name: object) -> bool:
    """Whether it names a file of the same folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _rename(key: str, tensor: Tensor, gated: bool) -> tuple[str, Tensor]:
    """Convert a feed-forward weight with an old name to its present name and `nn.Linear` layout; others are unchanged.

    Old layouts: gate [K, N]; up [N, K] when gated, [K, N] when not; down [N, K].
    """
    prefix, dot, last = key.rpartition(".")
    if last not in _OLD_NAMES:
        return key, tensor
    transposed = last != "up_weight" or not gated
    return prefix + dot + _OLD_NAMES[last], tensor.t().contiguous() if transposed else tensor


def _once(pairs: Iterator[tuple[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, tensor in pairs:
        if key in found:
            raise CheckpointError(f"{folder}: the weight {key} is in more than one file")
        found[key] = tensor
    return found


def _todays(
    tensors: dict[str, Tensor], content: dict[str, Any], gated: bool, config: LlamaConfig, folder: Path
) -> dict[str, Tensor]:
    """The weights with present names and layouts. Raises `CheckpointError` for one under both an old and a new name."""
    found: dict[str, Tensor] = {}
    for key, old in tensors.items():
        name, tensor = _rename(key, old, gated)
        if name in found:
            raise CheckpointError(
                f"{folder}: {name} is there twice, under its old and its new name; delete one of them"
            )
        if name == key and name.endswith(".down_proj.weight") and content.get("model_type") == PUBLISHED_TYPE:
            tensor = _down_proj(tensor, content, config, folder)
        found[name] = tensor
    return found


def _down_proj(tensor: Tensor, content: dict[str, Any], config: LlamaConfig, folder: Path) -> Tensor:
    """A published down_proj.weight in the layout of nn.Linear, [K, N].

    Training with the hybrid kernels (sparsity_use_hybrid_kernel) writes [N, K], but a published weight may have been
    transposed since, so the shape decides. Raises `CheckpointError` if K = N, unless DOWN_LAYOUT gives the layout.
    """
    square, layout = config.hidden_size == config.intermediate_size, content.get(DOWN_LAYOUT)
    if layout not in (None, "KN", "NK"):
        raise CheckpointError(f'{folder}: {DOWN_LAYOUT} must be "KN" or "NK", got {layout!r}')
    if square and layout is None and content.get("sparsity_use_hybrid_kernel"):
        raise CheckpointError(
            f"{folder}: hidden and intermediate size are both {config.hidden_size}, so the shape of down_proj.weight "
            f'does not tell whether it is transposed, as hybrid training writes it: say "{DOWN_LAYOUT}": "NK" '
            'in its config.json if it is, "KN" if not'
        )
    transposed = layout == "NK" if square else tensor.shape == (config.intermediate_size, config.hidden_size)
    return tensor.t().contiguous() if transposed else tensor


def _is_gated(content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> bool:
    """Whether the weights have a gate, which must agree with the configuration (if that specifies it)."""
    has_gate = any(key.endswith((".gate_proj.weight", ".gate_weight")) for key in tensors)
    said = content.get("sparsity_gated_mlp")
    if said is not None and bool(said) != has_gate:
        raise CheckpointError(
            f"{folder}: sparsity_gated_mlp={said}, but the weights have {'a' if has_gate else 'no'} gate"
        )
    return has_gate


# --- configuration ----------------------------------------------------------------------------------------------------


def _llama_config(content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> LlamaConfig:
    size = content.get("sparsity_new_intermediate_size") or content.get("intermediate_size")
    plain = {key: value for key, value in content.items() if not key.startswith("sparsity_") and key != "auto_map"}
    layers = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):  # building a skeleton with so many layers would never end
        raise CheckpointError(f"{folder / CONFIG}: num_hidden_layers is {layers}, but there are {len(tensors)} weights")
    try:
        config = LlamaConfig.from_dict({**plain, "model_type": "llama", "intermediate_size": size})
        _describe("", config, "relu", gated=True)
    except (*_WRONG_VALUES, ConfigError) as error:
        raise CheckpointError(f"{folder / CONFIG} has an invalid value: {in_one_line(error)}") from error
    config.architectures = ["LlamaForCausalLM"]
    return config


def _describe(name: str, config: LlamaConfig, activation: str, gated: bool) -> ModelConfig:
    described = ModelConfig(
        name=name or "unnamed",
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        activation=activation,  # type: ignore[arg-type]  # a skeleton accepts only these
        gated=gated,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rope_theta=float(dict(config.rope_parameters or {})["rope_theta"]),
        tied_embeddings=config.tie_word_embeddings,
        rms_norm_eps=config.rms_norm_eps,
    )
    return check_ranges(described)


def _tokenizer_beside(folder: Path) -> PreTrainedTokenizerFast | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        log.warning("%s has no tokenizer", folder)
        return None
    return named_tokenizer(folder)
