"""What `slurm.status`, `slurm.log` and `slurm.cancel` do with a study that was submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from experiments.run.config import option
from experiments.run.errors import ConfigError, RunError
from experiments.run.locks import is_held
from experiments.study.definition import load_study
from experiments.study.graph import State
from slurm import scheduler
from slurm.display import ORDER, Line, line_of, summary, table
from slurm.records import RUNS, note_submitted, read_launcher, read_submission, submitted_studies
from slurm.states import ALIVE, ItemState, item_states

TRACEBACKS = 5
LOG_WIDTH = 1000  # characters: a line in a log or a pipe may be as long as it is
# Between two looks at a log; at the state of jobs, for which the scheduler is asked; at jobs that are cancelled.
READ_SECONDS, STATE_SECONDS, POLL_SECONDS = 0.5, 10.0, 3.0
_BLOCK_BYTES = 1 << 16


@dataclass
class SubmittedStudy:
    """The options that name a study."""

    study: str = option("", "name of the study, or its file")
    runs: str = option(RUNS, "folder of the runs; the study is a folder in it", required=True)

    @property
    def folder(self) -> Path:
        """The study's folder.

        Raises:
            ConfigError: no study is named; the message lists those that were submitted.
        """
        if not self.study:
            known = ", ".join(submitted_studies(Path(self.runs))) or "none"
            raise ConfigError(f"name a study, study=NAME; submitted in {self.runs}: {known}")
        file = Path(self.study)
        if file.suffix not in (".yaml", ".yml"):
            return (Path(self.runs) / file).absolute()
        if self.runs == RUNS and file.is_file():  # which may name another folder of runs
            return load_study(self.study).folder.absolute()
        return (Path(self.runs) / file.stem).absolute()

    def states(self, *, must_know: bool = True) -> dict[str, ItemState]:
        """The state of every item. Raises `ConfigError` if nothing was submitted there, else as `item_states`."""
        return item_states(self.folder, read_submission(self.folder), must_know=must_know)


# --- status -----------------------------------------------------------------------------------------------------------


@dataclass
class StatusConfig(SubmittedStudy):
    """Show where the runs of a study stand: state, step, loss, mean non-zeros, tokens/s, node, how long the last
    start took, time left."""

    all: bool = option(False, "on a terminal: every item, however many")


def lines(folder: Path) -> tuple[str, list[Line], dict[str, ItemState]]:
    """A title, a line for every item of a study, those that need attention first, and the states that the lines show.
    Raises as `SubmittedStudy.states` does."""
    submission = read_submission(folder)
    states = item_states(folder, submission, must_know=False)
    entries = sorted(states.values(), key=lambda entry: ORDER.index(entry.state))
    made = [line_of(entry, submission.steps.get(entry.item.name)) for entry in entries]
    return summary(folder.name, (entry.state for entry in entries)), made, states


def status(config: StatusConfig) -> None:
    """Show the table: on a terminal until nothing runs or waits any more, or Ctrl-C. Tracebacks follow."""
    console = Console()
    title, rows, states = lines(config.folder)
    if not console.is_terminal:
        made = io.StringIO()
        Console(file=made, width=LOG_WIDTH).print(table(title, rows, None, LOG_WIDTH))
        text = "\n".join(line.rstrip() for line in made.getvalue().splitlines())
        print("\n\n".join(filter(None, [text, tracebacks(states)])))
        return
    live = Live(console=console, auto_refresh=False, vertical_overflow="visible" if config.all else "crop")
    with live, contextlib.suppress(KeyboardInterrupt):  # the usual way to leave a live table
        while True:
            room = None if config.all else console.height - 4
            live.update(table(title, rows, room, console.width), refresh=True)
            if not any(entry.state in ALIVE for entry in states.values()):
                break
            time.sleep(STATE_SECONDS)
            title, rows, states = lines(config.folder)
    if text := tracebacks(states):
        console.print(text, markup=False, highlight=False)


def tracebacks(states: Mapping[str, ItemState]) -> str:
    """Error, traceback and log file of the first items that failed."""
    failed = [entry for entry in states.values() if entry.state is State.FAILED]
    parts = []
    for entry in failed[:TRACEBACKS]:
        log_file = f"log: {entry.job.log}" if entry.job is not None else "no log"
        parts.append(f"{entry.item.name}: {entry.reason}\n{entry.report.traceback if entry.report else ''}{log_file}")
    if len(failed) > TRACEBACKS:
        parts.append(f"and {len(failed) - TRACEBACKS} more failed")
    return "\n\n".join(parts)


# --- log --------------------------------------------------------------------------------------------------------------


@dataclass
class LogConfig(SubmittedStudy):
    """Print the log of an item's latest job: that of its first process; those of others lie beside it."""

    item: str = option("", "name of the item; may be left out where the study has one only")
    follow: bool = option(False, "go on printing until the job ends")


def log(config: LogConfig) -> None:
    """Print the log.

    Raises:
        ConfigError: nothing was submitted there, or no such item.
        RunError: the item has no job, or its job has written nothing yet.
    """
    states = config.states(must_know=False)
    name = config.item or (next(iter(states)) if len(states) == 1 else "")
    if name not in states:
        raise ConfigError(f"item={config.item}: wanted one of {', '.join(states)}")
    state, job = states[name].state, states[name].job
    if job is None:
        raise RunError(f"{name} has no job yet ({state.value}): slurm.submit starts it")
    path = Path(job.log)
    print(f"==> {path} ({name}, {state.value}) <==", flush=True)
    if not config.follow and not path.is_file():
        said = ", ".join(filter(None, [state.value, states[name].reason]))
        raise RunError(f"{path} does not exist yet: the job is {said}; follow=true waits for it")
    position, looked = 0, time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
        while True:
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(position)
                    while block := file.read(_BLOCK_BYTES):
                        sys.stdout.buffer.write(block)
                    position = file.tell()
            sys.stdout.flush()
            if not config.follow or state not in ALIVE:
                return
            time.sleep(READ_SECONDS)
            if time.monotonic() - looked > STATE_SECONDS:
                looked, state = time.monotonic(), config.states(must_know=False)[name].state


# --- cancel -----------------------------------------------------------------------------------------------------------


@dataclass
class CancelConfig(SubmittedStudy):
    """End the jobs of a study: those that run write a checkpoint first, those that wait leave the queue."""

    only: list[str] = option([], "items whose jobs to end; empty: all. On this machine, only all is possible")


def cancel(config: CancelConfig) -> None:
    """Cancel, and say what.

    Raises:
        ConfigError: nothing was submitted there, or `only` names what is not there.
        RunError: the jobs are another machine's, or SLURM cannot be asked.
    """
    folder, states = config.folder, config.states()
    if unknown := [name for name in config.only if name not in states]:
        raise ConfigError(f"no item {', '.join(unknown)}; there are {', '.join(states)}")
    chosen = [entry for name, entry in states.items() if entry.state in ALIVE and name in (config.only or states)]
    slurm = [entry for entry in chosen if entry.job is not None and entry.job.executor == "slurm"]
    if slurm:
        _cancel_in_slurm(folder, slurm)
    elif is_held(folder) and (launcher := read_launcher(folder)) is not None:
        pid, host = launcher
        if host != platform.node():
            raise RunError(f"the study was started on {host}: cancel it there")
        if config.only:
            raise ConfigError("only: the runs of this machine are cancelled all together")
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGTERM)  # it stops its items, and ends
    elif chosen:
        runs = ", ".join(f"{entry.item.name} (process {entry.job.job if entry.job else 'unknown'})" for entry in chosen)
        raise RunError(f"no launcher to be told: {runs} were started by hand, or their launcher was killed")
    names = ", ".join(entry.item.name for entry in chosen) or "none ran"
    print(f"cancelled {len(chosen)} of {len(states)} items: {names}")


def _cancel_in_slurm(folder: Path, chosen: list[ItemState]) -> None:
    """Cancel what waits, and tell what runs to write its checkpoint and end. `scancel` alone would leave it the time of
    SLURM's KillWait for that, by default 30 s.

    The cancellation is recorded first: the jobs see it, and do not requeue themselves; and nobody who looks in between
    takes them for failed ones.
    """
    from slurm.job import REQUEUE_SIGNAL  # of submitit

    jobs = {entry.job: entry.seen for entry in chosen if entry.job is not None}
    note_submitted(folder, [dataclasses.replace(job, cancelled=True) for job in jobs])
    running = [job.job for job, seen in jobs.items() if seen is not None and seen.state == "RUNNING"]
    scheduler.cancel([job.job for job in jobs if job.job not in running])
    if not running:
        return
    seconds = max(job.signal_seconds for job in jobs if job.job in running)
    scheduler.signal(running, REQUEUE_SIGNAL.name.removeprefix("SIG"))
    print(f"{len(running)} running, told to stop; what still runs after {seconds} s is ended", flush=True)
    deadline = time.monotonic() + seconds
    while running and time.monotonic() < deadline:
        time.sleep(min(POLL_SECONDS, seconds))
        with contextlib.suppress(RunError):  # a controller that does not answer now does so later
            seen = scheduler.queue(running)
            alive = {job: seen[job].state for job in running if job in seen and seen[job].alive}
            running = [job for job, state in alive.items() if state not in ("PENDING", "COMPLETING")]
            scheduler.cancel([job for job, state in alive.items() if state == "PENDING"])  # requeued at that moment
    scheduler.cancel(running)
