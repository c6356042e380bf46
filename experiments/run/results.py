"""Result rows: one row is one measurement, with the columns of `analysis.schema`."""

from __future__ import annotations

import csv
import datetime
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from analysis.schema import COLUMNS, METRICS, NAMES, check_header
from experiments.run.environment import row_environment
from experiments.run.files import write_atomic

_KINDS = {column.name: column.kind for column in COLUMNS}
_PYTHON_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
_PARSERS: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": {"True": True, "False": False}.__getitem__}


def make_row(*, device: Any = "cpu", **fields: Any) -> dict[str, Any]:
    """One result row with every column of the schema; what is not given is None (an empty cell).

    `device` is a torch device or its name; revision, versions, date and `unit` are filled in. A value that could not be
    measured is left out, and `missing` says why. Raises `ValueError` for an unknown column or metric, a value of the
    wrong type, a `value` that is not finite, or neither `value` nor `missing`.
    """
    unknown = sorted(set(fields) - set(NAMES))
    if unknown:
        raise ValueError(f"unknown columns {unknown}; the columns are {list(NAMES)}")
    metric = fields.get("metric")
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; the metrics are {list(METRICS)}")
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    filled = {"unit": METRICS[metric].unit, "date": date, **row_environment(device)}
    row = {name: _plain(name, {**filled, **fields}.get(name)) for name in NAMES}
    if (row["value"] is None) == (not row["missing"]):
        raise ValueError(f"a row has either a value or a reason in 'missing', got {row['value']!r}, {row['missing']!r}")
    return row


def _plain(name: str, value: Any) -> Any:
    """The value as a plain Python scalar of the column's kind (numpy and torch scalars are converted)."""
    if value is None or value == "":
        return None
    value = value.item() if hasattr(value, "item") else value
    kind = _KINDS[name]
    if not isinstance(value, _PYTHON_TYPES[kind]) or (kind in ("int", "float") and isinstance(value, bool)):
        raise ValueError(f"column {name} must be {kind}, got {value!r} ({type(value).__name__})")
    if kind == "float" and not math.isfinite(value):
        raise ValueError(f"column {name} must be finite, got {value}; what could not be measured is left out")
    return float(value) if kind == "float" else value


def write_rows(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as CSV, atomically, replacing the file. Empty cells are values that do not apply."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(NAMES)
    writer.writerows([row[name] for name in NAMES] for row in rows)  # csv leaves the cell of a None empty
    write_atomic(Path(path), text.getvalue(), "result rows")


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a CSV file with the types of the schema, None for empty cells.

    Raises `ValueError` when the columns are not the schema's, a line is cut off, or a cell cannot be read as its
    column's kind.
    """
    text = Path(path).read_bytes().decode("utf8")
    header, *rows = csv.reader(io.StringIO(text, newline="")) if text else [[]]
    try:
        check_header(header)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not text.endswith("\n") or any(len(row) != len(header) for row in rows):
        raise ValueError(f"{path}: half-written: a line is cut off")
    return [{name: _from_cell(path, name, cell) for name, cell in zip(header, row, strict=True)} for row in rows]


def _from_cell(path: str | Path, name: str, cell: str) -> Any:
    if cell == "":
        return None
    try:
        return _PARSERS[_KINDS[name]](cell)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: column {name} must be {_KINDS[name]}, got {cell!r}") from error
