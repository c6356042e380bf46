"""Print what the latest job of an item has written, and go on until it ends.

    python -m slurm.log study=l1_sweep item=0.5b_l1_0_seed_0
    python -m slurm.log study=l1_sweep item=0.5b_l1_0_seed_0 follow=true lines=20

Ctrl-C ends the command, not the job.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.run.config import entry, option
from experiments.run.errors import ConfigError, RunError
from slurm.command import SubmittedStudy
from slurm.records import read_submission
from slurm.states import ALIVE, ItemState, item_states

READ_SECONDS = 0.5
# Each look at the state asks the scheduler.
STATE_SECONDS = 10.0
_BLOCK_BYTES = 1 << 16


@dataclass
class LogConfig(SubmittedStudy):
    """Print the log of an item's latest job."""

    item: str = option("", "name of the item; may be left out where the study has one only")
    follow: bool = option(False, "go on printing until the job ends")
    lines: int = option(0, "only the last lines, so many; 0: all", minimum=0)
    process: int = option(0, "which of the job's processes", minimum=0)


def main(config: LogConfig) -> None:
    """Print the log.

    Raises:
        ConfigError: nothing was submitted there, or no such item.
        RunError: the item has no job, or its job has written nothing yet.
    """
    one = _state(config)
    if one.job is None:
        raise RunError(f"{one.item.name} has no job yet ({one.state.value}): slurm.submit starts it")
    path = log_of(Path(one.job.log), config.process)
    print(f"==> {path} ({one.item.name}, {one.state.value}) <==", flush=True)
    if not config.follow and not path.is_file():
        raise RunError(f"{path} does not exist yet: the job is {one.state.value}; follow=true waits for it")
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to leave
        _print(path, config, one)


def log_of(first: Path, process: int) -> Path:
    """The log file of a process, from that of the first one (submitit: 17_0_log.out, 17_1_log.out)."""
    return first.with_name(first.name.removesuffix("_0_log.out") + f"_{process}_log.out") if process else first


def _state(config: LogConfig) -> ItemState:
    states = item_states(config.folder, read_submission(config.folder))
    name = config.item or (next(iter(states)) if len(states) == 1 else "")
    if name not in states:
        raise ConfigError(f"item={config.item}: wanted one of {', '.join(states)}")
    return states[name]


def _print(path: Path, config: LogConfig, one: ItemState) -> None:
    position = _start(path, config.lines)
    looked, alive = time.monotonic(), one.state in ALIVE
    while True:
        for text in _new_text(path, position):
            position += len(text)
            sys.stdout.buffer.write(text)
        sys.stdout.flush()
        if not (config.follow and alive):
            return
        time.sleep(READ_SECONDS)
        if time.monotonic() - looked > STATE_SECONDS:
            looked, alive = time.monotonic(), _state(config).state in ALIVE


def _start(path: Path, lines: int) -> int:
    """Where in the file its last lines begin, in bytes; the beginning for 0 lines, or while there is no file."""
    if not lines or not path.is_file():
        return 0
    data = path.read_bytes()
    return len(data) - len(b"".join(data.splitlines(keepends=True)[-lines:]))


def _new_text(path: Path, position: int) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(position)
        while block := file.read(_BLOCK_BYTES):
            yield block


if __name__ == "__main__":
    entry(main, LogConfig)
