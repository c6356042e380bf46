"""Tables of items: of a submitted study, of what runs on this machine meanwhile, and of the results at its end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from experiments.run.progress import read_progress
from experiments.study.graph import Graph, Item, State
from experiments.training.metrics import last_record
from slurm.states import ALIVE, ItemState

COLUMNS = ("item", "state", "step", "loss", "non-zeros", "tokens/s", "node", "took", "left", "")
NUMBERS = ("step", "loss", "non-zeros", "tokens/s")
DROPPED = ("node", "took", "left", "tokens/s", "non-zeros", "loss")  # from a terminal too narrow, in this order
SHORTEST = {"item": 24, "": 24}  # characters to which a name may be cut, and a reason folded
# Those of a line in a log file.
SHOWN = (*NUMBERS, "left")
# What a user looks for first, and its colour.
COLOURS = {
    State.FAILED: "bold red",
    State.RUNNING: "cyan",
    State.STOPPED: "yellow",
    State.QUEUED: "blue",
    State.CANCELLED: "yellow",
    State.TODO: "dim",
    State.WAITS: "dim",
    State.DONE: "green",
}
ORDER = list(COLOURS)
Line = dict[str, str]  # one item of the table: a cell for each of `COLUMNS`
SECONDS = 20.0  # between two reports of what runs on this machine
TRUSTED_SECONDS = 60.0  # so much is taken to have gone as expected: the first minute says little of the rest
CAPTION = "held-out: cross-entropy, nats/token. non-zeros: per token, in the last steps of training"
TIMES = "forward, training: throughput of the fastest sparse backend over dense in the same run"


def line_of(entry: ItemState, steps: int | None) -> Line:
    """The line of one item; `steps` are the optimizer steps of a training."""
    cells = dict.fromkeys(COLUMNS, "") | {"item": entry.item.name, "state": entry.state.value, "": entry.reason}
    running = entry.state is State.RUNNING
    if steps is not None and (record := last_record(entry.item.folder)) is not None:
        step, nonzeros, speed = record["step"], record["nonzeros"], record["tokens_per_s"]
        cells |= {
            "step": f"{step}/{steps}",
            "loss": f"{record['cross_entropy']:.3f}",
            "non-zeros": f"{sum(nonzeros) / len(nonzeros):.1f}",
            "tokens/s": f"{speed:,.0f}",
            "left": duration((steps - step) * record["tokens"] / step / speed) if running else "",
        }
    elif steps is None and running and (progress := read_progress(entry.item.folder)) is not None:
        cells["step"] = f"{progress.done}/{progress.total}"
    if entry.report is not None and entry.report.seconds is not None:
        cells["took"] = duration(entry.report.seconds)
    if entry.state in ALIVE:
        cells["node"] = (entry.seen.nodes if entry.seen else "") or (entry.report.node if entry.report else "")
        if entry.report is not None and entry.report.restarts:
            cells[""] = f"{cells['']} started {entry.report.restarts + 1} times".strip()
    return cells


def duration(seconds: float) -> str:
    """Duration in words, for instance `8 s`, `2:05 min`, `3:07 h` or `2 d 03 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{hours}:{minutes:02d} h" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def summary(name: str, states: Iterable[State]) -> str:
    """States counted in one line, for instance `study smoke: 13 items: 2 running, 5 waits, 6 done`."""
    counts = Counter(states)
    return f"study {name}: {counts.total()} items: " + ", ".join(f"{counts[s]} {s.value}" for s in ORDER if counts[s])


def table(title: str, lines: Sequence[Line], room: int | None, width: int) -> Table:
    """The lines as a table of at most `room` rows, of columns that fit a terminal of so many characters."""
    first = lines if room is None else lines[: max(1, room)]
    # Those in which some line has anything; item and state are always there.
    columns = [column for column in COLUMNS if column in COLUMNS[:2] or any(line[column] for line in first)]
    widths = {column: max(len(text) for text in (column, *(line[column] for line in first))) for column in columns}
    needed = {name: min(least, SHORTEST.get(name, least)) for name, least in widths.items()}
    for column in DROPPED:
        if sum(needed.values()) + 2 * (len(needed) - 1) > width:
            needed.pop(column, None)
    needed["item"] = min(widths["item"], max(8, needed["item"] + width - sum(needed.values()) - 2 * (len(needed) - 1)))
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column, least in needed.items():
        made.add_column(
            column,
            justify="right" if column in NUMBERS else "left",
            no_wrap=column != "",
            min_width=least,
            max_width=least if column == "item" else None,
        )
    for line in first:
        item, state, *rest = (escape(line[column]) for column in needed)
        made.add_row(item, f"[{COLOURS[State(state)]}]{state}[/]", *rest)
    if len(first) < len(lines):
        made.caption = f"and {len(lines) - len(first)} more (all=true shows them)"
    return made


class Display:
    """Progress of the items that run, and how long the study will take.

    Args:
        name: of the study.
        expected: by item that is to be run, the seconds it is expected to take.
        steps: by training, its optimizer steps.
        say: prints a line.
    """

    def __init__(
        self, name: str, expected: Mapping[str, float], steps: Mapping[str, int], say: Callable[[str], None]
    ) -> None:
        self._name, self._expected, self._steps, self.say = name, expected, steps, say
        self._began = self._shown = time.monotonic()
        self._states = dict.fromkeys(expected, State.TODO)
        self._started: dict[str, float] = {}

    def ended(self, item: Item, state: State) -> None:
        self._states[item.name] = state

    def show(self, running: Sequence[Item]) -> None:
        """Say how far the running items are, if some time has passed since the last call that did."""
        now = time.monotonic()
        for item in running:
            self._started.setdefault(item.name, now)
        if now - self._shown < SECONDS:
            return
        self._shown = now
        lines = [line_of(ItemState(item, State.RUNNING), self._steps.get(item.name)) for item in running]
        states = self._states | {item.name: State.RUNNING for item in running}
        elapsed = now - self._began
        self.say(f"-- {summary(self._name, states.values())}, {duration(elapsed)}{self._left(elapsed, lines)}")
        for line in lines:
            values = [f"{name} {line[name]}" for name in SHOWN if line[name]]
            self.say("    ".join(["", line["item"], ", ".join(values)]).rstrip())

    def _left(self, elapsed: float, lines: Sequence[Line]) -> str:
        """The time left: the expected seconds of what is not made, by how long those made took, side by side."""
        shares = {}
        for line in lines:
            done, _, total = line["step"].partition("/")
            name = line["item"]
            # An item that reports no steps, and takes longer than expected, is nearly done.
            by_time = min((time.monotonic() - self._started[name]) / self._expected.get(name, math.inf), 0.9)
            shares[name] = (int(done) / int(total) if total else 0.0) or by_time
        made = sum(
            seconds * (1.0 if self._states[name] is not State.TODO else shares.get(name, 0.0))
            for name, seconds in self._expected.items()
        )
        slower = (elapsed + TRUSTED_SECONDS / max(1, len(lines))) / (made + TRUSTED_SECONDS)
        return f", about {duration((sum(self._expected.values()) - made) * slower)} left"


# --- results ----------------------------------------------------------------------------------------------------------


def results_table(graph: Graph) -> str:
    """One line for each training: validation loss (nats/token), sparsity, accuracy, and throughput of the best sparse
    backend over dense in the same run; without columns of which nothing was measured, empty without results."""
    import pandas as pd

    rows = {name: item.rows() for name, item in graph.items.items()}
    lines = {}
    for name in (name for name, item in graph.items.items() if item.kind == "train" and rows[name]):
        training, neurons = rows[name], rows[name][0]["intermediate"]
        nonzeros, dead = (_value(training, metric=metric, layer=None) for metric in ("nonzeros", "dead_fraction"))
        cells = {
            "held-out": ("{:.3f}", _value(training, metric="validation_cross_entropy")),
            "non-zeros": ("{:.1f}", nonzeros),
            "of N": ("{:.1%}", nonzeros and neurons and nonzeros / neurons),
            "dead": ("{:.0%}", dead),
            "accuracy": ("{:.1f}%", _value(rows.get(f"evaluate_{name}", []), metric="accuracy", task="mean")),
            "forward": ("x{:.2f}", _best_ratio(rows.get("bench_forward", []), op="model_forward", pattern=name)),
            "training": ("x{:.2f}", _best_ratio(rows.get("bench_training", []), op="model_training", pattern=name)),
        }
        filled = {column: form.format(value) for column, (form, value) in cells.items() if value is not None}
        lines[name] = dict.fromkeys(cells) | filled
    if not lines:
        return ""
    frame = pd.DataFrame.from_dict(lines, orient="index").dropna(axis=1, how="all").fillna("-")
    caption = "; ".join([CAPTION, *([TIMES] if {"forward", "training"} & {*frame.columns} else [])])
    return f"\nResults\n{frame.to_string()}\n{caption}"


def _matching(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


def _value(rows: Sequence[Mapping[str, Any]], **columns: Any) -> float | None:
    """The value of the first row with these columns; None if there is no such row, or it has no value."""
    return next((row["value"] for row in _matching(rows, columns)), None)


def _best_ratio(rows: Sequence[Mapping[str, Any]], **columns: Any) -> float | None:
    """The largest throughput over dense among the sparse alternatives with these columns."""
    sparse = [row for row in _matching(rows, columns | {"metric": "throughput"}) if row["plan"] != "dense"]
    return max((row["ratio"] for row in sparse if row["ratio"] is not None), default=None)
