"""Compare the results of a study that was run on this machine with the committed rows.

    python -m analysis.check                                      # the demo, from runs/demo
    python -m analysis.check study=scaled source=runs/scaled      # another study, or another folder of results

`source` is a study's folder of runs, or a folder that slurm.collect or analysis.build wrote. The default is
runs/<study>, or runs/<study>.collected if the former does not exist.

The criteria hold on every processor, although training amplifies the rounding in which processors differ
(EVALUATION.md has how far): all rows are there, held-out cross-entropy within 2%, the mean non-zeros of a model within
a factor, the same order of L1 values by non-zeros, and accuracies within 5 points. Speed, energy and memory depend on
the machine: only their ratios to dense are compared, and only on the same GPU.

Exit codes: 0 if every criterion holds. 1 if not, or if nothing is committed for the study, or only models that were
trained on another text. 2 for a wrong command or a damaged file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.build import read_options

USAGE = "usage: python -m analysis.check [study=NAME] [source=FOLDER]"


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """study= and source= with their defaults. Raises `ValueError` for anything else."""
    options = read_options(arguments, ("study", "source"), "study= or source=", USAGE)
    study = options.get("study", "demo")
    return {"study": study, "source": str(default_source(study))} | options


def default_source(study: str) -> Path:
    """Where the runs of a study are, or else what was collected of them."""
    runs, collected = Path("runs") / study, Path("runs") / f"{study}.collected"
    return collected if collected.is_dir() and not runs.is_dir() else runs


def check(study: str, source: Path) -> int:
    """Compare, print the report, and return the exit code.

    Raises:
        ValueError: no such study.
        FileNotFoundError: the source does not exist or holds no results.
        analysis.read.ResultsError: a file of results is damaged.
    """
    from analysis import comparison, describe
    from analysis.choose import where
    from analysis.load import load

    expected = comparison.committed_rows(study)
    if expected.empty:
        if study not in comparison.studies():
            raise ValueError(f"study={study}: wanted one of {', '.join(comparison.studies())}")
        print(f"The repository has no rows of the study {study} yet: there is nothing to compare with.")
        return 1
    if source == default_source(study) and not source.exists():
        command = "make reproduce" if study == "demo" else f"python -m slurm.submit study={study} cluster=..."
        raise FileNotFoundError(
            f"{source} does not exist: run the study first ({command}), or name its folder with source=FOLDER"
        )
    measured = where(load(source).rows, study=study)
    if measured.empty:
        raise FileNotFoundError(f"{source} has no rows of the study {study}")
    texts = set(measured["text"]) - {""}
    alike = expected[expected["text"].eq("") | expected["text"].isin(texts)] if texts else expected
    if alike.empty:
        theirs, ours = (" and ".join(sorted(set(names) - {""})) for names in (expected["text"], texts))
        print(
            f"The committed models of the study {study} were trained on {theirs}, these on {ours}: nothing to compare."
        )
        return 1
    criteria = comparison.criteria(alike, measured)
    shown = criteria.assign(holds=criteria["holds"].map({True: "yes", False: "NO"})).to_string(index=False)
    print(f"Beside the committed results ({describe.devices(alike['device'])}):\n{shown}")
    return 0 if criteria["holds"].all() else 1


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
        return check(options["study"], Path(options["source"]))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
