"""Compare the results of a study that was run on this machine with the committed rows.

    python -m analysis.check                                      # the demo, from runs/demo
    python -m analysis.check study=scaled source=runs/scaled      # another study, or another folder of results
    python -m analysis.check strict=true                          # every number against a tolerance of its own
    python -m analysis.check strict=true show=all                 # all of them, not only the worst of each metric

`source` is a study's folder of runs, or a folder that slurm.collect or analysis.build wrote. The default is
runs/<study>, or runs/<study>.collected if the former does not exist.

By default, trainings are compared by criteria that hold on every processor, although training amplifies the rounding in
which processors differ: all rows are there, held-out cross-entropy within 2%, the mean non-zeros of a model within a
factor, and the same order of L1 values by non-zeros. EVALUATION.md has how far processors differ.

With strict=true, rows are matched by what they measured: item, operation, backend, layer, task, tokens, seed, metric.
TOLERANCES gives
the allowed difference from the committed value for each metric. On the same CPU with the same versions, training is
reproducible bit for bit, so losses and counts must be equal to the last digit. A CPU is the same if its name is, and
the name has a number: virtual machines give CPUs of several generations one name without any. Speed, energy and memory
depend on the machine: only their ratios to dense are compared, and only on the same device.

Exit codes: 0 if every criterion holds; with strict=true, if every committed number has a row here and is within its
tolerance. A row without a value counts if it gives a reason (for instance, accuracies without task files); such rows
are listed. 1 if not, or if nothing is committed for the study, or only models that were trained on another text. 2 for
a wrong command or a damaged file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = "usage: python -m analysis.check [study=NAME] [source=FOLDER] [strict=true|false] [show=worst|all]"


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """study=, source=, strict= and show= with their defaults.

    Raises:
        ValueError: an unknown, repeated or empty option.
    """
    options: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in ("study", "source", "strict", "show") or not value:
            raise ValueError(f"got {argument!r}, wanted study=, source=, strict= or show=\n{USAGE}")
        if name in options:
            raise ValueError(f"{name} is given twice\n{USAGE}")
        options[name] = value
    study = options.get("study", "demo")
    found = {"study": study, "source": str(default_source(study)), "strict": "false", "show": "worst"} | options
    for name, values in {"strict": ("true", "false"), "show": ("worst", "all")}.items():
        if found[name] not in values:
            raise ValueError(f"got {name}={found[name]}, wanted {' or '.join(values)}\n{USAGE}")
    return found


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

        strict, show_all = options["strict"] == "true", options["show"] == "all"
        return check(options["study"], options["source"], strict=strict, show_all=show_all)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
