"""Runs cases of the targets for a given time, and records violations of the rule."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from random import Random

import torch

from fuzz.targets import TARGETS

# Far beyond any case on a machine with other work to do.
HANGS_SECONDS = 120


class Hangs(BaseException):
    """Not an `Exception`: what is tested must not catch it."""


@dataclass
class Tally:
    """Cases tried, and failures: (target, number of the case, what happened)."""

    tried: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        by_target = ", ".join(f"{name} {count}" for name, count in self.tried.items())
        return f"{sum(self.tried.values())} cases ({by_target}), {len(self.failures)} failures"


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise Hangs(f"still running after {HANGS_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANGS_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(
    seed: int, seconds: float | None = None, names: Iterable[str] = TARGETS, cases: Iterable[int] | None = None
) -> Tally:
    """Cases 0, 1, 2, ... of every target, for an equal share of the time each; or just `cases` of them.

    Case n of a target is the same for the same seed, whatever ran before it.
    """
    tally, names = Tally(), list(names)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.NullHandler()]
    try:
        for name in names:
            with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
                case = TARGETS[name](Path(scratch))
                end = time.monotonic() + (seconds or 0) / len(names)
                in_time = takewhile(lambda number, end=end: number == 0 or time.monotonic() < end, count())
                for number in in_time if cases is None else cases:
                    tally.tried[name] = tally.tried.get(name, 0) + 1
                    try:
                        with _limited():
                            case(Random(f"{seed}/{name}/{number}"))
                    except (Exception, Hangs) as error:  # noqa: BLE001 (whatever it is, it is a finding)
                        tally.failures.append((name, number, _told(error)))
    finally:
        root.handlers = handlers
        torch.set_num_threads(threads)
    return tally


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-6:]]
    return f"{type(error).__name__}: {str(error)[:500]!r} ({' > '.join(places)})"
