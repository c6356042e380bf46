"""The seven multiple-choice tasks for lm-eval: from a folder of JSON lines, or by the harness's own names.

A folder holds `<task>.jsonl`, `.jsonl.xz` or `.jsonl.gz`, one record a line: `context`, `choices` and `answer` (index
of the correct choice); WinoGrande: `contexts` (the sentence up to and including each option), `continuation` (the rest)
and `answer`. CommonsenseQA is in cloze form in these files, while the harness asks for letters: the scores are not
comparable.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval
import yaml
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from analysis import schema
from experiments.data.sources import DAMAGE, open_text
from experiments.run.errors import DataError
from experiments.run.values import shown

TASKS = tuple(schema.TASKS)
# Folders of the harness's own definitions: reading only these avoids a scan of thousands of files.
HARNESS_FOLDERS = ("hellaswag", "commonsense_qa", "piqa", "winogrande", "arc", "openbookqa")
SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")
TEMPLATES = Path(__file__).parents[1] / "configs" / "tasks"
log = logging.getLogger(__name__)


def task_protocol(source: str, limit: int | None) -> str:
    """How tasks are scored, for the column `task_protocol`: `source` is a folder, "hub", or empty for no tasks."""
    items = "all items" if limit is None else f"first {limit} items"
    form = "the harness's own prompts" if source == "hub" else "cloze, local files"
    return f"zero-shot, {form}, {items}, lm-eval {lm_eval.__version__}" if source else ""


class TaskScore(NamedTuple):
    """Shares of correct answers in percent, with standard errors; `accuracy_norm` is None if it is not defined."""

    accuracy: float
    accuracy_error: float
    accuracy_norm: float | None
    accuracy_norm_error: float | None
    items: int


def find_file(folder: Path, task: str) -> Path:
    """The file of `task` in `folder`.

    Raises:
        FileNotFoundError: if there is none; the message names the files looked for.
    """
    paths = [folder / f"{task}{suffix}" for suffix in SUFFIXES]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(f"no task file {', '.join(path.name for path in paths)} in {folder}")


def read_records(path: Path, task: str) -> list[dict[str, Any]]:
    """The checked records of one task file.

    Raises:
        ValueError: at a line that is not a record of the task's format, or in a file without records.
    """
    try:
        with open_text(path) as lines:
            records = list(_records(lines, path, task))
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged or not UTF-8 text: {error}") from error
    if not records:
        raise ValueError(f"{path} has no records")
    return records


def _records(lines: Iterator[str], path: Path, task: str) -> Iterator[dict[str, Any]]:
    context, options = ("continuation", "contexts") if task == "winogrande" else ("context", "choices")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a record of {task} is an object, got {type(record).__name__}")
        absent = [name for name in (context, options, "answer") if name not in record]
        if absent:
            raise ValueError(f"{where}: a record of {task} needs {context}, {options} and answer; {absent} not in it")
        texts, answer = record[options], record["answer"]
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in [record[context], *texts]):
            raise ValueError(f"{where}: {context} must be text, and {options} a list of texts")
        if len(texts) < 2:
            raise ValueError(f"{where}: {len(texts)} {options}, and two or more are needed")
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts):
            raise ValueError(f"{where}: answer {answer!r} is not an index of {len(texts)} {options}")
        names = [context, *(f"{options}[{index}]" for index in range(len(texts)))]
        for name, text in zip(names, [record[context], *texts], strict=True):
            if not text.strip() and (text or name != "context"):  # without any context, it is the end token
                raise ValueError(f"{where}: {name} is {text!r}: there is nothing to score")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{where}: {name} is not valid Unicode: {error}") from error
        yield {name: record[name] for name in (context, options, "answer")}


class LanguageModel(HFLM):
    """A model as lm-eval takes it. It says how many texts are cut because they are longer than the model's sequence."""

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], *arguments: Any, **options: Any
    ) -> list[tuple[float, bool]]:
        fits = [0 < len(choice_ids) <= self.max_length and bool(context_ids) for _, context_ids, choice_ids in requests]
        if not all(fits):
            (context, choice), context_ids, choice_ids = requests[fits.index(False)]
            raise DataError(
                f"{fits.count(False)} of {len(fits)} choices cannot be scored. The model takes {self.max_length} "
                f"tokens: {shown(choice)} has {len(choice_ids)}, after {len(context_ids)} of {shown(context)}"
            )
        cut = sum(len(context_ids) + len(ids) > self.max_length + 1 for _, context_ids, ids in requests)
        if cut:
            log.warning(
                "%d of %d choices have more than %d tokens with their context, whose beginning is cut off",
                cut,
                len(requests),
                self.max_length,
            )
        return super()._loglikelihood_tokens(requests, *arguments, **options)


def local_task(folder: Path, task: str) -> Task:
    """The lm-eval task over the records of `folder`.

    Raises:
        FileNotFoundError, ValueError: see `find_file` and `read_records`.
    """
    records = read_records(find_file(folder, task), task)
    template = TEMPLATES / ("winogrande.yaml" if task == "winogrande" else "cloze.yaml")
    config: dict[str, Any] = {"task": task, **yaml.safe_load(template.read_text())}
    config["custom_dataset"] = lambda **_: {"test": datasets.Dataset.from_list(records)}
    return TaskManager(include_defaults=False).load([config])["tasks"][task]


def hub_task(task: str) -> Task:
    """The harness's own definition, whose data is downloaded from the Hugging Face hub.

    Raises:
        OSError: if the data are neither cached nor available.
    """
    folder = Path(lm_eval.__file__).parent / "tasks"
    manager = TaskManager(include_path=[folder / name for name in HARNESS_FOLDERS], include_defaults=False)
    return manager.load([task])["tasks"][task]


def score(lm: LM, task: Task, limit: int | None = None) -> TaskScore:
    """Zero-shot accuracy of `lm` on the first `limit` items of a task (None: on all).

    Raises:
        DataError: a choice is longer than the model's sequence.
    """
    name = task.config.task
    task.set_config(key="num_fewshot", value=0)
    # simple_evaluate would also run pip and other programs to describe the machine: two seconds a task.
    results = lm_eval.evaluate(
        lm, {"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0, log_samples=False
    )
    values, items = results["results"][name], results["n-samples"][name]["effective"]
    accuracy, norm = values["acc,none"], values.get("acc_norm,none")
    return TaskScore(
        accuracy=100 * accuracy,
        accuracy_error=100 * _standard_error(accuracy, items),
        accuracy_norm=None if norm is None else 100 * norm,
        accuracy_norm_error=None if norm is None else 100 * _standard_error(norm, items),
        items=items,
    )


def _standard_error(share: float, items: int) -> float:
    """The standard error of a mean of zeros and ones, as the harness computes it; 0 for a single item."""
    return (share * (1 - share) / (items - 1)) ** 0.5 if items > 1 else 0.0
