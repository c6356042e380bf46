"""Errors that stop an experiment with a message instead of a traceback, and the exit codes of every entry point."""

from __future__ import annotations

import errno

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
EXIT_STOPPED = 85  # a signal or a limit asked to stop: a checkpoint was written, the same command continues the run


class RunError(RuntimeError):
    """A run cannot go on, for a reason that the user can act on: the message says which, in one line."""

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        # What a library said, which is part of many messages, may have several.
        return " ".join(line.strip() for line in super().__str__().splitlines())


class ConfigError(RunError, ValueError):
    """The configuration is wrong: an unknown key, a value of the wrong type, or values that contradict each other."""

    exit_code = EXIT_BAD_CONFIG


class DataError(RunError):
    """Text, token files or a tokenizer are missing, empty, damaged, or do not fit the model."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged, or of another model."""


class DivergenceError(RunError):
    """The loss or the gradient is no longer a finite number."""


class StorageError(RunError):
    """The disk is full, or a place cannot be written for another reason."""


class Stopped(RunError):
    """A signal or a limit asked to stop; a checkpoint was written, and the same command continues the run.

    `signal` is the signal's name, also when it came to another process of the run; empty for a limit of the run itself.
    `together`: all processes of the run stop, not this one alone.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, message: str, signal: str = "", *, together: bool = False) -> None:
        super().__init__(message)
        self.signal, self.together = signal, together


# What a full or broken disk says; and a folder that is read-only, forbidden, or no folder, or a name that cannot be.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_NOT_A_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG)
_STORAGE_ERRNOS = (*FULL_DISK, *_NOT_WRITABLE, *_NOT_A_PLACE)


def is_storage_error(error: BaseException) -> bool:
    """Whether `error` says that a file or folder cannot be written. safetensors and tokenizers say it in their text;
    there, no such file means a link to nothing."""
    if isinstance(error, OSError):
        return error.errno in _STORAGE_ERRNOS
    if isinstance(error, RunError):
        return False
    return any(f"os error {number})" in str(error) for number in (*_STORAGE_ERRNOS, errno.ENOENT))
