"""Read one file of results, check it, and convert its columns to their types.

Every error names the file, what was found and what is wanted. Nothing is filled in: an empty cell stays empty.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from analysis import schema

# The tables that gather_nonzeros writes (in_training is written by train), with the columns that identify a row and the
# columns with its numbers. masks and by_token also have a column layer_<i> for each layer.
NONZEROS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "by_layer": (("layer",), ("mean",)),
    "histogram": (("layer", "nonzeros"), ("tokens",)),
    "by_position": (("layer", "position"), ("mean", "tokens")),
    "by_token": (("token_id",), ("text", "count", "frequency", "mean")),
    "unions": (("layer", "group"), ("mean", "fraction")),
    "by_neuron": (("layer", "neuron"), ("rate",)),
    "masks": (("index",), ("token_id", "text", "position")),
    "in_training": (("step", "layer", "neuron"), ("tokens", "rate")),
}
RUN_COLUMNS: tuple[str, ...] = ("study", "item", "model", "l1")

DTYPES: dict[str, str] = {"str": "str", "int": "Int64", "float": "float64", "bool": "boolean"}

# KEY identifies what a row measured, see `identity`. The other columns hold the result and how it was measured.
RESULT_COLUMNS = (
    "unit", "value", "low", "high", "n", "ratio", "baseline", "check_error", "missing", "hot", "silent", "screened",
)  # fmt: skip
VERSION_COLUMNS = ("task_protocol", "power_state", "torch", "triton", "cuda", "revision", "dirty", "date")
DEVICE_FREE = ("train", "nonzeros", "evaluate")  # operations whose results are about a model, not about a device
KEY: list[str] = [name for name in schema.NAMES if name not in RESULT_COLUMNS + VERSION_COLUMNS]


class ResultsError(ValueError):
    """A file of results is invalid or damaged; the message names it."""


def read_rows(path: Path) -> pd.DataFrame:
    """The rows of one rows.csv with the types of `schema.COLUMNS`.

    Raises:
        ResultsError: columns that are not the schema's, a half-written line, a cell of the wrong type, an unknown
            metric, plan or modification, a unit that is not the metric's, a row with neither a value nor a reason, or
            a duplicate.
    """
    text = _text(path)
    if not text.endswith("\n"):
        raise ResultsError(f"{path}: half-written: the last line has no line end")
    try:
        header, *cells = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
        schema.check_header(header)
    except (ValueError, csv.Error) as error:
        raise ResultsError(f"{path}: {error}") from None
    for number, row in enumerate(cells, start=2):
        if len(row) != len(header):
            raise ResultsError(f"{path}: row {number} has {len(row)} cells, wanted {len(header)} (half-written?)")
    columns = zip(*cells, strict=True) if cells else [()] * len(header)
    rows = pd.DataFrame({one.name: _typed(path, one, part) for one, part in zip(schema.COLUMNS, columns, strict=True)})
    _check_known(path, rows, "plan", ("", *schema.PLANS))
    _check_known(path, rows, "modification", ("", *schema.MODIFICATIONS))
    _check_known(path, rows, "metric", schema.METRICS)
    units = rows["metric"].map({name: metric.unit for name, metric in schema.METRICS.items()})
    if len(wrong := rows[rows["unit"] != units]):
        at, row = wrong.index[0], wrong.iloc[0]
        raise ResultsError(f"{path}: row {at + 2}: {row['metric']} in {row['unit']!r}, wanted {units[at]!r}")
    if len(wrong := rows[rows["value"].isna() == (rows["missing"] == "")]):
        at, row = wrong.index[0], wrong.iloc[0]
        came = "neither a value nor a reason" if row["missing"] == "" else f"a value and a reason ({row['missing']!r})"
        what = f"row {at + 2} ({row['op']} {row['metric']})"
        raise ResultsError(f"{path}: {what} has {came}, wanted exactly one of them")
    _check_duplicates(path, identity(rows), KEY)
    return rows


def identity(rows: pd.DataFrame) -> pd.DataFrame:
    """The columns KEY: of two rows in which they are equal, one measured again what the other did. Non-zeros identify
    a synthetic pattern; those of a model are a result, and left out. So are the backends that layers got (plan
    by_layer; whether the rest is compiled still counts), and where a model was trained and scored: the same training on
    another device, or on more of them, is the same training."""
    requested, anywhere = rows["pattern"].str.startswith("synthetic"), rows["op"].isin(DEVICE_FREE)
    compiled = rows["backend"].str.extract(f"({schema.COMPILED})$", expand=False)
    return rows[KEY].assign(
        backend=rows["backend"].mask(rows["plan"].eq("by_layer"), compiled),
        mean_nnz=rows["mean_nnz"].where(requested),
        device=rows["device"].mask(anywhere, ""),
        gpus=rows["gpus"].mask(anywhere),
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path}: not UTF-8 text, from byte {error.start} on") from None


def _typed(path: Path, column: schema.Column, cells: Sequence[str]) -> pd.Series:
    values: dict[str, object] = {} if column.kind == "str" else {"": math.nan if column.kind == "float" else pd.NA}
    for cell in dict.fromkeys(cells):
        try:
            values[cell] = values[cell] if cell in values else _CONVERTERS[column.kind](cell)
        except (ValueError, OverflowError, KeyError):
            number = cells.index(cell) + 2
            raise ResultsError(f"{path}: row {number}: {column.name}={cell!r} is not a {column.kind}") from None
    return pd.Series([values[cell] for cell in cells], dtype=DTYPES[column.kind])


def _finite(cell: str) -> float:
    number = float(cell)
    if not math.isfinite(number):
        raise ValueError(cell)
    return number


_CONVERTERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": np.int64,
    "float": _finite,
    "bool": lambda cell: {"true": True, "false": False}[cell.lower()],
}


def _check_known(path: Path, rows: pd.DataFrame, name: str, known: Collection[str]) -> None:
    unknown = rows.index[~rows[name].isin(list(known))]
    if len(unknown):
        came, names = rows.loc[unknown[0], name], [word for word in known if word]
        raise ResultsError(f"{path}: row {unknown[0] + 2}: unknown {name} {came!r}, wanted one of {names}")


def _check_duplicates(path: Path, frame: pd.DataFrame, key: list[str]) -> None:
    again = frame.loc[frame.duplicated(key).to_numpy(), key]
    if len(again):
        what = {name: value for name, value in again.iloc[0].items() if not pd.isna(value) and value != ""}
        raise ResultsError(f"{path}: measured twice in one file: {what}")


# Keys of metrics.jsonl that hold words, not curves.
_NAMES = ("backend",)


def read_metrics(path: Path) -> pd.DataFrame:
    """The curves of one metrics.jsonl as a long frame: step, tokens, layer (empty for a whole model), metric, value.

    Raises:
        ResultsError: a line that is not a JSON object, has no step or tokens, holds something other than a number
            or a list of numbers, or whose step is not larger than the previous one.
    """
    return points_frame(metric_points(path))


def points_frame(points: list[tuple]) -> pd.DataFrame:
    """Points of `metric_points` as a frame: step, tokens, layer, metric, value."""
    frame = pd.DataFrame(points, columns=["step", "tokens", "layer", "metric", "value"])
    return frame.astype({"step": "int64", "tokens": "int64", "layer": "Int64", "metric": "str", "value": "float64"})


def metric_points(path: Path) -> list[tuple]:
    """(step, tokens, layer, metric, value) of one metrics.jsonl, in its order. Raises `ResultsError` as above."""
    points: list[tuple] = []
    last_step = -1
    for number, line in enumerate(_text(path).rstrip("\n").split("\n"), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{path}: line {number} is not JSON (half-written?): {error}") from None
        if not isinstance(record, dict) or not {"step", "tokens"} <= record.keys():
            raise ResultsError(f"{path}: line {number}: wanted an object with step and tokens, got {line[:80]!r}")
        step, tokens = record.pop("step"), record.pop("tokens")
        if step <= last_step:
            raise ResultsError(f"{path}: line {number}: step {step} comes after step {last_step}")
        last_step = step
        for metric, content in record.items():
            if metric in _NAMES or content is None:  # null: not measured at this step
                continue
            for layer, value in enumerate(content) if isinstance(content, list) else [(pd.NA, content)]:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ResultsError(f"{path}: line {number}: {metric} holds {value!r}, wanted numbers")
                points.append((step, tokens, layer, metric, float(value)))
    return points


# Columns of parquet files: text, and numbers that may be missing in the whole column.
_WORDS = ("study", "item", "model", "text", "activation", "modification", "metric")
_FLOATS = ("l1", "mean", "value", "fraction", "frequency")


def read_table(path: Path, key: tuple[str, ...], values: tuple[str, ...]) -> pd.DataFrame:
    """One parquet file with at least the columns `key` and `values`; every combination of `key` occurs once.

    Raises:
        ResultsError: the file is damaged, lacks a column, has text in place of numbers, or has a duplicate key.
    """
    try:
        frame = pd.read_parquet(path)
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise ResultsError(f"{path}: not a whole parquet file (half-written?): {error}") from error
    missing = [name for name in (*key, *values) if name not in frame.columns]
    if missing:
        raise ResultsError(f"{path}: columns {missing} are missing, got {list(frame.columns)}")
    _check_duplicates(path, frame, list(key))
    return frame.assign(**{name: _column(path, frame[name]) for name in {*key, *values}})


def _column(path: Path, column: pd.Series) -> pd.Series:
    """The column with its proper type; a column without any value has lost its type in the file."""
    name = str(column.name)
    if name in _WORDS:
        return column.astype("str").where(column.notna(), "")
    if column.isna().all():
        return column.astype("float64" if name in _FLOATS else "Int64")
    if not pd.api.types.is_numeric_dtype(column):
        raise ResultsError(f"{path}: column {name} holds {column.dropna().iloc[0]!r}, wanted numbers")
    if column.dtype == "Int64" and column.notna().all():
        return column.astype("int64")
    return column.astype("float64") if name == "l1" else column


def read_config(path: Path) -> dict[str, str]:
    """A saved config.yaml as dotted keys and text: {"model.hidden_size": "128", ...}."""
    # PyYAML's loader in C, if available, is eight times as fast: a study may have thousands of configs.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        config = yaml.load(_text(path), Loader=loader)
    except yaml.YAMLError as error:
        raise ResultsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ResultsError(f"{path}: wanted a mapping, got {type(config).__name__}")
    return _flatten_config(config, "")


def _flatten_config(config: dict, prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "/".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat
