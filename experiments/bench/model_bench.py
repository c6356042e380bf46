"""Shared by the benchmarks of whole models: the loop over the models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from experiments.bench.options import ModelBenchConfig
from experiments.models.subject import Subject, load_subject
from experiments.run.output import Rows, device_of, dtype_of, results_folder, write_as_measured
from experiments.run.train_config import ModelConfig

log = logging.getLogger(__name__)


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
    models: Sequence[str | ModelConfig] = config.checkpoints or [config.model]

    def parts() -> Iterator[Rows]:
        for done, model in enumerate(models):
            if report:
                report(done, len(models))
            subject = load_subject(model, device, dtype_of(dtype, device), config.seed)
            log.info("%s: %s", subject.name, subject.columns)
            yield from rows_of(subject, device)

    write_as_measured(results_folder(config, program), parts(), config)
