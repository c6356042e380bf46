"""Shared by the commands that are about a study that was submitted: the options that say which one is meant."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import option

RUNS = "runs"


@dataclass
class SubmittedStudy:
    """Options that say which study is meant."""

    study: str = option("", "name of the study")
    runs: str = option(RUNS, "folder of the runs; the study is a folder in it", required=True)

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return (Path(self.runs) / self.study).absolute()


def naming(folder: Path) -> str:
    """The options by which the study in this folder is meant, for advice: `study=l1_sweep runs=/scratch/me`."""
    words = [f"study={folder.name}"]
    if folder.parent != Path(RUNS).absolute():
        words.append(f"runs={folder.parent}")
    return shlex.join(words)
