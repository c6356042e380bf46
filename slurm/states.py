"""Finds out where each item of a study stands, from its results, the report of its job, and the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments.run.locks import is_held
from experiments.study.graph import Graph, Item, State
from experiments.study.programs import config_difference
from slurm import scheduler
from slurm.records import Job, Report, Submission, config_digest, latest_jobs, report_or_damage
from slurm.scheduler import Seen

ALIVE = (State.RUNNING, State.QUEUED)


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
    report, _ = report_or_damage(item.folder)
    made_so = report is not None and report.state == "done" and report.arguments == item.arguments
    if report is not None and made_so and report.config and report.config == config_digest(item.folder):
        return None
    return config_difference(item)


class ItemStates(dict[str, ItemState]):
    """The state of every item, by its name. `damaged` says which of the launcher's files could not be read."""

    def __init__(self, states: Mapping[str, ItemState], damaged: Iterable[str] = ()) -> None:
        super().__init__(states)
        self.damaged = list(damaged)


def item_states(
    folder: Path, submission: Submission, same_config: Callable[[Item], str | None] = same_arguments
) -> ItemStates:
    """The state of every item of a study. An item whose job waits or runs is not done, whatever results are there. Of
    others, the results decide whether they are; only then counts what the job and the scheduler say.

    Raises:
        RunError: some jobs are SLURM's, and SLURM cannot be asked.
    """
    graph = Graph(submission.items, same_config)
    states, jobs = graph.states(), latest_jobs(folder)
    reports, damaged = {}, list(jobs.damaged)
    for name, item in graph.items.items():
        reports[name], damage = report_or_damage(item.folder)
        damaged += [damage] if damage else []
    settled = {name for name in states if states[name][0] is State.DONE and _has_ended(jobs.get(name), reports[name])}
    open_jobs = {name: job for name, job in jobs.items() if name in states and name not in settled}
    slurm = [job.job for job in open_jobs.values() if job.executor == "slurm"]
    seen = scheduler.queue(slurm)
    seen = scheduler.accounting([job for job in slurm if job not in seen]) | seen
    found = {}
    for name, item in graph.items.items():
        state, why = states[name]
        found[name] = ItemState(item, state, why, jobs.get(name), report=reports[name])
        if name not in settled:
            now = _open_state(item, state, why, open_jobs.get(name), reports[name], seen)
            found[name] = now if state is not State.DONE or now.state in ALIVE else found[name]
    return ItemStates(found, damaged)


def _has_ended(job: Job | None, report: Report | None) -> bool:
    """Whether the item's latest job is known to be over."""
    return report is not None and report.has_ended and (job is None or job.job == report.job)


def _open_state(
    item: Item, state: State, why: str, job: Job | None, report: Report | None, all_seen: Mapping[str, Seen]
) -> ItemState:
    """The state of an item that its results alone call `state`. If they say done, only an answer counts that the item
    waits or runs."""
    if job is None:
        return ItemState(item, State.RUNNING if is_held(item.folder) else state, why)
    seen = all_seen.get(job.job)
    report = report if report is not None and report.job == job.job else None

    def result(state: State, reason: str) -> ItemState:
        return ItemState(item, state, reason, job, seen, report)

    if seen is not None and seen.alive:
        return result(*((State.RUNNING, "") if seen.state != "PENDING" else (State.QUEUED, seen.reason)))
    if job.executor != "slurm" and is_held(item.folder):
        return result(State.RUNNING, "")
    if job.executor == "local" and report is None and _is_starting(job):
        return result(State.QUEUED, "starting")
    if job.cancelled:
        return result(State.CANCELLED, "")
    if state is State.WAITS:
        return result(State.WAITS, why)
    if report is not None and report.state == "failed":
        return result(State.FAILED, report.error)
    if seen is not None and seen.state == "CANCELLED":
        return result(State.CANCELLED, "outside of slurm.cancel")
    if report is not None and report.state == "stopped":
        return result(State.STOPPED, report.error)
    if report is not None and report.state == "done":
        return result(State.TODO, why)  # what it was made from has changed since, or its files have
    how = f"SLURM says {seen.state}" if seen is not None else "killed?"
    return result(State.FAILED, f"the job ended without a word ({how})")


def _is_starting(job: Job) -> bool:
    """Whether the job is a process of this machine, which imports for some seconds before it writes its report. Without
    /proc the answer is no."""
    try:
        return b"submitit" in Path(f"/proc/{job.job}/cmdline").read_bytes()
    except OSError:
        return False


def failed_ones(states: Mapping[str, ItemState]) -> list[str]:
    """What `resubmit` takes: items that failed, and items that could not run only because those failed."""
    taken: set[str] = set()
    for name, one in states.items():  # each after what it needs
        lost = [need for need in one.item.needs if states[need].state not in (State.DONE, *ALIVE)]
        if one.state is State.FAILED or (one.state is State.WAITS and lost and taken.issuperset(lost)):
            taken.add(name)
    return [name for name in states if name in taken]
