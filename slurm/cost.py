"""Estimates what a study will cost: GPU hours, tokens and storage of its trainings.

    python -m slurm.cost study=paper

Throughput is derived, but for the models in `MEASURED`: the number of floating-point operations per second is that of
the measured model nearest in size, sparse kernels are left out, and several GPUs are taken to be as many times as fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.run.config import entry, option, parse
from experiments.run.train_config import ModelConfig, TrainConfig
from experiments.study.definition import load_study

# Tokens per second of one training that has an H200 to itself, with torch.compile, by preset: docs/log/2026-11-22.md
# (21m), and of paper_figures/h200 items 56m and 120m of frontier and 0.5b_backend_dense of kernels_in_training.
MEASURED = {"21m": 1_930_000.0, "56m": 1_061_000.0, "120m": 562_000.0, "0.5b": 162_000.0}
MOST = 10_000_000  # tokens per second that an estimate may say: smaller models wait for the host
# float32 weights and two moments of AdamW.
CHECKPOINT_BYTES = 12
# Of a vocabulary of at most 2^16 entries.
TOKEN_BYTES = 2


@dataclass
class CostConfig:
    """Estimate GPU hours, tokens and storage of a study's trainings."""

    study: str = option("", "name of the study, or its file")


@dataclass(frozen=True)
class Cost:
    """Cost of the trainings of one model: how many, tokens of each, tokens/s of one GPU, GPU hours of each, and bytes
    of the checkpoints that each keeps and of the one that it writes beside them."""

    model: str
    runs: int
    tokens: int
    tokens_per_s: float
    gpu_hours: float
    checkpoint_bytes: int

    @property
    def all_hours(self) -> float:
        """GPU hours of all of them."""
        return self.runs * self.gpu_hours


def flops_per_token(model: ModelConfig, sequence: int) -> int:
    """Operations per token of a dense training step: 6 for each weight (tied embeddings are the output head's), and the
    scores and sums of causal attention, which sees half of the sequence on average."""
    return 6 * model.parameters + 6 * model.layers * model.hidden_size * sequence


def tokens_per_second(model: ModelConfig, sequence: int) -> float:
    """Throughput of one GPU, at the rate of operations of the measured model that is nearest in size."""
    measured = [parse(TrainConfig, [f"model={name}"]) for name in MEASURED]
    nearest = min(measured, key=lambda other: abs(math.log(other.model.parameters / model.parameters)))
    operations = MEASURED[nearest.model.name] * flops_per_token(nearest.model, nearest.training.sequence_length)
    return operations / flops_per_token(model, sequence)


def costs(trainings: Sequence[TrainConfig]) -> list[Cost]:
    """One entry for each model and number of tokens, in the order of their first appearance."""
    alike: dict[tuple[str, int], list[TrainConfig]] = defaultdict(list)
    for training in trainings:
        alike[training.model.name, training.training.steps * training.training.tokens_per_step].append(training)
    models = []
    for (name, tokens), runs in alike.items():
        first = runs[0]
        speed = tokens_per_second(first.model, first.training.sequence_length)
        kept = first.model.parameters * CHECKPOINT_BYTES * (first.run.keep_checkpoints + 1)
        models.append(Cost(name, len(runs), tokens, speed, tokens / speed / 3600, kept))
    return models


def table(models: list[Cost]) -> str:
    """Costs as a table in markdown."""
    columns = ("model", "runs", "tokens of each (1e9)", "tokens/s of one GPU", "GPU hours of each", "GPU hours")
    lines = [f"| {' | '.join(columns)} | checkpoints (GB) |", "|---" * 7 + "|"]
    for cost in models:
        tokens = f"{cost.tokens / 1e9:.{1 if cost.tokens >= 1e9 else 3}f}"
        speed = f"{cost.tokens_per_s:,.0f}" if cost.tokens_per_s <= MOST else "–"
        cells = (cost.model, str(cost.runs), tokens, speed, _hours(cost.gpu_hours, digits=1))
        kept = f"{cost.runs * cost.checkpoint_bytes / 1e9:,.0f}"
        lines.append(f"| {' | '.join(cells)} | {_hours(cost.all_hours)} | {kept} |")
    runs, hours = sum(cost.runs for cost in models), _hours(sum(cost.all_hours for cost in models))
    kept = f"{sum(cost.runs * cost.checkpoint_bytes for cost in models) / 1e9:,.0f}"
    return "\n".join([*lines, f"| all | {runs} | | | | {hours} | {kept} |"])


def _hours(hours: float, digits: int = 0) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:,.{digits}f}"


def study_costs(name: str) -> list[Cost]:
    """Costs of a study's trainings. Raises `ConfigError` as `load_study` does."""
    studies = load_study(name).with_parts()
    return costs([parse(TrainConfig, one.training_arguments(name)) for one in studies for name in one.trainings])


def main(config: CostConfig) -> None:
    """Print the table, and the size of the token files."""
    models = study_costs(config.study)
    print(table(models))
    tokens = {cost.tokens for cost in models}
    print(f"\ntoken files: {sum(tokens) * TOKEN_BYTES / 1e9:,.0f} GB, one for each number of tokens")


if __name__ == "__main__":
    entry(main, CostConfig)
