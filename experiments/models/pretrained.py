"""Loads models that were not trained here: the paper's published checkpoints and ordinary Hugging Face Llama
checkpoints.

They are read from a local folder or the hub. Weights are read from safetensors only, so that nothing is unpickled. The
published checkpoints have the model type `llama_sparse_relu`; their gate is a ReLU whatever `hidden_act` says, and
their feed-forward weights have Hugging Face's names, or older ones with another layout (see `_OLD_NAMES`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from experiments.data.tokenizer import named_tokenizer
from experiments.models.llama import EMBEDDING, HEAD, materialize, skeleton
from experiments.run.errors import CheckpointError
from experiments.run.train_config import ModelConfig, TrainConfig

PUBLISHED_TYPE = "llama_sparse_relu"
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]
_IGNORED_PARTS = {"tracker", "metrics_accumulator", "rotary_emb"}
_OLD_NAMES = {"gate_weight": "gate_proj.weight", "up_weight": "up_proj.weight", "down_weight": "down_proj.weight"}
log = logging.getLogger(__name__)


@dataclass
class LoadedModel:
    """A model ready to use. `step` and `training` are None for a model that was not trained here.

    `tokenizer` is None when the checkpoint has none.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast | None
    config: ModelConfig
    step: int | None = None
    training: TrainConfig | None = None


def load_pretrained(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "dense",
    stats: str = "full",
) -> LoadedModel:
    """A model from a local folder or by its name on the hub; `dtype=None` keeps the dtype of the files.

    Raises `CheckpointError` for a missing, damaged or incomplete checkpoint, or one of another architecture.
    """
    folder = Path(name) if Path(name).is_dir() else _download(str(name))
    content = _read_json(folder / "config.json")
    tensors = dict(_tensors(folder, device, dtype))
    gated = _is_gated(content, tensors, folder)
    config = _llama_config(content, tensors, folder)
    activation = "relu" if content.get("model_type") == PUBLISHED_TYPE else config.hidden_act
    tensors = {new: tensor for key, old in tensors.items() for new, tensor in [_rename(key, old, gated)]}
    config.hidden_act = activation
    try:
        model = skeleton(config, activation=activation, gated=gated, backend=backend, stats=stats)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    fill(model, tensors, device, str(folder))
    tokenizer = _tokenizer_beside(folder)
    return LoadedModel(model.eval(), tokenizer, _describe(Path(name).name, config, activation, gated))


def fill(model: LlamaForCausalLM, tensors: dict[str, Tensor], device: torch.device | str, where: str) -> None:
    """Give a skeleton its weights. Raises `CheckpointError` when names or shapes are not the model's."""
    if model.config.tie_word_embeddings and EMBEDDING in tensors:
        tensors = {**tensors, HEAD: tensors[EMBEDDING]}
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # torch lists missing and unexpected names, and shapes that differ
        raise CheckpointError(f"{where}: the weights do not fit the configuration: {error}") from error
    materialize(model, device)


def _download(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name} is neither a local folder nor a model that the hub gives us: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


# --- weights ----------------------------------------------------------------------------------------------------------


def _tensors(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for key in file.keys():  # noqa: SIM118 (not a dictionary)
                    if _IGNORED_PARTS.isdisjoint(key.split(".")):
                        tensor = file.get_tensor(key)
                        yield key, tensor if dtype is None else tensor.to(dtype)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is missing or damaged: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no safetensors; other formats are not read, since they can run code")
    return files


def _rename(key: str, tensor: Tensor, gated: bool) -> tuple[str, Tensor]:
    """Today's name and `nn.Linear` layout of a feed-forward weight under an older name; others pass unchanged.

    Old layouts: gate [K, N]; up [N, K] when gated, [K, N] when not; down [N, K].
    """
    prefix, dot, last = key.rpartition(".")
    if last not in _OLD_NAMES:
        return key, tensor
    transposed = last != "up_weight" or not gated
    return prefix + dot + _OLD_NAMES[last], tensor.t().contiguous() if transposed else tensor


def _is_gated(content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> bool:
    """Whether the weights have a gate, which must agree with what the configuration says (if it does)."""
    has_gate = any(key.endswith((".gate_proj.weight", ".gate_weight")) for key in tensors)
    said = content.get("sparsity_gated_mlp")
    if said is not None and bool(said) != has_gate:
        raise CheckpointError(
            f"{folder}: sparsity_gated_mlp={said}, but the weights have {'a' if has_gate else 'no'} gate"
        )
    return has_gate


# --- configuration ----------------------------------------------------------------------------------------------------


def _llama_config(content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> LlamaConfig:
    if content.get("model_type") not in ("llama", PUBLISHED_TYPE):
        raise CheckpointError(
            f"{folder}: model type must be llama or {PUBLISHED_TYPE}, got {content.get('model_type')!r}"
        )
    size = content.get("sparsity_new_intermediate_size") or content.get("intermediate_size")
    plain = {key: value for key, value in content.items() if not key.startswith("sparsity_") and key != "auto_map"}
    config = LlamaConfig.from_dict({**plain, "model_type": "llama", "intermediate_size": size})
    config.architectures = ["LlamaForCausalLM"]
    return config


def _describe(name: str, config: LlamaConfig, activation: str, gated: bool) -> ModelConfig:
    return ModelConfig(
        name=name,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        attention_heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        activation=activation,  # type: ignore[arg-type]  # a skeleton takes no other than these
        gated=gated,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        initializer_range=config.initializer_range,
        rope_theta=float(dict(config.rope_parameters or {})["rope_theta"]),
        tied_embeddings=config.tie_word_embeddings,
        rms_norm_eps=config.rms_norm_eps,
    )


def _tokenizer_beside(folder: Path) -> PreTrainedTokenizerFast | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        log.warning("%s has no tokenizer", folder)
        return None
    return named_tokenizer(folder)
