"""Time the forward of whole models, and of each of their feed-forward blocks, dense against the sparse backends.

    python -m experiments.bench_forward checkpoints=[runs/demo/relu,runs/demo/relu_l1_1e-4] batch=4 sequence=256
    python -m experiments.bench_forward model=0.5b backends=[dense]          # random weights

As in the paper: the decoder without the output head, on 64 sequences of 2048 tokens, throughput in tokens/ms and energy
in mJ/token (figure 4, tables 1 and 3). The blocks are timed one by one on the inputs that they get in the model
(figures 6, 10 and 11). Text is the model's own validation split, since sparsity depends on it. Hidden states are
compared with float32 before anything is timed. With `backends=[hopper,auto]` the decoder is also measured with each
block dense or sparse as is fastest for it (`twell.autotune`; plan by_layer). Where a compiled dense form is measured,
each backend also is with the rest of the decoder compiled (`hopper_compiled`).

A backend with +hot (hot neurons by index), +ordered (neurons sorted by firing rate) or +live (sorted, without those
that fire for none of the tokens) behind its name is timed on the blocks alone. `backends=[hopper,hopper+hot,
hopper+ordered,hopper+live,dense+live]` gives what figure E shows. What +live leaves out is silent on this text; on
another it need not be. dense+live is the control: what leaving these neurons out gives to dense products.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from experiments.bench.options import (
    DENSE_FORMS,
    FP8,
    MODEL_METRICS,
    OWN_DENSE,
    SECTION_4,
    SPARSE_BACKENDS,
    SequenceBenchConfig,
    check_form,
)
from experiments.run.config import entry, option, section
from experiments.run.errors import ConfigError
from experiments.run.output import Rows
from experiments.run.train_config import LARGEST_SIZE
from experiments.timing.options import TimingConfig
from experiments.timing.plans import AUTO, WITH_HOT, WITH_LIVE, WITH_ORDERED, Name

if TYPE_CHECKING:
    import torch

    from experiments.models.subject import Subject

PROGRAM = "bench_forward"
log = logging.getLogger(__name__)


def _check_name(name: str) -> None:
    """Raise `ValueError` for what is neither AUTO nor the name of a form of a block's forward."""
    if name == AUTO:
        return
    check_form(name)
    if Name.of(name).backup:
        raise ValueError(f"only training has a dense backup, got {name!r}")


@dataclass
class BenchForwardConfig(SequenceBenchConfig):
    """Time whole decoders (without the head) and their feed-forward blocks, forward."""

    batch: int = option(64, "sequences in one forward", source=SECTION_4, minimum=1, maximum=LARGEST_SIZE)
    random_ids: bool = option(
        False, "also on uniformly random token ids, on which a trained model has other non-zeros than on text"
    )
    backends: list[str] = option(
        SPARSE_BACKENDS,
        "backends of kernels; auto: each layer dense or sparse, as is fastest; of blocks alone also with "
        f"{WITH_HOT}, {WITH_ORDERED} or {WITH_LIVE} behind",
        distinct=True,
        check=_check_name,
    )
    dense: list[Literal["dense_transformers", "dense_eager", "dense_compiled", "dense_twell", "dense_fp8"]] = option(  # type: ignore[assignment]
        ["dense_transformers", "dense_eager", "dense_compiled", OWN_DENSE],
        "dense forms (of a whole model: as transformers computes, with this package's dense block, both compiled, "
        f"compiled with FP8 blocks), of blocks always {OWN_DENSE}; the fastest is the baseline, dense_fp8, not exact, "
        "never",
        distinct=True,
    )
    per_layer: bool = option(True, "also time every feed-forward block alone, on its real input")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    layer_timing: TimingConfig = section(TimingConfig, "how long to time a block")

    def __post_init__(self) -> None:
        of_blocks = [name for name in self.backends if not Name.of(name).plain]
        if of_blocks and not self.per_layer:
            raise ConfigError(f"{', '.join(of_blocks)}: of blocks alone, so per_layer must be true")


def subject_rows(subject: Subject, config: BenchForwardConfig, device: torch.device) -> Iterator[Rows]:
    """The rows of one model: of the whole decoder, with the plain backends and AUTO, then of each feed-forward block,
    on the input that it gets in the model.

    Raises:
        CheckFailed: an output is off by more than rounding.
    """
    size = config.batch, config.sequence, config.seed
    yield from _rows(subject, subject.text(*size, config.data), "", config, device)
    if config.random_ids:
        yield from _rows(subject, subject.random_ids(*size), "_random_ids", config, device)


def _rows(
    subject: Subject, ids_BS: torch.Tensor, on: str, config: BenchForwardConfig, device: torch.device
) -> Iterator[Rows]:
    from experiments.bench import feedforward
    from experiments.bench.decoder import Decoder, decoder_alternatives
    from experiments.timing.compare import compare

    ids_BS = ids_BS[:, :-1].to(device)
    decoder = Decoder(subject.model, ids_BS)
    name = subject.name
    columns = {**config.run.columns(PROGRAM), **subject.columns, "tokens": ids_BS.numel()}
    plain = [name for name in config.backends if Name.of(name).plain]
    alternatives = decoder_alternatives(decoder, config.dense, plain)
    columns |= {"op": f"model_forward{on}", "pattern": name, "mean_nnz": statistics.mean(decoder.nonzeros())}
    yield compare(alternatives, device, config.timing, MODEL_METRICS, **columns)
    dense = list(dict.fromkeys((OWN_DENSE, *(name for name in config.dense if name in (*DENSE_FORMS, FP8)))))
    for layer in range(len(decoder.blocks)) if config.per_layer and decoder.sparse else ():
        log.info("layer %d of %d", layer, len(decoder.blocks))
        problem = decoder.problem(layer)
        alternatives = feedforward.alternatives(problem, dense, [name for name in config.backends if name != AUTO])
        columns |= {"op": f"ffn_forward{on}", "pattern": f"{name}/layer{layer}", "layer": layer}
        columns["mean_nnz"] = feedforward.mean_nonzeros(problem)
        yield compare(alternatives, device, config.layer_timing, MODEL_METRICS, **columns)


def main(config: BenchForwardConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    from experiments.bench.model_bench import benchmark

    benchmark(config, PROGRAM, config.dtype, lambda subject, device: subject_rows(subject, config, device), report)


if __name__ == "__main__":
    entry(main, BenchForwardConfig)
