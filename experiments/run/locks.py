"""Locks that let one process at a time use a folder. The system frees a lock when its process ends for any reason."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.run.errors import RunError
from experiments.run.files import make_folder, storage_errors

LOCK = ".lock"
_SECONDS, _PAUSE_SECONDS = 0.2, 0.02


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block. `is_held` holds it for a moment, so it is tried for a while.

    Raises:
        RunError: when another process holds it, or the file system has no locks.
        StorageError: when the folder cannot be made or written.
    """
    make_folder(folder, what)
    path, deadline = folder / LOCK, time.monotonic() + _SECONDS
    with storage_errors(path, "the lock"):
        lock = path.open("a+")
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(f"another process is running the {what} in {folder}") from None
                time.sleep(_PAUSE_SECONDS)
            except OSError as error:
                raise RunError(f"{path} cannot be locked ({error.strerror}): choose a folder elsewhere") from error
        yield


def is_held(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or none that anyone could hold
        return False
    return False
