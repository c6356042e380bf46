"""Submit again what failed, and what could not run because of it; nothing else.

    python -m slurm.resubmit study=l1_sweep                  # where it was submitted before
    python -m slurm.resubmit study=l1_sweep cluster=big      # somewhere else, for instance with more memory

The code is that of now: mend what was broken, then resubmit. Trainings continue from their newest checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import entry, option
from slurm.cluster import load_cluster
from slurm.records import CLUSTER, read_submission
from slurm.states import failed_ones, item_states
from slurm.submit import Request, submit


@dataclass
class ResubmitConfig:
    """Submit again what failed of a study, and what could not run because of it."""

    study: str = option("", "name of the study")
    runs: str = option("runs", "folder of the runs; the study is a folder in it")
    cluster: str = option("", "another cluster than before: a name in slurm/clusters/, or a file")


def main(config: ResubmitConfig) -> None:
    """Submit; on this machine, also run.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: as `slurm.submit` does.
    """
    study = (Path(config.runs) / config.study).absolute()
    submission = read_submission(study)
    names = failed_ones(item_states(study, submission))
    if not names:
        print(f"nothing of {config.study} has failed")
        return
    cluster = load_cluster(config.cluster or str(study / CLUSTER))
    os.chdir(submission.directory)  # where the relative paths among the arguments start
    submit(Request(study.name, study, submission.items, tuple(names), cluster))


if __name__ == "__main__":
    entry(main, ResubmitConfig)
