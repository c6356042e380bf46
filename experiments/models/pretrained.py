"""Loads models that were not trained here: the paper's published checkpoints, Hugging Face's Llama checkpoints, and
models of every other type that `twell.sparsify` supports.

They are read from a local folder or the hub, from safetensors only, so nothing is unpickled. `twell.released` reads the
published ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.data.tokenizer import named_tokenizer
from experiments.models.llama import SiluFeedForward, feed_forward_blocks, skeleton
from experiments.run.config import check_ranges
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.train_config import ModelConfig, TrainConfig
from experiments.run.values import in_one_line
from twell import feed_forward_blocks as all_blocks
from twell import released, sparsify
from twell.huggingface import RELEASED, replaceable
from twell.released import CONFIG, WRONG_VALUES

SILU = ("SiLU", "SiLUActivation")  # torch's, and that of newer transformers
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
    name: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """A model from a local folder or by its name on the hub; `dtype=None` keeps the dtype of the files.

    Its MLPs become our feed-forward blocks: those that `twell.sparsify` supports, and those with SiLU instead of
    ReLU. Raises `CheckpointError` for a missing, damaged or incomplete checkpoint, or one with other blocks.
    """
    with _checkpoint_errors():
        folder = released.local_folder(name)
        kind = released.read_json(folder / CONFIG).get("model_type")
    if kind not in ("llama", RELEASED):
        return _load_other(kind, folder, Path(name).name, device, dtype)
    with _checkpoint_errors():
        config, activation, gated, tensors = released.read(folder, device=device, dtype=dtype)
    with _checkpoint_errors(f"{folder / CONFIG} has an invalid value: ", (*WRONG_VALUES, ConfigError)):
        described = ModelConfig(
            name=Path(name).name or "unnamed",
            layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            attention_heads=config.num_attention_heads,
            key_value_heads=config.num_key_value_heads or config.num_attention_heads,
            gated=gated,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            initializer_range=config.initializer_range,
            rope_theta=float(dict(config.rope_parameters or {})["rope_theta"]),
            tied_embeddings=config.tie_word_embeddings,
            rms_norm_eps=config.rms_norm_eps,
        )
        check_ranges(described)
    with _checkpoint_errors(f"{folder}: ", (*WRONG_VALUES, RuntimeError)):
        model = skeleton(config, activation=activation, gated=gated)
    fill(model, tensors, device, str(folder))
    described = replace(described, activation=activation)  # type: ignore[arg-type]  # a skeleton accepts only these
    return LoadedModel(model.eval(), _tokenizer_beside(folder), described)


def fill(model: LlamaForCausalLM, tensors: dict[str, Tensor], device: torch.device | str, where: str) -> None:
    """Load the weights into a skeleton. Raises `CheckpointError` if names or shapes do not match."""
    with _checkpoint_errors():
        released.fill(model, tensors, device, where)


@contextlib.contextmanager
def _checkpoint_errors(what: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Turn errors of these kinds into a `CheckpointError` that begins with `what`."""
    try:
        yield
    except kinds as error:
        raise CheckpointError(what + in_one_line(error)) from error


# --- models of other types --------------------------------------------------------------------------------------------


def _load_other(
    kind: Any, folder: Path, name: str, device: torch.device | str, dtype: torch.dtype | None
) -> LoadedModel:
    with _checkpoint_errors():
        released.weight_files(folder)  # raises if there are only pickles
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder}: the installed transformers has no model type {kind!r}, and a model's own code is not run"
        )
    wrong_files = (OSError, RuntimeError, SafetensorError, *WRONG_VALUES)
    with _checkpoint_errors(f"{folder} cannot be loaded: ", wrong_files):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    model, info = loaded
    for what in ("missing_keys", "mismatched_keys"):
        if wrong := sorted(map(str, info[what])):
            raise CheckpointError(f"{folder}: the weights do not fit the configuration: {what}: {', '.join(wrong[:5])}")
    with _checkpoint_errors(f"{folder}: "):
        activation = _put_blocks(model)
    model.to(device)
    blocks, embedding = feed_forward_blocks(model), model.get_input_embeddings()
    shape = ModelShape(
        name=name,
        layers=len(blocks),
        hidden_size=blocks[0].up_proj.in_features,
        intermediate_size=max(block.up_proj.out_features for block in blocks),
        activation=activation,
        gated=blocks[0].gated,
        vocab_size=embedding.weight.shape[0],
        max_positions=getattr(model.config.get_text_config(), "max_position_embeddings", None) or None,
    )
    return LoadedModel(model.eval(), _tokenizer_beside(folder), shape)


def _put_blocks(model: PreTrainedModel) -> Literal["relu", "relu2", "silu"]:
    """Put our blocks in place of the MLPs, and return the name of their activation. Raises ValueError if they do not
    fit."""
    has_silu = any(type(module).__name__ in SILU for module in model.modules())
    mlps = replaceable(model, "relu") if has_silu else {}
    activations = {type(getattr(mlp.module, str(mlp.act), None)).__name__ for mlp in mlps.values()}
    if not mlps or not activations <= {*SILU}:
        sparsify(model, plan="dense", keep_stats=True)
        return "relu" if all_blocks(model)[0].activation == "relu" else "relu2"
    for name, mlp in mlps.items():
        model.set_submodule(name, SiluFeedForward.from_linears(*mlp.linears))
    return "silu"


def _tokenizer_beside(folder: Path) -> PreTrainedTokenizerFast | None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        log.warning("%s has no tokenizer", folder)
        return None
    return named_tokenizer(folder)
