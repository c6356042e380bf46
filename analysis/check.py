"""Compare the results of a study that was run on this machine with the committed rows.

    python -m analysis.check                                      # the demo, from runs/demo
    python -m analysis.check study=scaled source=runs/scaled      # another study, or another folder of results
    python -m analysis.check study=demo show=all                  # every number, not only the worst one of each metric

`source` is a study's folder of runs, or a folder that slurm.collect or analysis.build wrote. The default is
runs/<study>, or runs/<study>.collected if the former does not exist.

Rows are matched by what they measured: item, operation, backend, layer, task, tokens, seed, metric. TOLERANCES gives
the allowed difference from the committed value for each metric. On the same CPU with the same versions, training is
reproducible bit for bit, so losses and counts must be equal to the last digit. A CPU is the same if its name is, and
the name has a number: virtual machines give CPUs of several generations one name without any. Speed, energy and memory
depend on the machine: only their ratios to dense are compared, and only on the same device.

Exit codes: 0 if every committed number has a row here and is within its tolerance. A row without a value counts if it
gives a reason (for instance, accuracies without task files); such rows are listed. 1 if a number is missing or outside
its tolerance, or if nothing is committed for the study, or only models that were trained on another text. 2 for a wrong
command or a damaged file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m analysis.check [study=NAME] [source=FOLDER] [show=worst|all]"


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """study=, source= and show= with their defaults.

    Raises:
        ValueError: an unknown, repeated or empty option.
    """
    options: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in ("study", "source", "show") or not value:
            raise ValueError(f"got {argument!r}, wanted study=, source= or show=\n{USAGE}")
        if name in options:
            raise ValueError(f"{name} is given twice\n{USAGE}")
        options[name] = value
    study, show = options.get("study", "demo"), options.get("show", "worst")
    if show not in ("worst", "all"):
        raise ValueError(f"got show={show}, wanted worst or all\n{USAGE}")
    return {"study": study, "source": options.get("source", str(default_source(study))), "show": show}


def default_source(study: str) -> Path:
    """Where the runs of a study are, or else what was collected of them."""
    runs, collected = Path("runs") / study, Path("runs") / f"{study}.collected"
    return collected if collected.is_dir() and not runs.is_dir() else runs


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
        from analysis.implementation.check import check

        return check(options["study"], options["source"], options["show"] == "all")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
