"""Requests to stop: SIGTERM and SIGUSR2 (a scheduler's), SIGINT (Ctrl-C)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

from experiments.run.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)


class _Interrupted(BaseException):
    """Not an `Exception`: what is being loaded at that moment (packages, a tokenizer, a checkpoint) may catch those."""


class StopRequest:
    """`signal` is the name of the signal that came, None before.

    While `graceful` is false (there is nothing to save yet) a signal leaves the block of `stop_requests` at once. Once
    it is true, only the signal's name is kept, so that the current step can finish and a checkpoint can be written.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.graceful = False

    def note(self, number: int, frame: object) -> None:
        """The signal handler. A second Ctrl-C interrupts even a graceful stop."""
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        if not self.graceful:
            raise _Interrupted


@contextlib.contextmanager
def stop_requests(
    signals: Sequence[signal.Signals] = STOP_SIGNALS, said: str = "stopped by {} before the first step"
) -> Iterator[StopRequest]:
    """Catch these signals inside the block. Python does so in the main thread only: elsewhere, nothing is caught.

    Raises:
        Stopped: by a signal, while the request is not graceful, with what is `said` of the signal's name.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    earlier = {number: signal.signal(number, request.note) for number in signals}
    try:
        yield request
    except _Interrupted:
        raise Stopped(said.format(request.signal), request.signal or "") from None
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
