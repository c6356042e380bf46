"""Locks that let one process at a time use a folder. The system frees a lock when its process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from experiments.run.errors import RunError

# Errors of cluster file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_TRIES, _PAUSE_SECONDS = 10, 0.02
log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block. On a file system without locks, log a warning and go on.

    Raises:
        RunError: when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            _take(lock)
        except BlockingIOError:
            raise RunError(f"another process is running the {what} in {folder}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: no locks on this file system: make sure that no other process runs the %s", folder, what)
        yield


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
