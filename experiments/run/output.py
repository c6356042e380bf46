"""Where a measurement writes, and under which names its rows are found."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from experiments.run.config import option, save_config, to_yaml
from experiments.run.errors import ConfigError
from experiments.run.files import make_folder, storage_errors
from experiments.run.results import write_rows
from experiments.run.values import DEVICE, NAME, read_yaml

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Rows = list[dict[str, Any]]
NOT_GIVEN: tuple[Any, ...] = (None, "null", "", [])  # of an option without a value, in a configuration read as text
REPLACED = "rows_replaced.csv"  # rows that were measured with other options, before


@dataclass
class OutputConfig:
    """The run section of every measurement; the same names as a training's."""

    study: str = option("local", "name of the study, for result rows and the folder", required=True, pattern=NAME)
    item: str = option("", "name of this measurement in the study; empty: that of the program", pattern=NAME)
    dir: str | None = option(None, "folder of the results; null: runs/<study>/<item>", required=True)

    def folder(self, program: str) -> Path:
        return Path(self.dir) if self.dir is not None else Path("runs") / self.study / self.name(program)

    def name(self, program: str) -> str:
        return self.item or program

    def columns(self, program: str) -> dict[str, str]:
        """The columns of a result row that name the measurement."""
        return {"study": self.study, "item": self.name(program)}


def results_folder(config: Any, program: str) -> Path:
    """Make the folder of a measurement, `config.run.folder(program)`. Rows that were measured there with other options
    are kept beside the new ones, as rows_replaced.csv.

    Raises:
        ConfigError: it holds results of another model, or of other masks, which would be lost.
        StorageError: there can be no such folder, or no file in it.
    """
    folder = config.run.folder(program)
    earlier: dict[str, Any] = {}  # empty, too, where the options of the results cannot be read
    if (folder / "rows.csv").exists():
        with contextlib.suppress(OSError, yaml.YAMLError, TypeError, ValueError):
            earlier = dict(read_yaml((folder / "config.yaml").read_bytes()))
    now = read_yaml(to_yaml(config).encode())
    for name in ("checkpoint", "checkpoints", "masks", "masks_item"):
        there, here = (None if values.get(name) in NOT_GIVEN else values[name] for values in (earlier, now))
        if earlier and there != here:
            raise ConfigError(f"{folder} holds results of {name}={there}, not of {here}: choose another run.item")
    if "checkpoints" in now and not now["checkpoints"]:  # a random model
        there, here = earlier.get("model") or {}, now["model"]
        if changed := [name for name in here if name in there and there[name] != here[name]]:
            was, is_ = (", ".join(f"{name}={values[name]}" for name in changed) for values in (there, here))
            raise ConfigError(f"{folder} holds results of a model with {was}, not {is_}: choose another run.item")
    make_folder(folder, "results")
    if changed := [name for name in now if name in earlier and name != "run" and earlier[name] != now[name]]:
        with storage_errors(folder / REPLACED, "result rows"):
            shutil.copy2(folder / "rows.csv", folder / REPLACED)
        shown = [{name: str(options[name]).replace("'", "") for name in changed} for options in (earlier, now)]
        what = ", ".join(f"{name}: {shown[0][name]} there, {shown[1][name]} here" for name in changed)
        log.warning("%s holds results of other options (%s): they are kept as %s", folder, what, REPLACED)
    return folder


def write_as_measured(folder: Path, parts: Iterable[Rows], config: Any) -> None:
    """Write the rows of a long measurement: those so far to `rows_so_far.csv`, for whoever has to stop it, and all of
    them with `write_results`. An item of a study is measured when it has all its rows, so it starts again either way.

    Args:
        parts: rows as they are measured.
    """
    so_far = folder / "rows_so_far.csv"
    rows: Rows = []
    for part in parts:
        rows += part
        write_rows(so_far, rows)
    write_results(folder, rows, config)
    with storage_errors(so_far, "result rows"):
        so_far.unlink(missing_ok=True)
    log.info("%d rows in %s", len(rows), folder / "rows.csv")


def write_results(folder: Path, rows: Iterable[dict[str, Any]], config: Any) -> None:
    """Write the rows of a measurement, and the configuration that they come from.

    In this order: rows beside the configuration of earlier ones count as made by that, and are measured again.
    """
    write_rows(folder / "rows.csv", rows)
    save_config(config, folder / "config.yaml")


def device_option() -> Any:
    """The option of a measurement that `device_of` takes."""
    meaning = "cpu, cuda, cuda:1, ...; auto: CUDA if there is one"
    return option("auto", meaning, required=True, pattern=DEVICE)


def device_of(name: str) -> torch.device:
    """The torch device of an option: `auto` is CUDA if there is one. Call it before anything is computed: it makes
    results on a CPU repeatable.

    Raises:
        ConfigError: this machine does not have it.
    """
    import torch

    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name}: this machine has no CUDA device that torch can use")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    # MKL chooses its vector functions at the first call. If several threads make it at once, one of them may get
    # another rounding: seen in 1 of 1,000 processes (docs/log/2026-11-25.md). So make it on this thread alone.
    torch.zeros(1).cos()
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of an option: `auto` is bfloat16 on a GPU, and float32 on a CPU: those without AVX-512 multiply
    bfloat16 one number at a time, over ten times more slowly than float32."""
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)
