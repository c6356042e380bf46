"""Finds out where each item of a study stands, from its results, the report of its job, and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.run.errors import RunError
from experiments.run.locks import is_held
from experiments.study.graph import Graph, Item, State, config_difference
from slurm import scheduler
from slurm.records import Job, Report, Submission, config_digest, latest_jobs, read_report
from slurm.scheduler import Seen

ALIVE = (State.RUNNING, State.QUEUED)
KILLED = "killed? then usually by the system, out of memory"
DELETED = "its folder was deleted"
FORGOTTEN = "SLURM has forgotten it"


@dataclass(frozen=True)
class ItemState:
    """An item's state, and why it is not done.

    `job`, `seen` (by the scheduler) and `report` (by the job) are those of its latest job; None if there is none.
    """

    item: Item
    state: State
    reason: str = ""
    job: Job | None = None
    seen: Seen | None = None
    report: Report | None = None


def same_arguments(item: Item) -> str | None:
    """What differs between the configuration of an item's results and its own, None if nothing does.

    Quick for the usual case: a job has made them with the very same arguments, and nothing else has since.
    """
    report = read_report(item.folder)
    made_so = report is not None and report.state == "done" and report.arguments == item.arguments
    if report is not None and made_so and report.config and report.config == config_digest(item.folder):
        return None
    return config_difference(item)


def item_states(
    folder: Path,
    submission: Submission,
    same_config: Callable[[Item], str | None] = same_arguments,
    *,
    must_know: bool = True,
) -> dict[str, ItemState]:
    """The state of every item of a study. An item whose job waits or runs is not done, whatever results are there. Of
    others, the results decide whether they are; only then counts what the job and the scheduler say.

    must_know: False: what SLURM cannot be asked about is shown as waiting, with the reason.

    Raises:
        RunError: some jobs are SLURM's, and SLURM cannot be asked; a file of the launcher is damaged.
    """
    graph = Graph(submission.items, same_config)
    results, jobs = graph.states(), latest_jobs(folder)
    states, unsettled = {}, {}
    for name, item in graph.items.items():
        job, report = jobs.get(name), read_report(item.folder)
        states[name] = ItemState(item, *results[name], job, report=report)
        is_over = report is not None and report.has_ended and (job is None or job.job == report.job)
        if not (is_over and states[name].state is State.DONE):
            unsettled[name] = states[name]
    open_jobs = [entry.job for entry in unsettled.values() if entry.job is not None]
    slurm = {job.item: job.job for job in open_jobs if job.executor == "slurm"}
    seen, unanswered = {}, ""
    try:
        seen = scheduler.queue(slurm.values()) if slurm else {}
        if forgotten := [job for job in slurm.values() if job not in seen]:
            seen |= scheduler.accounting(forgotten)
    except RunError as error:
        if must_know:
            raise RunError(f"{error}; asked for {', '.join(slurm)}, submitted to SLURM") from error
        unanswered = f"unknown: {error}"
    for name, entry in unsettled.items():
        open_state = _open_state(entry, seen, unanswered)
        if entry.state is not State.DONE or open_state.state in ALIVE:
            states[name] = open_state
    return states


def _open_state(entry: ItemState, all_seen: Mapping[str, Seen], unanswered: str) -> ItemState:
    """The state of an item that may wait or run, whatever its results say. unanswered: why SLURM did not say."""
    item, job = entry.item, entry.job
    if job is None:
        return ItemState(item, State.RUNNING if is_held(item.folder) else entry.state, entry.reason)
    seen = all_seen.get(job.job)
    report = entry.report if entry.report is not None and entry.report.job == job.job else None

    def result(state: State, reason: str = "") -> ItemState:
        return ItemState(item, state, reason, job, seen, report)

    if seen is not None and seen.alive:
        return result(State.RUNNING) if seen.state != "PENDING" else result(State.QUEUED, seen.reason)
    if unanswered and seen is None and job.executor == "slurm" and not (report is not None and report.has_ended):
        return result(State.QUEUED, unanswered)
    if job.executor != "slurm" and is_held(item.folder):
        return result(State.RUNNING)
    if job.executor == "local" and report is None and _is_starting(job):
        return result(State.QUEUED, "starting")
    if job.cancelled:
        return result(State.CANCELLED)
    if entry.state is State.WAITS:
        return result(State.WAITS, entry.reason)
    if report is not None and report.state == "failed":
        return result(State.FAILED, report.error)
    if seen is not None and seen.state == "CANCELLED":
        if seen.reason.startswith("Dependency"):
            return result(State.TODO, entry.reason)  # SLURM dropped it: what it needed had failed
        return result(State.CANCELLED, "outside of slurm.cancel")
    if report is not None and report.state == "stopped":
        return result(State.STOPPED, report.error)
    if report is not None and report.state == "done":
        return result(State.TODO, entry.reason)  # what it was made from has changed since, or its files have
    killed = KILLED if item.folder.is_dir() else DELETED
    says = f"SLURM says {seen.state}" if seen is not None else FORGOTTEN if job.executor == "slurm" else killed
    return result(State.FAILED, without_a_word(job, says))


def without_a_word(job: Job, how: str = KILLED) -> str:
    """The reason of a job that has ended without a report, as one does that is killed."""
    words = job.last_words()
    return f"the job ended without a word ({how})" + (f"; its log ends: {words}" if words else "")


def _is_starting(job: Job) -> bool:
    """Whether the job is a process of this machine, which imports for some seconds before it writes its report. Without
    /proc the answer is no."""
    try:
        return b"submitit" in Path(f"/proc/{job.job}/cmdline").read_bytes()
    except OSError:
        return False
