"""Reads and writes `metrics.jsonl` of a run, one JSON object per logged step, and makes result rows from it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run.errors import DataError
from experiments.run.files import storage_errors
from experiments.run.results import make_row
from experiments.run.train_config import TrainConfig, model_columns, training_columns
from experiments.timing.plans import layers_columns

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
_TAIL_BYTES = 1 << 16  # many times the longest line, which has some numbers for each layer
Record = dict[str, Any]


def read_metrics(run_dir: Path) -> list[Record]:
    """The records of a run, by step; empty if there is no file yet. An incomplete last line is ignored.

    Raises:
        DataError: a line is no record.
    """
    path = run_dir / METRICS
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or "step" not in record:
            raise ValueError("no object with a step")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not a record of a training ({error})") from error
    return record


def last_record(run_dir: Path) -> Record | None:
    """The latest complete record, without reading the whole file; None if there is none, or its line is damaged."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
        return _record(lines[-2].decode(), METRICS)
    except (FileNotFoundError, IndexError, UnicodeDecodeError, DataError):
        return None


def append(run_dir: Path, record: Record, *, begins: bool) -> None:
    """Add one record; `begins`: it is the first of the run.

    Raises:
        DataError: the records before it are gone.
        StorageError: the disk is full.
    """
    path = run_dir / METRICS
    if not (begins or path.is_file()):
        raise DataError(f"{path} was deleted while its training runs; the same command continues from its checkpoint")
    with storage_errors(path, "metrics"), path.open("a") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


# --- rows -------------------------------------------------------------------------------------------------------------


def training_rows(config: TrainConfig, records: Sequence[Record], device: torch.device, gpus: int) -> list[Record]:
    """The result rows of a finished run. Training values are means over the last tenth of the records; plan, backend
    and hot neurons are those of the last one."""
    last = records[-max(1, len(records) // 10) :]
    nonzeros = _mean_by_layer([record["nonzeros"] for record in last])
    dead = _mean_by_layer([record["dead_fraction"] for record in last])
    backends, hot, backup = last[-1]["backend"], last[-1]["hot_neurons"], config.execution.sparse.backup
    known = model_columns(config.model) | training_columns(config, last[-1]["step"])
    known |= layers_columns(backends, backup=backup)
    known |= {
        "study": config.run.study,
        "item": config.run.item,
        "op": "train",
        "tokens": config.training.tokens_per_step,
        "pattern": f"{config.run.study}/{config.run.item}",
        "mean_nnz": _mean(nonzeros),
        "device": device,
        "gpus": gpus or None,
    }
    validation = [record["validation_cross_entropy"] for record in records if "validation_cross_entropy" in record]
    rows = [
        make_row(**known, metric="cross_entropy", value=_mean([r["cross_entropy"] for r in last]), n=len(last)),
        make_row(**known, metric="validation_cross_entropy", value=validation[-1], n=1),
        make_row(**known, metric="nonzeros", value=_mean(nonzeros), n=len(last)),
        make_row(**known, metric="dead_fraction", value=_mean(dead), n=len(last)),
    ]
    for metric, values in (("nonzeros", nonzeros), ("dead_fraction", dead)):
        for layer, value in enumerate(values):
            own = {"layer": layer, "mean_nnz": nonzeros[layer], "hot": None, "backup": None}
            own |= layers_columns([backends[layer]], backup=backup, hot=hot[layer])
            rows.append(make_row(**{**known, **own, "metric": metric, "value": value, "n": len(last)}))
    # Without the first record, which includes one-time costs.
    speeds = sorted(record["tokens_per_s"] / 1e3 for record in records[1:] or records)
    low, high = (speeds[round(share * (len(speeds) - 1))] for share in (0.2, 0.8))
    speed = {"value": statistics.median(speeds), "low": low, "high": high, "n": len(speeds)}
    memory: Record = {"missing": "the CPU has no counter of allocated memory"}
    if device.type == "cuda":
        memory = {"value": max(record["memory_gb"] for record in records), "n": 1}
    return [*rows, make_row(**known, metric="throughput", **speed), make_row(**known, metric="peak_memory", **memory)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_by_layer(rows: Sequence[Sequence[float]]) -> list[float]:
    return [_mean(layer) for layer in zip(*rows, strict=True)]
