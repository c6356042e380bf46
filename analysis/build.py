"""Build every table and figure of the paper from run folders, or rebuild them from folders that were built before.

    python -m analysis.build                                                  # all that the repository holds
    python -m analysis.build source=runs/demo out=paper_figures/demo          # one study
    python -m analysis.build source=paper_figures/h200,runs/scaled.collected out=paper_figures/h200

`source` may name several folders, separated by commas: their rows become one source. `out` gets each table (.md, .csv)
and figure (.png, .pdf, and the plotted data as .csv), index.html, README.md, and the tidy frames that everything was
built from. Without arguments, everything in the repository that shows a number is rebuilt from the committed rows: each
folder in paper_figures, the pages above them (claims, evaluation, and index.html, which git ignores), RESULTS.md, and
the marked blocks of README.md and kernels/README.md. The same rows give the same bytes.

Everything is built in a temporary folder beside `out` and moved into place at the end: a build that stops half-way
leaves `out` unchanged. If a table, figure or claim cannot be built from the rows, the reason is printed, the others are
built, and the exit code is 1.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

USAGE = "usage: python -m analysis.build [source=FOLDER[,FOLDER...] out=FOLDER]"


def read_options(arguments: Sequence[str], names: Sequence[str], wanted: str, usage: str) -> dict[str, str]:
    """`name=value` arguments as a dictionary.

    Raises:
        ValueError: an unknown, repeated or empty option; the message has `wanted` and `usage`.
    """
    options: dict[str, str] = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in names or not value:
            raise ValueError(f"got {argument!r}, wanted {wanted}\n{usage}")
        if name in options:
            raise ValueError(f"{name} is given twice\n{usage}")
        options[name] = value
    return options


def parse(arguments: Sequence[str]) -> dict[str, str]:
    """source= and out=, both or none. Raises `ValueError` for anything else."""
    options = read_options(arguments, ("source", "out"), "source=... or out=...", USAGE)
    if options and (absent := [name for name in ("source", "out") if name not in options]):
        raise ValueError(f"{' and '.join(absent)} missing\n{USAGE}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Build what the arguments name, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options = parse(arguments)
        from analysis import publish
        from analysis.load import NotMade

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NotMade)
            if options:
                publish.build(options["source"].split(","), options["out"])
            else:
                publish.build_committed()
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        print(line, file=sys.stderr)
    return 1 if any(issubclass(warning.category, NotMade) for warning in caught) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
