"""The options that the commands on a submitted study share: they name the study."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import option
from experiments.run.errors import ConfigError
from slurm.records import submitted_studies

RUNS = "runs"


@dataclass
class SubmittedStudy:
    """The options that name a study."""

    study: str = option("", "name of the study")
    runs: str = option(RUNS, "folder of the runs; the study is a folder in it", required=True)

    @property
    def folder(self) -> Path:
        """The study's folder.

        Raises:
            ConfigError: no study is named; the message lists those that were submitted.
        """
        if not self.study:
            known = ", ".join(submitted_studies(Path(self.runs))) or "none"
            raise ConfigError(f"name a study, study=NAME; submitted in {self.runs}: {known}")
        return (Path(self.runs) / self.study).absolute()


def naming(folder: Path) -> str:
    """The options that name the study in this folder, for advice: `study=l1_sweep runs=/scratch/me`."""
    words = [f"study={folder.name}"]
    if folder.parent != Path(RUNS).absolute():
        words.append(f"runs={folder.parent}")
    return shlex.join(words)
