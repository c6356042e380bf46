"""Shared by the benchmarks of whole models: most of their options, and the loop over the models."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from experiments.models.subject import Subject, load_subject
from experiments.run.config import option, save_config, section
from experiments.run.errors import ConfigError
from experiments.run.output import OutputConfig, device_of
from experiments.run.results import write_rows
from experiments.run.train_config import ModelConfig
from experiments.timing.compare import TimingConfig
from kernels.registry import check_name

log = logging.getLogger(__name__)

SECTION_4 = "the paper, its measurements"
Rows = list[dict[str, Any]]


@dataclass
class ModelBenchConfig:
    """Options of every benchmark of whole models."""

    checkpoints: list[str] = option([], "run folders, checkpoints, or Hugging Face models; empty: `model` at random")
    model: ModelConfig = section(ModelConfig, "shape of the random model", presets="model")
    data: str = option("", "text: stdlib, path:... or hf:...; empty: what the model was trained on. Validation split")
    sequence: int = option(2048, "tokens of one sequence", unit="tokens", source=SECTION_4)
    dense: list[Literal["dense_eager", "dense_compiled"]] = option(
        ["dense_eager", "dense_compiled"], "dense forms; the fastest is the baseline"
    )
    backends: list[str] = option(
        [], "backends of kernels; auto: each layer dense or sparse, as is fastest; empty: every one but dense"
    )
    metrics: list[str] = option(["throughput", "time", "energy", "peak_memory"], "what to measure")
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto: CUDA if there is one")
    seed: int = option(0, "of random weights and tokens")
    timing: TimingConfig = section(TimingConfig, "how long to time a model")
    run: OutputConfig = section(OutputConfig, "where results go")

    def __post_init__(self) -> None:
        for name in self.backends:
            try:
                check_name(name)
            except ValueError as error:
                raise ConfigError(f"backends: {error}") from error


def benchmark(
    config: ModelBenchConfig,
    program: str,
    dtype: torch.dtype,
    rows_of: Callable[[Subject, torch.device], Rows],
    report: Callable[..., None] | None = None,
) -> None:
    """Write the rows of every model of `config` to `<folder>/rows.csv`.

    Args:
        program: name of the benchmark, for the folder.
        dtype: of the weights.
        rows_of: all rows of one model on a device.
        report: is called with the number of models done, and of all.
    """
    device, folder = device_of(config.device), config.run.folder(program)
    save_config(config, folder / "config.yaml")
    names: list[str] | list[None] = config.checkpoints or [None]
    rows: Rows = []
    for done, name in enumerate(names):
        if report:
            report(done, len(names))
        subject = load_subject(name, config.model, device, dtype, config.seed)
        log.info("%s: %s", subject.name, subject.columns)
        rows += rows_of(subject, device)
    write_rows(folder / "rows.csv", rows)
    log.info("%d rows in %s", len(rows), folder / "rows.csv")
