"""Where rows come from: studies, devices, versions, revisions and dates."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from analysis import render
from analysis.load import Results


def table(results: Results) -> pd.DataFrame:
    """One line for each study, device, number of GPUs and revision: operations, text, seeds, dates, and whether the
    working tree was clean."""
    names = ["torch", "triton", "cuda"]
    versions = [
        _listed(f"{name} {value}" for name, value in zip(names, line, strict=True) if value)
        for line in results.rows[names].itertuples(index=False)
    ]
    dirty = results.rows["dirty"].map({True: "changed", False: "clean"}).fillna("unknown")
    rows = results.rows.assign(dirty=dirty, versions=versions)
    rows["tokens_trained"] = rows["tokens_trained"].astype("Float64") / 1e6
    by = ["study", "device", "gpus", "power_state", "revision", "dirty", "versions"]
    lines = rows.groupby(by, dropna=False, as_index=False).agg(
        rows=("value", "size"),
        operations=("op", _listed),
        text=("text", _listed),
        tokens=("tokens_trained", lambda column: _listed(render.significant(float(v), 4) for v in column.dropna())),
        seeds=("seed", lambda column: _listed(str(int(seed)) for seed in sorted(column.dropna()))),
        first=("date", "min"),
        last=("date", "max"),
    )
    short = {name: lines[name].str[:10] for name in ("first", "last")}
    headings = {
        "dirty": "working tree", "power_state": "power state", "tokens": "training tokens (millions)",
        "gpus": "GPUs", "first": "first (UTC)", "last": "last (UTC)",
    }  # fmt: skip
    return lines.assign(revision=lines["revision"].str[:12], **short).rename(columns=headings)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))
