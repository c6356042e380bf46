"""Time greedy generation by whole models with `model.generate`, dense against the sparse backends.

    python -m experiments.bench_generate checkpoints=[runs/demo/relu_l1_1e-3] batch=[1,4] prompt=64 new_tokens=32
    python -m experiments.bench_generate model=1.5b batch=[1,16] backends=[hopper,auto]      # random weights

Prompts are the model's own validation text. A call generates exactly `new_tokens` tokens behind each of `batch`
prompts; throughput (tokens/ms) and energy (mJ/token) are those of the new tokens over the whole call, the forward of
the prompts included. dense_eager is generate as it comes: a cache that grows, nothing compiled. In dense_compiled the
cache has a fixed size, so transformers compiles the decoding step and runs it as a CUDA graph. Each backend is measured
in the same forms (`hopper`, `hopper_compiled`): with `dense=[dense_compiled]` compiled only. With `backends=[auto]`
each block is dense or sparse as is fastest for the prompts, and as is fastest for a decoding step (`twell.autotune`;
plan by_layer).

Before anything is timed, the hidden states of the prompts and the logits of every generated token are compared with
float32. Where two tokens are almost equally likely, rounding decides, so the tokens themselves need not be equal:
`same_tokens` is the share of them that are those of dense_eager. `device_time` (CUDA) is the part of a call in which
the device is busy: the loop of `generate` runs on the host, for which the device waits in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from experiments.bench.options import MODEL_METRICS, ModelBenchConfig
from experiments.run.config import entry, option
from experiments.run.output import Rows
from experiments.run.train_config import LARGEST_SIZE

if TYPE_CHECKING:
    import torch

    from experiments.models.subject import Subject

PROGRAM = "bench_generate"


@dataclass
class BenchGenerateConfig(ModelBenchConfig):
    """Time greedy generation by whole models."""

    batch: list[int] = option(
        [1, 16],
        "sequences generated at once; each number is measured by itself",
        required=True,
        distinct=True,
        minimum=1,
        maximum=LARGEST_SIZE,
    )
    prompt: int = option(128, "tokens of each prompt", unit="tokens", minimum=2, maximum=LARGEST_SIZE)
    new_tokens: int = option(
        128, "tokens generated behind each prompt: never more, never fewer", unit="tokens", minimum=2,
        maximum=LARGEST_SIZE,
    )  # fmt: skip
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "of weights and activations; auto: bfloat16 on a GPU, float32 on a CPU"
    )


def subject_rows(subject: Subject, config: BenchGenerateConfig, device: torch.device) -> Iterator[Rows]:
    """The rows of one model, batch by batch.

    Raises:
        CheckFailed: an alternative is off by more than rounding.
        ConfigError: the model has fewer positions than prompt and new tokens need.
    """
    from experiments.bench.generation import Generation
    from experiments.timing.compare import compare

    subject.check_length(config.prompt + config.new_tokens, "prompt+new_tokens")
    prompt_BP = subject.text(max(config.batch), config.prompt, config.seed, config.data)[:, :-1].to(device)
    names = {**config.run.columns(PROGRAM), "op": "generate", "pattern": subject.name}
    for batch in config.batch:
        generation = Generation(subject.model, prompt_BP[:batch], config.new_tokens)
        alternatives = generation.alternatives(config.dense, config.backends)
        sizes = {"tokens": batch * config.new_tokens, "batch": batch, "prompt_tokens": config.prompt}
        columns: dict[str, Any] = {**names, **subject.columns, **sizes, "mean_nnz": generation.mean_nonzeros()}
        yield compare(alternatives, device, config.timing, MODEL_METRICS, **columns)


def main(config: BenchGenerateConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`."""
    from experiments.bench.model_bench import benchmark

    benchmark(config, PROGRAM, config.dtype, lambda subject, device: subject_rows(subject, config, device), report)


if __name__ == "__main__":
    entry(main, BenchGenerateConfig)
