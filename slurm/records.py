"""Reads and writes the files of a study's folder that are about its jobs, not its results.

    items.json    the items, as they were submitted last; `.jobs/items.json` is a second copy
    cluster.yaml  where
    jobs.jsonl    a line for each job of each item: submitted, cancelled
    <item>/job.json  written by the job: when it began and ended, where, and the traceback if it failed

Logs and submitit's files are in `.jobs/`, copies of the code in `.code/`.

A damaged file must not keep anyone from seeing, cancelling or resubmitting the rest: whatever reads these files says
which one is damaged and goes on without it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from experiments.run.errors import ConfigError, RunError
from experiments.run.files import sha256_file, storage_errors, write_json
from experiments.study.graph import Expected, Graph, Item

ITEMS, JOBS, JOB, CLUSTER, CONFIG = "items.json", "jobs.jsonl", "job.json", "cluster.yaml", "config.yaml"
LOGS, CODE = ".jobs", ".code"
log = logging.getLogger(__name__)


class DamagedRecord(RunError):
    """A file of the launcher's own does not hold what was written to it."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"{path} is damaged: {why}")


def now() -> str:
    """UTC as ISO 8601, in milliseconds, since processes of one job often fail within the same second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# --- the items of a study ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submission:
    """The items of a study as they were submitted last, with absolute folders.

    Relative paths among their arguments start at `directory`. `steps` are the optimizer steps of each training.
    """

    items: tuple[Item, ...]
    directory: str
    steps: dict[str, int]


def write_submission(folder: Path, submission: Submission) -> None:
    """Write items.json and its second copy, atomically."""
    content = {
        "directory": submission.directory,
        "steps": submission.steps,
        "items": [dataclasses.asdict(item) for item in submission.items],
    }
    plain = json.loads(json.dumps(content, default=str))
    for path in _copies(folder):
        write_json(path, plain, "list of items")


def was_submitted(folder: Path) -> bool:
    """Whether there is a list of items, damaged or not."""
    return any(path.is_file() for path in _copies(folder))


def submitted_studies(runs: Path) -> list[str]:
    """The names of the studies that were submitted in a folder of runs."""
    return sorted(path.parent.name for path in runs.glob(f"*/{ITEMS}"))


def read_submission(folder: Path) -> Submission:
    """The items of a study. Where items.json is damaged, a warning says so, and its second copy is read.

    Raises:
        ConfigError: nothing was submitted there.
        DamagedRecord: both copies are damaged.
    """
    if not was_submitted(folder):
        others = submitted_studies(folder.parent)
        raise ConfigError(f"nothing was submitted in {folder}; there are: {', '.join(others) or 'no studies'}")
    first, second = _copies(folder)
    try:
        return _read_submission(first)
    except DamagedRecord as damage:
        try:
            found = _read_submission(second)
        except DamagedRecord:
            raise DamagedRecord(first, "submit the study again, which writes it anew") from damage
        log.warning("%s; its copy %s is used", damage, second)
        return found


def _copies(folder: Path) -> tuple[Path, Path]:
    return folder / ITEMS, folder / LOGS / ITEMS


def _read_submission(path: Path) -> Submission:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
        items = tuple(map(_item, content["items"]))
        Graph(items)  # each need comes before what needs it
        steps = {str(name): int(count) for name, count in content["steps"].items()}
        return Submission(items, str(content["directory"]), steps)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedRecord(path, f"{type(error).__name__}: {error}") from error


def _item(values: dict[str, Any]) -> Item:
    expected = tuple(Expected(tuple(map(tuple, e["columns"])), e["may_miss"]) for e in values["expected"])
    lists = {name: tuple(map(str, values[name])) for name in ("arguments", "needs")}
    folder, files = Path(values["folder"]), tuple(map(Path, values["files"]))
    return Item(**(values | lists | {"folder": folder, "files": files, "expected": expected}))


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The latest job of an item. `log` is the file that its first process writes to."""

    item: str
    job: str
    executor: str
    log: str
    submitted: str
    cancelled: bool = False


def note_submitted(folder: Path, jobs: Iterable[Job]) -> None:
    """Append a line for each job. A last line that a crash cut off is ended first.

    Raises:
        StorageError: the disk is full.
    """
    path = folder / JOBS
    with storage_errors(path, "list of jobs"), path.open("ab+") as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        lines = [json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs]
        file.write(("\n" * torn + "".join(lines)).encode())
        file.flush()
        os.fsync(file.fileno())


class LatestJobs(dict[str, Job]):
    """By item, its latest job; `damaged` says which lines of the file could not be read."""

    def __init__(self, jobs: Mapping[str, Job] | None = None, damaged: Iterable[str] = ()) -> None:
        super().__init__(jobs or {})
        self.damaged = list(damaged)


def latest_jobs(folder: Path) -> LatestJobs:
    """The latest job of every item that was ever submitted."""
    path, found = folder / JOBS, LatestJobs()
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    except OSError as error:
        return LatestJobs(damaged=[f"{path} cannot be read: {error.strerror}"])
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            job = _typed(Job, json.loads(line))
        except ValueError as error:
            found.damaged.append(f"{path}, line {number} is damaged, a job that it names is not seen: {error}")
        else:
            found[job.item] = job
    return found


# --- reports of jobs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a job wrote last. `state` is running until it ends in an orderly way; `arguments` are those it ran with;
    `gpus` are those that it may use on its machine, as CUDA_VISIBLE_DEVICES names them. `config` is a digest of the
    configuration beside its results (`config_digest`), written when the job is done."""

    job: str
    state: Literal["running", "stopped", "failed", "done"]
    node: str
    restarts: int
    arguments: tuple[str, ...]
    began: str
    ended: str = ""
    error: str = ""
    traceback: str = ""
    gpus: str = ""
    config: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the job cannot begin again by itself, as one may that was stopped or killed."""
        return self.state in ("done", "failed")

    @property
    def seconds(self) -> float | None:
        """How long the job took; None before its end."""
        try:
            return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()
        except (ValueError, TypeError):
            return None


def write_report(folder: Path, report: Report, rank: int = 0) -> None:
    """Write job.json, atomically; processes other than the first write job.<rank>.json, and only when they fail."""
    write_json(folder / (f"job.{rank}.json" if rank else JOB), dataclasses.asdict(report), "report of the job")


def config_digest(folder: Path) -> str:
    """A digest of the configuration that results were made with; empty if there is none."""
    try:
        return sha256_file(folder / CONFIG)
    except OSError:
        return ""


def read_report(folder: Path) -> Report | None:
    """What the item's latest job wrote: of several processes that failed, the first; None if there is nothing.

    Raises:
        DamagedRecord: job.json is damaged.
    """
    report = _report(folder / JOB)
    if report is None or report.state in ("done", "stopped"):
        return report
    return failure(folder, report.job, report.began) or report


def report_or_damage(folder: Path) -> tuple[Report | None, str]:
    """As `read_report`; for a damaged file, None and what is wrong with it."""
    try:
        return read_report(folder), ""
    except DamagedRecord as damage:
        return None, str(damage)


def failure(folder: Path, job: str, began: str) -> Report | None:
    """What the first process of this job that failed since then wrote, None if none has."""
    failed = []
    for path in (folder / JOB, *folder.glob("job.*.json")):
        try:
            report = _report(path)
        except DamagedRecord:
            continue
        if report is not None and report.job == job and report.state == "failed" and report.ended >= began:
            failed.append(report)
    return min(failed, key=lambda one: one.ended, default=None)


def _report(path: Path) -> Report | None:
    try:
        return _typed(Report, json.loads(path.read_text(encoding="utf8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DamagedRecord(path, error) from error


T = TypeVar("T")


def _typed(cls: type[T], values: Any) -> T:
    """`cls(**values)`, if the values have the types of its fields.

    Raises:
        ValueError: they have not; the message says which.
    """
    if not isinstance(values, dict):
        raise ValueError(f"an object with {cls.__name__}'s fields is wanted, this is a {type(values).__name__}")
    types = typing.get_type_hints(cls)
    checked = {}
    for name, value in values.items():
        wanted = types.get(name)
        if wanted == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
            checked[name] = tuple(value)
        elif type(value) is wanted or (typing.get_origin(wanted) is Literal and value in typing.get_args(wanted)):
            checked[name] = value
        else:
            raise ValueError(f"{name} cannot be {str(value)[:60]!r}")
    try:
        return cls(**checked)
    except TypeError as error:
        raise ValueError(f"a field is missing: {error}") from error
