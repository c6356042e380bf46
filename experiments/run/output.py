"""Where a measurement writes, and under which names its rows are found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.run.config import option


@dataclass
class OutputConfig:
    """The run section of every measurement; the same names as a training's."""

    study: str = option("local", "name of the study, for result rows and the folder")
    item: str = option("", "name of this measurement in the study; empty: that of the program")
    dir: str | None = option(None, "folder of the results; null: runs/<study>/<item>")

    def folder(self, program: str) -> Path:
        """The folder that results are written to."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.study / self.name(program)

    def name(self, program: str) -> str:
        """The item's name."""
        return self.item or program


def device_of(name: str) -> torch.device:
    """The torch device of a configuration: `auto` is CUDA if there is one.

    Raises:
        RuntimeError: for a device that torch does not know.
    """
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
