"""Shared by the benchmarks of whole models: most of their options, and the loop over the models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from experiments.models.subject import Subject, load_subject
from experiments.run.config import option, section
from experiments.run.output import OutputConfig, Rows, device_of, dtype_of, results_folder, write_as_measured
from experiments.run.train_config import A_TEXT_SOURCE, LARGEST_SIZE, TEXT_SOURCE, ModelConfig, check_backend_name
from experiments.run.values import A_DEVICE, DEVICE, LARGEST_SEED
from experiments.timing.compare import ALL_METRICS, TimingConfig

log = logging.getLogger(__name__)

SECTION_4 = "the paper, its measurements"
# Held memory is that of one block; and host time takes several calls in a row, whose launches must fit into a queue.
MODEL_METRICS = tuple(metric for metric in ALL_METRICS if metric not in ("held_memory", "host_time"))


@dataclass
class ModelBenchConfig:
    """Options of every benchmark of whole models."""

    checkpoints: list[str] = option(
        [], "run folders, checkpoints, or Hugging Face models; empty: `model` at random", distinct=True
    )
    model: ModelConfig = section(ModelConfig, "shape of the random model", presets="model")
    data: str = option(
        "",
        "text: stdlib, path:... or hf:...; empty: what the model was trained on. Validation split",
        pattern=TEXT_SOURCE,
        wanted=A_TEXT_SOURCE,
    )
    dense: list[Literal["dense_eager", "dense_compiled"]] = option(
        ["dense_eager", "dense_compiled"], "dense forms; the fastest is the baseline", distinct=True
    )
    backends: list[str] = option(
        [],
        "backends of kernels; auto: each layer dense or sparse, as is fastest; empty: every one but dense",
        distinct=True,
        check=check_backend_name,
    )
    metrics: list[str] = option(
        ["throughput", "time", "energy", "peak_memory"],
        "what to measure",
        required=True,
        distinct=True,
        choices=MODEL_METRICS,
    )
    device: str = option(
        "auto", "cpu, cuda, cuda:1, ...; auto: CUDA if there is one", required=True, pattern=DEVICE, wanted=A_DEVICE
    )
    seed: int = option(0, "of random weights and tokens", minimum=0, maximum=LARGEST_SEED)
    timing: TimingConfig = section(TimingConfig, "how long to time a model")
    run: OutputConfig = section(OutputConfig, "where results go")


@dataclass
class SequenceBenchConfig(ModelBenchConfig):
    """Options of a benchmark that runs whole sequences at once."""

    sequence: int = option(
        2048, "tokens of one sequence", unit="tokens", source=SECTION_4, minimum=1, maximum=LARGEST_SIZE
    )


def benchmark(
    config: ModelBenchConfig,
    program: str,
    dtype: str,
    rows_of: Callable[[Subject, torch.device], Iterable[Rows]],
    report: Callable[..., None] | None = None,
) -> None:
    """Write the rows of every model of `config` to `<folder>/rows.csv`.

    Args:
        program: name of the benchmark, for the folder.
        dtype: of the weights, as `dtype_of` takes it.
        rows_of: the rows of one model on a device, as they are measured.
        report: is called with the number of models done, and of all.
    """
    device = device_of(config.device)
    names: list[str] | list[None] = config.checkpoints or [None]

    def parts() -> Iterator[Rows]:
        for done, name in enumerate(names):
            if report:
                report(done, len(names))
            subject = load_subject(name, config.model, device, dtype_of(dtype, device), config.seed)
            log.info("%s: %s", subject.name, subject.columns)
            yield from rows_of(subject, device)

    with results_folder(config, program) as folder:
        write_as_measured(folder, parts(), config)
