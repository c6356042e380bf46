"""Evaluate a model: the paper's seven tasks through lm-eval (table 6), and cross-entropy on the validation split.

    python -m experiments.evaluate checkpoint=runs/demo/relu tasks=FOLDER       # <task>.jsonl[.xz|.gz] in it
    python -m experiments.evaluate checkpoint=SakanaAI/SparseLM0.5B tasks=hub data=hf:HuggingFaceFW/fineweb-edu

Zero-shot. The mean over tasks (`task` = mean) of `accuracy` is the mean of the plain accuracies, which is what table 6
must hold, since its HellaSwag and OpenBookQA are far below what normalised accuracy gives models of that size; the
paper does not say. The mean of `accuracy_norm` takes the plain accuracy of WinoGrande, which has no normalised one.

A task whose data is missing, or that has a choice longer than the model's sequence, leaves a row with the reason, and
the program fails after all others are done.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.schema import TASKS
from experiments.run.config import entry, option, section
from experiments.run.errors import DataError, RunError
from experiments.run.output import OutputConfig, Rows, device_of, device_option, results_folder, write_results
from experiments.run.results import make_row
from experiments.run.train_config import LARGEST_SIZE, TEXT_SOURCE

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from experiments.data.tasks import TaskScore
    from experiments.models.subject import Subject

PROGRAM = "evaluate"
HUB = "hub"
# Rotary positions have no end: items longer than a small model's training sequences are scored whole, not cut.
MAX_LENGTH = 2048
NO_TASKS = "no task data given: tasks=FOLDER or tasks=hub"
FLOAT32_LOGITS = 2**30  # at most so many at once in float32 (4 GiB): a loss needs them twice
log = logging.getLogger(__name__)


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
    limit: int | None = option(None, "items of each task, from its beginning; null: all", minimum=1)
    data: str = option(
        "",
        "text: stdlib, path:... (all of it, or its validation split by the names of files) or hf:...; empty: what the "
        "model was trained on. Validation split: of hf: as much is read as it takes to hold out evaluation_tokens",
        pattern=TEXT_SOURCE,
    )
    evaluation_tokens: int = option(1_048_576, "validation tokens used, if there are as many", unit="tokens", minimum=1)
    batch: int = option(16, "sequences in one forward", minimum=1, maximum=LARGEST_SIZE)
    device: str = device_option()
    run: OutputConfig = section(OutputConfig, "where results go")


class TasksMissing(RunError):
    """Some tasks were asked for and could not be scored."""


def cross_entropy(subject: Subject, config: EvaluateConfig) -> tuple[float, int]:
    """(nats per token on validation text, number of tokens).

    Raises:
        DataError: when there is no text.
    """
    import torch
    from torch.nn import functional as F

    model, device = subject.model, subject.model.device
    total, tokens = 0.0, 0
    for batch in subject.batches(config.batch, max_tokens=config.evaluation_tokens, data=config.data):
        ids_BS, targets_BS = batch[:, :-1].to(device), batch[:, 1:].to(device)
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=subject.autocast):
            logits_MV = model(input_ids=ids_BS, use_cache=False).logits.flatten(0, 1)
        few = max(1, FLOAT32_LOGITS // logits_MV.shape[1])
        for part, targets in zip(logits_MV.split(few), targets_BS.flatten().split(few), strict=True):
            total += F.cross_entropy(part.float(), targets).item() * targets.numel()
        tokens += targets_BS.numel()
    return total / tokens, tokens


def language_model(subject: Subject, batch: int) -> LM:
    """The model as lm-eval takes it.

    Raises:
        DataError: without a tokenizer.
    """
    from experiments.data.tasks import LanguageModel

    if subject.loaded.tokenizer is None:
        raise DataError(f"{subject.name} has no tokenizer, so it cannot read the tasks")
    return LanguageModel(
        pretrained=subject.model,
        tokenizer=subject.loaded.tokenizer,
        batch_size=batch,
        max_length=max(subject.sequence_length, MAX_LENGTH),
        softmax_dtype="float32",
        mixed_precision_dtype="bfloat16" if subject.autocast else None,
    )


def score_tasks(lm: LM, config: EvaluateConfig) -> tuple[dict[str, TaskScore], dict[str, str]]:
    """(scores by task, for tasks that cannot be scored the reason why not)."""
    from experiments.data.tasks import hub_task, local_task, score

    scores, absent = {}, {}
    for name in TASKS:
        try:
            task = hub_task(name) if config.tasks == HUB else local_task(Path(config.tasks), name)
            scores[name] = score(lm, task, config.limit)
        except (OSError, ValueError, DataError) as error:
            absent[name] = str(error) or type(error).__name__
            log.error("task %s: %s", name, absent[name])
    return scores, absent


def task_rows(scores: Mapping[str, TaskScore], absent: Mapping[str, str], columns: dict[str, Any]) -> Rows:
    """Two rows a task, and the means over all tasks, which need every task."""
    rows = []
    for name, result in scores.items():
        for metric in ("accuracy", "accuracy_norm"):
            value, error = getattr(result, metric), getattr(result, f"{metric}_error")
            if value is not None:
                share = {"value": value, "low": value - error, "high": value + error, "n": result.items}
                rows.append(make_row(task=name, metric=metric, **share, **columns))
    for name, reason in absent.items():
        rows.append(make_row(task=name, metric="accuracy", missing=reason, **columns))
    return rows + [
        make_row(task="mean", metric=m, **_mean(m, scores, absent), **columns) for m in ("accuracy", "accuracy_norm")
    ]


def _mean(metric: str, scores: Mapping[str, TaskScore], absent: Mapping[str, str]) -> dict[str, Any]:
    if absent:
        return {"missing": f"not scored: {', '.join(absent)}" if scores else next(iter(absent.values()))}
    # Normalised where asked for and defined.
    pairs = [
        (result.accuracy, result.accuracy_error)
        if metric == "accuracy" or result.accuracy_norm is None
        else (result.accuracy_norm, result.accuracy_norm_error or 0.0)
        for result in scores.values()
    ]
    value = sum(share for share, _ in pairs) / len(pairs)
    error = math.sqrt(sum(error**2 for _, error in pairs)) / len(pairs)
    return {"value": value, "low": value - error, "high": value + error, "n": sum(s.items for s in scores.values())}


def main(config: EvaluateConfig, report: Callable[..., None] | None = None) -> None:
    """Evaluate; the rows are in `<folder>/rows.csv`.

    Raises:
        TasksMissing: after everything else is written, when a task that was asked for could not be scored.
    """
    from experiments.data.tasks import task_protocol
    from experiments.models.subject import load_subject

    # One line for every item that is longer than the model's sequence, and more: too much to read.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = device_of(config.device)
    folder = results_folder(config, PROGRAM)
    subject = load_subject(config.checkpoint, device)
    lm = language_model(subject, config.batch) if config.tasks else None
    columns = {**config.run.columns(PROGRAM), "op": "evaluate", "device": device}
    protocol = task_protocol(config.tasks, config.limit)
    columns |= {"pattern": subject.name, **subject.columns}
    value, tokens = cross_entropy(subject, config)
    rows = [make_row(metric="validation_cross_entropy", value=value, n=1, tokens=tokens, **columns)]
    log.info("%s: cross-entropy %.4f over %d tokens", subject.name, value, tokens)
    if report:
        report(1, 2, cross_entropy=value)
    scores, absent = score_tasks(lm, config) if lm else ({}, dict.fromkeys(TASKS, NO_TASKS))
    rows += task_rows(scores, absent, columns | {"task_protocol": protocol})
    write_results(folder, rows, config)
    for name, result in scores.items():
        log.info("%s: %.1f%% (normalised %s) of %d items", name, result.accuracy, result.accuracy_norm, result.items)
    if config.tasks and absent:
        raise TasksMissing(f"{len(absent)} of {len(TASKS)} tasks could not be scored: {', '.join(absent)}")


if __name__ == "__main__":
    entry(main, EvaluateConfig)
