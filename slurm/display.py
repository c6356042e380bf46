"""What a queue of this machine shows while it runs: a live table on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from experiments.study.graph import Item, State
from slurm.states import ItemState
from slurm.status import Line, duration, line_of, summary, table

TABLE_SECONDS, LINES_SECONDS = 1.0, 20.0
SHOWN = ("step", "loss", "non-zeros", "tokens/s", "left")


class Display:
    """Progress of the items that run, and how long the study will take. Used as a context manager around the run.

    Args:
        name: of the study.
        expected: by item that is to be run, the seconds it is expected to take.
        steps: by training, its optimizer steps.
        say: prints a line where there is no terminal.
    """

    def __init__(
        self, name: str, expected: Mapping[str, float], steps: Mapping[str, int], say: Callable[[str], None]
    ) -> None:
        self._name, self._expected, self._steps, self._print = name, expected, steps, say
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._terminal = self._console.is_terminal
        self._began = self._shown = time.monotonic()
        self._states = dict.fromkeys(expected, State.TODO)
        self._started: dict[str, float] = {}

    def __enter__(self) -> Display:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._terminal:
            self._console.print(escape(text), highlight=False, soft_wrap=True)
        else:
            self._print(text)

    def ended(self, item: Item, state: State) -> None:
        """Take note of how an item ended."""
        self._states[item.name] = state

    def show(self, running: Sequence[Item]) -> None:
        """Show how far the running items are, if some time has passed since the last call that did."""
        now = time.monotonic()
        for item in running:
            self._started.setdefault(item.name, now)
        if now - self._shown < (TABLE_SECONDS if self._terminal else LINES_SECONDS):
            return
        self._shown = now
        found = [line_of(ItemState(item, State.RUNNING), self._steps.get(item.name)) for item in running]
        if self._terminal:
            self._live.update(table(self._title(running, found), found, self._console.height - 4), refresh=True)
            return
        self._print(f"-- {self._title(running, found)}")
        for line in found:
            values = [f"{name} {line[name]}" for name in SHOWN if line[name]]
            self._print("    ".join(["", line["item"], ", ".join(values)]).rstrip())

    def _title(self, running: Sequence[Item], found: Sequence[Line]) -> str:
        states = self._states | {item.name: State.RUNNING for item in running}
        elapsed = time.monotonic() - self._began
        return f"{summary(self._name, states.values())}, {duration(elapsed)}{self._left(elapsed, found)}"

    def _left(self, elapsed: float, found: Sequence[Line]) -> str:
        """By the expected seconds, scaled by how long their like has taken so far."""
        shares = {line["item"]: _share(line["step"]) or self._share_by_time(line["item"]) for line in found}
        made = sum(
            seconds * (1.0 if self._states[name] is not State.TODO else shares.get(name, 0.0))
            for name, seconds in self._expected.items()
        )
        if not made:
            return ""
        return f", about {duration(elapsed * (sum(self._expected.values()) / made - 1))} left"

    def _share_by_time(self, name: str) -> float:
        """Of an item that does not tell its steps; one that takes longer than expected is nearly done."""
        seconds = time.monotonic() - self._started.get(name, time.monotonic())
        return min(seconds / self._expected[name], 0.9) if name in self._expected else 0.0


def _share(step: str) -> float:
    """Of a cell such as 40/190."""
    done, _, total = step.partition("/")
    return int(done) / int(total) if total else 0.0
