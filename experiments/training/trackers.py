"""Sends the records of a training to TensorBoard or Weights & Biases. Both packages are optional; metrics.jsonl remains
the source of all tables and figures."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.run.config import to_dict
from experiments.run.errors import ConfigError
from experiments.run.files import sha256_json
from experiments.run.train_config import TrainConfig
from experiments.training.metrics import Record

NO_METRICS = ("step", "tokens", "seconds", "backend")
Write = Callable[[int, dict[str, float]], None]  # of a step and its numbers by name


@contextlib.contextmanager
def _tensorboard(config: TrainConfig, step: int) -> Iterator[Write]:
    """Event files in `<run's folder>/tensorboard`. When a run continues, TensorBoard hides repeated steps."""
    from torch.utils.tensorboard import SummaryWriter

    folder = str(config.run.folder / "tensorboard")
    with SummaryWriter(folder, purge_step=step + 1 if step else None) as writer:

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextlib.contextmanager
def _wandb(config: TrainConfig, step: int) -> Iterator[Write]:
    """A run in the project with the study's name. Account, entity and offline mode come from WANDB_API_KEY,
    WANDB_ENTITY and WANDB_MODE, as W&B documents them; our files do not contain them."""
    folder = config.run.folder.absolute()
    run = importlib.import_module("wandb").init(
        project=config.run.study,
        name=config.run.item,
        id=sha256_json([str(folder), config.run.study, config.run.item])[:16],  # the same run after a restart
        resume="allow",
        dir=str(folder),
        config=to_dict(config),
    )
    try:
        yield lambda step, values: run.log(values, step=step)
    finally:
        run.finish()


# By the name in run.log, which is that of the package that it needs; `step`: optimizer steps done before.
TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}


def check_trackers(names: Sequence[str]) -> None:
    """Raises:
    ConfigError: a package that one of them needs is not installed.
    """
    for package in names:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"run.log=[{package}] needs the package {package}: python -m pip install {package} ({error})"
            ) from error


@contextlib.contextmanager
def trackers(config: TrainConfig, step: int) -> Iterator[Callable[[Record], None]]:
    """Yields a function that sends a record to every tracker in `run.log`. Everything is flushed when the block ends.

    Args:
        step: optimizer steps done before.
    """
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(TRACKERS[name](config, step)) for name in config.run.log]

        def send(record: Record) -> None:
            for write in writers:
                write(record["step"], scalars(record))

        yield send


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record, by name: those of the whole model, means over layers, and one for each layer
    (`nonzeros/layer_3`)."""
    found: dict[str, float] = {"sparse_layers": sum(backend != "dense" for backend in record["backend"])}
    for name, value in record.items():
        if name in NO_METRICS:
            continue
        if isinstance(value, list):
            found[name] = sum(value) / len(value)
            found |= {f"{name}/layer_{layer}": of_layer for layer, of_layer in enumerate(value)}
        else:
            found[name] = value
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
