"""Reads and writes the files of a study's folder that are about its jobs, not its results.

    items.json    the items, as they were submitted last
    jobs.jsonl    a line for each job of each item: submitted, cancelled
    queue.json    the process that runs them on this machine, while it does
    <item>/job.json  written by the job: when it began and ended, where, and the error if it failed

Logs and submitit's files are in `.jobs/`, copies of the code in `.code/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from experiments.run.errors import ConfigError, RunError
from experiments.run.files import sha256_file, storage_errors, write_json
from experiments.study.graph import Expected, Item

ITEMS, JOBS, JOB, CONFIG = "items.json", "jobs.jsonl", "job.json", "config.yaml"
LOGS, CODE, QUEUE = ".jobs", ".code", "queue.json"
RUNS = "runs"  # the folder of studies that are submitted without another
_TAIL_BYTES = 4096


def now() -> str:
    """UTC as ISO 8601, in milliseconds, since processes of one job often fail within the same second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextlib.contextmanager
def _undamaged(where: str, remedy: str) -> Iterator[None]:
    """Turn the errors of a file that does not hold what was written to it into one that says what to do."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{where} is damaged ({type(error).__name__}: {error}): {remedy}") from error


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
    """Write items.json, atomically."""
    content = dataclasses.asdict(submission)
    write_json(folder / ITEMS, json.loads(json.dumps(content, default=str)), "list of items")


def naming(folder: Path) -> str:
    """The options that name the study in this folder, for advice: `study=l1_sweep runs=/scratch/me`."""
    words = [f"study={folder.name}"]
    if folder.parent != Path(RUNS).absolute():
        words.append(f"runs={folder.parent}")
    return shlex.join(words)


def submitted_studies(runs: Path) -> list[str]:
    """The names of the studies that were submitted in a folder of runs."""
    return sorted(path.parent.name for path in runs.glob(f"*/{ITEMS}"))


def read_submission(folder: Path) -> Submission:
    """The items of a study.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: items.json is damaged.
    """
    path = folder / ITEMS
    if not path.is_file():
        known = ", ".join(submitted_studies(folder.parent)) or "no studies"
        raise ConfigError(f"nothing was submitted in {folder}; there are: {known}")
    with _undamaged(str(path), "delete it and submit the study again"):
        content = json.loads(path.read_text(encoding="utf8"))
        items = []
        for values in content["items"]:
            expected = tuple(
                Expected(tuple(map(tuple, rows["columns"])), rows["may_miss"]) for rows in values["expected"]
            )
            lists = {name: tuple(values[name]) for name in ("arguments", "needs")}
            paths = {"folder": Path(values["folder"]), "files": tuple(map(Path, values["files"]))}
            items.append(Item(**(values | lists | paths | {"expected": expected})))
        return Submission(tuple(items), content["directory"], content["steps"])


# --- jobs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The latest job of an item. `log` is the file that its first process writes to, `signal_seconds` the time that its
    cluster leaves it to stop."""

    item: str
    job: str
    executor: str
    log: str
    submitted: str
    cancelled: bool = False
    signal_seconds: int = 120

    def last_words(self) -> str:
        """The last line of its log that is not srun's, which says less than the cause; empty if there is none."""
        try:
            with Path(self.log).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        own = (line.strip() for line in reversed(lines) if not line.startswith("srun:"))
        return next(filter(None, own), "")


def note_submitted(folder: Path, jobs: Iterable[Job]) -> None:
    """Append a line for each job. Raises `StorageError` when the disk is full."""
    path = folder / JOBS
    with storage_errors(path, "list of jobs"), path.open("a") as file:
        file.write("".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs))
        file.flush()
        os.fsync(file.fileno())


def latest_jobs(folder: Path) -> dict[str, Job]:
    """The latest job of every item that was ever submitted. Raises `RunError` for a damaged line."""
    path, jobs = folder / JOBS, {}
    if path.is_file():
        # What follows the last line break is being written.
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            with _undamaged(f"{path}, line {number}", "delete the line"):
                job = Job(**json.loads(line))
                jobs[job.item] = job
    return jobs


# --- the launcher of this machine ------------------------------------------------------------------------------------


def read_launcher(folder: Path) -> tuple[int, str] | None:
    """(process, machine) of the launcher that runs the items of a study; None if there is no queue.json.

    Raises:
        RunError: queue.json is damaged.
    """
    path = folder / QUEUE
    if not path.is_file():
        return None
    with _undamaged(str(path), "end the launcher by hand"):
        values = json.loads(path.read_text(encoding="utf8"))
        return int(values["pid"]), str(values["host"])


# --- reports of jobs --------------------------------------------------------------------------------------------------


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
        """Whether the job has ended by itself; one that was stopped or killed may begin again."""
        return self.state in ("done", "failed")

    @property
    def seconds(self) -> float | None:
        """The duration of the job; None before its end."""
        if not self.ended:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()


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
    """The report of the item's latest job: of several processes that failed, the first; None if there is none.

    Raises:
        RunError: job.json is damaged.
    """
    report = _report(folder / JOB)
    if report is None or report.state in ("done", "stopped"):
        return report
    return failure(folder, report.job, report.began) or report


def failure(folder: Path, job: str, began: str) -> Report | None:
    """The report of the first process of this job that failed since then; None if none has."""
    reports = (_report(path) for path in (folder / JOB, *folder.glob("job.*.json")))
    failed = [each for each in reports if each and each.job == job and each.state == "failed" and each.ended >= began]
    return min(failed, key=lambda report: report.ended, default=None)


def _report(path: Path) -> Report | None:
    if not path.is_file():
        return None
    with _undamaged(str(path), "delete it"):
        values = json.loads(path.read_text(encoding="utf8"))
        return Report(**values | {"arguments": tuple(values["arguments"])})
