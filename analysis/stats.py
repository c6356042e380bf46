"""Numbers derived from measurements: gains, spreads, correlations, shares. Undefined results are NaN, never 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pandas as pd

Number = TypeVar("Number", float, pd.Series)


def gain_percent(ratio: Number) -> Number:
    """A gain in percent: a speedup of 1.3 is +30%."""
    return (ratio - 1.0) * 100.0


def cost_percent(ratio: Number) -> Number:
    """The change of a cost (energy, memory), in percent, for `ratio` = baseline / ours: 1.25 is -20%."""
    return (1.0 / ratio - 1.0) * 100.0


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r; NaN for fewer than three points, or if one of the series is constant."""
    both = np.asarray([x, y], dtype=float)
    if len(x) < 3 or (np.ptp(both, axis=1) == 0).any():
        return math.nan
    return float(np.corrcoef(both)[0, 1])


def pearson_interval(r: float, points: int) -> tuple[float, float]:
    """The 95% interval of Pearson's r, by Fisher's transformation; NaN for fewer than four points, or r = NaN."""
    if points < 4 or math.isnan(r):
        return math.nan, math.nan
    if abs(r) == 1:
        return r, r
    z, half = math.atanh(r), NORMAL_975 / math.sqrt(points - 3)
    return math.tanh(z - half), math.tanh(z + half)


def layer_contributions(time_ms: pd.Series, ratio: pd.Series) -> pd.Series:
    """The time that each layer saves, in percent of the dense time of all layers; negative where it loses time.

    Args:
        time_ms: time of each layer with the sparse plan.
        ratio: dense time over sparse time of each layer.
    """
    dense = time_ms * ratio
    return (dense - time_ms) / dense.sum() * 100.0


# 97.5th percentile of Student's t for 2, 3, ... 30 degrees of freedom; beyond, the normal distribution is close enough.
T_975: tuple[float, ...] = (
    4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
NORMAL_975 = 1.9600


def half_width_95(values: Sequence[float]) -> float:
    """Half the width of the 95% confidence interval of the mean (t distribution); NaN for fewer than two values.

    For two values, half their range: the interval with one degree of freedom is 18 times as wide and would say only
    that two runs are too few.
    """
    if len(values) < 2:
        return math.nan
    if len(values) == 2:
        return float(np.ptp(np.asarray(values, dtype=float))) / 2
    quantile = T_975[len(values) - 3] if len(values) - 3 < len(T_975) else NORMAL_975
    return float(quantile * np.std(np.asarray(values, dtype=float), ddof=1) / math.sqrt(len(values)))


def of_seeds(rows: pd.DataFrame) -> pd.Series:
    """The mean of each seed; empty values are left out."""
    measured = rows[["seed", "value"]].dropna(subset="value")
    return measured["value"].groupby(measured["seed"].fillna(-1)).mean()


def over_seeds(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """One line for each combination of `by`: the mean over seeds, with its interval (see `half_width_95`).

    Runs of one seed are averaged first, since they are not independent. Columns: `by`, `value`, low and high (NaN for
    one seed), seeds (their number). Empty values are left out.
    """
    measured = rows[rows["value"].notna()]
    seeds = measured.assign(seed=measured["seed"].fillna(-1)).groupby([*by, "seed"], dropna=False, sort=True)["value"]
    groups = seeds.mean().groupby(level=by, dropna=False, sort=True)
    table = groups.agg(["mean", "count", half_width_95]).reset_index()
    lines = table[by].assign(
        value=table["mean"],
        low=table["mean"] - table["half_width_95"],
        high=table["mean"] + table["half_width_95"],
        seeds=table["count"],
    )
    return lines.astype({name: rows[name].dtype for name in by} | dict.fromkeys(("value", "low", "high"), "float64"))
