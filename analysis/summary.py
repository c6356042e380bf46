"""Our own results at a glance: each training in one line, each timed kernel in one line."""

from __future__ import annotations

import math

import pandas as pd

from analysis import choose
from analysis.choose import where
from analysis.floors import floors, yes_or_no
from analysis.load import Results
from analysis.measures import Variant, measure
from analysis.read import KEY

COLUMNS = (
    "model", "activation", "modification", "l1", "cross_entropy", "cross_entropy_change_pct", "nonzeros", "active_pct",
    "dead_pct", "forward_ratio", "training_ratio",
)  # fmt: skip


def summary(results: Results) -> pd.DataFrame:
    """One line for each training: held-out cross-entropy and its change against the ReLU model without L1, mean
    non-zeros, dead neurons, and the speed of the fastest sparse plan over dense (device with the most rows)."""
    trained = where(results.rows, op="train")
    keys = ["model", "activation", "gated", "modification", "l1"]
    runs = trained[keys].drop_duplicates()
    lines = []
    for model in choose.model_order(runs["model"]):
        rows = where(results.rows, model=model)
        order = where(runs, model=model).sort_values(["activation", "modification", "l1"], key=_position)
        lines += [_line(rows, model, line) for line in order.itertuples()]
    return pd.DataFrame(lines, columns=list(COLUMNS))


KERNEL_COLUMNS = (
    "op", "plan", "backend", "device", "tokens", "hidden", "intermediate", "gated", "mean_nnz", "time_ms",
    "time_low_ms", "time_high_ms", "ratio", "floor_ms", "floor_share", "energy_mj_per_token", "peak_memory_gb",
    "host_us", "check_error",
)  # fmt: skip
BESIDE_TIME = {"energy": "energy_mj_per_token", "peak_memory": "peak_memory_gb", "host_time": "host_us"}


def kernels(results: Results) -> pd.DataFrame:
    """Every timed kernel and feed-forward block on synthetic patterns: time with its spread, ratio over the fastest
    dense backend of the run (with statistics: over the same without), the floor of its plan (`analysis.floors`) and
    floor / time, energy, peak memory and host time of the same call, and the error against the reference from the same
    run. Columns without any value are left out."""
    synthetic = results.rows[results.rows["pattern"].str.startswith("synthetic")]
    timed = where(synthetic, metric="time")
    timed = timed[timed["value"].notna()]
    ordered = timed.sort_values(["op", "device", "tokens", "gated", "mean_nnz", "plan", "backend"], kind="stable")
    names = {"value": "time_ms", "low": "time_low_ms", "high": "time_high_ms"}
    table = ordered.rename(columns=names).assign(floor_ms=floors(ordered, results.rows))
    table["floor_share"] = table["floor_ms"] / table["time_ms"]
    same_call = [name for name in KEY if name != "metric"]
    for metric, name in BESIDE_TIME.items():
        other = where(synthetic, metric=metric)[[*same_call, "value"]].rename(columns={"value": name})
        table = table.merge(other, on=same_call, how="left")
    table = table.assign(gated=yes_or_no(table["gated"]))[list(KERNEL_COLUMNS)]
    return table.drop(columns=[name for name in table.columns[table.isna().all()] if len(table)])


LAYER_COLUMNS: dict[str, str] = {  # metric -> column
    "nonzeros": "nonzeros",
    "nonzeros_p50": "nonzeros_p50",
    "nonzeros_p99": "nonzeros_p99",
    "nonzeros_max": "nonzeros_max",
    "silent_fraction": "silent_pct",
    "hot_share": "hot_pct",
}


def layers(results: Results) -> pd.DataFrame:
    """One line for each layer of the gated ReLU runs without mitigation: how its non-zeros are distributed over real
    tokens, neurons that never fired, and the share of all non-zeros that the most active tenth carries."""
    rows = choose.relu_runs(where(results.rows, op="nonzeros", metric=tuple(LAYER_COLUMNS)))
    rows = rows[rows["layer"].notna()]
    table = rows.pivot_table(index=["model", "l1", "layer"], columns="metric", values="value", aggfunc="mean")
    table = table.rename(columns=LAYER_COLUMNS).reindex(columns=list(LAYER_COLUMNS.values()))
    table[["silent_pct", "hot_pct"]] *= 100
    return table.rename_axis(columns=None).reset_index()


def _position(column: pd.Series) -> pd.Series:
    """SiLU first as the usual baseline, runs without mitigation before those with one."""
    ranks = {"silu": 0, "relu": 1} | {name: i for i, name in enumerate(choose.MODIFICATIONS)}
    return column if column.name == "l1" else column.map(ranks)


def _line(rows: pd.DataFrame, model: str, run) -> dict:
    variant = Variant(run.l1, run.activation == "relu", run.activation, run.gated, run.modification)
    own = variant.of(rows)
    loss = measure(own, "cross_entropy", variant).value
    base = measure(Variant(0.0, False, gated=run.gated).of(rows), "cross_entropy", variant).value
    nonzeros = measure(own, "nonzeros", variant).value
    return {
        "model": model,
        "activation": run.activation,
        "modification": run.modification,
        "l1": run.l1,
        "cross_entropy": loss,
        "cross_entropy_change_pct": (loss / base - 1) * 100,
        "nonzeros": nonzeros,
        "active_pct": nonzeros / float(own["intermediate"].dropna().max()) * 100,
        "dead_pct": measure(own, "dead_fraction", variant).value * 100,
        "forward_ratio": _best_ratio(own, "model_forward"),
        "training_ratio": _best_ratio(own, "model_training"),
    }


def _best_ratio(rows: pd.DataFrame, op: str) -> float:
    sparse = choose.main_device(where(rows, op=op, metric="throughput"))
    ratios = sparse[sparse["plan"] != "dense"]["ratio"].dropna()
    return float(ratios.max()) if len(ratios) else math.nan
