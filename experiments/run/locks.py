"""Locks that let one process at a time use a folder. The system frees a lock when its process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from experiments.run.errors import RunError
from experiments.run.files import made_folder, storage_errors

# Errors of cluster file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_TRIES, _PAUSE_SECONDS = 10, 0.02
log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block. On a file system without locks, log a warning and go on. A block that
    raises leaves no lock, nor folder, that was not there before.

    Raises:
        RunError: when another process holds it.
        StorageError: when the folder cannot be made or written.
    """
    path = folder / ".lock"
    with made_folder(folder, what):
        new = not path.exists()
        while True:
            with storage_errors(path, "the lock"):
                lock = path.open("w")
            with lock:
                try:
                    _take(lock)
                except BlockingIOError:
                    raise RunError(f"another process is running the {what} in {folder}") from None
                except OSError as error:
                    if error.errno not in _NO_LOCKS:
                        raise
                    advice = "make sure that no other process runs the"
                    log.warning("%s: no locks on this file system: %s %s", folder, advice, what)
                if not _is_at(lock, path):
                    continue  # a process that failed has just deleted it
                try:
                    yield
                except BaseException:
                    if new:
                        path.unlink(missing_ok=True)
                    raise
                return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether `path` is this open file, and not one that was made there since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _take(lock: IO[str]) -> None:
    """Take the lock. `is_held` holds it for a moment, so a few attempts are made before `BlockingIOError` is raised."""
    for last in (*[False] * _TRIES, True):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if last:
                raise
            time.sleep(_PAUSE_SECONDS)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the folder's lock."""
    try:
        with (folder / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return False
