"""Reads and writes the files of a study's folder that are about its jobs, not its results.

    items.json    the items, as they were submitted last
    cluster.yaml  where
    jobs.jsonl    a line for each job of each item: submitted, cancelled
    <item>/job.json  written by the job: when it began and ended, where, and the traceback if it failed

Logs and submitit's files are in `.jobs/`, copies of the code in `.code/`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from experiments.run.errors import ConfigError
from experiments.run.files import write_json
from experiments.study.graph import Expected, Item

ITEMS, JOBS, JOB, CLUSTER = "items.json", "jobs.jsonl", "job.json", "cluster.yaml"
LOGS, CODE = ".jobs", ".code"


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
    """Write items.json, atomically."""
    content = {
        "directory": submission.directory,
        "steps": submission.steps,
        "items": [dataclasses.asdict(item) for item in submission.items],
    }
    write_json(folder / ITEMS, json.loads(json.dumps(content, default=str)), "list of items")


def read_submission(folder: Path) -> Submission:
    """The items of a study.

    Raises:
        ConfigError: nothing was submitted there.
    """
    if not (folder / ITEMS).is_file():
        others = sorted(path.parent.name for path in folder.parent.glob(f"*/{ITEMS}"))
        raise ConfigError(f"nothing was submitted in {folder}; there are: {', '.join(others) or 'no studies'}")
    content = json.loads((folder / ITEMS).read_text(encoding="utf8"))
    return Submission(tuple(map(_item, content["items"])), content["directory"], content["steps"])


def _item(values: dict[str, Any]) -> Item:
    expected = tuple(Expected(tuple(map(tuple, e["columns"])), e["may_miss"]) for e in values["expected"])
    lists = {name: tuple(values[name]) for name in ("arguments", "needs")}
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
    """Append a line for each job."""
    with (folder / JOBS).open("a", encoding="utf8") as file:
        file.writelines(json.dumps(dataclasses.asdict(job)) + "\n" for job in jobs)


def latest_jobs(folder: Path) -> dict[str, Job]:
    """The latest job of every item that was ever submitted."""
    path = folder / JOBS
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf8").splitlines()
    return {job.item: job for job in (Job(**json.loads(line)) for line in lines)}


# --- reports of jobs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a job wrote last. `state` is running until it ends in an orderly way; `arguments` are those it ran with;
    `gpus` are those that it may use on its machine, as CUDA_VISIBLE_DEVICES names them."""

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

    @property
    def seconds(self) -> float | None:
        """How long the job took; None before its end."""
        if not self.ended:
            return None
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.began)).total_seconds()


def write_report(folder: Path, report: Report, rank: int = 0) -> None:
    """Write job.json, atomically; processes other than the first write job.<rank>.json, and only when they fail."""
    write_json(folder / (f"job.{rank}.json" if rank else JOB), dataclasses.asdict(report), "report of the job")


def read_report(folder: Path) -> Report | None:
    """What the item's latest job wrote: of several processes that failed, the first; None if there is nothing."""
    try:
        report = _report(folder / JOB)
    except FileNotFoundError:
        return None
    return report if report.state in ("done", "stopped") else failure(folder, report.job, report.began) or report


def failure(folder: Path, job: str, began: str) -> Report | None:
    """What the first process of this job that failed since then wrote, None if none has."""
    reports = [_report(path) for path in (folder / JOB, *folder.glob("job.*.json")) if path.is_file()]
    failed = [one for one in reports if one.job == job and one.state == "failed" and one.ended >= began]
    return min(failed, key=lambda one: one.ended, default=None)


def _report(path: Path) -> Report:
    values = json.loads(path.read_text(encoding="utf8"))
    return Report(**(values | {"arguments": tuple(values["arguments"])}))
