"""End the jobs of a study. Trainings write a checkpoint first, so that `slurm.submit` can continue them later: under
SLURM this command waits for that, at most the cluster's `signal_seconds`.

python -m slurm.cancel study=l1_sweep
python -m slurm.cancel study=l1_sweep "only=[0.5b_l1_0_seed_0]"
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import entry, option
from experiments.run.errors import ConfigError, RunError
from experiments.run.locks import is_held
from slurm import scheduler
from slurm.cluster import ClusterConfig, load_cluster
from slurm.command import SubmittedStudy
from slurm.job import REQUEUE_SIGNAL
from slurm.local import QUEUE
from slurm.records import CLUSTER, DamagedRecord, note_submitted, read_submission
from slurm.states import ALIVE, ItemState, item_states

POLL_SECONDS = 3.0


@dataclass
class CancelConfig(SubmittedStudy):
    """End the jobs of a study: those that run write a checkpoint first, those that wait leave the queue."""

    only: list[str] = option([], "items whose jobs to end; empty: all. On this machine, only all is possible")


def main(config: CancelConfig) -> None:
    """Cancel, and say what.

    Raises:
        ConfigError: nothing was submitted there, or `only` names what is not there.
        RunError: the jobs are another machine's, or SLURM cannot be asked.
    """
    folder = config.folder
    states = item_states(folder, read_submission(folder))
    for damage in states.damaged:
        print(damage)
    if unknown := [name for name in config.only if name not in states]:
        raise ConfigError(f"no item {', '.join(unknown)}; there are {', '.join(states)}")
    chosen = [one for name, one in states.items() if one.state in ALIVE and name in (config.only or states)]
    slurm = [one for one in chosen if one.job is not None and one.job.executor == "slurm"]
    if slurm:
        _cancel_in_slurm(folder, slurm)
    elif is_held(folder) and (folder / QUEUE).is_file():
        _stop_queue(folder, config.only)
    elif chosen:
        runs = ", ".join(f"{one.item.name} (process {one.job.job if one.job else 'unknown'})" for one in chosen)
        raise RunError(f"no launcher to be told: {runs} were started by hand, or their launcher was killed")
    print(f"cancelled {len(chosen)} of {len(states)} items: {', '.join(one.item.name for one in chosen) or 'none ran'}")


def _cancel_in_slurm(folder: Path, chosen: list[ItemState]) -> None:
    """Cancel what waits, and tell what runs to write its checkpoint and end. `scancel` alone would leave it the time of
    SLURM's KillWait for that, by default 30 s.

    The cancellation is recorded first: the jobs see it, and do not requeue themselves; and nobody who looks in between
    takes them for failed ones.
    """
    known = {one.job.job: one for one in chosen if one.job is not None}
    note_submitted(folder, [dataclasses.replace(one.job, cancelled=True) for one in chosen if one.job is not None])
    running = [job for job, one in known.items() if one.seen is not None and one.seen.state == "RUNNING"]
    scheduler.cancel([job for job in known if job not in running])
    if not running:
        return
    seconds = _signal_seconds(folder)
    scheduler.signal(running, REQUEUE_SIGNAL.name.removeprefix("SIG"))
    print(
        f"{len(running)} jobs write their checkpoints and end; what still runs after {seconds} s is ended", flush=True
    )
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, seconds))
        with contextlib.suppress(RunError):  # a controller that does not answer now does so later
            seen = scheduler.queue(running)
            states = {job: seen[job].state for job in running if job in seen and seen[job].alive}
            running = [job for job, state in states.items() if state not in ("PENDING", "COMPLETING")]
            scheduler.cancel([job for job, state in states.items() if state == "PENDING"])  # requeued at that moment
    scheduler.cancel(running)


def _signal_seconds(folder: Path) -> int:
    """How long a checkpoint may take, as the cluster's file says that was submitted to last."""
    try:
        return load_cluster(str(folder / CLUSTER)).signal_seconds
    except ConfigError as error:
        print(f"{error}; waiting as long as by default")
        return ClusterConfig().signal_seconds


def _stop_queue(folder: Path, only: list[str]) -> None:
    """The queue of this machine, which holds the study's lock, stops its items and ends."""
    path = folder / QUEUE
    try:
        queue = json.loads(path.read_text(encoding="utf8"))
        host, process = str(queue["host"]), int(queue["pid"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRecord(path, "the launcher's process is not known; Ctrl-C where it runs stops it") from error
    if host != platform.node():
        raise RunError(f"the study was started on {host}: cancel it there")
    if only:
        raise ConfigError("only: the runs of this machine are cancelled all together")
    os.kill(process, signal.SIGTERM)


if __name__ == "__main__":
    entry(main, CancelConfig)
