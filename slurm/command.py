"""Shared by the commands that are about a study that was submitted: their options, and errors in one line."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from experiments.run.config import entry, option
from experiments.run.errors import RunError

RUNS = "runs"
T = TypeVar("T")


@dataclass
class SubmittedStudy:
    """Options that say which study is meant."""

    study: str = option("", "name of the study")
    runs: str = option(RUNS, "folder of the runs; the study is a folder in it")

    @property
    def folder(self) -> Path:
        """The study's folder."""
        return (Path(self.runs) / self.study).absolute()


def naming(folder: Path) -> str:
    """The options by which the study in this folder is meant, for advice: `study=l1_sweep runs=/scratch/me`."""
    words = [f"study={folder.name}"]
    if folder.parent != Path(RUNS).absolute():
        words.append(f"runs={folder.parent}")
    return shlex.join(words)


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Inside the block, an error of a file or folder (forbidden, read-only, a file in the way, too long a name) becomes
    a `RunError` that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise RunError(f"{error.filename}: {error.strerror}") from error


def program(main: Callable[[T], Any], config_class: type[T]) -> NoReturn:
    """Run `main(config)` as `experiments.run.config.entry` does, with `file_errors`."""

    def run(config: T) -> None:
        with file_errors():
            main(config)

    entry(run, config_class)
