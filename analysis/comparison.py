"""Compares the rows of a study that was run on this machine with the committed ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from analysis import describe, read
from analysis.choose import cells, where
from analysis.load import FIGURES, ROOT
from analysis.read import read_rows
from analysis.render import significant

STUDIES = ROOT / "experiments" / "studies"


# --- criteria that hold on every processor ----------------------------------------------------------------------------

LOSS_SHARE = 0.02  # of the committed held-out cross-entropy
NONZEROS_FACTOR = 1.3  # between mean non-zeros of a model


def criteria(expected: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """How the trainings of a study here agree with the committed ones. One line for each criterion: name, the worst
    value found in words, what is allowed, and whether it holds.

    Args:
        expected: the committed rows of the study.
        measured: those of this machine.
    """
    committed, here = (rows.groupby(["item", "op"]).size() for rows in (expected, measured))
    fewer = committed.index[here.reindex(committed.index, fill_value=0) < committed]
    lacks = f"fewer in {', '.join(sorted({item for item, _ in fewer}))}" if len(fewer) else "every one"
    lines = [("rows of results", f"{len(measured):,}, {lacks}", f"{len(expected):,}", not len(fewer))]
    both = _final(expected).join(_final(measured)[["loss", "nonzeros"]].add_suffix("_here"), how="inner")
    if len(both):
        loss = (both["loss_here"] / both["loss"] - 1).abs().sort_values()
        factor = np.exp(np.log(both["nonzeros_here"] / both["nonzeros"]).abs()).sort_values()
        other = []
        for _, sweep in both[both["modification"] == "none"].groupby(["model", "seed"]):
            ordered = [list(sweep.sort_values(name).index) for name in ("nonzeros", "nonzeros_here")]
            other += [f"{a} and {b}" for a, b in zip(*ordered, strict=True) if a != b]
        apart, times = f"{loss.iloc[-1]:.1%} apart ({loss.index[-1]})", f"factor {factor.iloc[-1]:.2f}"
        lines += [
            ("held-out cross-entropy", apart, f"{LOSS_SHARE:.0%}", loss.iloc[-1] <= LOSS_SHARE),
            (
                "mean non-zeros", f"{times} ({factor.index[-1]})", f"factor {NONZEROS_FACTOR:g}",
                factor.iloc[-1] <= NONZEROS_FACTOR,
            ),
            ("order by non-zeros", f"other: {other[0]}" if other else "the same", "the same", not other),
        ]  # fmt: skip
    return pd.DataFrame(lines, columns=["name", "found", "allowed", "holds"])


def _final(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each training: l1, modification, gated, seed, `loss` (held-out, nats/token), `nonzeros` (mean)."""
    whole = rows[(rows["op"] == "train") & rows["layer"].isna()]
    keys = ["item", "model", "l1", "modification", "seed"]
    table = whole.pivot_table(index=keys, columns="metric", values="value", aggfunc="last").reset_index()
    table = table.rename(columns={"validation_cross_entropy": "loss"})
    return table.reindex(columns=[*keys, "loss", "nonzeros"]).set_index("item")


# --- every number -----------------------------------------------------------------------------------------------------


class Tolerance(NamedTuple):
    """How far a measured number may be from the committed one.

    relative: share of the committed value. absolute: in the metric's unit. The larger of the two applies.
    factor: used instead of both: the value may be this many times larger or smaller.
    """

    relative: float = 0.0
    absolute: float = 0.0
    factor: float = 0.0

    def bounds(self, expected: float) -> tuple[float, float]:
        """The lowest and the highest allowed value."""
        if self.factor:
            return expected / self.factor, expected * self.factor
        width = max(self.relative * abs(expected), self.absolute)
        return expected - width, expected + width

    def times(self, count: float) -> Tolerance:
        """Tolerance that is `count` times as wide."""
        return self._replace(relative=count * self.relative, absolute=count * self.absolute)

    def text(self) -> str:
        """In words: "±1%", "±10% or ±1", "factor 2"."""
        if self.factor:
            return f"factor {self.factor:g}"
        parts = [f"±{self.relative:.0%}"] if self.relative else []
        return " or ".join([*parts, *([f"±{self.absolute:g}"] if self.absolute else [])]) or "exact"


LOSSES = ("cross_entropy", "validation_cross_entropy")
# For values on the same device with other versions; with the same ones, on a CPU, they must be equal to the last digit.
# Another kind of processor sums in another order, and training amplifies the difference: there ELSEWHERE times as much
# is allowed. (Measured on one CPU with its AVX2 instructions and without: the loss of a demo training agrees to six
# digits at first, differs by 0.04% at step 25, and the final ones of two trainings by 0.2% and 0.5%, non-zeros of
# single layers by up to 22%.)
ELSEWHERE = 3
TOLERANCES: dict[str, Tolerance] = {
    "cross_entropy": Tolerance(relative=0.01),
    "validation_cross_entropy": Tolerance(relative=0.01),
    "nonzeros": Tolerance(relative=0.10, absolute=1.0),
    "nonzeros_p50": Tolerance(relative=0.15, absolute=2.0),
    "nonzeros_p99": Tolerance(relative=0.15, absolute=5.0),
    "nonzeros_max": Tolerance(relative=0.30, absolute=10.0),
    "dead_fraction": Tolerance(absolute=0.05),
    "silent_fraction": Tolerance(absolute=0.05),
    "hot_share": Tolerance(absolute=0.05),
    "union_fraction": Tolerance(absolute=0.05),
    "accuracy": Tolerance(absolute=5.0),
    "accuracy_norm": Tolerance(absolute=5.0),
}
# For ratios to dense in the same run, on the same device: a GPU's clock is reproducible, a shared CPU's is not.
GPU_RATIO, CPU_RATIO = Tolerance(relative=0.15), Tolerance(factor=3)
RATIOS: tuple[str, ...] = ("time", "energy", "peak_memory", "held_memory")

# What a row measured, as far as two machines agree on it. `pattern` names a run, or the kind of synthetic pattern.
SAME = [
    "item", "op", "plan", "backend", "model", "activation", "gated", "l1", "modification", "task", "layer",
    "step", "tokens", "batch", "prompt_tokens", "hidden", "intermediate", "about_nnz", "pattern", "seed", "metric",
]  # fmt: skip
EQUAL, WITHIN, OUTSIDE, MISSING = "equal", "within", "OUTSIDE", "MISSING"
OTHER, UNMEASURED = "other device", "not measured"
# From best to worst.
VERDICTS = (EQUAL, OTHER, UNMEASURED, WITHIN, MISSING, OUTSIDE)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    lines: one for each committed number: `SAME`, quantity (value or ratio), expected, measured, difference, tolerance
        (in words), excess (distance beyond the bounds, as a share of the committed value), reason (why it was not
        measured), verdict.
    not_committed: how many numbers measured here have no committed counterpart.
    """

    lines: pd.DataFrame
    not_committed: int

    @property
    def passed(self) -> bool:
        """Whether anything was compared, and every number is present and within its tolerance."""
        return len(self.lines) > 0 and not self.lines["verdict"].isin((MISSING, OUTSIDE)).any()


def committed_rows(study: str) -> pd.DataFrame:
    """The committed rows of a study, and of the studies it consists of: the latest of each measurement; empty if there
    are none.

    Raises:
        analysis.read.ResultsError: a file is damaged.
    """
    files = [read_rows(path) for path in sorted(FIGURES.glob("*/rows.csv"))]
    names = (study, *parts(study))
    rows = where(pd.concat(files, ignore_index=True), study=names) if files else pd.DataFrame(columns=["study"])
    if rows.empty:
        return rows
    ordered = rows.sort_values("date", kind="stable")
    return ordered[~read.identity(ordered).duplicated(keep="last")]


def compare(expected: pd.DataFrame, measured: pd.DataFrame) -> Comparison:
    """Compare the measured rows with the committed rows of the same study."""
    committed, here = _quantities(expected), _quantities(measured)
    keys = [*SAME, "quantity"]
    named = {"number": "measured", "device": "on", "versions": "their_versions"}
    both = committed.merge(here[[*keys, *named]].rename(columns=named), on=keys, how="left", indicator="origin")
    unmeasured = _identified(measured[measured["missing"] != ""])
    reasons = dict(zip(cells(unmeasured, SAME), unmeasured["missing"], strict=True))
    # Also without the metric, the last of SAME: a task that was not scored has no accuracy in any form.
    reasons |= {key[:-1]: reason for key, reason in reasons.items() if key[SAME.index("task")]}
    devices = measured.groupby("item")["device"].agg(set).to_dict()
    both["reason"] = [reasons.get(key) or reasons.get(key[:-1], "") for key in cells(both, SAME)]
    judged = [_compared(line, devices.get(line.item, set())) for line in both.itertuples()]
    judged = pd.DataFrame(judged, columns=["tolerance", "excess", "reason", "verdict"])
    lines = both[[*keys, "measured"]].assign(expected=both["number"], difference=both["measured"] - both["number"])
    extra = here.merge(committed[keys], on=keys, how="left", indicator="origin")
    return Comparison(pd.concat([lines, judged], axis=1), int((extra["origin"] == "left_only").sum()))


def _quantities(rows: pd.DataFrame) -> pd.DataFrame:
    """The numbers to compare: values of TOLERANCES, and ratios of sparse plans; with `device` and `versions`."""
    rows = _identified(rows)
    # A GPU's order of summation varies: nothing repeats bit for bit.
    rows = rows.assign(versions=rows["torch"].where(rows["gpus"].isna(), ""))
    values = rows[rows["metric"].isin(TOLERANCES) & rows["value"].notna()]
    ratios = rows[rows["metric"].isin(RATIOS) & rows["ratio"].notna() & (rows["plan"] != "dense")]
    numbers = {"value": values, "ratio": ratios}
    parts = [frame.assign(quantity=name, number=frame[name]) for name, frame in numbers.items()]
    ordered = pd.concat(parts, ignore_index=True).sort_values("date", kind="stable")
    return ordered.drop_duplicates([*SAME, "quantity"], keep="last").sort_index()


def _identified(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with `about_nnz`, the non-zeros requested of a synthetic pattern, which identify the measurement, and
    without the plan and backend that the program chose by itself: those of layers in a training, and of a block after
    `autotune`. Another machine may choose others."""
    made_up = rows["mean_nnz"].where(rows["pattern"].str.startswith("synthetic"))
    about = made_up.map(lambda value: float(f"{value:.2g}"), na_action="ignore").astype("float64")
    trained, tuned = rows["op"] == "train", rows["op"].str.startswith("ffn_tuned") & (rows["plan"] == "by_layer")
    plan, backend = rows["plan"].mask(trained, ""), rows["backend"].mask(trained | tuned, "")
    return rows.assign(about_nnz=about, plan=plan, backend=backend)


def _compared(line: Any, devices: set[str]) -> tuple[str, float, str, str]:
    """Tolerance, excess, reason, verdict. `devices`: those that measured the item."""
    expected, ratio = line.number, line.quantity == "ratio"
    same_device = line.on == line.device
    tolerance = (CPU_RATIO if line.versions else GPU_RATIO) if ratio else TOLERANCES[line.metric]
    same_model = same_device and _names_a_model(line.device)
    if not ratio and not same_model:
        tolerance = tolerance.times(ELSEWHERE)
    elif not ratio and line.versions != "" and line.versions == line.their_versions:
        tolerance = Tolerance()
    if line.origin == "left_only" and ratio and devices and line.device not in devices:
        return "-", 0.0, "", OTHER
    if line.origin == "left_only":
        return tolerance.text(), 0.0, line.reason, UNMEASURED if line.reason else MISSING
    if ratio and not same_device:
        return "-", 0.0, "", OTHER
    low, high = tolerance.bounds(expected)
    excess = max(low - line.measured, line.measured - high) / (abs(expected) or 1.0)
    verdict = EQUAL if line.measured == expected else WITHIN if excess <= 0 else OUTSIDE
    return tolerance.text(), excess, "", verdict


def _names_a_model(name: str) -> bool:
    """Whether a device's name says more than, for instance, "Intel(R) Xeon(R) Processor, 2 cores"."""
    model = re.sub(r", \d+ cores$", "", name)
    return model == name or re.search(r"\d", model) is not None


# --- what is printed --------------------------------------------------------------------------------------------------


def worst(lines: pd.DataFrame) -> pd.DataFrame:
    """The worst line of each operation, metric and quantity, with `numbers`, how many lines there are."""
    rank = lines["verdict"].map(VERDICTS.index)
    by = ["op", "metric", "quantity"]
    ordered = lines.assign(rank=rank).sort_values(["rank", "excess"], ascending=False, kind="stable")
    counts = lines.groupby(by).size().rename("numbers").reset_index()
    return ordered.drop_duplicates(by).merge(counts, on=by).sort_values(by, kind="stable")


def as_text(lines: pd.DataFrame) -> str:
    shown = pd.DataFrame(
        {
            "operation": lines["op"],
            "metric": lines["metric"].where(lines["quantity"] == "value", lines["metric"] + ", ratio to dense"),
            **({"numbers": lines["numbers"]} if "numbers" in lines else {}),
            "item": [_place(line) for line in lines.itertuples()],
            "expected": _numbers(lines["expected"]),
            "measured": _numbers(lines["measured"]),
            "difference": _numbers(lines["difference"], 2),
            "tolerance": lines["tolerance"],
            "verdict": lines["verdict"],
        }
    )
    return shown.to_string(index=False)


def _place(line: Any) -> str:
    """The item, with its layer and task where they apply."""
    parts = [line.item]
    parts += [] if pd.isna(line.layer) else [f"layer {line.layer}"]
    parts += [line.task] if line.task else []
    parts += [] if pd.isna(line.about_nnz) else [f"{line.about_nnz:g} non-zeros"]
    return ", ".join(parts)


def _numbers(column: pd.Series, digits: int = 6) -> list[str]:
    return ["-" if math.isnan(value) else significant(value, digits) for value in column]


def report(comparison: Comparison) -> str:
    """The table, followed by a summary in sentences: losses, missing numbers, reasons, verdict."""
    lines = comparison.lines
    parts = ["The worst number of each operation and metric.", "", as_text(worst(lines)), ""]
    outside = lines[lines["verdict"] == OUTSIDE]
    if len(outside):
        parts += [f"Outside their tolerance, {len(outside)}:", as_text(outside), ""]
    counts = lines["verdict"].value_counts()
    parts.append(", ".join(f"{counts[name]} {name.lower()}" for name in VERDICTS if name in counts) + ".")
    losses = where(lines, metric=LOSSES)
    if len(losses):
        equal = int((losses["verdict"] == EQUAL).sum())
        share = "All" if equal == len(losses) else f"{equal} of"
        parts.append(f"{share} {len(losses)} losses are equal to the last digit.")
    absent = lines[lines["verdict"] == MISSING]
    for item, rows in absent.groupby("item"):
        all_of_it = len(rows) == len(where(lines, item=item))
        parts.append(f"Missing: {item}: {'all' if all_of_it else 'some'} of its numbers ({len(rows)}).")
    for reason, rows in lines[lines["verdict"] == UNMEASURED].groupby("reason"):
        parts.append(f"Not measured: {', '.join(sorted(set(rows['metric'])))} ({len(rows)}): {reason}.")
    if comparison.not_committed:
        parts.append(f"{comparison.not_committed} numbers measured here have no committed counterpart.")
    parts.append("PASSED" if comparison.passed else "FAILED")
    return "\n".join(parts)


# --- studies ----------------------------------------------------------------------------------------------------------


def studies() -> list[str]:
    """The names of the studies that the repository defines."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def parts(study: str) -> list[str]:
    """The studies of which a study consists; empty for a study of its own runs, and for one that has no file."""
    path = STUDIES / f"{study}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return list(content.get("parts", ()))


def origin(rows: pd.DataFrame) -> str:
    """How many rows there are, and with what they were measured: devices, versions of torch, revisions."""
    versions = " and ".join(f"torch {name}" for name in sorted(set(rows["torch"]) - {""}))
    revisions = ", ".join(sorted({name[:12] for name in rows["revision"]} - {""}))
    return f"{len(rows):,} rows, {describe.devices(rows['device'])}, {versions}, revision {revisions or 'unknown'}"
