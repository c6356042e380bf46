"""Summaries of our own results: a line for each kind of training, timed kernel, generating model and layer."""

from __future__ import annotations

import functools
import math
from typing import Any

import pandas as pd

from analysis import choose, describe, schema, stats
from analysis.choose import where
from analysis.floors import floors, yes_or_no
from analysis.load import Results
from analysis.measures import Variant, eager_ratios, measure
from analysis.read import KEY
from analysis.render import INTERVAL

COLUMNS = (
    "model", "activation", "modification", "l1", "seeds", "text", "tokens_trained_m", "tokens_per_parameter",
    "cross_entropy", "cross_entropy_ci95", "cross_entropy_change_pct", "nonzeros", "nonzeros_ci95", "nonzeros_seeds",
    "active_pct", "dead_pct", "forward_ratio", "training_ratio", "remark",
)  # fmt: skip
TRAINED = ["model", "activation", "gated", "modification", "l1", "text", "tokens_trained"]


@functools.lru_cache(maxsize=4)  # tables, figures and pages read it of the same results
def summary(results: Results) -> pd.DataFrame:
    """One line for each kind of training, over its seeds: held-out cross-entropy and its change against the ReLU model
    without L1, mean non-zeros, dead neurons, and the speed of the fastest sparse plan over dense, if this checkpoint
    was timed, with a remark where that was on another device than most. Empty columns are left out."""
    usual = set(choose.main_device(_timed(results.rows, schema.WHOLE_MODELS))["device"])
    runs = choose.trainings(results.rows)[[*TRAINED, "tokens_per_parameter"]].drop_duplicates(TRAINED)
    lines = []
    for model in choose.model_order(runs["model"]):
        rows = where(results.rows, model=model)
        order = where(runs, model=model).sort_values(["activation", "modification", "l1"], key=_position)
        lines += [_line(rows, line, usual) for line in order.itertuples()]
    table = pd.DataFrame(lines, columns=list(COLUMNS)).astype({"seeds": "Int64"})
    return _without_empty(table)


KERNEL_COLUMNS = (
    "op", "plan", "backend", "hot", "silent", "screened", "backup", "device", "tokens", "hidden", "intermediate",
    "gated", "mean_nnz", "time_ms", "time_low_ms", "time_high_ms", "ratio", "eager_ratio", "floor_ms", "floor_share",
    "energy_mj_per_token", "peak_memory_gb", "host_us", "check_error",
)  # fmt: skip
BESIDE_TIME = {"energy": "energy_mj_per_token", "peak_memory": "peak_memory_gb", "host_time": "host_us"}


def kernels(results: Results) -> pd.DataFrame:
    """Every timed kernel and feed-forward block on synthetic patterns, on devices where backends made for speed ran.

    Columns: time with its spread, ratio to the fastest dense form of the run (for calls with statistics: to the same
    call without) and to the eager form, the floor of the plan (`analysis.floors`) and floor / time, energy, peak memory
    and host time of the same call, and the error against the reference in the same run. Empty columns are left out.
    """
    synthetic = choose.made_for_speed(results.rows[results.rows["pattern"].str.startswith("synthetic")])
    timed = where(synthetic, metric="time").dropna(subset="value")
    by = ["op", "device", "tokens", "gated", "mean_nnz", "plan", "backend"]
    ordered = timed.sort_values(by, kind="stable", key=_rank)
    names = {"value": "time_ms", "low": "time_low_ms", "high": "time_high_ms"}
    ordered = ordered.assign(eager_ratio=eager_ratios(ordered, synthetic).where(ordered["plan"] != "dense"))
    table = ordered.rename(columns=names).assign(floor_ms=floors(ordered, results.rows))
    table["floor_share"] = table["floor_ms"] / table["time_ms"]
    table = _with_other_metrics(table, synthetic, BESIDE_TIME)
    return _without_empty(table.assign(gated=yes_or_no(table["gated"]))[list(KERNEL_COLUMNS)])


CHECKED = ("ffn_forward", "ffn_training", "gate_pack", "gated_down", "down")
SPARSE = ("reference", "hopper", "triton")


def exactness(results: Results) -> pd.DataFrame:
    """For each device, operation and sparse backend: the calls that were checked, the most non-zeros, the largest
    relative error against float32, and the largest of dense products on the same inputs."""
    rows = where(results.rows, op=CHECKED)
    rows = rows[rows["check_error"].notna() & (rows["backend"].isin(SPARSE) | rows["plan"].eq("dense"))]
    rows = rows.drop_duplicates(["study", "item", "op", "plan", "backend", "tokens", "mean_nnz", "pattern", "layer"])
    by = ["device", "op"]
    dense = where(rows, plan="dense").groupby(by)["check_error"].max().rename("dense_error")
    sparse = rows[rows["plan"] != "dense"].groupby([*by, "backend"])
    table = sparse.agg(calls=("check_error", "size"), mean_nnz=("mean_nnz", "max"), check_error=("check_error", "max"))
    return table.reset_index().merge(dense, on=by, how="left")


GENERATION_KEYS = (
    "model", "activation", "gated", "modification", "l1", "device", "batch", "prompt_tokens", "new_tokens", "backend",
    "plan",
)  # fmt: skip
GENERATION_COLUMNS = (
    *GENERATION_KEYS, "mean_nnz", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "speedup", "eager_speedup",
    "time_ms", "device_ms", "energy_mj_per_token", "peak_memory_gb", "same_tokens_pct", "check_error",
)  # fmt: skip
BESIDE_THROUGHPUT = {
    "time": "time_ms",
    "device_time": "device_ms",
    "energy": "energy_mj_per_token",
    "peak_memory": "peak_memory_gb",
    "same_tokens": "same_tokens_pct",
}


def generation(results: Results) -> pd.DataFrame:
    """Greedy generation by whole models: one line for each number of sequences and alternative, of the devices that
    have kernels made for speed; mean over seeds.

    Generated tokens per second of the whole call with their spread, over the fastest dense form and the eager one of
    the same run; time of the call and the device's share of it, energy of a generated token, peak memory, how many
    tokens are those of the eager form, and the error against float32 from the same run. Columns without any value are
    left out.
    """
    fast = choose.made_for_speed(where(results.rows, op="generate").dropna(subset="value"))
    timed = choose.longest_trained(where(fast, metric="throughput"))
    if timed.empty:
        return pd.DataFrame()
    timed = timed.assign(
        new_tokens=timed["tokens"] // timed["batch"],
        tokens_per_s=timed["value"] * 1e3,
        tokens_per_s_low=timed["low"] * 1e3,
        tokens_per_s_high=timed["high"] * 1e3,
        speedup=timed["ratio"],
        eager_speedup=eager_ratios(timed, fast),
    )
    table = _with_other_metrics(timed, fast, BESIDE_THROUGHPUT)
    table["same_tokens_pct"] *= 100
    numbers = [name for name in GENERATION_COLUMNS if name not in GENERATION_KEYS]
    means = table.groupby(list(GENERATION_KEYS), dropna=False)[numbers].mean().reset_index()
    means = _by_model(means.sort_values(list(GENERATION_KEYS), kind="stable", key=_rank))
    return _without_empty(means.assign(gated=yes_or_no(means["gated"]))[list(GENERATION_COLUMNS)])


def _with_other_metrics(timed: pd.DataFrame, rows: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """The rows, and beside each the values that other metrics of the same call have: metric -> column."""
    same_call = [name for name in KEY if name != "metric"]
    for metric, name in names.items():
        other = where(rows, metric=metric)[[*same_call, "value"]].rename(columns={"value": name})
        timed = timed.merge(other, on=same_call, how="left")
    return timed


def layers(results: Results) -> pd.DataFrame:
    """One line for each layer of the gated ReLU runs without mitigation, averaged over seeds: the distribution of its
    non-zeros over real tokens, the neurons that never fired, and the share of all non-zeros in the most active
    tenth."""
    metrics = ("nonzeros", "nonzeros_p50", "nonzeros_p99", "nonzeros_max", "silent_fraction", "hot_share")
    rows = choose.relu_runs(where(results.rows, op="nonzeros", metric=metrics))
    rows = choose.equally_trained(rows[rows["layer"].notna()])
    means = rows.groupby(["model", "l1", "layer", "metric"], dropna=False)["value"].mean()
    table = means.unstack("metric").reindex(columns=metrics)
    table = table.rename(columns={"silent_fraction": "silent_pct", "hot_share": "hot_pct"})
    table[["silent_pct", "hot_pct"]] *= 100
    return _by_model(table.rename_axis(columns=None).reset_index())


def dead_by_window(results: Results) -> pd.DataFrame:
    """The share of neurons that fire for none of this many consecutive tokens (mean over layers and seeds)."""
    rows = where(results.rows, op="nonzeros", metric="dead_fraction", layer=None)
    rows = choose.equally_trained(choose.relu_runs(rows))
    over = _by_model(stats.over_seeds(rows, ["model", "l1", "tokens"])).rename(columns={"tokens": "window"})
    numbers = {"dead_pct": over["value"] * 100, "dead_pct" + INTERVAL: (over["high"] - over["value"]) * 100}
    return over[["model", "l1", "window", "seeds"]].astype({"seeds": "Int64"}).assign(**numbers)


def _by_model(table: pd.DataFrame) -> pd.DataFrame:
    """The lines model by model, in the order of `choose.model_order`."""
    order = {name: position for position, name in enumerate(choose.model_order(table["model"]))}
    return table.sort_values("model", kind="stable", key=lambda column: column.map(order), ignore_index=True)


def _without_empty(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=[name for name in table.columns[table.isna().all()] if len(table)])


def _rank(column: pd.Series) -> pd.Series:
    """Sort key: backends in the order of the schema, then others by name."""
    if column.name != "backend":
        return column
    known = {name: f"{position:02d}" for position, name in enumerate(schema.BACKENDS)}
    return column.map(lambda name: known.get(name, "99") + name)


def _position(column: pd.Series) -> pd.Series:
    """Sort key: SiLU first as the usual baseline, runs without mitigation before those with one."""
    ranks = {"silu": 0, "relu": 1} | {name: i for i, name in enumerate(choose.MODIFICATIONS)}
    return column if column.name == "l1" else column.map(ranks)


def _line(rows: pd.DataFrame, run: Any, usual: set[str]) -> dict[str, object]:
    """usual: the device on which most models were timed."""
    same = rows["text"].eq(run.text) & rows["tokens_trained"].eq(run.tokens_trained)
    trained = rows[rows["tokens_trained"].isna() | same]
    variant = Variant(run.l1, run.activation == "relu", run.activation, run.gated, run.modification)
    own = variant.of(trained)
    at_end = own[own["step"].isna() | own["step"].isin(set(where(own, op="train")["step"].dropna()))]
    loss, nonzeros = measure(own, "cross_entropy", variant), measure(own, "nonzeros", variant)
    forward, training = (choose.main_device(_timed(at_end, op)) for op in schema.WHOLE_MODELS)
    remarks = ["non-zeros are of the last training steps"] if nonzeros.remark else []
    remarks += _of_devices(where(own, op="train")["device"], pd.concat([forward["device"], training["device"]]), usual)
    return {
        "model": run.model,
        "activation": run.activation,
        "modification": run.modification,
        "l1": run.l1,
        "seeds": loss.seeds or None,
        "text": run.text if rows["text"].replace("", pd.NA).nunique() > 1 else None,
        "tokens_trained_m": float(run.tokens_trained) / 1e6 if not pd.isna(run.tokens_trained) else math.nan,
        "tokens_per_parameter": run.tokens_per_parameter,
        "cross_entropy": loss.value,
        "cross_entropy_ci95": loss.half_width,
        "cross_entropy_change_pct": _change(own, Variant(0.0, False, gated=run.gated).of(trained)),
        "nonzeros": nonzeros.value,
        "nonzeros_ci95": nonzeros.half_width,
        "nonzeros_seeds": nonzeros.seeds if 0 < nonzeros.seeds < loss.seeds else math.nan,
        "active_pct": nonzeros.value / own["intermediate"].astype("float64").max() * 100,
        "dead_pct": measure(own, "dead_fraction", variant).value * 100,
        "forward_ratio": _best_ratio(forward),
        "training_ratio": _best_ratio(training),
        "remark": "; ".join(remarks) or None,
    }


def _of_devices(trained: pd.Series, timed: pd.Series, usual: set[str]) -> list[str]:
    """A remark where a device timed the model on which it was not trained, or which timed no other model."""
    if len(trained) and not timed.isin(set(trained)).all():
        return [f"trained on {describe.devices(trained)}, timed on {describe.devices(timed)}"]
    elsewhere = timed[~timed.isin(usual)]
    return [f"speeds on {describe.devices(elsewhere)}"] if len(elsewhere) else []


def _change(rows: pd.DataFrame, base: pd.DataFrame) -> float:
    """Held-out cross-entropy in percent above that of `base`, the same seed, as a mean over seeds."""
    losses, without = (
        choose.equally_trained(where(part, op="train", metric="validation_cross_entropy", layer=None))
        for part in (rows, base)
    )
    return float(stats.over_seeds(choose.above_unregularised(losses, without), ["l1"])["value"].mean())


def _timed(rows: pd.DataFrame, op: str | tuple[str, ...]) -> pd.DataFrame:
    return choose.of_one_micro_batch(choose.made_for_speed(where(rows, op=op, metric="throughput")))


def _best_ratio(timed: pd.DataFrame) -> float:
    timed = choose.against_the_fastest(timed)
    ratios = timed[timed["plan"] != "dense"].groupby(["plan", "backend", "tokens"])["ratio"].mean().dropna()
    return float(ratios.max()) if len(ratios) else math.nan
