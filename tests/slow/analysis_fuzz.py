"""Makes odd but valid results from sound ones: those of a foreign model, a broken run or a hand-made file.

`alter` changes the cells of rows.csv and the parquet files beside it. Whatever comes out, a build either names the file
that it refuses, or makes every table, figure and claim, each with its content or with the reason for its absence.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pandas as pd
from synthetic_results import write_rows

Row = dict[str, str]
Rows = list[Row]

ODD = (
    "模型", "a|b", "$x^2$", "<script>alert(1)</script>", "two\nlines", "\u2028", "ends in _", "%s {0}", "-nongated",
    "\ufdfd", "0", "nan", "x" * 300,
)  # fmt: skip
WORDS = ("study", "item", "model", "activation", "modification", "text", "pattern", "device", "task", "backend", "op")
NUMBERS = ("l1", "mean_nnz", "value", "low", "high", "ratio", "tokens_per_parameter")
WHOLE = (
    "layers", "layer", "step", "tokens_trained", "tokens", "hidden", "intermediate", "seed", "gpus", "n", "hot",
    "silent",
)  # fmt: skip
# Of a model that was not trained here.
UNKNOWN = ("model", "l1", "modification", "text", "tokens_trained", "tokens_per_parameter", "step", "seed")
BLANKED = (*(set(WORDS) - {"study", "item", "op"}), *NUMBERS[:2], *NUMBERS[3:], *WHOLE, "plan", "baseline", "gated")


def _keep(name: str) -> Callable[[Rows, Random], Rows]:
    """Rows with one value of a column, and those where it does not apply."""

    def keep(rows: Rows, random: Random) -> Rows:
        values = sorted({row[name] for row in rows} - {""})
        chosen = random.choice(values) if values else ""
        return [row for row in rows if row[name] in ("", chosen)]

    return keep


def _leave_out(name: str) -> Callable[[Rows, Random], Rows]:
    def leave_out(rows: Rows, random: Random) -> Rows:
        values = sorted({row[name] for row in rows} - {""})
        gone = set(random.sample(values, k=random.randint(0, len(values))))
        return [row for row in rows if row[name] not in gone]

    return leave_out


def _foreign(rows: Rows, random: Random) -> Rows:
    """Measured on a model that was not trained here: its training is unknown."""
    unknown = dict.fromkeys(UNKNOWN, "")
    some = random.random() < 0.5
    chosen = {row["item"] for row in rows if row["op"] != "train" and (some or random.random() < 0.2)}
    return [row | unknown if row["item"] in chosen else row for row in rows if row["op"] != "train"]


def _blank_column(rows: Rows, random: Random) -> Rows:
    name = random.choice(BLANKED)
    return [row | {name: ""} for row in rows]


def _blank_cells(rows: Rows, random: Random) -> Rows:
    names = random.sample(BLANKED, k=3)
    return [row | {name: "" for name in names if random.random() < 0.3} for row in rows]


def _unmeasured(rows: Rows, random: Random) -> Rows:
    share = random.choice((0.05, 0.5, 1.0))
    empty = {"value": "", "low": "", "high": "", "ratio": "", "missing": "not measured, for a reason"}
    return [row | empty if row["value"] and random.random() < share else row for row in rows]


def _constant(rows: Rows, random: Random) -> Rows:
    name = random.choice((*NUMBERS, *WHOLE))
    value = random.choice(("0", "1", "-1", "7"))
    return [row | {name: value} if row[name] else row for row in rows]


def _extreme(rows: Rows, random: Random) -> Rows:
    name = random.choice(NUMBERS)
    value = random.choice(("0", "-3.5", "1e300", "1e-300", "-1e300"))
    return [row | {name: value} if row[name] and random.random() < 0.1 else row for row in rows]


def _odd_name(rows: Rows, random: Random) -> Rows:
    name = random.choice(WORDS)
    values = sorted({row[name] for row in rows} - {""})
    renamed = {value: random.choice(ODD) + str(at) for at, value in enumerate(values) if random.random() < 0.7}
    return [row | {name: renamed.get(row[name], row[name])} for row in rows]


def _odd_cell(rows: Rows, random: Random) -> Rows:
    """A cell of the wrong type, which is refused."""
    at, name = random.randrange(len(rows)), random.choice((*NUMBERS, *WHOLE, "gated", "dirty", "metric", "plan"))
    return [row | {name: random.choice(ODD)} if number == at else row for number, row in enumerate(rows)]


def _twice(rows: Rows, random: Random) -> Rows:
    return [*rows, random.choice(rows)]


def _shuffled(rows: Rows, random: Random) -> Rows:
    return random.sample(rows, k=len(rows))


def _nothing(rows: Rows, random: Random) -> Rows:
    return rows[: random.randint(0, 3)]


ALTERATIONS: tuple[Callable[[Rows, Random], Rows], ...] = (
    *map(_keep, ("layer", "seed", "l1", "item", "op", "metric", "model", "plan", "backend", "mean_nnz")),
    *map(_leave_out, ("l1", "op", "metric", "item", "backend", "layer", "tokens", "device")),
    _foreign, _foreign, _foreign, _blank_column, _blank_column, _blank_cells, _unmeasured, _constant, _extreme,
    _odd_name, _odd_name, _odd_cell, _twice, _shuffled, _nothing,
)  # fmt: skip


def _alter_tables(folder: Path, rows: Rows, random: Random, *, damage: bool) -> None:
    """The parquet files of the items that are left; with `damage`, some and the settings cut, emptied, of other types,
    half-written or gone."""
    described = {(row["study"], row["item"]): row for row in rows}
    for path in sorted(folder.glob("*.parquet")):
        frame = pd.read_parquet(path)
        known = [key in described for key in zip(frame["study"], frame["item"], strict=True)]
        frame = frame[known].reset_index(drop=True)
        own = [described[key] for key in zip(frame["study"], frame["item"], strict=True)]
        if own and all(row["l1"] == "" for row in own):
            frame = frame.assign(model="", l1=None)
        what = random.random() if damage else 1.0
        if what < 0.05:
            path.unlink()
        elif what < 0.08:
            path.write_bytes(path.read_bytes()[:-5])
        else:
            if what < 0.15:
                frame = frame.iloc[: random.randint(0, 3)]
            elif what < 0.22:
                name = random.choice([name for name in frame.columns if name not in ("study", "item")])
                frame = frame.assign(**{name: random.choice((None, 0, 1.5, float("nan"), "模型"))})
            elif what < 0.25:
                frame = frame.drop(columns=random.choice(list(frame.columns)))
            frame.to_parquet(path, index=False)
    if damage and random.random() < 0.3:
        contents = (b"", b"study,item\n", b"\xff\xfe", b"study,item,key,value\n")
        (folder / "settings.csv").write_bytes(random.choice(contents))


KEPT_L1 = ("", "0.0", "2e-05", "0.0001", "0.001", "0.0015", "0.003")
KEPT_STEPS = 16  # of a curve


def reduce(source: Path, out: Path) -> Path:
    """A copy of the data of a built folder that is small enough to be built in seconds: fewer L1 values, steps,
    positions, tokens and neurons; every operation and metric."""
    out.mkdir(parents=True)
    with (source / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["l1"] in KEPT_L1]
    write_rows(out / "rows.csv", rows)
    items = {row["item"] for row in rows}
    for path in source.glob("*.parquet"):
        frame = pd.read_parquet(path)
        frame = frame[frame["item"].isin(items)]
        if "step" in frame:
            of_one_run = [name for name in ("item", "metric") if name in frame]
            steps = frame.groupby(of_one_run)["step"].rank("dense", ascending=False)
            frame = frame[(steps - 1) % max(1, int(steps.max()) // KEPT_STEPS) == 0]
        for name in {"token_id", "position", "neuron"} & set(frame.columns):
            frame = frame[frame[name] % 16 < 2]
        frame.to_parquet(out / path.name, index=False)
    shutil.copy(source / "settings.csv", out)
    return out


def alter(source: Path, out: Path, seed: int) -> list[str]:
    """Write an altered copy of the data of a built folder; returns the names of the alterations, for the message."""
    random = Random(seed)
    out.mkdir(parents=True)
    for path in [*source.glob("*.parquet"), source / "settings.csv"]:
        shutil.copy(path, out / path.name)
    with (source / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows: Rows = list(csv.DictReader(file))
    names = []
    for change in random.choices(ALTERATIONS, k=random.randint(1, 3)):
        rows = change(rows, random) or rows[:1]
        names.append(f"{change.__name__} {change.__closure__[0].cell_contents if change.__closure__ else ''}".strip())
    write_rows(out / "rows.csv", rows)
    _alter_tables(out, rows, random, damage=random.random() < 0.3)
    return names
