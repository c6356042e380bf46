"""What a running study shows: two bars on a terminal, plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from experiments.study.graph import Graph, Item, State

LINE_INTERVAL_SECONDS = 20.0
LABELS = {"tokens_per_s": "tokens/s", "cross_entropy": "loss", "nonzeros": "non-zeros"}
COLOURS = {State.DONE: "green", State.READY: "yellow", State.BLOCKED: "dim"}


def duration(seconds: float) -> str:
    """As `8 s` or `2:05 min`."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


class Display:
    """Progress of a study: overall, weighted by the seconds each item is expected to take, and of the current item.

    Used as a context manager around the run.
    """

    def __init__(self, console: Console, weights: Mapping[str, float]):
        self._console, self._weights = console, weights
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._overall = self._bars.add_task("whole study", total=sum(weights.values()), note="")
        self._current = self._bars.add_task("", total=None, note="")
        self._finished, self._weight, self._number, self._last_line = 0.0, 0.0, 0, 0.0

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def begin(self, item: Item) -> None:
        """A new item starts."""
        self._number += 1
        self._weight, self._last_line = self._weights[item.name], time.monotonic()
        self._bars.reset(self._current, description=item.name, total=None, note="")
        self._bars.update(self._overall, note=f"item {self._number} of {len(self._weights)}")

    def update(self, done: int, total: int, values: Mapping[str, float]) -> None:
        """The current item has done `done` of `total` parts; `values` are shown beside the bar."""
        note = " · ".join(f"{LABELS.get(name, name)} {_short(value)}" for name, value in values.items())
        self._bars.update(self._current, completed=done, total=total, note=note)
        self._bars.update(self._overall, completed=self._finished + self._weight * done / max(total, 1))
        if not self._console.is_terminal and time.monotonic() - self._last_line >= LINE_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(f"         {done} of {total}  {note}", highlight=False)

    def finish(self, item: Item, verdict: str) -> None:
        """The item ended; `verdict` is printed above the bars and stays."""
        self._finished += self._weights[item.name]
        self._bars.update(self._overall, completed=self._finished)
        self._console.print(
            f"[{self._number:>2}/{len(self._weights)}] {item.name:<26} {verdict}", highlight=False, soft_wrap=True
        )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def graph_table(graph: Graph, seconds: Mapping[str, float]) -> Table:
    """State of every item: why it is not done, its number of rows, how long it took last."""
    table = Table("item", "state", "rows", "took", "needs or reason", box=None, header_style="bold")
    for name, (state, reason) in graph.states().items():
        item = graph.items[name]
        took = duration(seconds[name]) if name in seconds else ""
        rows = str(len(item.rows()) or "") if not item.files else ""
        table.add_row(name, f"[{COLOURS[state]}]{state.value}[/]", rows, took, escape(reason))
    return table
