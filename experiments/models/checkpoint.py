"""Checkpoints of a run: `checkpoints/step_00000100/` with model.safetensors, optimizer.safetensors and state.json.

A checkpoint is written under a temporary name, synced and renamed, so it is complete or absent. `state.json` holds the
step, the data position, the random states, the options that determine the results, size and SHA-256 of the other
files, and a SHA-256 of all this, so that damage is found before anything is used. Copies of the run's records are there
too, so that a run that continues has those that belong to the step. Nothing in a checkpoint is pickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.data.tokenizer import named_tokenizer
from experiments.models.llama import llama_config, skeleton
from experiments.models.pretrained import LoadedModel, fill, load_pretrained
from experiments.run.config import load_config, nearest
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.files import atomic_folder, delete_folder, sha256_file, sha256_json, write_json
from experiments.run.train_config import TrainConfig, science, science_differences
from experiments.run.values import in_one_line, shown
from twell.released import CONFIG as MODEL_CONFIG

FORMAT = 2
STATE = "state.json"
CHECKSUM = "sha256"
TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")
CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
Found = TypeVar("Found")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint: tensors by name, JSON values, and files of the run's folder by name."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]
    records: Mapping[str, bytes] = field(default_factory=dict)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint, *, keep: int) -> None:
    """Write a checkpoint (replacing a damaged one of the same step) and delete all older ones but the last `keep` - 1.

    Checkpoints of later steps are deleted as well: a run reaches this step again only if they are damaged. Raises
    `StorageError` if it does not fit on the disk; older checkpoints are then unchanged, and no part of it is left.
    """
    path = checkpoint_path(run_dir, checkpoint.step)
    with atomic_folder(path, "checkpoint", replace=True) as folder:
        for name, tensors in zip(TENSOR_FILES, (checkpoint.model, checkpoint.optimizer), strict=True):
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, folder / name)
        for name, content in checkpoint.records.items():
            (folder / name).write_bytes(content)
        paths = [folder / name for name in (*TENSOR_FILES, *checkpoint.records)]
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths}
        state = {"format": FORMAT, "step": checkpoint.step, "files": files, **checkpoint.state}
        write_json(folder / STATE, {**state, CHECKSUM: sha256_json(state)})
    folders = _folders(run_dir)
    kept = folders[folders.index(path) :][:keep]
    for other in folders:
        if other not in kept:
            delete_folder(other)


def _folders(run_dir: Path) -> list[Path]:
    """The folders of checkpoints, newest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def remove_leftovers(run_dir: Path) -> None:
    """Delete incomplete checkpoints of a killed process. Only the process that writes to the folder may call this."""
    for path in (run_dir / "checkpoints").glob(".tmp-*"):
        shutil.rmtree(path)


def check(path: Path, files: Sequence[str] = ()) -> dict[str, Any]:
    """The state of a checkpoint after checking all of its files, or these. Raises `CheckpointError` for damage."""
    state = read_state(path)
    for name in files or state["files"]:
        file, wanted = path / name, state["files"][name]
        try:
            if not file.is_file():
                raise CheckpointError(f"{file} is missing")
            size = file.stat().st_size
            if size != wanted["bytes"]:
                raise CheckpointError(f"{file} is truncated: {size} bytes, wanted {wanted['bytes']}")
            if sha256_file(file) != wanted["sha256"]:
                raise CheckpointError(f"{file} is damaged: its checksum is not the one in {STATE}")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The checked state of a checkpoint; its tensors are not checked. Raises `CheckpointError` for damage."""
    try:
        state = json.loads((path / STATE).read_text())
        wanted = state.pop(CHECKSUM, None)
        version, step = state["format"], state["step"]
        for name in TENSOR_FILES:
            _ = state["files"][name]["bytes"], state["files"][name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path / STATE} is missing or damaged: {in_one_line(error)}") from error
    if wanted != sha256_json(state):
        raise CheckpointError(f"{path / STATE} is damaged: its checksum is not that of its content")
    if version != FORMAT:
        raise CheckpointError(f"{path} is of format {version}, wanted {FORMAT}")
    named = re.fullmatch(r"step_(\d{8,})", path.resolve().name)
    if named and step != int(named[1]):
        raise CheckpointError(f"{path / STATE} is damaged: its step is {shown(step)}")
    if "science" in state:  # an option that was not there then had its default
        state["science"] = science(TrainConfig()) | state["science"]
    return state


def newest_state(run_dir: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint with an undamaged state; None if there is none."""
    for path in _folders(run_dir):
        with contextlib.suppress(CheckpointError):
            return read_state(path)
    return None


def newest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest undamaged checkpoint of a run, or None. Damaged ones are reported (as warnings) and skipped."""
    found = _newest(Path(run_dir), check)
    return found and found[0]


def read_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint and read it into host memory. Raises `CheckpointError` if it is damaged."""
    state = check(path)
    model, optimizer = (_load_tensors(path / name) for name in TENSOR_FILES)
    records = {name: (path / name).read_bytes() for name in state["files"] if name not in TENSOR_FILES}
    return Checkpoint(state["step"], model, optimizer, state, records)


def _load_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is missing or damaged: {in_one_line(error)}") from error


def read_newest(run_dir: Path) -> Checkpoint | None:
    """The content of the newest undamaged checkpoint; None if there is none. Damaged ones are reported and skipped."""
    found = _newest(run_dir, read_checkpoint)
    return found and found[1]


def _newest(run_dir: Path, read: Callable[[Path], Found]) -> tuple[Path, Found] | None:
    for path in _folders(run_dir):
        try:
            return path, read(path)
        except CheckpointError as error:
            log.warning("skipping a damaged checkpoint: %s", error)
    return None


def has_checkpoints(run_dir: Path) -> bool:
    """Whether there is any, whole or damaged."""
    return bool(_folders(run_dir))


@torch.no_grad()
def load_parameters(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model's parameters. Raises `CheckpointError` if they belong to another model."""
    parameters = dict(model.named_parameters())
    wanted, found = ({name: (t.shape, t.dtype) for name, t in some.items()} for some in (parameters, tensors))
    if different := sorted({name for name, _ in wanted.items() ^ found.items()}):
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(different[:5])} differ")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


# --- models to use ----------------------------------------------------------------------------------------------------


def load_trained(
    where: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """A model from a run folder (its newest whole checkpoint), one checkpoint, a Hugging Face folder, or the hub.

    `dtype=None` keeps the stored dtype (float32 for our runs). Raises `CheckpointError` if there is no model or it is
    damaged.
    """
    path = Path(where)
    if os.path.isfile(path / CONFIG):  # noqa: PTH113 (of a name that is too long, Path raises)
        newest = _newest(path, _check_model)
        if newest is None:
            raise CheckpointError(f"{path} is a run without a whole checkpoint")
        return _load_run(path, *newest, device, dtype)
    if os.path.isfile(path / STATE):  # noqa: PTH113
        return _load_run(path.resolve().parents[1], path, _check_model(path), device, dtype)
    if os.path.isdir(path.parent) and path.parent != Path() and not os.path.exists(path):  # noqa: PTH110, PTH112
        beside = sorted(other.name for other in path.parent.iterdir())
        raise CheckpointError(f"there is no {path}{nearest(path.name, beside)}")
    if os.path.isdir(path) and not os.path.exists(path / MODEL_CONFIG):  # noqa: PTH110, PTH112
        raise CheckpointError(f"{path} is neither a run (no {CONFIG}) nor a checkpoint or model (no {MODEL_CONFIG})")
    return load_pretrained(where, device=device, dtype=dtype)


def _check_model(path: Path) -> dict[str, Any]:
    """The state of a checkpoint. Its optimizer, twice as large as the model, is neither read nor checked."""
    return check(path, TENSOR_FILES[:1])


def _load_run(
    run_dir: Path, path: Path, state: dict[str, Any], device: torch.device | str, dtype: torch.dtype | None
) -> LoadedModel:
    try:
        training = load_config(TrainConfig, run_dir / CONFIG)
    except ConfigError as error:
        raise CheckpointError(f"{run_dir}: {error}") from error
    if differences := science_differences(state.get("science"), science(training)):
        raise CheckpointError(f"{path} does not belong to the run that {run_dir / CONFIG} describes ({differences})")
    config = training.model
    tensors = _load_tensors(path / TENSOR_FILES[0], device)
    tensors = {name: tensor if dtype is None else tensor.to(dtype) for name, tensor in tensors.items()}
    model = skeleton(llama_config(config), activation=config.activation, gated=config.gated)
    fill(model, tensors, device, str(path))
    tokenizer = named_tokenizer(run_dir / TOKENIZER)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    return LoadedModel(model.eval(), tokenizer, config, state["step"], training, state.get("source"))
