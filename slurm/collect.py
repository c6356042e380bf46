"""Gather the results of a study into the few files that `analysis` reads, and name what is missing.

    python -m slurm.collect study=l1_sweep                        # into runs/l1_sweep.collected
    python -m analysis.build source=runs/l1_sweep.collected out=paper_figures/l1_sweep

Thousands of run folders are slow to walk through, and their checkpoints are large: what this writes is all that tables,
figures and notebooks need. A run counts when its results are whole and were made from the configuration asked for;
any other is named with the reason, in missing.csv too, and makes the exit code 1. Nothing is filled in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import entry, option
from experiments.run.errors import RunError
from slurm.command import SubmittedStudy


class Incomplete(RunError):
    """Some results are missing or damaged."""


@dataclass
class CollectConfig(SubmittedStudy):
    """Gather the results of a study into one folder for analysis, and name those that are missing."""

    out: str = option("", "where to write; empty: <runs>/<study>.collected")

    @property
    def output(self) -> Path:
        """Where to write."""
        return Path(self.out or f"{self.folder}.collected")


def main(config: CollectConfig) -> None:
    """Collect, and name what is missing.

    Raises:
        Incomplete: something is; what is there was collected.
    """
    from slurm.implementation.collect import MISSING, collect, some

    missing = collect(config.folder, config.output)
    print(f"results are in {config.output}")
    if missing:
        raise Incomplete(f"{len(missing)} results are missing (all are in {config.output / MISSING}):{some(missing)}")


if __name__ == "__main__":
    entry(main, CollectConfig)
