"""Train a model of the paper.

    python -m experiments.train model=0.5b sparsity.l1=2e-5 data=stdlib
    torchrun --nproc-per-node 8 -m experiments.train model=1.5b data=hf:HuggingFaceTB/smollm-corpus:fineweb-edu-dedup

The run's folder gets config.yaml, environment.json, metrics.jsonl, nonzeros_in_training.parquet, checkpoints/,
tokenizer/ and, at the end, rows.csv.
When it is started again, a run continues from its newest complete checkpoint, and a finished run returns at once.
`--help` lists every option. Exit codes: 0 done, 1 failed, 2 wrong configuration, 85 stopped after writing a checkpoint
(torchrun itself always turns them into 1).
"""

from __future__ import annotations

from experiments.run.config import entry
from experiments.run.train_config import TrainConfig


def main(config: TrainConfig) -> None:
    """Train, or continue, the run of `config`; returns when it is finished."""
    from experiments.implementation import train

    train.main(config)


def by_hand(config: TrainConfig) -> None:
    """As `main`, in a folder in which no other process may train meanwhile."""
    from experiments.implementation import train

    train.by_hand(config)


if __name__ == "__main__":
    entry(by_hand, TrainConfig)
