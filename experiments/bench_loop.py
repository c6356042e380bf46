"""Measures what our training loop costs compared with a bare torch loop of the same model.

    python -m experiments.bench_loop model=demo sparsity.l1=1e-4 out=runs/local/bench_loop

Both loops train transformers' Llama from the same weights on the same tokens with the same optimizer. The bare one has
plain torch modules for the feed-forward blocks, its tokens in memory, writes no file, and computes the L1 term only if
it has a coefficient. Ours is the one of `experiments.train`: activity of every neuron, non-zeros, logging, the check
for NaN, the order of the data. The two loops alternate step by step, so that whatever slows the machine slows both, and
they must reach the same losses. The result is the ratio of their times over rounds of `run.log_every` steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from experiments.run.config import entry, option, section
from experiments.run.train_config import (
    MOVED,
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SparsityConfig,
    TrainingConfig,
)


@dataclass
class BenchLoopConfig:
    """Measure what our training loop costs over a bare torch loop of the same model."""

    MOVED: ClassVar[dict[str, str]] = MOVED

    model: ModelConfig = section(ModelConfig, "what is trained", presets="model")
    data: DataConfig = section(DataConfig, "what it is trained on", short="source")
    training: TrainingConfig = section(TrainingConfig, "steps are those of each loop, after one that is not counted")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW, schedule, clipping")
    sparsity: SparsityConfig = section(SparsityConfig, "L1 term, dead neurons")
    execution: ExecutionConfig = section(ExecutionConfig, "as in training")
    run: RunConfig = section(
        RunConfig,
        "study: of the rows; log_every: steps of one round, in which ours logs once; the rest has no effect",
    )
    out: str = option("runs/local/bench_loop", "folder of the result rows", required=True)


def main(config: BenchLoopConfig) -> None:
    """Measure, print, and write rows.csv in `config.out`. Raises `RunError` when the losses of the loops differ."""
    from experiments.implementation import bench_loop

    bench_loop.main(config)


if __name__ == "__main__":
    entry(main, BenchLoopConfig)
