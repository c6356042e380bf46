"""Numbers made of measured numbers: gains, spreads, correlations, shares. Undefined results are NaN, never 0."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd


def gain_percent(ratio):
    """How much more per time, in percent: a speedup of 1.3 is +30%. Works on numbers and arrays."""
    return (ratio - 1.0) * 100.0


def cost_percent(ratio):
    """The change of a cost (energy, memory), in percent, for `ratio` = baseline / ours: 1.25 is -20%."""
    return (1.0 / ratio - 1.0) * 100.0


def ratio_with_spread(
    ours: tuple[float, float, float], baseline: tuple[float, float, float]
) -> tuple[float, float, float]:
    """ours / baseline with its widest bounds, each given as (value, low, high) of a positive quantity."""
    value, low, high = ours
    base_value, base_low, base_high = baseline
    return value / base_value, low / base_high, high / base_low


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r; NaN for fewer than three points or where one side does not vary."""
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) != len(y):
        raise ValueError(f"wanted two series of equal length, got {len(x)} and {len(y)}")
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values; NaN for none.

    Raises:
        ValueError: a value is zero or negative.
    """
    values = np.asarray(values, dtype=float)
    if len(values) == 0:
        return math.nan
    if (values <= 0).any():
        raise ValueError(f"a geometric mean needs positive values, got {values.min()}")
    return float(np.exp(np.log(values).mean()))


def layer_contributions(time_ms: Sequence[float], ratio: Sequence[float]) -> pd.DataFrame:
    """What each layer adds to the speedup of all of them together.

    Args:
        time_ms: time of each layer with the sparse plan.
        ratio: dense time over sparse time of each layer; dense time is their product.

    Returns:
        saved_ms: dense minus sparse time; negative where the sparse plan is slower.
        contribution_pct: saved_ms over the dense time of all layers: sums to the time saved by all of them.
        share_pct: saved_ms over the size of the total saving: sums to +100, or to -100 where all in all time is lost.
    """
    time, ratio = np.asarray(time_ms, dtype=float), np.asarray(ratio, dtype=float)
    dense = time * ratio
    saved = dense - time
    total = abs(saved.sum())
    share = saved / total * 100.0 if total > 0 else np.full(len(saved), math.nan)
    return pd.DataFrame({"saved_ms": saved, "contribution_pct": saved / dense.sum() * 100.0, "share_pct": share})


def bootstrap_interval(
    values: Sequence[float], level: float = 0.6, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; (NaN, NaN) for fewer than three values. Same seed, same interval.

    The default level leaves 20% on either side, like `low` and `high` of a result row.
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 3:
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    means = generator.choice(values, (draws, len(values))).mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def over_repeats(rows: pd.DataFrame, by: list[str], value: str = "value") -> pd.DataFrame:
    """One line for each combination of `by`: mean over repeated measurements (seeds, items) with its spread.

    low and high are the bootstrap interval of three or more, the ends of two, and what one measurement itself
    says (its 20th and 80th percentile, which may be empty). `repeats` counts the rows; empty values are left out.
    """
    measured = rows[rows[value].notna()]
    lines = []
    for key, group in measured.groupby(by, dropna=False, sort=True):
        lines.append((*key, group[value].mean(), *_spread(group, value), len(group)))
    table = pd.DataFrame(lines, columns=[*by, value, "low", "high", "repeats"])
    return table.astype({name: rows[name].dtype for name in by})


def _spread(group: pd.DataFrame, value: str) -> tuple[float, float]:
    values = group[value]
    if len(values) >= 3:
        return bootstrap_interval(values)
    if len(values) == 2:
        return values.min(), values.max()
    if value == "value":
        return group["low"].iloc[0], group["high"].iloc[0]
    return math.nan, math.nan
