"""Run a whole study, continue it, or show where it stands.

    python -m experiments.reproduce run scale=demo          # what is not done yet; interrupted, it continues
    python -m experiments.reproduce list scale=demo         # every item and its command
    python -m experiments.reproduce status scale=demo       # what is done, and what each item waits for

An item is done when its expected rows exist (experiments/study/graph.py), so a study may be copied, pruned, or run
piece by piece by hand. A failed item leaves its log, items that do not need it go on, and the exit code is not zero.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from experiments.run.config import entry
from experiments.run.errors import EXIT_BAD_CONFIG, RunError, Stopped
from experiments.run.locks import exclusive
from experiments.study.definition import ReproduceConfig, items
from experiments.study.display import Display, duration, graph_table
from experiments.study.graph import Graph, Item, State
from experiments.study.journal import last_durations, record
from experiments.study.runner import Runner, config_difference
from experiments.study.summary import summary_table, where_to_look

DEFAULT_SECONDS = 10.0


def graph_of(config: ReproduceConfig) -> Graph:
    """The study's graph, or the part of it that `only` names."""
    graph = Graph(items(config), config_difference)
    return graph.select(config.only) if config.only else graph


class StudyFailed(RunError):
    """Some items are not done."""


def run(config: ReproduceConfig, console: Console) -> None:
    """Run what is not done.

    Raises:
        StudyFailed: after everything else has run, when items failed or could not run.
        RunError: when the same study is running already.
        Stopped: by SIGTERM or Ctrl-C, after the current item has been stopped.
    """
    graph, start = graph_of(config), time.monotonic()
    todo = [name for name, (state, _) in graph.states().items() if state is not State.DONE]
    progress = f"study {config.scale}: {len(todo)} of {len(graph.items)} items to do, in {config.folder}"
    console.print(progress, markup=False, soft_wrap=True)
    weights = {name: config.seconds.get(graph.items[name].kind, DEFAULT_SECONDS) for name in todo}
    with exclusive(config.folder, "study"), _stoppable(), Display(console, weights) as display:
        failed = _run_items(graph, config, display)
    if (table := summary_table(graph)).row_count:
        console.print(table)
    console.print(f"{duration(time.monotonic() - start)} in all")
    console.print(where_to_look(config, graph), highlight=False, markup=False, soft_wrap=True)
    for name, reason in failed.items():
        console.print(f"[red]{name}[/]: {escape(reason)}", highlight=False, soft_wrap=True)
    if failed:
        raise StudyFailed(f"{len(failed)} of {len(todo)} items are not done; the same command tries them again")


def _run_items(graph: Graph, config: ReproduceConfig, display: Display) -> dict[str, str]:
    """Items that failed or could not run, each with the reason."""
    runner, done, failed = Runner(), set(), {}
    for item in graph.items.values():
        state, reason = graph.state(item, done)
        if state is State.DONE:
            done.add(item.name)
            continue
        display.begin(item)
        if state is State.BLOCKED:
            failed[item.name] = f"not run, waits {reason}"
            display.finish(item, f"[yellow]{escape(failed[item.name])}[/]")
            continue
        if error := _run_item(item, graph, runner, config, display):
            failed[item.name] = f"{error} (log: {item.log_path})"
        else:
            done.add(item.name)
    return failed


def _run_item(item: Item, graph: Graph, runner: Runner, config: ReproduceConfig, display: Display) -> str:
    """The error that the item ended with, or that its results have; empty when it is done."""
    outcome = runner.run(item, display.update)
    error = outcome.error or graph.problem(item) or ""
    record(config.folder, item.name, outcome.seconds, error)
    verdict = f"[red]failed[/]: {escape(error)}" if error else f"[green]done[/] in {duration(outcome.seconds)}"
    display.finish(item, verdict)
    return error


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM stops the study as Ctrl-C does."""

    def stop(number: int, _) -> None:
        raise Stopped(f"{signal.Signals(number).name}: the same command continues")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_list(config: ReproduceConfig, console: Console) -> None:
    """Print every item's command, as one would type it."""
    for item in graph_of(config).items.values():
        console.print(f"[bold]{item.name}[/]\n    {escape(item.command())}", highlight=False, soft_wrap=True)


def show_status(config: ReproduceConfig, console: Console) -> None:
    """Print every item's state."""
    console.print(graph_table(graph_of(config), last_durations(config.folder)))


ACTIONS: dict[str, Callable[[ReproduceConfig, Console], None]] = {"run": run, "list": show_list, "status": show_status}


def main(arguments: Sequence[str]) -> None:
    """Do what the first argument says, with the configuration of the others; exits."""
    action, *rest = arguments or ["--help"]
    if action not in ACTIONS and action not in ("-h", "--help"):
        print(f"the action must be one of {', '.join(ACTIONS)}, got {action!r}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIG)
    if action not in ACTIONS:
        rest = [action]
    elif not any(argument.startswith("scale=") for argument in rest):
        rest = ["scale=demo", *rest]
    # Threads that wait must not spin: beside any other load on the machine that makes small models several times
    # slower. It is for the items' processes, which start with a fresh OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # In a log file a line may be as long as it is.
    console = Console(width=None if sys.stdout.isatty() else 160)

    def act(config: ReproduceConfig) -> None:
        # What a study prints goes through the console; the items log to their own files.
        logging.getLogger().setLevel(logging.WARNING)
        ACTIONS[action](config, console)

    entry(act, ReproduceConfig, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
