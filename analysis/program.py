"""What every program of this repository (`python -m experiments.train` and the like) does before its first import.

Each folder with programs calls `prepare` in its `__init__.py`, which Python runs before it looks for the program. It
lives in this folder because every other one may import it. Only the standard library is imported here, and the syntax
is that of any Python 3, since it is here that a missing environment or an old Python is told in one line.
"""

import atexit
import os
import select
import signal
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 11)


def prepare() -> None:
    """Make a program end in one line where no traceback helps: under another Python, without the pinned packages, on
    Ctrl-C, and when its output is no longer read. Does nothing where the folder is imported by something else."""
    if sys.argv[:1] != ["-m"]:  # what Python says until it has found the program
        return
    if sys.version_info < OLDEST:
        sys.exit("Python {}.{} or newer is needed; {} is {}. {}".format(*OLDEST, *_this_python(), _advice()))
    sys.excepthook = _report
    atexit.register(_flush)
    # There is nothing to put in order while packages are imported, and some of them would turn the exception of a
    # Ctrl-C into another one.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin() -> None:
    """From here on, Ctrl-C is an exception again. For the start of a program's `main`, after its imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _report(kind: type, error: BaseException, trace: "types.TracebackType | None") -> None:
    """Takes the place of `sys.excepthook`."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and not _is_ours(error.name):
        print(f"{error}, which {_this_python()[0]} does not have. {_advice()}", file=sys.stderr)
    elif not (isinstance(error, BrokenPipeError) and _nobody_reads()):
        sys.__excepthook__(kind, error, trace)


def _is_ours(name: "str | None") -> bool:
    top = (name or "").partition(".")[0]
    return (ROOT / top).is_dir() or (ROOT / (top + ".py")).is_file()


def _this_python() -> "tuple[str, str]":
    return sys.executable, sys.version.split()[0]


def _advice() -> str:
    """How to get at the pinned environment."""
    folder = ROOT / ".venv"
    if Path(sys.prefix).resolve() == folder.resolve():
        return f"In {ROOT}, `make install` installs what requirements.txt names"
    return f"`make install` in {ROOT} installs the pinned environment, `source {folder}/bin/activate` activates it"


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that has been closed at its other end."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no poll, no standard output, or one that is no file
        return False
    return bool(poll.poll(0))


def _flush() -> None:
    """Write what is left of the output, while it can still be left out without a message."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
