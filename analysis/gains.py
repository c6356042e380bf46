"""Gains of the sparse plans over dense in the same run: ours from the rows, the paper's from its tables."""

from __future__ import annotations

import pandas as pd

from analysis import paper, schema, stats
from analysis.choose import longest_trained, made_for_speed, of_one_micro_batch, series_of, where
from analysis.measures import SAME_RUN, eager_ratios


def gains(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The sparse measurements of `metric`, each relative to the fastest dense form of its run.

    Columns: `ratio`; `percent`, the change, with its values at the ends of the spread; `eager_percent`, the change
    by `eager_ratios` with nothing compiled; `series`, plan and backend. The reference backend is left out:
    it is not made for speed; of several checkpoints of a training, the last counts; of a training step, the one with
    the most tokens that the dense form takes."""
    chosen = longest_trained(where(of_one_micro_batch(made_for_speed(rows)), metric=metric))
    compared = chosen[chosen["ratio"].notna() & chosen["value"].notna() & (chosen["plan"] != "dense")]
    run = ["study", "item", "pattern", "device", "plan", "backend", "backup"]
    eager = eager_ratios(compared, chosen).mask(compared["backend"].str.endswith(schema.COMPILED))
    beside = eager.notna().groupby([compared[name] for name in run], dropna=False).transform("any")
    kept = eager.notna() | ~beside | compared["op"].ne("model_training")
    compared = compared.assign(eager=eager)[kept]
    most = compared.groupby(run, dropna=False)["tokens"].transform("max")
    # Training steps with fewer tokens, for which a dense form has no room with more.
    compared = compared[~(compared["op"].eq("model_training") & compared["tokens"].lt(most).fillna(False))]
    percent = stats.gain_percent if metric in (*schema.LARGER_IS_BETTER, "time") else stats.cost_percent
    ends = _ratio_spreads(compared, where(chosen, plan="dense"), metric).apply(percent)
    columns = [
        *SAME_RUN, "layers", "plan", "backend", "hot", "silent", "screened", "backup",
        "baseline", "value", "unit", "ratio",
    ]  # fmt: skip
    data = compared[columns].assign(
        series=series_of(compared),
        percent=percent(compared["ratio"]),
        percent_low=ends.min(axis=1),
        percent_high=ends.max(axis=1),
        eager_percent=percent(compared["eager"]),
    )
    return data.sort_values(["op", "device", "plan", "l1", "layer", "mean_nnz"], kind="stable").reset_index(drop=True)


def _ratio_spreads(rows: pd.DataFrame, dense: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The widest bounds of each row's ratio, from its spread and, where known, the baseline's; NaN over 0."""
    key, ends = [*SAME_RUN, "baseline"], ["low", "high"]
    known = dense.drop(columns="baseline").rename(columns={"backend": "baseline"}).drop_duplicates(key, keep=False)
    base = rows[key].merge(known[[*key, *ends]], on=key, how="left").set_index(rows.index)[ends]
    larger = metric in schema.LARGER_IS_BETTER
    value = rows["value"] / rows["ratio"] if larger else rows["value"] * rows["ratio"]
    base = base.apply(lambda column: column.fillna(value))
    above, below = (rows, base) if larger else (base, rows)
    below = below[ends].where(below[ends] != 0)
    return pd.DataFrame({"low": above["low"] / below["high"], "high": above["high"] / below["low"]})


def published(op: str, gated: bool = True) -> pd.DataFrame:
    """The paper's changes against dense in percent: model, l1, and one column for each metric of the operation.

    Table 1 has every scale at the recommended L1; table 4 has one more forward value at 1.5B, and those of non-gated
    models. Training steps of 2B are left out: the sparse one has a larger batch than the dense one.
    """
    columns = {
        "model_forward": {"throughput": "forward_tokens_per_ms", "energy": "energy_mj_per_token"},
        "model_training": {"throughput": "train_tokens_per_ms", "peak_memory": "peak_memory_gb"},
    }[op]
    tables = [paper.table("table1_scales")] if gated else []
    if op == "model_forward":
        tables.append(where(paper.table("table4_gating"), gated="yes" if gated else "no"))
    else:
        tables = [table[table["scale"] != "2B"] for table in tables]
    lines = []
    for scale, rows in (of_scale for table in tables for of_scale in table.groupby("scale", sort=False)):
        dense = where(rows, sparse="no").iloc[0]
        for _, sparse in where(rows, sparse="yes").iterrows():
            changes = {metric: (sparse[name] / dense[name] - 1) * 100 for metric, name in columns.items()}
            lines.append({"model": scale.lower(), "l1": sparse["l1"], **changes})
    return pd.DataFrame(lines).drop_duplicates(["model", "l1"], ignore_index=True)
