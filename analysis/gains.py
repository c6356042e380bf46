"""What the sparse plans gain over the fastest dense backend of the same run: ours from the rows, the paper's from its
tables."""

from __future__ import annotations

import pandas as pd

from analysis import paper, stats
from analysis.choose import where

HIGHER_IS_BETTER = {"throughput"}
SAME_RUN = [
    "study", "item", "op", "metric", "device", "model", "l1", "activation", "gated", "modification", "tokens", "layer",
    "pattern", "mean_nnz",
]  # fmt: skip


def gains(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The sparse measurements of `metric`, with `percent`, the change against dense, and its spread.

    `series` names plan and backend.
    """
    chosen = where(rows, metric=metric)
    compared = chosen[chosen["ratio"].notna() & chosen["value"].notna() & (chosen["plan"] != "dense")]
    spread = [_ratio_spread(row, chosen) for _, row in compared.iterrows()]
    percent = stats.gain_percent if metric in (*HIGHER_IS_BETTER, "time") else stats.cost_percent
    columns = [*SAME_RUN, "layers", "hidden", "intermediate", "plan", "backend", "baseline", "value", "unit", "ratio"]
    data = compared[columns].assign(
        series=compared["plan"] + " (" + compared["backend"] + ")",
        percent=percent(compared["ratio"]),
        percent_low=[min(map(percent, ends)) for ends in spread],
        percent_high=[max(map(percent, ends)) for ends in spread],
    )
    return data.sort_values(["op", "device", "plan", "l1", "layer", "mean_nnz"], kind="stable").reset_index(drop=True)


def _ratio_spread(row: pd.Series, rows: pd.DataFrame) -> tuple[float, float]:
    """Bounds of a row's ratio, from its spread and the baseline's where that is known."""
    same = {name: None if pd.isna(row[name]) else row[name] for name in SAME_RUN}
    dense = where(rows, plan="dense", backend=row["baseline"], **same)
    ours = (row["value"], row["low"], row["high"])
    if len(dense) == 1 and dense["low"].notna().all():
        base = tuple(dense.iloc[0][["value", "low", "high"]])
    else:
        value = row["value"] / row["ratio"] if row["metric"] in HIGHER_IS_BETTER else row["value"] * row["ratio"]
        base = (value, value, value)
    pair = (ours, base) if row["metric"] in HIGHER_IS_BETTER else (base, ours)
    return stats.ratio_with_spread(*pair)[1:]


def published_forward() -> dict[str, pd.Series]:
    """Percent over dense of the gated rows of the paper's table 4, by L1 value."""
    gated = where(paper.table("table4_gating"), gated="yes").set_index("l1")
    dense, sparse = gated.loc[0], gated.drop(index=0)
    speed = stats.gain_percent(sparse["forward_tokens_per_ms"] / dense["forward_tokens_per_ms"])
    energy = stats.cost_percent(dense["energy_mj_per_token"] / sparse["energy_mj_per_token"])
    return {"throughput": speed, "energy": energy}


def published_training() -> dict[str, pd.Series]:
    """Percent over dense of the 1.5B rows of the paper's table 1, by L1 value."""
    scale = where(paper.table("table1_scales"), scale="1.5B").set_index("l1")
    dense, sparse = scale.loc[0], scale.drop(index=0)
    speed = stats.gain_percent(sparse["train_tokens_per_ms"] / dense["train_tokens_per_ms"])
    memory = stats.cost_percent(dense["peak_memory_gb"] / sparse["peak_memory_gb"])
    return {"throughput": speed, "peak_memory": memory}
