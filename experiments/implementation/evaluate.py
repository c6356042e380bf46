"""The implementation of `experiments.evaluate`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from torch.nn import functional as F

from experiments.data.tasks import TASKS, LanguageModel, TaskScore, hub_task, local_task, score, task_protocol
from experiments.evaluate import HUB, EvaluateConfig
from experiments.models.subject import Subject, load_subject
from experiments.run.errors import DataError, RunError
from experiments.run.output import device_of, results_folder, write_results
from experiments.run.results import make_row

log = logging.getLogger(__name__)

PROGRAM = "evaluate"
# Rotary positions have no end: items longer than a small model's training sequences are scored whole, not cut.
MAX_LENGTH = 2048
NOT_ASKED = "no task data given: tasks=FOLDER or tasks=hub"
FLOAT32_LOGITS = 2**30  # at most so many at once in float32 (4 GiB): a loss needs them twice


class TasksMissing(RunError):
    """Some tasks were asked for and could not be scored."""


@torch.no_grad()
def cross_entropy(subject: Subject, config: EvaluateConfig) -> tuple[float, int]:
    """(nats per token on validation text, number of tokens).

    Raises:
        DataError: when there is no text.
    """
    model, device = subject.model, subject.model.device
    total, tokens = 0.0, 0
    for batch in subject.batches(config.batch, max_tokens=config.evaluation_tokens, data=config.data):
        ids_BS, targets_BS = batch[:, :-1].to(device), batch[:, 1:].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=_autocast(subject)):
            logits_MV = model(input_ids=ids_BS, use_cache=False).logits.flatten(0, 1)
        few = max(1, FLOAT32_LOGITS // logits_MV.shape[1])
        for part, targets in zip(logits_MV.split(few), targets_BS.flatten().split(few), strict=True):
            total += F.cross_entropy(part.float(), targets).item() * targets.numel()
        tokens += targets_BS.numel()
    return total / tokens, tokens


def _autocast(subject: Subject) -> bool:
    """Whether the products run in bfloat16, as in the model's training."""
    training = subject.loaded.training
    return training is not None and training.training.precision == "bfloat16"


def language_model(subject: Subject, batch: int) -> LM:
    """The model as lm-eval takes it.

    Raises:
        DataError: without a tokenizer.
    """
    if subject.loaded.tokenizer is None:
        raise DataError(f"{subject.name} has no tokenizer, so it cannot read the tasks")
    return LanguageModel(
        pretrained=subject.model,
        tokenizer=subject.loaded.tokenizer,
        batch_size=batch,
        max_length=max(subject.sequence_length, MAX_LENGTH),
        softmax_dtype="float32",
        mixed_precision_dtype="bfloat16" if _autocast(subject) else None,
    )


def find_tasks(source: str, names: Sequence[str]) -> tuple[dict[str, Task], dict[str, str]]:
    """(tasks whose data is there, for the others the reason why not)."""
    found, absent = {}, {}
    for name in names:
        try:
            found[name] = hub_task(name) if source == HUB else local_task(Path(source), name)
        except (OSError, ValueError) as error:
            absent[name] = str(error) or type(error).__name__
            log.error("task %s: %s", name, absent[name])
    return found, absent


def task_rows(
    scores: Mapping[str, TaskScore], absent: Mapping[str, str], columns: dict[str, Any]
) -> list[dict[str, Any]]:
    """Two rows a task, and the means over all tasks, which need every task."""
    rows = []
    for name, result in scores.items():
        for metric in ("accuracy", "accuracy_norm"):
            value, error = getattr(result, metric), getattr(result, f"{metric}_error")
            if value is not None:
                found = {"value": value, "low": value - error, "high": value + error, "n": result.items}
                rows.append(make_row(task=name, metric=metric, **found, **columns))
    for name, reason in absent.items():
        rows.append(make_row(task=name, metric="accuracy", missing=reason, **columns))
    return rows + [
        make_row(task="mean", metric=m, **_mean(m, scores, absent), **columns) for m in ("accuracy", "accuracy_norm")
    ]


def _mean(metric: str, scores: Mapping[str, TaskScore], absent: Mapping[str, str]) -> dict[str, Any]:
    if missing := [name for name in TASKS if name not in scores]:
        reason = next(iter(absent.values())) if absent and not scores else f"not scored: {', '.join(missing)}"
        return {"missing": reason}
    pairs = [_counted(metric, result) for result in scores.values()]
    value = sum(share for share, _ in pairs) / len(pairs)
    error = math.sqrt(sum(error**2 for _, error in pairs)) / len(pairs)
    return {"value": value, "low": value - error, "high": value + error, "n": sum(s.items for s in scores.values())}


def _counted(metric: str, result: TaskScore) -> tuple[float, float]:
    """What a task contributes to the mean: (accuracy, standard error), normalised where asked for and defined."""
    if metric == "accuracy" or result.accuracy_norm is None:
        return result.accuracy, result.accuracy_error
    return result.accuracy_norm, result.accuracy_norm_error or 0.0


def main(config: EvaluateConfig, report: Callable[..., None] | None = None) -> None:
    """Evaluate; the rows are in `<folder>/rows.csv`.

    Raises:
        TasksMissing: after everything else is written, when a task that was asked for could not be scored.
    """
    # One line for every item that is longer than the model's sequence, and more: too much to read.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device = device_of(config.device)
    with results_folder(config, PROGRAM) as folder:
        subject = load_subject(config.checkpoint, None, device)
        columns = {"study": config.run.study, "item": config.run.name(PROGRAM), "op": "evaluate", "device": device}
        protocol = task_protocol(config.tasks, config.limit)
        columns |= {"pattern": subject.name, **subject.columns}
        value, tokens = cross_entropy(subject, config)
        rows = [make_row(metric="validation_cross_entropy", value=value, n=1, tokens=tokens, **columns)]
        log.info("%s: cross-entropy %.4f over %d tokens", subject.name, value, tokens)
        if report:
            report(1, 2, cross_entropy=value)
        tasks, absent = (
            find_tasks(config.tasks, config.names) if config.tasks else ({}, dict.fromkeys(config.names, NOT_ASKED))
        )
        scores = score(language_model(subject, config.batch), list(tasks.values()), config.limit) if tasks else {}
        rows += task_rows(scores, absent, columns | {"task_protocol": protocol})
        write_results(folder, rows, config)
    for name, result in scores.items():
        log.info("%s: %.1f%% (normalised %s) of %d items", name, result.accuracy, result.accuracy_norm, result.items)
    if config.tasks and absent:
        raise TasksMissing(f"{len(absent)} of {len(config.names)} tasks could not be scored: {', '.join(absent)}")
