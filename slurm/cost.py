"""Estimates what a study will cost: GPU hours, tokens and storage of its trainings.

    python -m slurm.cost study=paper

Throughput is derived, but for the models in `MEASURED`: the number of floating-point operations per second is that of
the measured model nearest in size, sparse kernels are left out, and several GPUs are taken to be as many times as fast.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from experiments.run.config import entry, option, parse
from experiments.run.train_config import ModelConfig, TrainConfig
from experiments.study.definition import load_study

# Tokens per second of one training that has an H200 to itself, with torch.compile, by preset: docs/log/2026-11-22.md
# (21m), and item h200/real_dense_s0 of paper_figures/h200 (0.5b).
MEASURED = {"21m": 1_930_000.0, "0.5b": 166_000.0}
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
    of the checkpoints that each keeps."""

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


def parameters(model: ModelConfig) -> int:
    """Weights of the matrices: attention, feed-forward blocks, and the embedding once."""
    head = model.hidden_size // model.attention_heads
    attention = model.hidden_size * head * 2 * (model.attention_heads + model.key_value_heads)
    feed_forward = (3 if model.gated else 2) * model.hidden_size * model.intermediate_size
    return model.layers * (attention + feed_forward) + model.vocab_size * model.hidden_size


def flops_per_token(model: ModelConfig, sequence: int) -> int:
    """Operations per token of a dense training step: 6 for each weight (the embedding counts as output head), and the
    scores and sums of causal attention, which sees half of the sequence on average."""
    return 6 * parameters(model) + 6 * model.layers * model.hidden_size * sequence


def tokens_per_second(model: ModelConfig, sequence: int) -> float:
    """Throughput of one GPU, at the rate of operations of the measured model that is nearest in size."""

    def distance(one: TrainConfig) -> float:
        return abs(math.log(parameters(one.model) / parameters(model)))

    nearest = min((parse(TrainConfig, [f"model={name}"]) for name in MEASURED), key=distance)
    operations = MEASURED[nearest.model.name] * flops_per_token(nearest.model, nearest.training.sequence_length)
    return operations / flops_per_token(model, sequence)


def costs(trainings: list[TrainConfig]) -> list[Cost]:
    """One entry for each model and number of tokens, in the order of their first appearance."""
    alike: dict[tuple[str, int], list[TrainConfig]] = defaultdict(list)
    for training in trainings:
        alike[training.model.name, training.training.steps * training.training.tokens_per_step].append(training)
    return [_cost(name, runs) for (name, _), runs in alike.items()]


def _cost(name: str, runs: list[TrainConfig]) -> Cost:
    first = runs[0]
    tokens = first.training.steps * first.training.tokens_per_step
    speed = tokens_per_second(first.model, first.training.sequence_length)
    kept = parameters(first.model) * CHECKPOINT_BYTES * first.run.keep_checkpoints
    return Cost(name, len(runs), tokens, speed, tokens / speed / 3600, kept)


def table(found: list[Cost]) -> str:
    """Costs as a table in markdown."""
    columns = ("model", "runs", "tokens of each (1e9)", "tokens/s of one GPU", "GPU hours of each", "GPU hours")
    lines = [f"| {' | '.join(columns)} | checkpoints (GB) |", "|---" * 7 + "|"]
    for one in found:
        speed, kept = f"{one.tokens_per_s:,.0f}", one.runs * one.checkpoint_bytes / 1e9
        hours = f"{_hours(one.gpu_hours)} | {_hours(one.all_hours, digits=0)}"
        lines.append(f"| {one.model} | {one.runs} | {_billions(one.tokens)} | {speed} | {hours} | {kept:,.0f} |")
    total, kept = sum(one.all_hours for one in found), sum(one.runs * one.checkpoint_bytes for one in found) / 1e9
    lines.append(f"| all | {sum(one.runs for one in found)} | | | | {_hours(total, digits=0)} | {kept:,.0f} |")
    return "\n".join(lines)


def _hours(hours: float, digits: int = 1) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:,.{digits}f}"


def _billions(tokens: int) -> str:
    return f"{tokens / 1e9:.1f}" if tokens >= 1e9 else f"{tokens / 1e9:.3f}"


def study_costs(name: str) -> list[Cost]:
    """Costs of a study's trainings. Raises `ConfigError` as `load_study` does."""
    studies = load_study(name).with_parts()
    return costs([parse(TrainConfig, one.training_arguments(name)) for one in studies for name in one.trainings])


def main(config: CostConfig) -> None:
    """Print the table, and the size of the token files."""
    found = study_costs(config.study)
    print(table(found))
    tokens = {one.tokens for one in found}
    print(f"\ntoken files: {sum(tokens) * TOKEN_BYTES / 1e9:,.0f} GB, one for each number of tokens")


if __name__ == "__main__":
    entry(main, CostConfig)
