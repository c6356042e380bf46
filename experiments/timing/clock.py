"""Measures the time spent on training itself, and limits how long one process works on a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from experiments.run.train_config import RunConfig


class Stopwatch:
    """Seconds since `start`, on top of an earlier reading, without those inside `paused` blocks."""

    def __init__(self, earlier: float = 0.0) -> None:
        self._offset = earlier
        self._started = time.perf_counter()
        self._paused: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def seconds(self) -> float:
        """The current reading, which does not change while the stopwatch is paused."""
        now = time.perf_counter() if self._paused is None else self._paused
        return self._offset + now - self._started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        self._paused = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - self._paused
            self._paused = None


def limit_reached(config: RunConfig, steps: int, seconds: float) -> str | None:
    """The limit that one process has reached after so many steps and seconds; None if none is."""
    if config.max_steps is not None and steps >= config.max_steps:
        return f"run.max_steps={config.max_steps}"
    if config.max_seconds is not None and seconds >= config.max_seconds:
        return f"run.max_seconds={config.max_seconds}"
    return None
