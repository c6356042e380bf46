"""Locks that let one process at a time use a folder. The system frees a lock when its process ends for any reason."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from experiments.run.errors import RunError
from experiments.run.files import made_folder, storage_errors, write_json

# Errors of cluster file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
LOCK = ".lock"
_TRIES, _PAUSE_SECONDS = 10, 0.02
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Holder:
    """The process that holds a lock where the file system has none: `began` tells it from a later one of its number."""

    host: str
    process: int
    began: int | None

    @staticmethod
    def this() -> _Holder:
        return _Holder(platform.node(), os.getpid(), _began(os.getpid()))

    @staticmethod
    def of(folder: Path) -> _Holder | None:
        """That of a folder, None if there is none."""
        try:
            found = json.loads((folder / LOCK).read_text(encoding="utf8"))
            return _Holder(str(found["host"]), int(found["process"]), found["began"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def runs_here(self) -> bool:
        """Whether it is a process of this machine that has not ended."""
        if self.host != platform.node():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return _began(self.process) == self.began


def _began(process: int) -> int | None:
    """When a process of this machine began, in ticks since the machine did; None where the system does not say."""
    try:
        about = Path(f"/proc/{process}/stat").read_text(encoding="utf8", errors="replace")
        return int(about.rpartition(")")[2].split()[19])  # after the name, which may hold spaces and brackets itself
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def exclusive(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder's lock inside this block. A block that raises leaves no lock, nor folder, that was not there
    before.

    On a file system without locks, the file of the lock names the process that holds it. This keeps other processes of
    this machine away, but not those of others: a warning says so.

    Raises:
        RunError: when another process holds it.
        StorageError: when the folder cannot be made or written.
    """
    path = folder / LOCK
    with made_folder(folder, what):
        new = not path.exists()
        while True:
            with storage_errors(path, "the lock"):
                lock = path.open("a+")
            with lock:
                try:
                    has_locks = _take(lock)
                except BlockingIOError:
                    raise RunError(f"another process is running the {what} in {folder}") from None
                if not _is_at(lock, path):
                    continue  # a process that failed has just deleted it
                if not has_locks:
                    _take_by_name(folder, what)
                try:
                    yield
                except BaseException:
                    if new:
                        path.unlink(missing_ok=True)
                    raise
                finally:
                    if not has_locks and path.exists():
                        path.write_text("", encoding="utf8")
                return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether `path` is this open file, and not one that was made there since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _take(lock: IO[str]) -> bool:
    """Take the lock, or raise `BlockingIOError`; false where the file system has no locks."""
    try:
        _flock(lock)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _flock(lock: IO[str]) -> None:
    """`is_held` holds the lock for a moment, so a few attempts are made before `BlockingIOError` is raised."""
    for last in (*[False] * _TRIES, True):
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if last:
                raise
            time.sleep(_PAUSE_SECONDS)


def _take_by_name(folder: Path, what: str) -> None:
    holder = _Holder.of(folder)
    if holder is not None and holder.runs_here():
        raise RunError(f"another process, {holder.process}, is running the {what} in {folder}")
    log.warning("%s: no locks on this file system: make sure that no other machine runs the %s", folder, what)
    write_json(folder / LOCK, asdict(_Holder.this()), "the lock")


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds the folder's lock."""
    try:
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        holder = _Holder.of(folder)
        return holder is not None and holder.runs_here()
    return False
