"""The small file in which a launcher finds how far a program is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

PROGRESS = "progress.json"
_INTERVAL_SECONDS = 1.0


class Done(NamedTuple):
    """`done` of `total` parts."""

    done: int
    total: int


class ProgressFile:
    """Keeps `<folder>/progress.json` up to date, at most once a second. A program calls it as it goes, with parts done,
    parts in all, and values that may be of interest."""

    def __init__(self, folder: Path) -> None:
        self._path, self._last = folder / PROGRESS, 0.0

    def __call__(self, done: int, total: int, **values: Any) -> None:
        now = time.monotonic()
        if done < total and now - self._last < _INTERVAL_SECONDS:
            return
        self._last = now
        # Not synced to the disk: it is of use only while the program runs.
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"done": done, "total": total}))
        new.replace(self._path)


def read_progress(folder: Path) -> Done | None:
    """What the program that writes to this folder reported last; None before its first report, and where the file does
    not hold one."""
    try:
        return Done(**json.loads((folder / PROGRESS).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
