"""Shows where the runs of a study stand.

python -m slurm.status study=l1_sweep               # a live table on a terminal, else plain lines, once
python -m slurm.status study=l1_sweep all=true      # every item, also those that are done
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from experiments.run.config import entry, option
from experiments.run.progress import read_progress
from experiments.study.graph import Item, State
from experiments.training.metrics import METRICS, last_record
from slurm.command import SubmittedStudy
from slurm.records import read_submission
from slurm.states import ALIVE, ItemState, ItemStates, item_states

COLUMNS = ("item", "state", "step", "loss", "non-zeros", "tokens/s", "node", "took", "left", "")
NUMBERS = ("step", "loss", "non-zeros", "tokens/s")
# On a narrow terminal these are cut; numbers never are.
CUT = ("item", "node", "")
COLOURS = {
    State.DONE: "green",
    State.RUNNING: "cyan",
    State.QUEUED: "blue",
    State.FAILED: "bold red",
    State.STOPPED: "yellow",
    State.CANCELLED: "yellow",
}
# What a user looks for first.
ORDER = (
    State.FAILED,
    State.RUNNING,
    State.STOPPED,
    State.QUEUED,
    State.CANCELLED,
    State.TODO,
    State.WAITS,
    State.DONE,
)
TRACEBACKS = 5


@dataclass
class StatusConfig(SubmittedStudy):
    """Show where the runs of a study stand: state, step, loss, mean non-zeros, tokens/s, node, time taken and left."""

    all: bool = option(False, "on a terminal: every item, however many")
    every: float = option(
        10.0,
        "time between two looks on a terminal; each asks the scheduler once",
        unit="s",
        minimum=0.1,
        maximum=24 * 3600,
    )


@dataclass(frozen=True)
class Line:
    """One item's line of the table: its state, and a cell for each of `COLUMNS`."""

    state: State
    cells: tuple[str, ...]

    def __getitem__(self, column: str) -> str:
        return self.cells[COLUMNS.index(column)]


def lines(folder: Path) -> tuple[list[Line], ItemStates]:
    """A line for every item of a study, those that need attention first, and the states that the lines show.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: some jobs are SLURM's, and SLURM cannot be asked.
    """
    submission = read_submission(folder)
    states = item_states(folder, submission)
    found = [line_of(one, submission.steps.get(one.item.name)) for one in states.values()]
    return sorted(found, key=lambda line: ORDER.index(line.state)), states


def line_of(one: ItemState, steps: int | None) -> Line:
    """The line of one item; `steps` are the optimizer steps of a training."""
    cells = dict.fromkeys(COLUMNS, "")
    cells |= {"item": one.item.name, "state": one.state.value, "": one.reason}
    running = one.state is State.RUNNING
    if steps is not None:
        try:
            cells |= _training_cells(one.item, steps, running)
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError) as error:
            cells[""] = f"{cells['']} {one.item.folder / METRICS} is damaged: {error}".strip()
    elif running and (progress := read_progress(one.item.folder)) is not None:
        cells["step"] = f"{progress.done}/{progress.total}"
    if one.report is not None and one.report.seconds is not None:
        cells["took"] = duration(one.report.seconds)
    if one.state in ALIVE:
        cells["node"] = (one.seen.nodes if one.seen else "") or (one.report.node if one.report else "")
        if one.report is not None and one.report.restarts:
            cells[""] = f"{cells['']} started {one.report.restarts + 1} times".strip()
    return Line(one.state, tuple(cells.values()))


def _training_cells(item: Item, steps: int, running: bool) -> dict[str, str]:
    record = last_record(item.folder)
    if record is None:
        return {}
    step, nonzeros, speed = record["step"], record["nonzeros"], record["tokens_per_s"]
    left = (steps - step) * record["tokens"] / step / speed
    return {
        "step": f"{step}/{steps}",
        "loss": f"{record['cross_entropy']:.3f}",
        "non-zeros": f"{sum(nonzeros) / len(nonzeros):.1f}",
        "tokens/s": f"{speed:,.0f}",
        "left": duration(left) if running else "",
    }


def duration(seconds: float) -> str:
    """For instance `8 s`, `2:05 min`, `3:07 h` or `2 d 03 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def summary(name: str, states: Iterable[State]) -> str:
    """For instance `study smoke: 13 items: 2 running, 5 waits, 6 done`."""
    counts = Counter(states)
    return f"study {name}: {counts.total()} items: " + ", ".join(f"{counts[s]} {s.value}" for s in ORDER if counts[s])


def table(title: str, found: list[Line], room: int | None) -> Table:
    """The lines as a table of at most `room` rows."""
    shown = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    first = found if room is None else found[: max(1, room)]
    columns = _filled(first)
    for column in columns:
        width = max(len(text) for text in (column, *(line[column] for line in first)))
        justify: Literal["left", "right"] = "right" if column in NUMBERS else "left"
        shown.add_column(column, justify=justify, no_wrap=column != "", min_width=0 if column in CUT else width)
    for line in first:
        item, state, *rest = (escape(line[column]) for column in columns)
        colour = COLOURS.get(line.state, "dim")
        shown.add_row(item, f"[{colour}]{state}[/]", *rest)
    if len(first) < len(found):
        shown.caption = f"and {len(found) - len(first)} more (all=true shows them)"
    return shown


def _filled(found: Sequence[Line]) -> list[str]:
    """The columns in which some line has anything; item and state are always there."""
    return [column for column in COLUMNS if column in COLUMNS[:2] or any(line[column] for line in found)]


def plain(title: str, found: list[Line]) -> str:
    """The lines as text in columns, for logs and pipes."""
    columns = _filled(found)
    rows = [columns, *([line[column] for column in columns] for line in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title, *text])


def tracebacks(states: Mapping[str, ItemState]) -> str:
    """Error, traceback and log file of the first items that failed."""
    failed = [one for one in states.values() if one.state is State.FAILED]
    parts = []
    for one in failed[:TRACEBACKS]:
        log = f"log: {one.job.log}" if one.job is not None else "no log"
        parts.append(f"{one.item.name}: {one.reason}\n{one.report.traceback if one.report else ''}{log}")
    if len(failed) > TRACEBACKS:
        parts.append(f"and {len(failed) - TRACEBACKS} more failed")
    return "\n\n".join(parts)


def main(config: StatusConfig) -> None:
    """Show the table: on a terminal until nothing runs or waits any more, or Ctrl-C."""
    console = Console()
    found, states = lines(config.folder)
    title = summary(config.study, (line.state for line in found))
    if not console.is_terminal:
        print("\n\n".join(filter(None, [plain(title, found), tracebacks(states), "\n".join(states.damaged)])))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible" if config.all else "crop") as live:
        try:
            while True:
                live.update(table(title, found, None if config.all else console.height - 4), refresh=True)
                if not any(one.state in ALIVE for one in states.values()):
                    break
                time.sleep(config.every)
                found, states = lines(config.folder)
                title = summary(config.study, (line.state for line in found))
        except KeyboardInterrupt:
            pass  # the usual way to leave a live table
    for text in filter(None, [tracebacks(states), "\n".join(states.damaged)]):
        console.print(text, markup=False, highlight=False)


if __name__ == "__main__":
    entry(main, StatusConfig)
