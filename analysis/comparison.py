"""Compares the rows of a study that was run on this machine with the committed ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
import yaml

from analysis import read
from analysis.choose import where
from analysis.load import FIGURES, ROOT
from analysis.read import read_rows

STUDIES = ROOT / "experiments" / "studies"
LINE = ["name", "found", "allowed", "holds"]
LOSS_SHARE = 0.02  # of the committed held-out cross-entropy
NONZEROS_FACTOR = 1.3  # between mean non-zeros of a model
ACCURACY_POINTS = 5  # percentage points of a task
RATIO_SHARE = 0.15  # of the committed ratio to dense
MOST = 0.95  # share of the ratios of an operation and metric that must be so near: those of short calls vary
RATIOS = ("time", "energy", "peak_memory", "held_memory")


def criteria(expected: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """How a study here agrees with the committed rows. One line for each criterion that both have numbers for: name,
    the worst that was found in words, what is allowed, and whether it holds.

    Args:
        expected: the committed rows of the study.
        measured: those of this machine.
    """
    committed, here = (rows.groupby(["item", "op"]).size() for rows in (expected, measured))
    fewer = committed.index[here.reindex(committed.index, fill_value=0) < committed]
    lacks = f"fewer in {', '.join(sorted({item for item, _ in fewer}))}" if len(fewer) else "every one"
    rows = [("rows of results", f"{len(measured):,}, {lacks}", f"{len(expected):,}", not len(fewer))]
    lines = pd.concat([pd.DataFrame(rows, columns=LINE), of_trainings(expected, measured)], ignore_index=True)
    gathered = _side_by_side(expected, measured, "value", op="nonzeros", metric="nonzeros")
    gathered = gathered[gathered["layer"].isna()]
    if len(gathered):
        factor = np.exp(np.log(gathered["value_here"] / gathered["value"]).abs().max())
        allowed = f"factor {NONZEROS_FACTOR:g}"
        lines.loc[len(lines)] = "gathered non-zeros", f"factor {factor:.2f}", allowed, factor <= NONZEROS_FACTOR
    scored = _side_by_side(expected, measured, "value", metric="accuracy")
    if len(scored):
        points = (scored["value_here"] - scored["value"]).abs().max()
        allowed = f"{ACCURACY_POINTS} points"
        lines.loc[len(lines)] = "accuracies", f"{points:.1f} points apart", allowed, points <= ACCURACY_POINTS
    # A GPU's clock is reproducible, a shared CPU's is not.
    timed = _side_by_side(expected, measured, "ratio", metric=RATIOS).dropna(subset="gpus")
    timed = timed[timed["plan"] != "dense"]
    if len(timed):
        change = (timed["ratio_here"] / timed["ratio"] - 1).abs()
        apart = change.groupby([timed["op"], timed["metric"]]).quantile(MOST)
        worst = apart.max()
        found = f"{MOST:.0%} within {worst:.0%} ({', '.join(apart.idxmax())})"
        lines.loc[len(lines)] = "ratios to dense on the same GPU", found, f"{RATIO_SHARE:.0%}", worst <= RATIO_SHARE
    return lines


def of_trainings(expected: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """The lines of `criteria` about the trainings that both have."""
    both = _final(expected).join(_final(measured)[["loss", "nonzeros"]].add_suffix("_here"), how="inner")
    if both.empty:
        return pd.DataFrame(columns=LINE)
    loss = (both["loss_here"] / both["loss"] - 1).abs().sort_values()
    factor = np.exp(np.log(both["nonzeros_here"] / both["nonzeros"]).abs()).sort_values()
    other = []
    for _, sweep in both[both["modification"] == "none"].groupby(["model", "seed"]):
        ordered = [list(sweep.sort_values(name).index) for name in ("nonzeros", "nonzeros_here")]
        other += [f"{a} and {b}" for a, b in zip(*ordered, strict=True) if a != b]
    apart, times = f"{loss.iloc[-1]:.1%} apart ({loss.index[-1]})", f"factor {factor.iloc[-1]:.2f} ({factor.index[-1]})"
    lines = [
        ("held-out cross-entropy", apart, f"{LOSS_SHARE:.0%}", loss.iloc[-1] <= LOSS_SHARE),
        ("mean non-zeros", times, f"factor {NONZEROS_FACTOR:g}", factor.iloc[-1] <= NONZEROS_FACTOR),
        ("order by non-zeros", f"other: {other[0]}" if other else "the same", "the same", not other),
    ]
    return pd.DataFrame(lines, columns=LINE)


def _side_by_side(expected: pd.DataFrame, measured: pd.DataFrame, name: str, **wanted: object) -> pd.DataFrame:
    """The same measurements among the rows with these values: their column `name`, that of `measured` as `<name>_here`.
    The rows of a study may stand in those of its parts."""
    chosen = (where(rows, **wanted).dropna(subset=name) for rows in (expected, measured))
    one, other = (read.identity(rows).drop(columns="study").assign(**{name: rows[name]}) for rows in chosen)
    key = [column for column in one if column != name]
    return one.drop_duplicates(key).merge(other.drop_duplicates(key), on=key, suffixes=("", "_here"))


def _final(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each training: l1, modification, gated, seed, `loss` (held-out, nats/token), `nonzeros` (mean)."""
    whole = rows[(rows["op"] == "train") & rows["layer"].isna()]
    keys = ["item", "model", "l1", "modification", "seed"]
    table = whole.pivot_table(index=keys, columns="metric", values="value", aggfunc="last").reset_index()
    table = table.rename(columns={"validation_cross_entropy": "loss"})
    return table.reindex(columns=[*keys, "loss", "nonzeros"]).set_index("item")


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


def studies() -> list[str]:
    """The names of the studies that the repository defines."""
    return sorted(path.stem for path in STUDIES.glob("*.yaml"))


def parts(study: str) -> list[str]:
    """The studies of which a study consists; empty for a study of its own runs, and for one that has no file."""
    path = STUDIES / f"{study}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    return list(content.get("parts", ()))
