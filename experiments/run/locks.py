"""Locks that let one process at a time use a folder. The system frees a lock when its process ends for any reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from experiments.run.errors import RunError
from experiments.run.files import made_folder, storage_errors

LOCK = ".lock"
_SECONDS, _PAUSE_SECONDS = 0.2, 0.02


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block. A block that raises leaves no lock, nor folder, that was not there
    before.

    Raises:
        RunError: when another process holds it, or the file system has no locks.
        StorageError: when the folder cannot be made or written.
    """
    path = folder / LOCK
    with made_folder(folder, what):
        new = not path.exists()
        with _locked(path, what):
            try:
                yield
            except BaseException:
                if new:
                    path.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Open and lock the file at `path`. `is_held` holds a lock for a moment, so it is tried for a while."""
    deadline = time.monotonic() + _SECONDS
    while True:
        with storage_errors(path, "the lock"):
            lock = path.open("a+")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(f"another process is running the {what} in {path.parent}") from None
                time.sleep(_PAUSE_SECONDS)
            except OSError as error:
                raise RunError(f"{path} cannot be locked ({error.strerror}): choose a folder elsewhere") from error
            else:
                if _is_at(lock, path):
                    yield
                    return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether `path` is this open file; a process that failed deletes its lock."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


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
