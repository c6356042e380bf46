"""Evaluate a model: the paper's seven tasks through lm-eval (table 6), and cross-entropy on the validation split.

    python -m experiments.evaluate checkpoint=runs/demo/relu tasks=FOLDER       # <task>.jsonl[.xz|.gz] in it
    python -m experiments.evaluate checkpoint=SakanaAI/SparseLM0.5B tasks=hub data=hf:HuggingFaceFW/fineweb-edu

Zero-shot. The mean over tasks (`task` = mean) of `accuracy` is the mean of the plain accuracies, which is what table 6
must hold, since its HellaSwag and OpenBookQA are far below what normalised accuracy gives models of that size; the
paper does not say. The mean of `accuracy_norm` takes the plain accuracy of WinoGrande, which has no normalised one.

A task whose data is missing leaves a row with the reason, and the program fails after all others are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from analysis.schema import TASKS
from experiments.run.config import entry, option, section
from experiments.run.output import OutputConfig
from experiments.run.train_config import A_TEXT_SOURCE, LARGEST_SIZE, TEXT_SOURCE
from experiments.run.values import A_DEVICE, DEVICE

HUB = "hub"


@dataclass
class EvaluateConfig:
    """Score a model on the seven tasks and on held-out text."""

    checkpoint: str = option(
        "", "run folder, checkpoint, or Hugging Face folder or hub name of the model", required=True
    )
    tasks: str = option(
        "",
        "folder with <task>.jsonl[.xz|.gz] (their form: experiments/DATA_CARD.md), or hub for the harness's own data; "
        "empty: no tasks",
    )
    names: list[str] = option(
        list(TASKS), "tasks to score", source="the paper, table 6", required=True, distinct=True, choices=tuple(TASKS)
    )
    limit: int | None = option(None, "items of each task, from its beginning; null: all", minimum=1)
    data: str = option(
        "",
        "text: stdlib, path:... (all of it, or its validation split by the names of files) or hf:...; empty: what the "
        "model was trained on. Validation split: of hf: as much is read as it takes to hold out evaluation_tokens",
        pattern=TEXT_SOURCE,
        wanted=A_TEXT_SOURCE,
    )
    evaluation_tokens: int = option(1_048_576, "validation tokens used, if there are as many", unit="tokens", minimum=1)
    batch: int = option(16, "sequences in one forward", minimum=1, maximum=LARGEST_SIZE)
    device: str = option(
        "auto", "cpu, cuda, cuda:1, ...; auto: CUDA if there is one", required=True, pattern=DEVICE, wanted=A_DEVICE
    )
    run: OutputConfig = section(OutputConfig, "where results go")


def main(config: EvaluateConfig, report: Callable[..., None] | None = None) -> None:
    """Evaluate; the rows are in `<folder>/rows.csv`."""
    from experiments.implementation import evaluate

    evaluate.main(config, report)


if __name__ == "__main__":
    entry(main, EvaluateConfig)
