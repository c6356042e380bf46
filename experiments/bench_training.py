"""Time a training step of whole models: forward, backward, clipping and optimizer, dense against the sparse backends.

    python -m experiments.bench_training checkpoints=[runs/demo/relu,runs/demo/relu_l1_1e-4] micro_batch=8
    python -m experiments.bench_training model=0.5b backends=[dense]        # random weights, largest micro-batch

As in the paper (table 1, figures 5 and 12): sequences of 2048 tokens, throughput in tokens/ms, peak memory, energy.
With `micro_batch=0` the largest that fits is searched, without allocations that have to be tried again: all are
compared at the largest of the dense forms; an alternative that takes a larger one is measured there too (`tokens` of
its rows says so), as in table 1's last line.
Forms with nothing compiled take fewer: they are also compared with each other at the largest that all of them take,
which is the paper's comparison, without plain transformers, which take the fewest, and with them.
Where a compiled dense form is measured, each backend also is with the layers around it compiled (`hopper_compiled`).
With `backends=[auto]` each layer is dense or sparse as a training would choose (plan by_layer); with `hopper+backup`
every layer has the paper's hybrid format, an eighth of the tokens being its dense backup. Before anything is timed,
each block is compared with float64 as the alternative runs it, and the loss and every gradient of the model with
float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments.bench.options import MODEL_METRICS, SECTION_4, SPARSE_BACKENDS, SequenceBenchConfig
from experiments.run.config import entry, option
from experiments.run.errors import CheckpointError, ConfigError
from experiments.run.output import Rows, dtype_of
from experiments.run.train_config import LARGEST_SIZE
from experiments.timing.plans import AUTO, TRANSFORMERS, WITH_BACKUP
from twell.names import check_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from experiments.bench.training_step import Form
    from experiments.models.subject import Subject
    from experiments.timing.compare import Absent, Candidate

PROGRAM = "bench_training"
READ_FOR_SEARCH = 64  # sequences of text, where the largest micro-batch is searched; more are read if it takes them
log = logging.getLogger(__name__)


def _check_name(name: str) -> None:
    """Raise `ValueError` for what is neither AUTO nor the name of a backend, alone or with WITH_BACKUP behind it."""
    backend = name.removesuffix(WITH_BACKUP)
    check_name(backend)
    if backend != name and backend in (AUTO, "dense"):
        raise ValueError(f"only a sparse backend has a dense backup, got {name!r}")


@dataclass
class BenchTrainingConfig(SequenceBenchConfig):
    """Time training steps of whole models."""

    backends: list[str] = option(
        [f"hopper{WITH_BACKUP}", *SPARSE_BACKENDS],
        "backends of kernels; auto: each layer dense or sparse, as is fastest; with "
        f"{WITH_BACKUP} behind (hopper{WITH_BACKUP}): an eighth of the tokens dense, as in the paper",
        distinct=True,
        check=_check_name,
    )
    dense: list[Literal["dense_transformers", "dense_eager", "dense_compiled", "dense_compiled_layers"]] = option(  # type: ignore[assignment]
        ["dense_transformers", "dense_eager", "dense_compiled", "dense_compiled_layers"],
        "dense forms (as transformers computes, with this package's dense block, the whole model compiled, or layer by "
        "layer); the fastest is the baseline",
        distinct=True,
    )
    l1: float | None = option(
        None, "coefficient of the L1 term in the backends' step; null: that of the training", minimum=0
    )
    micro_batch: int = option(
        0, "sequences of one step; 0: the largest that fits (CUDA)", source=SECTION_4, minimum=0, maximum=LARGEST_SIZE
    )
    check_sequences: int = option(
        1,
        "sequences on which gradients are compared with float32: with fewer than 2,000 tokens, rounding dominates",
        minimum=1,
        maximum=LARGEST_SIZE,
    )
    precision: Literal["auto", "bfloat16", "float32"] = option(
        "auto", "of the products (autocast); auto: bfloat16 on a GPU, float32 on a CPU"
    )


class Workload:
    """A subject's training step and its batches.

    Raises:
        CheckpointError: the model is none whose training step this is.
        ConfigError: there is no form to time.
    """

    def __init__(self, subject: Subject, config: BenchTrainingConfig, device: torch.device):
        from transformers import LlamaForCausalLM

        from experiments.bench.training_step import TrainingStep, forms

        if not isinstance(subject.model, LlamaForCausalLM):
            got = type(subject.model).__name__
            raise CheckpointError(f"{subject.name}: the training step is that of Llama models, this is a {got}")
        self.subject, self.config, self.device = subject, config, device
        # Read once: finding the text again takes longer than a small step.
        read = max(config.check_sequences, config.micro_batch or READ_FOR_SEARCH)
        self._text = subject.text(read, config.sequence, config.seed, config.data)
        self.step = TrainingStep(subject.model, dtype_of(config.precision, device))
        self.l1 = subject.columns.get("l1") if config.l1 is None else config.l1  # random weights have none
        self.forms = forms(self.step, config.dense, config.backends, self.l1 or 0.0)
        if not self.forms:
            raise ConfigError(f"{subject.name}: nothing to time: its blocks are dense, and dense=[] names no form")
        self._last_largest = 16  # micro-batch, where the search for the next form's starts

    @property
    def can_search(self) -> bool:
        """Whether it can be found out how many sequences fit."""
        return self.device.type == "cuda"

    def columns(self, batch: int) -> dict[str, Any]:
        """Columns that all rows of steps with this micro-batch share."""
        names = {**self.config.run.columns(PROGRAM), "pattern": self.subject.name}
        counted = {"mean_nnz": self.step.mean_nonzeros(self.tokens(batch)), "l1": self.l1}
        return {"op": "model_training", **names, **self.subject.columns, **counted}

    def tokens(self, batch: int) -> Tensor:
        """int64 [batch, sequence + 1], on the device."""
        if len(self._text) < batch:
            self._text = self.subject.text(batch, self.config.sequence, self.config.seed, self.config.data)
        return self._text[:batch].to(self.device)

    def micro_batch(self, form: Form) -> int:
        """The configured one, or the largest with which this form fits."""
        from experiments.bench.training_step import largest_batch, peak_memory_of, usable_memory

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
        from experiments.bench.training_step import without_retries

        tokens_BS = self.tokens(batch)
        self.step.prepare(form, tokens_BS, roughly=True)  # to choose takes longer than the step
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
    from experiments.bench.training_step import checked
    from experiments.timing.compare import Absent

    if not workload.config.micro_batch and not workload.can_search:
        raise ConfigError("micro_batch=0 searches the largest that fits, on CUDA only: give micro_batch")
    check_tokens = workload.tokens(workload.config.check_sequences)
    makers = {form: checked(workload.step, form, check_tokens) for form in workload.forms}
    largest = {form: workload.micro_batch(form) for form, make in makers.items() if not isinstance(make, Absent)}

    def compared(size: int, sizes_at: Callable[[int], dict[Form, int]]) -> Rows:
        return _that_fits(size, lambda fits: _compare(sizes_at(fits), makers, largest, workload), workload)

    dense = [size for form, size in largest.items() if form.plan == "dense"]
    rows = compared(max(dense or largest.values(), default=workload.config.check_sequences), _all_at(makers))
    yield rows
    size = rows[0]["tokens"] // workload.config.sequence
    baseline = {form: size for form in makers if form.name == rows[0]["baseline"]}
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
    import torch

    from experiments.bench.training_step import allocation_retries, free_cached_memory

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
    makers: Mapping[Form, Absent | Callable[..., Candidate]],
    largest: Mapping[Form, int],
    workload: Workload,
) -> Rows:
    """The rows of these forms, each with its number of sequences, of which the baseline has the least; non-zeros are
    those of the most sequences."""
    from experiments.timing.compare import Absent, compare

    config, least = workload.config, min(sizes.values())

    def alternative(form: Form, size: int) -> Candidate | Absent:
        make = makers[form]
        if isinstance(make, Absent):
            return make
        if largest[form] < size:
            reason = f"out of memory with {size} sequences, {largest[form]} fit"
            return Absent(form.name, form.plan, reason, form.backup)
        return make(workload.tokens(size), size * config.sequence if size > least else None)

    return compare(
        [alternative(form, size) for form, size in sizes.items()],
        workload.device,
        config.timing,
        MODEL_METRICS,
        tokens=least * config.sequence,
        **workload.columns(max(sizes.values())),
    )


def main(config: BenchTrainingConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    from experiments.bench.model_bench import benchmark

    benchmark(
        config, PROGRAM, "float32", lambda subject, device: subject_rows(Workload(subject, config, device)), report
    )


if __name__ == "__main__":
    entry(main, BenchTrainingConfig)
