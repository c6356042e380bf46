"""One process at a time for a folder. The system frees a lock when its process ends, however that happens."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from experiments.core.errors import RunError


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block.

    Raises:
        RunError: when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process is running the {what} in {folder}") from None
        yield


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the folder's lock."""
    try:
        with (folder / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
