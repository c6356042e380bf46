"""End the jobs of a study. Trainings write a checkpoint first, so that `slurm.submit` can continue them later.

python -m slurm.cancel study=l1_sweep
python -m slurm.cancel study=l1_sweep "only=[0.5b_l1_0_seed_0]"
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import entry, option
from experiments.run.errors import ConfigError, RunError
from experiments.run.locks import is_held
from slurm import scheduler
from slurm.command import SubmittedStudy
from slurm.local import QUEUE
from slurm.records import DamagedRecord, Job, note_submitted, read_submission
from slurm.states import ALIVE, item_states


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
        cancel_in_slurm(folder, [one.job for one in slurm if one.job is not None])
    elif is_held(folder) and (folder / QUEUE).is_file():
        _stop_queue(folder, config.only)
    elif chosen:
        runs = ", ".join(f"{one.item.name} (process {one.job.job if one.job else 'unknown'})" for one in chosen)
        raise RunError(f"no launcher to be told: {runs} were started by hand, or their launcher was killed")
    print(f"cancelled {len(chosen)} of {len(states)} items: {', '.join(one.item.name for one in chosen) or 'none ran'}")


def cancel_in_slurm(folder: Path, jobs: list[Job]) -> None:
    """Cancel the jobs; this is recorded first, so that nobody who looks in between takes them for failed ones."""
    note_submitted(folder, [dataclasses.replace(job, cancelled=True) for job in jobs])
    scheduler.cancel([job.job for job in jobs])


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
