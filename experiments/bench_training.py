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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from experiments.bench.options import SECTION_4, SequenceBenchConfig
from experiments.run.config import entry, option
from experiments.run.train_config import LARGEST_SIZE
from experiments.timing.plans import AUTO, WITH_BACKUP
from twell.names import check_name


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
        [],
        "backends of kernels; auto: each layer dense or sparse, as is fastest; with "
        f"{WITH_BACKUP} behind (hopper{WITH_BACKUP}): the paper's hybrid format; empty: every one but dense",
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
        0,
        "sequences of one step; 0: the largest that fits (CUDA)",
        source=SECTION_4,
        minimum=0,
        maximum=LARGEST_SIZE,
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


def main(config: BenchTrainingConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    from experiments.implementation import bench_training

    bench_training.main(config, report)


if __name__ == "__main__":
    entry(main, BenchTrainingConfig)
