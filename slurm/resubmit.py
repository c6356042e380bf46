"""Submit again what failed, and what could not run because of it; nothing else.

    python -m slurm.resubmit study=l1_sweep                  # where it was submitted before
    python -m slurm.resubmit study=l1_sweep cluster=big      # somewhere else, for instance with more memory

The code is that of now: mend what was broken, then resubmit. Trainings continue from their newest checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from experiments.run.config import entry, option
from experiments.study.graph import State
from slurm.cluster import load_cluster
from slurm.command import SubmittedStudy
from slurm.records import CLUSTER, read_submission
from slurm.states import ALIVE, failed_ones, item_states
from slurm.submit import Request, submit


@dataclass
class ResubmitConfig(SubmittedStudy):
    """Submit again what failed of a study, and what could not run because of it."""

    cluster: str = option("", "another cluster than before: a name in slurm/clusters/, or a file")


def main(config: ResubmitConfig) -> None:
    """Submit; on this machine, also run.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: as `slurm.submit` does.
    """
    folder = config.folder
    submission = read_submission(folder)
    states = item_states(folder, submission)
    for damage in states.damaged:
        print(damage)
    names = failed_ones(states)
    if not names:
        left = [name for name, one in states.items() if one.state not in (State.DONE, *ALIVE)]
        more = (
            f"; {len(left)} of it are not done: python -m slurm.submit with the same arguments continues"
            if left
            else ""
        )
        print(f"nothing of {config.study} has failed{more}")
        return
    cluster = load_cluster(config.cluster or str(folder / CLUSTER))
    os.chdir(submission.directory)  # where the relative paths among the arguments start
    submit(Request(folder.name, folder, submission.items, tuple(names), cluster))


if __name__ == "__main__":
    entry(main, ResubmitConfig)
