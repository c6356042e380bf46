"""The implementation of `experiments.bench_forward`."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from experiments.bench import feedforward
from experiments.bench.decoder import Decoder, decoder_alternatives
from experiments.bench.model_bench import benchmark
from experiments.bench_forward import BenchForwardConfig
from experiments.models.subject import Subject
from experiments.run.output import Rows
from experiments.timing.compare import Absent, Candidate, compare
from experiments.timing.options import TimingConfig
from experiments.timing.plans import AUTO, Name

log = logging.getLogger(__name__)

PROGRAM = "bench_forward"


def model_rows(decoder: Decoder, config: BenchForwardConfig, columns: dict[str, Any]) -> Rows:
    """Rows of the whole decoder, with the plain backends and AUTO.

    Raises:
        CheckFailed: when the hidden states of an alternative are off by more than rounding.
    """
    backends = feedforward.chosen(config.backends, decoder.ids.device)
    whole = [name for name in backends if Name.of(name).plain]
    found = decoder_alternatives(decoder, config.dense, whole, config.check_sequences)
    mean_nnz = statistics.mean(decoder.nonzeros())
    return _compare(found, decoder, config.timing, config, op="model_forward", mean_nnz=mean_nnz, **columns)


def layer_rows(decoder: Decoder, layer: int, config: BenchForwardConfig, columns: dict[str, Any]) -> Rows:
    """Rows of one feed-forward block, on the input that it gets in the model.

    Raises:
        CheckFailed: when an output is off by more than rounding.
    """
    log.info("layer %d of %d", layer, len(decoder.blocks))
    problem, backends = decoder.problem(layer), feedforward.chosen(config.backends, decoder.ids.device)
    own = [name for name in backends if name != AUTO]
    dense = [name for name in config.dense if name in feedforward.DENSE_FORMS]
    found = feedforward.alternatives(problem, dense, own)
    columns = columns | {"layer": layer, "pattern": f"{columns['pattern']}/layer{layer}"}
    mean_nnz = feedforward.mean_nonzeros(problem)
    return _compare(found, decoder, config.layer_timing, config, op="ffn_forward", mean_nnz=mean_nnz, **columns)


def _compare(
    found: list[Candidate | Absent], decoder: Decoder, timing: TimingConfig, config: BenchForwardConfig, **columns: Any
) -> Rows:
    device, tokens = decoder.ids.device, decoder.ids.numel()
    return compare(found, device, timing, config.metrics, tokens=tokens, **columns)


def subject_rows(subject: Subject, config: BenchForwardConfig, device: torch.device) -> Iterator[Rows]:
    """The rows of one model: of the whole decoder, then of each block."""
    ids_BS = subject.text(config.batch, config.sequence, config.seed, config.data)[:, :-1].to(device)
    decoder = Decoder(subject.model, ids_BS)
    columns = {"study": config.run.study, "item": config.run.name(PROGRAM), "pattern": subject.name, **subject.columns}
    if config.whole_model:
        yield model_rows(decoder, config, columns)
    if config.per_layer and decoder.sparse:
        for layer in range(len(decoder.blocks)):
            yield layer_rows(decoder, layer, config, columns)


def main(config: BenchForwardConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    benchmark(config, PROGRAM, config.dtype, lambda subject, device: subject_rows(subject, config, device), report)
