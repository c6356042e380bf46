"""Checkpoints of a run: `checkpoints/step_00000100/` with model.safetensors, optimizer.safetensors and state.json.

A checkpoint is written under a temporary name, synced and renamed, so it is complete or absent. `state.json` holds the
step, the data position, the random states, and size and SHA-256 of the two tensor files, so that damage is found before
anything is used. Nothing in a checkpoint is pickled.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.data.tokenizer import named_tokenizer
from experiments.models.llama import llama_config, skeleton
from experiments.models.pretrained import LoadedModel, fill, load_pretrained
from experiments.run.config import load_config
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.files import atomic_folder, delete_folder, sha256_file, write_json
from experiments.run.train_config import TrainConfig

__all__ = ["LoadedModel", "load_trained", "newest_checkpoint", "read_checkpoint", "write_checkpoint"]

FORMAT = 1
STATE = "state.json"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds: tensors by name, and JSON values."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint (in place of a damaged one of the same step) and delete all but it and the `keep` - 1 before.

    Checkpoints of later steps are deleted as well: a run reaches this step again only when they are damaged. Raises
    `StorageError` when the disk cannot take it; then the older ones are untouched, and no part of it is left.
    """
    path = checkpoint_path(run_dir, checkpoint.step)
    with atomic_folder(path, "checkpoint", replace=True) as folder:
        for name, tensors in zip(TENSOR_FILES, (checkpoint.model, checkpoint.optimizer), strict=True):
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
        files = {name: _fingerprint(folder / name) for name in TENSOR_FILES}
        write_json(folder / STATE, {"format": FORMAT, "step": checkpoint.step, "files": files, **checkpoint.state})
    folders = _folders(run_dir)
    kept = folders[folders.index(path) :][:keep]
    for other in folders:
        if other not in kept:
            delete_folder(other)
    return path


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _folders(run_dir: Path) -> list[Path]:
    """Folders of checkpoints, the newest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def remove_leftovers(run_dir: Path) -> None:
    """Delete incomplete checkpoints of a killed process. Only the process that writes to the folder may call this."""
    for path in (run_dir / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)


def check(path: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files are all as they were written; else `CheckpointError` says what is wrong."""
    try:
        state = json.loads((path / STATE).read_text())
        expected = {name: state["files"][name] for name in TENSOR_FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / STATE} is missing or damaged: {error!r}") from error
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is of format {state.get('format')}, wanted {FORMAT}")
    for name, wanted in expected.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing")
        size = (path / name).stat().st_size
        if size != wanted["bytes"]:
            raise CheckpointError(f"{path / name} is truncated: {size} bytes, wanted {wanted['bytes']}")
        if sha256_file(path / name) != wanted["sha256"]:
            raise CheckpointError(f"{path / name} is damaged: its checksum is not the one in {STATE}")
    return state


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run that is whole, or None. Damaged ones are reported (as warnings) and skipped."""
    for path in _folders(Path(run_dir)):
        try:
            check(path)
        except CheckpointError as error:
            log.warning("skipping a damaged checkpoint: %s", error)
        else:
            return path
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, checked, into host memory. Raises `CheckpointError` when it is damaged."""
    state = check(path)
    model, optimizer = (load_file(path / name) for name in TENSOR_FILES)
    return Checkpoint(state["step"], model, optimizer, state)


def read_newest(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, read; None if there is none. Damaged ones are reported and skipped."""
    path = newest_checkpoint(run_dir)
    return None if path is None else read_checkpoint(path)


def has_checkpoints(run_dir: Path) -> bool:
    """Whether there is any, whole or damaged."""
    return bool(_folders(run_dir))


@torch.no_grad()
def load_parameters(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model's parameters. Raises `CheckpointError` when they are those of another model."""
    parameters = dict(model.named_parameters())
    different = {
        name for name in parameters.keys() | tensors.keys() if _shape(parameters, name) != _shape(tensors, name)
    }
    if different:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(sorted(different)[:5])} differ")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None


# --- models to use ----------------------------------------------------------------------------------------------------


def load_trained(
    where: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "dense",
    stats: str = "full",
) -> LoadedModel:
    """A model from a run folder (its newest whole checkpoint), one checkpoint, a Hugging Face folder, or the hub.

    `dtype=None` keeps what was stored (float32 for our runs). Raises `CheckpointError` when there is none or it is
    damaged.
    """
    path = Path(where)
    if (path / CONFIG).is_file():
        newest = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"{path} is a run without a whole checkpoint")
        return _load_run(path, newest, device, dtype, backend, stats)
    if (path / STATE).is_file():
        return _load_run(path.resolve().parents[1], path, device, dtype, backend, stats)
    return load_pretrained(where, device=device, dtype=dtype, backend=backend, stats=stats)


def _load_run(
    run_dir: Path, path: Path, device: torch.device | str, dtype: torch.dtype | None, backend: str, stats: str
) -> LoadedModel:
    try:
        training = load_config(TrainConfig, run_dir / CONFIG)
    except ConfigError as error:
        raise CheckpointError(f"{run_dir}: {error}") from error
    state = check(path)
    config = training.model
    tensors = load_file(path / TENSOR_FILES[0], device=str(device))
    tensors = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()}
    model = skeleton(
        llama_config(config), activation=config.activation, gated=config.gated, backend=backend, stats=stats
    )
    fill(model, tensors, device, str(path))
    tokenizer = named_tokenizer(run_dir / TOKENIZER)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return LoadedModel(model.eval(), tokenizer, config, state["step"], training)
