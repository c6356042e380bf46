"""Runs one item in a process of its own, with its output in a log file and its progress sent back.

The processes are forked from a server that has imported torch, transformers and the rest once: an item starts at once,
gets its memory back to the system when it ends, and can be stopped alone. Where there is no fork server each item is a
fresh process.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from experiments.run.config import load_config, parse, to_dict
from experiments.run.errors import ConfigError
from experiments.run.locks import exclusive
from experiments.run.train_config import WITHOUT_EFFECT
from experiments.study.graph import Item

PRELOAD = (
    "experiments.train",
    "experiments.gather_nonzeros",
    "experiments.bench_kernels",
    "experiments.bench_forward",
    "experiments.bench_training",
    "experiments.evaluate",
)
# Beginnings of the names of options that decide where results go and how work is laid out, not what comes out.
NO_EFFECT = ("run.", "execution.", *WITHOUT_EFFECT)
REPORT_INTERVAL_SECONDS = 0.1
# After a polite SIGTERM a training writes its checkpoint; past this it is killed.
STOP_SECONDS = 60.0

Update = tuple[int, int, dict[str, float]]
OnUpdate = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True)
class Outcome:
    """How an item ended: `error` is empty when it went well."""

    seconds: float
    error: str = ""


class Runner:
    """Starts items one after the other."""

    def __init__(self):
        methods = multiprocessing.get_all_start_methods()
        # A forked child of a process that has used Apple's frameworks crashes: a fresh process there.
        forkserver = "forkserver" in methods and sys.platform != "darwin"
        self._context = multiprocessing.get_context("forkserver" if forkserver else "spawn")
        if forkserver:
            self._context.set_forkserver_preload(list(PRELOAD))

    def run(self, item: Item, on_update: OnUpdate) -> Outcome:
        """Run the item to its end, calling `on_update(done, total, values)` as it goes.

        An exception that comes meanwhile, as from a signal, stops the item before it goes on.
        """
        item.folder.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(item, sender), name=item.name)
        process.start()
        sender.close()
        try:
            _listen(receiver, on_update)
            process.join()
        finally:
            if process.is_alive():
                _stop(process)
        error = _error(process.exitcode, item.log_path) if process.exitcode else ""
        return Outcome(time.perf_counter() - start, error)


def _listen(receiver: Connection, on_update: OnUpdate) -> None:
    """Pass updates on until the child closes its end."""
    while True:
        try:
            update = receiver.recv()
        except EOFError:
            return
        on_update(*update)


def _stop(process: multiprocessing.process.BaseProcess) -> None:
    process.terminate()
    process.join(STOP_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


def _error(code: int, log: Path) -> str:
    """Why a process ended with this code: by which signal, or the error at the end of its log."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    start = max((i for i, line in enumerate(lines) if line.startswith("Traceback ")), default=len(lines) - 2)
    headline = next(line for line in [*lines[start + 1 :], "no message"] if not line.startswith(" "))
    # Of "package.module.SomeError: message" the module says nothing to a user.
    return re.sub(r"^(\w+\.)+(?=[A-Z])", "", headline) + f" (exit code {code})"


def _child(item: Item, sender: Connection) -> None:
    """Body of an item's process. An error ends it with its traceback in the log and exit code 1."""
    # Ctrl-C reaches the whole group of the terminal: the parent decides, and sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _write_output_to(item.log_path)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True)
    print(f"$ {item.command()}", flush=True)
    main, config_class = entry_point(item)
    # An item whose parent was killed may still run when the study is started again.
    with exclusive(item.folder, "item"):
        if config_class is None:
            sys.exit(main(list(item.arguments)))
        main(parse(config_class, list(item.arguments)), report=_Reporter(sender))


def entry_point(item: Item) -> tuple[Callable[..., Any], type | None]:
    """The item's main function, and the class that its first parameter is annotated with: its configuration's. None for
    a main that takes the arguments as they are and returns an exit code (those of `analysis`)."""
    main = importlib.import_module(item.module).main
    annotation = typing.get_type_hints(main)[next(iter(inspect.signature(main).parameters))]
    return main, annotation if is_dataclass(annotation) else None


def config_difference(item: Item) -> str | None:
    """What differs between the configuration that the item was made with and the one asked for now; None if nothing.

    Options without an effect on results (`NO_EFFECT`) do not count.
    """
    path = item.folder / "config.yaml"
    if not path.is_file():
        return f"no {path}"
    _, config_class = entry_point(item)
    wanted = parse(config_class, list(item.arguments))
    try:
        saved, asked = to_dict(load_config(config_class, path)), to_dict(wanted)
    except ConfigError as error:
        return f"made by another version: {error}"
    changed = [key for key in asked if saved[key] != asked[key] and not key.startswith(NO_EFFECT)]
    return f"{changed[0]} was {saved[changed[0]]!r}, now {asked[changed[0]]!r}" if changed else None


def _write_output_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


class _Reporter:
    """Sends progress to the parent, at most ten times a second."""

    def __init__(self, sender: Connection):
        self._sender, self._last = sender, 0.0

    def __call__(self, done: int, total: int, **values: float) -> None:
        now = time.monotonic()
        if done < total and now - self._last < REPORT_INTERVAL_SECONDS:
            return
        self._last = now
        self._sender.send((done, total, values))
