"""The implementation of `experiments.bench_training`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from experiments.bench.feedforward import chosen
from experiments.bench.model_bench import benchmark
from experiments.bench.training_step import (
    Form,
    TrainingStep,
    allocation_retries,
    checked,
    forms,
    free_cached_memory,
    largest_batch,
    peak_memory_of,
    usable_memory,
    without_retries,
)
from experiments.bench_training import BenchTrainingConfig
from experiments.models.subject import Subject
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.output import Rows, dtype_of
from experiments.timing.compare import Absent, Candidate, compare
from experiments.timing.plans import TRANSFORMERS

log = logging.getLogger(__name__)

PROGRAM = "bench_training"
READ_FOR_SEARCH = 64  # sequences of text, where the largest micro-batch is searched; more are read if it takes them


class Workload:
    """A subject's training step and its batches.

    Raises:
        CheckpointError: the model is none whose training step this is.
        ConfigError: there is no form to time.
    """

    def __init__(self, subject: Subject, config: BenchTrainingConfig, device: torch.device):
        if not isinstance(subject.model, LlamaForCausalLM):
            got = type(subject.model).__name__
            raise CheckpointError(f"{subject.name}: the training step is that of Llama models, this is a {got}")
        self.subject, self.config, self.device = subject, config, device
        # Read once: finding the text again takes longer than a small step.
        read = max(config.check_sequences, config.micro_batch or READ_FOR_SEARCH)
        self._text = subject.text(read, config.sequence, config.seed, config.data)
        self.step = TrainingStep(subject.model, dtype_of(config.precision, device))
        self.l1 = subject.columns.get("l1") if config.l1 is None else config.l1  # random weights have none
        self.forms = forms(self.step, config.dense, chosen(config.backends, device), self.l1 or 0.0)
        if not self.forms:
            raise ConfigError(f"{subject.name}: nothing to time: its blocks are dense, and dense=[] names no form")
        self._last_largest = 16  # micro-batch, where the search for the next form's starts

    @property
    def can_search(self) -> bool:
        """Whether it can be found out how many sequences fit."""
        return self.device.type == "cuda"

    def columns(self, batch: int) -> dict[str, Any]:
        """Columns that all rows of steps with this micro-batch share."""
        names = {"study": self.config.run.study, "item": self.config.run.name(PROGRAM), "pattern": self.subject.name}
        counted = {"mean_nnz": self.step.mean_nonzeros(self.tokens(batch)), "l1": self.l1}
        return {"op": "model_training", **names, **self.subject.columns, **counted}

    def tokens(self, batch: int) -> Tensor:
        """int64 [batch, sequence + 1], on the device."""
        if len(self._text) < batch:
            self._text = self.subject.text(batch, self.config.sequence, self.config.seed, self.config.data)
        return self._text[:batch].to(self.device)

    def micro_batch(self, form: Form) -> int:
        """The configured one, or the largest with which this form fits."""
        if self.config.micro_batch:
            return self.config.micro_batch
        size = largest_batch(
            lambda batch: peak_memory_of(lambda: self._try(form, batch), self.device),
            usable_memory(self.device),
            self._last_largest,
        )
        self._last_largest = size
        log.info("%s, %s: largest micro-batch %d", self.subject.name, form.name, size)
        return size

    def _try(self, form: Form, batch: int) -> None:
        tokens_BS = self.tokens(batch)
        self.step.prepare(form, tokens_BS)
        for _ in range(2):  # the second finds memory in the pieces that the first left
            self.step.run(form, tokens_BS)
        without_retries(lambda: self.step.run(form, tokens_BS), self.device)


def subject_rows(workload: Workload) -> Iterator[Rows]:
    """The rows of one model: with the micro-batch of the dense forms, then with larger ones, then with one that is
    small enough for the forms with nothing compiled, if they need that.

    Raises:
        CheckFailed: when a result or a gradient of an alternative is off by more than rounding.
        ConfigError: the largest micro-batch would have to be searched on a CPU.
    """
    if not workload.config.micro_batch and not workload.can_search:
        raise ConfigError("micro_batch=0 searches the largest that fits, on CUDA only: give micro_batch")
    check_tokens = workload.tokens(workload.config.check_sequences)
    found = {form: checked(workload.step, form, check_tokens) for form in workload.forms}
    largest = {form: workload.micro_batch(form) for form, one in found.items() if not isinstance(one, Absent)}

    def compared(size: int, sizes_at: Callable[[int], dict[Form, int]]) -> Rows:
        return _that_fits(size, lambda fits: _compare(sizes_at(fits), found, largest, workload), workload)

    dense = [size for form, size in largest.items() if form.plan == "dense"]
    rows = compared(max(dense or largest.values(), default=workload.config.check_sequences), _all_at(found))
    yield rows
    size = rows[0]["tokens"] // workload.config.sequence
    baseline = {form: size for form in found if form.name == rows[0]["baseline"]}
    for form, own_size in largest.items():
        if form.plan != "dense" and own_size > size:
            both = compared(own_size, lambda size, form=form: baseline | {form: size})  # type: ignore[misc]
            yield [row for row in both if (row["backend"], row["plan"]) == (form.name, form.plan)]
    plain = {form: own_size for form, own_size in largest.items() if not form.compiled}
    ours = {form: own_size for form, own_size in plain.items() if form.backend != TRANSFORMERS}
    for some in (ours, plain):  # plain transformers take the fewest
        most = min(some.values(), default=size)
        if most < size and len(some) > 1 and any(form.plan == "dense" for form in some):
            yield compared(most, _all_at(some))
            size = most


def _all_at(some: Iterable[Form]) -> Callable[[int], dict[Form, int]]:
    return lambda size: dict.fromkeys(some, size)


def _that_fits(size: int, rows_at: Callable[[int], Rows], workload: Workload) -> Rows:
    """`rows_at(size)`. With a micro-batch that was searched, of the largest size up to it at which the timing does not
    run out of memory: what fits alone may not fit between other steps, which leave memory in other pieces."""
    while True:
        before = allocation_retries(workload.device)
        try:
            rows = rows_at(size)
            if more := allocation_retries(workload.device) - before:
                name = workload.subject.name
                log.warning("%s: %d allocations were tried again while %d sequences were timed", name, more, size)
            return rows
        except torch.cuda.OutOfMemoryError:
            if size == 1 or workload.config.micro_batch:
                raise
        free_cached_memory()  # outside of the handler, whose traceback would keep the activations alive
        smaller = size - max(1, size // 16)
        log.warning("%s: out of memory while %d sequences were timed, trying %d", workload.subject.name, size, smaller)
        size = smaller


def _compare(
    sizes: Mapping[Form, int],
    found: Mapping[Form, Absent | Callable[..., Candidate]],
    largest: Mapping[Form, int],
    workload: Workload,
) -> Rows:
    """The rows of these forms, each with its number of sequences, of which the baseline has the least; non-zeros are
    those of the most sequences."""
    config, least = workload.config, min(sizes.values())

    def alternative(form: Form, size: int) -> Candidate | Absent:
        made = found[form]
        if isinstance(made, Absent):
            return made
        if largest[form] < size:
            reason = f"out of memory with {size} sequences, {largest[form]} fit"
            return Absent(form.name, form.plan, reason, form.backup)
        return made(workload.tokens(size), size * config.sequence if size > least else None)

    return compare(
        [alternative(form, size) for form, size in sizes.items()],
        workload.device,
        config.timing,
        config.metrics,
        tokens=least * config.sequence,
        **workload.columns(max(sizes.values())),
    )


def main(config: BenchTrainingConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    benchmark(
        config,
        PROGRAM,
        "float32",
        lambda subject, device: subject_rows(Workload(subject, config, device)),
        report,
    )
