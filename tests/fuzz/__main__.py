"""python -m fuzz [seconds=600] [seed=0] [only=[options,...]] [case=N], with the folder `tests` on PYTHONPATH."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from experiments.run.config import option, parse
from fuzz.run import fuzz
from fuzz.targets import TARGETS


@dataclass
class FuzzConfig:
    """Look for inputs that end in a traceback, hang, leave something behind, or give a wrong result."""

    seconds: float = option(600.0, "in all", unit="s", above=0)
    seed: int = option(0, "of the cases", minimum=0)
    only: list[str] = option(list(TARGETS), "targets", required=True, distinct=True, choices=tuple(TARGETS))
    case: int | None = option(None, "run this case alone, with its traceback to be had in a debugger", minimum=0)


def main(config: FuzzConfig) -> int:
    """Fuzz, and say what was found. Returns the exit code."""
    tally = fuzz(config.seed, config.seconds, config.only, None if config.case is None else [config.case])
    for name, number, what in tally.failures:
        print(f"{name}, case {number}: {what}\n    python -m fuzz seed={config.seed} only=[{name}] case={number}")
    print(f"seed {config.seed}: {tally}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main(parse(FuzzConfig, sys.argv[1:])))
