"""Where each item of a study stands: from its results, its job's own report, and what the scheduler knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from experiments.run.locks import is_held
from experiments.study.graph import Graph, Item, State
from experiments.study.runner import config_difference
from slurm import scheduler
from slurm.records import Job, Plan, Report, latest_jobs, read_report
from slurm.scheduler import Seen


class Phase(Enum):
    """Of one item. Its results decide whether it is done; only then comes what its job says."""

    DONE = "done"
    RUNNING = "running"
    QUEUED = "queued"
    STOPPED = "stopped"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TODO = "to do"
    WAITS = "waits"


ALIVE = (Phase.RUNNING, Phase.QUEUED)


@dataclass(frozen=True)
class ItemState:
    """`reason` says why the item is not done. `job`, `seen` and `report` are of its latest job; None if unknown."""

    item: Item
    phase: Phase
    reason: str = ""
    job: Job | None = None
    seen: Seen | None = None
    report: Report | None = None


def same_arguments(item: Item) -> str | None:
    """What differs between the configuration of an item's results and its own, None if nothing does.

    Quick for the usual case, a job that ran with the very same arguments.
    """
    report = read_report(item.folder)
    return None if report is not None and report.arguments == item.arguments else config_difference(item)


def item_states(
    study: Path, plan: Plan, same_config: Callable[[Item], str | None] = same_arguments
) -> dict[str, ItemState]:
    """The state of every item of the plan.

    Raises:
        RunError: some jobs are SLURM's, and SLURM cannot be asked.
    """
    graph = Graph(plan.items, same_config)
    states, jobs = graph.states(), latest_jobs(study)
    open_jobs = {name: job for name, job in jobs.items() if name in states and states[name][0] is not State.DONE}
    slurm = [job.job for job in open_jobs.values() if job.executor == "slurm"]
    seen = scheduler.queue(slurm)
    seen = scheduler.accounting([job for job in slurm if job not in seen]) | seen
    return {
        name: ItemState(item, Phase.DONE, job=jobs.get(name))
        if states[name][0] is State.DONE
        else _open_state(item, *states[name], open_jobs.get(name), seen)
        for name, item in graph.items.items()
    }


def _open_state(item: Item, state: State, why: str, job: Job | None, all_seen: Mapping[str, Seen]) -> ItemState:
    """Of an item that is not done."""
    waiting = Phase.WAITS if state is State.BLOCKED else Phase.TODO
    if job is None:
        return ItemState(item, Phase.RUNNING if is_held(item.folder) else waiting, why)
    report, seen = read_report(item.folder), all_seen.get(job.job)
    report = report if report is not None and report.job == job.job else None

    def result(phase: Phase, reason: str) -> ItemState:
        return ItemState(item, phase, reason, job, seen, report)

    if seen is not None and seen.alive:
        return result(*((Phase.RUNNING, "") if seen.state != "PENDING" else (Phase.QUEUED, seen.reason)))
    if job.executor != "slurm" and is_held(item.folder):
        return result(Phase.RUNNING, "")
    if job.executor == "local" and report is None and _is_starting(job):
        return result(Phase.QUEUED, "starting")
    if job.cancelled:
        return result(Phase.CANCELLED, "")
    if state is State.BLOCKED:
        return result(Phase.WAITS, why)
    if report is not None and report.state == "failed":
        return result(Phase.FAILED, report.error)
    if seen is not None and seen.state == "CANCELLED":
        return result(Phase.CANCELLED, "outside of slurm.cancel")
    if report is not None and report.state == "stopped":
        return result(Phase.STOPPED, report.error)
    if report is not None and report.state == "done":
        return result(Phase.TODO, why)  # what it was made from has changed since, or its files have
    how = f"SLURM says {seen.state}" if seen is not None else "killed?"
    return result(Phase.FAILED, f"the job ended without a word ({how})")


def _is_starting(job: Job) -> bool:
    """Whether the job is a process of this machine: before it writes its report, it imports for some seconds. Where
    there is no /proc it is not known."""
    try:
        return b"submitit" in Path(f"/proc/{job.job}/cmdline").read_bytes()
    except OSError:
        return False


def failed_ones(states: Mapping[str, ItemState]) -> list[str]:
    """What `resubmit` takes: items that failed, and those that could not run for no other reason than that."""
    taken: set[str] = set()
    for name, one in states.items():  # each after what it needs
        lost = [need for need in one.item.needs if states[need].phase not in (Phase.DONE, *ALIVE)]
        if one.phase is Phase.FAILED or (one.phase is Phase.WAITS and lost and taken.issuperset(lost)):
            taken.add(name)
    return [name for name in states if name in taken]
