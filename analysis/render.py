"""Frames for readers: Markdown, HTML and the texts of cells. Rounding happens here and nowhere else."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pandas as pd

from analysis import schema
from analysis.choose import MODIFICATIONS, l1_label

NOTHING = "–"


def signed(value: float, digits: int = 0) -> str:
    """A change in percent with its sign: +12%, −3%, 0%."""
    text = f"{abs(value):.{digits}f}"
    sign = "" if float(text) == 0 else "+" if value > 0 else "−"
    return f"{sign}{text}%"


def significant(value: float, digits: int = 3) -> str:
    """At most `digits` significant digits, but at least the whole integer part: 2.93, 101, 1,290; "unknown" for NaN."""
    if math.isnan(value):
        return "unknown"
    if value != 0 and abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    places = 0 if value == 0 else max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def span(values: pd.Series, words: Callable[[float], str]) -> str:
    """The smallest and the largest value in words, "1.29 to 1.31"; once where they read alike."""
    return " to ".join(dict.fromkeys((words(values.min()), words(values.max()))))


def device(name: str) -> str:
    """A device's name without trademark signs."""
    return name.replace("(R)", "").replace("(TM)", "")


class Column(NamedTuple):
    """How to show a column: heading with unit, and digits after the point or significant digits (neither: text), with
    a sign if it is a change in percent. A column that is not in COLUMNS is text under its own name."""

    heading: str
    digits: int | None = None
    significant: int | None = None
    signed: bool = False


COLUMNS: dict[str, Column] = {
    "layers": Column("layers", 0),
    "modification": Column("mitigation"),
    "sparse": Column("run sparse"),
    "l1": Column("L1"),
    "mean_task_accuracy_pct": Column("mean accuracy (%)", 1),
    "cross_entropy": Column("cross-entropy (nats/token)", 3),
    "nonzeros": Column("non-zeros (neurons/token)", significant=3),
    "forward_tokens_per_ms": Column("forward (tokens/ms)", significant=4),
    "energy_mj_per_token": Column("energy (mJ/token)", significant=3),
    "train_tokens_per_ms": Column("training (tokens/ms)", significant=4),
    "peak_memory_gb": Column("peak memory (GB)", significant=3),
    "mean": Column("mean", 1),
    **{name: Column(task.title, 1) for name, task in schema.TASKS.items()},
    "seeds": Column("seeds", 0),
    "tokens_trained_m": Column("training tokens (millions)", significant=4),
    "tokens_per_parameter": Column("tokens / parameter", significant=3),
    "window": Column("tokens", 0),
    "gpus": Column("GPUs", 0),
    "hot": Column("hot neurons", 0),
    "silent": Column("pruned neurons", 0),
    "screened": Column("screened neurons", 0),
    "backup": Column("backup", 3),
    "eager_ratio": Column("speed over uncompiled dense", significant=3),
    "cross_entropy_change_pct": Column("against L1 = 0 (%)", 2),
    "active_pct": Column("active (% of N)", 2),
    "same_loss_pct": Column("dense neurons at equal loss (% of N)", 1),
    "dead_pct": Column("dead (% of N)", 1),
    "forward_ratio": Column("forward speed over dense", 2),
    "training_ratio": Column("training speed over dense", 2),
    "name": Column("hyper-parameter"),
    "layer": Column("layer", 0),
    "nonzeros_p50": Column("median", significant=3),
    "nonzeros_p99": Column("99th percentile", significant=3),
    "nonzeros_max": Column("maximum", significant=4),
    "silent_pct": Column("silent (% of N)", 1),
    "hot_pct": Column("in the hottest tenth (%)", 1),
    "op": Column("operation"),
    "tokens": Column("tokens", 0),
    "batch": Column("sequences", 0),
    "prompt_tokens": Column("prompt (tokens)", 0),
    "new_tokens": Column("generated (tokens)", 0),
    "tokens_per_s": Column("tokens/s", significant=4),
    "tokens_per_s_low": Column("20th percentile (tokens/s)", significant=4),
    "tokens_per_s_high": Column("80th percentile (tokens/s)", significant=4),
    "speedup": Column("speed over dense", significant=3),
    "eager_speedup": Column("speed over uncompiled dense", significant=3),
    "device_ms": Column("time of the device (ms)", significant=4),
    "same_tokens_pct": Column("tokens as uncompiled dense (%)", 1),
    "hidden": Column("hidden", 0),
    "intermediate": Column("intermediate", 0),
    "mean_nnz": Column("non-zeros (neurons/token)", significant=4),
    "time_ms": Column("time (ms)", significant=4),
    "time_low_ms": Column("20th percentile (ms)", significant=4),
    "time_high_ms": Column("80th percentile (ms)", significant=4),
    "ratio": Column("speed over dense", significant=3),
    "floor_ms": Column("floor (ms)", significant=4),
    "floor_share": Column("floor / time", significant=3),
    "host_us": Column("host (us)", significant=3),
    "check_error": Column("error", significant=2),
    "dense_error": Column("error of dense products", significant=2),
    "calls": Column("calls checked", 0),
    "active": Column("active neurons", significant=2),
    "forward_speed": Column("forward, speed", 2),
    "forward_energy_pct": Column("forward, energy", 0, signed=True),
    "step_speed": Column("training step, speed", 2),
    "step_memory_pct": Column("training step, memory", 0, signed=True),
    "step_tokens": Column("tokens in a step", 0),
    "whole_speed": Column("whole training, speed", 2),
    "fastest_over_eager": Column("ours", 2),
    "papers_over_eager": Column("the paper's method", 2),
    "papers_over_transformers": Column("the paper's method over transformers", 2),
    "published": Column("the paper reports", 2),
    "energy_pct": Column("its energy", 0, signed=True),
    "published_energy_pct": Column("energy in the paper", 0, signed=True),
    "peak_memory_pct": Column("its memory", 0, signed=True),
    "published_peak_memory_pct": Column("memory in the paper", 0, signed=True),
    "dense_ms": Column("fastest dense (ms)", 2),
    "plain": Column("hopper", 2),
    "hot_ratio": Column("hopper, hot", 2),
    "sorted_ratio": Column("hopper, sorted", 2),
    "backup_ratio": Column("hopper, backup", 2),
    "triton": Column("triton", 2),
    "text_active": Column("active on text", significant=3),
    "text_speed": Column("speed on text", 2),
    "random_active": Column("active on random ids", significant=3),
    "random_speed": Column("speed on random ids", 2),
    "fp8_error_pct": Column("its relative error (%)", 0),
    "graph": Column("CUDA graph"),
    "fewest": Column("fewest active", significant=3),
    "most": Column("most active", significant=3),
    **{name: Column(word, 2) for name, word in schema.WORDS.items() if name.startswith(("twell", "dense_"))},
    "step": Column("step", 0),
    "seed": Column("seed", 0),
    "neurons": Column("neurons", 0),
    "trained": Column("model"),
    "paper_l1": Column("L1 in the paper"),
    "paper": Column("the paper (1.5B)"),
    "as_written": Column("ours, L1 as written"),
    "times_64": Column("ours, 64 times"),
    "nearer_active": Column("nearer by active neurons"),
    "nearer_loss": Column("nearer by cross-entropy"),
    "live_pct": Column("live weights (% of dense)", 0),
    "time_pct": Column("time, estimated (% of dense)", 0),
    "time_pruned_pct": Column("pruned", 0),
    "loss_change_pct": Column("cross-entropy against dense", 1, signed=True),
    "train_loss_change_pct": Column("on the training text", 1, signed=True),
    "forward_pct": Column("forward (% of dense)", 0),
    "run_energy_pct": Column("forward, energy", 0),
    "blocks_pct": Column("blocks", 0),
    "pruned_pct": Column("blocks, pruned", 0),
    "training_step_pct": Column("training step", 0),
    "step_memory_of_dense_pct": Column("its memory", 0),
    "own_steps_pct": Column("steps as trained", 0),
    "own_memory_pct": Column("memory as trained", 0),
    "beyond_dense_pct": Column("over dense at equal time", 2, signed=True),
    "train_beyond_dense_pct": Column("that on the training text", 2, signed=True),
    "value": Column("rate", significant=4),
    "low": Column("20th percentile", significant=4),
    "high": Column("80th percentile", significant=4),
}
# Suffixes of column names: half the width of the 95% interval, the change in percent against the fastest dense form of
# the same run, and the number of seeds where it is less than that of the line.
INTERVAL, CHANGE, FEWER_SEEDS = BESIDE = ("_ci95", "_vs_dense_pct", "_seeds")


def texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text, with headings: "3.59 ± 0.01", "480 (+17%)", "31.0 ± 0.15 (2 seeds)".

    The column `note` is not shown: a row without any number shows it in place of its device, and `notes` collects the
    others.
    """
    shown = {}
    for name in frame.columns:
        if name.endswith(BESIDE) or name == "note":
            continue
        column = COLUMNS.get(name, Column(name))
        beside = [frame.get(name + ending, [math.nan] * len(frame)) for ending in BESIDE]
        cells = [_cell(name, column, value) for value in frame[name]]
        shown[column.heading] = [_qualified(*parts) for parts in zip(cells, *beside, strict=True)]
    table = pd.DataFrame(shown)
    if "note" in frame:
        absent = _without_numbers(frame)
        place, lead = ("device", "") if "device" in frame else ("source", "ours: ")
        table.loc[absent, place] = lead + frame.loc[absent, "note"]
    return table


def _qualified(text: str, half_width: float, change: float, seeds: float) -> str:
    if not pd.isna(half_width):
        text += f" ± {significant(round(half_width, 4), 2)}"
    brackets = [] if pd.isna(change) else [signed(change)]
    brackets += [] if pd.isna(seeds) else ["one seed" if seeds == 1 else f"{seeds:.0f} seeds"]
    return f"{text} ({'; '.join(brackets)})" if brackets else text


def _without_numbers(frame: pd.DataFrame) -> pd.Series:
    numbers = frame.select_dtypes("number").columns.difference(["l1", "layers"])
    return frame[numbers].isna().all(axis=1) & (frame["note"] != "")


def notes(frame: pd.DataFrame) -> list[str]:
    """Why rows lack some of their numbers: one sentence for each scale and reason."""
    if "note" not in frame:
        return []
    partly = frame[(frame["note"] != "") & ~_without_numbers(frame)]
    if partly.empty:
        return []
    if "l1" not in partly:
        return list(dict.fromkeys(partly["scale"] + ": " + partly["note"]))
    reasons = partly.groupby("scale")["note"].nunique()
    # Rows of one scale may lack different numbers.
    lines = [
        f"{_which(row) if reasons[row['scale']] > 1 else row['scale']}: {row['note']}" for _, row in partly.iterrows()
    ]
    return list(dict.fromkeys(lines))


def _which(row: pd.Series) -> str:
    kind = ", SiLU," if row.get("activation") == "silu" else ", non-gated," if row.get("gated") == "no" else ""
    name = f"{row['scale']}{kind} at L1 {l1_label(row['l1'])}"
    mitigation = row.get("modification", "none")
    return name if mitigation == "none" else f"{name} with {MODIFICATIONS[mitigation]}"


def _cell(name: str, column: Column, value: Any) -> str:
    if pd.isna(value) or value == "":
        return NOTHING
    if name == "l1":
        return l1_label(float(value))
    if name == "device":
        return device(str(value))
    if name == "plan":
        return schema.WORDS.get(str(value), str(value))
    if name == "modification":
        return MODIFICATIONS.get(str(value), str(value))
    if isinstance(value, str):
        return value
    if column.signed:
        return signed(float(value), column.digits or 0)
    if column.significant is not None:
        return _minus(significant(float(value), column.significant))
    if column.digits is None:
        return str(value)
    return _minus(f"{round(float(value), column.digits) + 0.0:,.{column.digits}f}")  # + 0.0: no "-0.00"


def _minus(number: str) -> str:
    """A number's text with a true minus sign in front; an exponent keeps its hyphen."""
    return f"−{number[1:]}" if number.startswith("-") else number


class Shown:
    """Displays a frame in a notebook as a table with all texts escaped. Anything else, such as the sentence that
    nothing was measured, is shown unchanged."""

    def __init__(self, frame: Any):
        self.frame = frame

    def _repr_html_(self) -> str:
        if not isinstance(self.frame, pd.DataFrame):
            return self.frame._repr_html_()
        missing = "".join(f"<p>Missing: {html.escape(note)}.</p>" for note in notes(self.frame))
        return texts(self.frame).to_html(index=False, border=0) + missing

    def __repr__(self) -> str:
        return texts(self.frame).to_string(index=False) if isinstance(self.frame, pd.DataFrame) else repr(self.frame)


def markdown(frame: pd.DataFrame) -> str:
    """A GitHub table: numbers aligned right, text aligned left."""
    table = texts(frame)
    numeric = [is_numeric(frame, heading) for heading in table.columns]
    lines = [
        _line(table.columns),
        _line("---:" if number else ":---" for number in numeric),
        *(_line(row) for row in table.itertuples(index=False)),
    ]
    missing = [f"\nMissing: {note}." for note in notes(frame)]
    return "\n".join([*lines, *missing]) + "\n"


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def is_numeric(frame: pd.DataFrame, heading: str) -> bool:
    """Whether the column that `texts` shows under this heading holds numbers."""
    names = [name for name in frame.columns if COLUMNS.get(name, Column(name)).heading == heading]
    return pd.api.types.is_numeric_dtype(frame[names[0]])
