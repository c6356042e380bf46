"""The implementation of `experiments.bench_generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from experiments.bench.feedforward import chosen
from experiments.bench.generation import Generation
from experiments.bench.model_bench import benchmark
from experiments.bench_generate import BenchGenerateConfig
from experiments.models.subject import Subject
from experiments.run.output import Rows
from experiments.timing.compare import compare

PROGRAM = "bench_generate"


def batch_rows(subject: Subject, prompt_BP: Tensor, config: BenchGenerateConfig, device: torch.device) -> Rows:
    """All rows of one model with these prompts.

    Raises:
        CheckFailed: when an alternative is off by more than rounding.
    """
    generation = Generation(subject.model, prompt_BP, config.new_tokens)
    columns = {
        **{"study": config.run.study, "item": config.run.name(PROGRAM), "op": "generate", "pattern": subject.name},
        **subject.columns,
        **{"batch": len(prompt_BP), "prompt_tokens": config.prompt, "mean_nnz": generation.mean_nonzeros()},
    }
    found = generation.alternatives(config.dense, chosen(config.backends, device), config.check_sequences)
    tokens = len(prompt_BP) * config.new_tokens
    return compare(found, device, config.timing, config.metrics, tokens=tokens, **columns)


def subject_rows(subject: Subject, config: BenchGenerateConfig, device: torch.device) -> Iterator[Rows]:
    """The rows of one model, batch by batch.

    Raises:
        ConfigError: it has fewer positions than prompt and new tokens need.
    """
    subject.check_length(config.prompt + config.new_tokens, "prompt+new_tokens")
    prompts = subject.text(max(config.batch), config.prompt, config.seed, config.data)[:, :-1].to(device)
    for batch in config.batch:
        yield batch_rows(subject, prompts[:batch], config, device)


def main(config: BenchGenerateConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    benchmark(config, PROGRAM, config.dtype, lambda subject, device: subject_rows(subject, config, device), report)
