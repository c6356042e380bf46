"""Where the runs of a study stand.

python -m slurm.status study=l1_sweep               # a live table on a terminal, else plain lines, once
python -m slurm.status study=l1_sweep all=true      # every item, also those that are done
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from experiments.run.config import entry, option
from experiments.study.display import duration
from experiments.training.metrics import last_record
from slurm.records import Plan, read_plan
from slurm.states import ALIVE, ItemState, Phase, item_states

COLUMNS = ("item", "state", "step", "loss", "non-zeros", "tokens/s", "node", "left", "")
COLOURS = {
    Phase.DONE: "green",
    Phase.RUNNING: "cyan",
    Phase.QUEUED: "blue",
    Phase.FAILED: "bold red",
    Phase.STOPPED: "yellow",
    Phase.CANCELLED: "yellow",
}
# What a user looks for first.
ORDER = (
    Phase.FAILED,
    Phase.RUNNING,
    Phase.STOPPED,
    Phase.QUEUED,
    Phase.CANCELLED,
    Phase.TODO,
    Phase.WAITS,
    Phase.DONE,
)
TRACEBACKS = 5


@dataclass
class StatusConfig:
    """Show where the runs of a study stand: state, step, loss, mean non-zeros, tokens/s, node, time left."""

    study: str = option("", "name of the study")
    runs: str = option("runs", "folder of the runs; the study is a folder in it")
    all: bool = option(False, "on a terminal: every item, however many")
    every: float = option(10.0, "time between two looks on a terminal; each asks the scheduler once", unit="s")

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return (Path(self.runs) / self.study).absolute()


@dataclass(frozen=True)
class Line:
    """One item's line: cells for `COLUMNS`."""

    phase: Phase
    cells: tuple[str, ...]


def lines(study: Path) -> tuple[list[Line], dict[str, ItemState]]:
    """A line for every item of a study, what needs attention first, and the states they are made of.

    Raises:
        ConfigError: nothing was submitted there.
        RunError: some jobs are SLURM's, and SLURM cannot be asked.
    """
    plan = read_plan(study)
    states = item_states(study, plan)
    made = [_line(one, plan) for one in states.values()]
    return sorted(made, key=lambda line: ORDER.index(line.phase)), states


def _line(one: ItemState, plan: Plan) -> Line:
    cells = dict.fromkeys(COLUMNS, "")
    cells["item"], cells["state"], cells[""] = one.item.name, one.phase.value, one.reason
    total = plan.steps.get(one.item.name)
    if total is not None and (record := last_record(one.item.folder)) is not None:
        step, nonzeros = record["step"], record["nonzeros"]
        cells["step"] = f"{step}/{total}"
        cells["loss"] = f"{record['cross_entropy']:.3f}"
        cells["non-zeros"] = f"{sum(nonzeros) / len(nonzeros):.1f}"
        cells["tokens/s"] = f"{record['tokens_per_s']:,.0f}"
        if one.phase is Phase.RUNNING:
            tokens_left = (total - step) * record["tokens"] / step
            cells["left"] = long_duration(tokens_left / record["tokens_per_s"])
    if one.phase in ALIVE:
        cells["node"] = (one.seen.nodes if one.seen else "") or (one.report.node if one.report else "")
        if one.report is not None and one.report.restarts:
            cells[""] = f"{cells['']} started {one.report.restarts + 1} times".strip()
    return Line(one.phase, tuple(cells.values()))


def long_duration(seconds: float) -> str:
    """As `8 s`, `2:05 min`, `3:07 h` or `2 d 03 h`."""
    if seconds < 3600:
        return duration(seconds)
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def summary(name: str, made: list[Line]) -> str:
    """As `study smoke: 13 items: 6 done, 2 running`."""
    counts = Counter(line.phase for line in made)
    return f"study {name}: {len(made)} items: " + ", ".join(f"{counts[p]} {p.value}" for p in ORDER if counts[p])


def table(name: str, made: list[Line], room: int | None) -> Table:
    """The lines as a table of at most `room` rows."""
    shown = Table(title=summary(name, made), title_justify="left", box=None, header_style="bold", pad_edge=False)
    first = made if room is None else made[: max(1, room)]
    for place, column in enumerate(COLUMNS):
        # On a narrow terminal, names and reasons are cut, numbers never.
        width = max(len(text) for text in (column, *(line.cells[place] for line in first)))
        least = 0 if column in ("item", "node", "") else width
        justify = "right" if column in COLUMNS[2:6] else "left"
        shown.add_column(column, justify=justify, no_wrap=column != "", min_width=least)
    for line in first:
        item, state, *rest = map(escape, line.cells)
        colour = COLOURS.get(line.phase, "dim")
        shown.add_row(item, f"[{colour}]{state}[/]", *rest)
    if len(first) < len(made):
        shown.caption = f"and {len(made) - len(first)} more (all=true shows them)"
    return shown


def plain(name: str, made: list[Line]) -> str:
    """The lines as text in columns, for logs and pipes."""
    rows = [COLUMNS, *(line.cells for line in made)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([summary(name, made), *text])


def tracebacks(states: Mapping[str, ItemState]) -> str:
    """Of the first items that failed: error, traceback, and where the log is."""
    failed = [one for one in states.values() if one.phase is Phase.FAILED]
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
    made, states = lines(config.folder)
    if not console.is_terminal:
        print("\n\n".join(filter(None, [plain(config.study, made), tracebacks(states)])))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="visible" if config.all else "crop") as live:
        try:
            while True:
                live.update(table(config.study, made, None if config.all else console.height - 4), refresh=True)
                if not any(one.phase in ALIVE for one in states.values()):
                    break
                time.sleep(config.every)
                made, states = lines(config.folder)
        except KeyboardInterrupt:
            pass  # how one leaves it
    if text := tracebacks(states):
        console.print(text, markup=False, highlight=False)


if __name__ == "__main__":
    entry(main, StatusConfig)
