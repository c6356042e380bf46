"""`from_released`: the paper's released checkpoints, whose feed-forward weights may have other names and layouts.

Weights are read from safetensors only, so nothing is unpickled, and no code of a checkpoint runs.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .huggingface import RELEASED
from .interface import RELU
from .modules import SparseFeedForward

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
CONFIG = "config.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"  # one tensor when they are tied
# What transformers and torch raise for values of the wrong type or size in a configuration.
WRONG_VALUES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, StrictDataclassError,
)  # fmt: skip
_IGNORED_PARTS = {"tracker", "metrics_accumulator", "rotary_emb"}
_OLD_NAMES = {"gate_weight": "gate_proj.weight", "up_weight": "up_proj.weight", "down_weight": "down_proj.weight"}


class Checkpoint(NamedTuple):
    """The content of a folder. activation: its config.json's, but ReLU where it is one of the released ones."""

    config: LlamaConfig
    activation: str
    gated: bool
    tensors: dict[str, Tensor]


def from_released(
    name: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """The model of a folder, or of a name on the hub, whose config.json has model_type "llama_sparse_relu", such as
    "SakanaAI/SparseLM0.5B": a Llama with SparseFeedForward blocks, in eval mode.

    Its gate is a ReLU whatever hidden_act says. dtype: None keeps that of the files. Raises ValueError for a checkpoint
    that is missing, damaged, incomplete or of another type.
    """
    folder = local_folder(name)
    if (kind := read_json(folder / CONFIG).get("model_type")) != RELEASED:
        raise ValueError(f"{folder / CONFIG} must have model_type {RELEASED!r}, got {kind!r}: use from_pretrained")
    config, activation, gated, tensors = read(folder, dtype=dtype, device=device)
    if config.mlp_bias:
        raise ValueError(f"{folder / CONFIG}: the block has no biases, but it says mlp_bias=true")
    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            for layer in model.model.layers:
                layer.mlp = SparseFeedForward(
                    config.hidden_size, config.intermediate_size, gated=gated, activation=activation
                )
    except (*WRONG_VALUES, RuntimeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    fill(model, tensors, device, str(folder))
    return model.eval()


def read(folder: Path, *, dtype: torch.dtype | None, device: torch.device | str) -> Checkpoint:
    """The checkpoint of a Llama, released or ordinary, with the weights' names and layouts as transformers has them.
    Raises ValueError."""
    content = read_json(folder / CONFIG)
    tensors: dict[str, Tensor] = {}
    for key, tensor in _tensors(folder, device, dtype):
        if key in tensors:
            raise ValueError(f"{folder}: the weight {key} is in more than one file")
        tensors[key] = tensor
    gated = any(key.endswith((".gate_proj.weight", ".gate_weight")) for key in tensors)
    setting = content.get("sparsity_gated_mlp")
    if setting is not None and bool(setting) != gated:
        raise ValueError(f"{folder}: sparsity_gated_mlp={setting}, but the weights have {'a' if gated else 'no'} gate")
    layers = content.get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):  # building a model with so many layers would never end
        raise ValueError(f"{folder / CONFIG}: num_hidden_layers is {layers}, but there are {len(tensors)} weights")
    size = content.get("sparsity_new_intermediate_size") or content.get("intermediate_size")
    plain = {key: value for key, value in content.items() if not key.startswith("sparsity_") and key != "auto_map"}
    try:
        config = LlamaConfig.from_dict({**plain, "model_type": "llama", "intermediate_size": size})
    except WRONG_VALUES as error:
        raise ValueError(f"{folder / CONFIG} has an invalid value: {error}") from error
    config.architectures = ["LlamaForCausalLM"]
    config.hidden_act = RELU if content.get("model_type") == RELEASED else config.hidden_act
    return Checkpoint(config, config.hidden_act, gated, _todays(tensors, content, gated, config, folder))


def fill(model: LlamaForCausalLM, tensors: dict[str, Tensor], device: torch.device | str, where: str) -> None:
    """Load the weights into a model on the meta device, and complete it. Raises ValueError if names or shapes do not
    match."""
    if model.config.tie_word_embeddings and EMBEDDING in tensors:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}
    needed = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if different := sorted(name for name in needed.keys() | given.keys() if needed.get(name) != given.get(name)):
        first = different[0]
        shapes = f"{first} is {_shape(given.get(first))}, wanted {_shape(needed.get(first))}"
        others = f", and {len(different) - 1} others" if len(different) > 1 else ""
        raise ValueError(f"{where}: the weights do not fit the configuration: {shapes}{others}")
    model.load_state_dict(tensors, assign=True)
    materialize(model, device)


def materialize(model: LlamaForCausalLM, device: torch.device | str) -> None:
    """Complete a model on the meta device in place: allocate weights that have no memory, tie tied weights, compute
    rotary tables."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)


def _shape(shape: torch.Size | None) -> str:
    return "not there" if shape is None else str([*shape])


def local_folder(name: str | Path) -> Path:
    """The folder of this name, or that of the hub, downloaded. Raises ValueError if there is none."""
    if os.path.isdir(name):  # noqa: PTH112 (of a name that is too long, Path raises)
        return Path(name)
    if os.path.lexists(name):
        raise ValueError(f"{name} is a file: name the folder of the checkpoint")
    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # OSError: also of a name that is not cached
        raise ValueError(f"{name} is neither a local folder nor a model on the hub: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises ValueError."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return content


# --- weights ----------------------------------------------------------------------------------------------------------


def _tensors(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for key in file.keys():  # noqa: SIM118 (not a dictionary)
                    if _IGNORED_PARTS.isdisjoint(key.split(".")):
                        tensor = file.get_tensor(key)
                        if not tensor.is_floating_point():
                            raise ValueError(f"{path}: {key} is {tensor.dtype}, not a weight")
                        yield key, tensor if dtype is None else tensor.to(dtype)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} is missing or damaged: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a checkpoint. Raises ValueError if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(map(_is_file_name, names.values())):
            raise ValueError(f"{index} is not an index: its weight_map must give the name of a file for each weight")
        return [folder / name for name in sorted(set(names.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors; other formats are not read, since they can run code")
    return files


def _is_file_name(name: object) -> bool:
    """Whether it names a file of the same folder."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _todays(
    tensors: dict[str, Tensor], content: dict[str, Any], gated: bool, config: LlamaConfig, folder: Path
) -> dict[str, Tensor]:
    """The weights with present names, and layouts of `nn.Linear`. Those with old names are: gate [K, N]; up [N, K] when
    gated, [K, N] when not; down [N, K]. Raises ValueError for one under both an old and a new name."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        prefix, dot, last = key.rpartition(".")
        name = prefix + dot + _OLD_NAMES.get(last, last)
        if name in renamed:
            raise ValueError(f"{folder}: {name} is there twice, under its old and its new name; delete one of them")
        if last in _OLD_NAMES and (last != "up_weight" or not gated):
            tensor = tensor.t().contiguous()
        elif name.endswith(".down_proj.weight") and content.get("model_type") == RELEASED:
            tensor = _down_proj(tensor, content, config, folder)
        renamed[name] = tensor
    return renamed


def _down_proj(tensor: Tensor, content: dict[str, Any], config: LlamaConfig, folder: Path) -> Tensor:
    """A released down_proj.weight in the layout of nn.Linear, [K, N].

    Training with the hybrid kernels (sparsity_use_hybrid_kernel) writes [N, K], but a released weight may have been
    transposed since, so the shape decides. Raises ValueError if K = N.
    """
    if config.hidden_size == config.intermediate_size:
        if content.get("sparsity_use_hybrid_kernel"):
            raise ValueError(
                f"{folder}: hidden and intermediate size are both {config.hidden_size}, so the shape of "
                "down_proj.weight does not tell whether it is transposed, as hybrid training writes it: make it that "
                'of an nn.Linear, and set "sparsity_use_hybrid_kernel": false in config.json'
            )
        return tensor
    transposed = tensor.shape == (config.intermediate_size, config.hidden_size)
    return tensor.t().contiguous() if transposed else tensor
