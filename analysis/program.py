"""What every program of this repository (`python -m experiments.train` and the like) does before its first import.

Each folder with programs calls `prepare` in its `__init__.py`, which Python runs before it looks for the program. This
module is in `analysis` because every other folder may import from it. It imports the standard library only and uses
syntax that any Python 3 accepts, so that it can report a missing environment or an old Python in one line.
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
    """Make a program end with one line where a traceback does not help: under an old Python, without the pinned
    packages, on Ctrl-C, and when the reader of its output has gone. Does nothing if the folder is merely imported."""
    if sys.argv[:1] != ["-m"]:  # the value of sys.argv until Python has found the program
        return
    if sys.version_info < OLDEST:
        sys.exit("Python {}.{} or newer is needed; {} is {}. {}".format(*OLDEST, *_this_python(), _advice()))
    sys.excepthook = _report
    atexit.register(_flush)
    # There is nothing to clean up while packages are imported, and some packages turn KeyboardInterrupt into another
    # exception.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again. Call this at the start of `main`, after the imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _report(kind: type, error: BaseException, trace: "types.TracebackType | None") -> None:
    """Replacement for `sys.excepthook`."""
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
    """How to install or activate the pinned environment."""
    folder = ROOT / ".venv"
    if Path(sys.prefix).resolve() == folder.resolve():
        return f"In {ROOT}, `make install` installs what requirements.txt names"
    return f"`make install` in {ROOT} installs the pinned environment, `source {folder}/bin/activate` activates it"


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose other end has been closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no poll, no standard output, or one without a file descriptor
        return False
    return bool(poll.poll(0))


def _flush() -> None:
    """Flush the output now: at interpreter exit, a broken pipe would print a message."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
