"""Shows the progress of a training: a bar on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

_LINE_EVERY_S = 10.0
log = logging.getLogger(__name__)


class Progress:
    """Steps done, with the values of the latest logged step."""

    def __init__(self, name: str, done: int, total: int, mode: str) -> None:
        self._name, self._total = name, total
        if mode == "auto":
            mode = "bar" if sys.stderr.isatty() else "lines"
        self._bar = tqdm(total=total, initial=done, desc=name, unit="step") if mode == "bar" else None
        self._lines = mode == "lines"
        self._started, self._first = time.monotonic(), done
        self._next_line = self._started

    def step(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def show(self, done: int, **values: Any) -> None:
        """Values of a logged step: cross_entropy, tokens_per_s, nonzeros (the mean over layers)."""
        if self._bar is not None:
            self._bar.set_postfix_str(_text(values))
        now = time.monotonic()
        if self._lines and (now >= self._next_line or done == self._total):
            self._next_line = now + _LINE_EVERY_S
            seconds = (now - self._started) / max(1, done - self._first) * (self._total - done)
            left = tqdm.format_interval(seconds)
            log.info("%s: step %d/%d, %s, %s left", self._name, done, self._total, _text(values), left)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _text(values: dict[str, Any]) -> str:
    return "loss {cross_entropy:.3f}, {tokens_per_s:,.0f} tokens/s, {nonzeros:.1f} non-zeros".format(**values)
