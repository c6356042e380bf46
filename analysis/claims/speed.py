"""Claims on speed, energy and memory, of whole models and of one block."""

from __future__ import annotations

import math

import pandas as pd

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.claims.evidence import (
    FAILS,
    FASTER,
    HOLDS,
    INCONSISTENT,
    PARTLY,
    SLOWER,
    Evidence,
    Finding,
    Untested,
    barely_trained,
)
from analysis.gains import gains, published
from analysis.measures import plan_keys
from analysis.render import NOTHING, signed, significant, span

PAPERS_KIND = "H100"  # its H100 PCIe and other cards of this name
H100_PCIE_WATTS = 350  # power limit in NVIDIA's data sheet of the card that the paper names


def whole_model(op: str, metric: str, evidence: Evidence) -> Finding:
    """The gain over dense, at the paper's pairs of model and L1 value and at others. L1 = 0 is the subject of
    `slower_without`."""
    sign = 1 if metric in schema.LARGER_IS_BETTER else -1
    printed = published(op)[["model", "l1", metric]].rename(columns={metric: "published"})
    rows = choose.relu_runs(where(evidence.results.rows, op=op))
    data = choose.main_device(gains(rows, metric), ["model", "l1"])
    data = data[data["l1"] != 0].merge(printed, on=["model", "l1"], how="left")
    if data.empty:
        raise Untested("whole models with L1 were not timed with a GPU backend")
    data = data.assign(gain=sign * data["percent"], short=sign * (data["published"] - data["percent"]))
    best = _of_the_fastest_plan(choose.against_the_fastest(data), rows)
    papers = choose.papers_plan(data)
    same, plain = (frame[frame["published"].notna()] for frame in (best, papers))
    plain = plain[~plain["backend"].str.endswith(schema.COMPILED)].dropna(subset="eager_percent")
    pairs = f"{len(same)} of the paper's {len(printed)} pairs"
    at, shown = (f"at {pairs}", same) if len(same) else ("at pairs without a number in the paper", best)
    ours = [f"{span(shown['percent'], signed)} against the fastest dense form, {at}"]
    if len(plain):
        ours.append(f"the paper's plan against eager, nothing compiled: {span(plain['eager_percent'], signed)}")

    enough, reached = 2 * len(same) >= len(printed), bool((same["short"] <= 0).all())
    nearest = best["percent_low"] if sign > 0 else best["percent_high"]  # of the spread, to no change; memory has none
    surely = sign * nearest.fillna(best["percent"]) > 0
    some = bool((surely | (sign * (best["eager_percent"] - best["published"]) >= 0)).any())
    active = paper.fact(3, r"(\d+) at 2e-5")
    reasons = [
        "" if enough else f"only {pairs} were timed",
        "" if some else "no gain beyond its spread",
        "" if reached else _shortfall(same),
        barely_trained(choose.longest_trained(rows[rows["l1"] != 0])),
        f"{span(shown['mean_nnz'], lambda value: significant(value, 2))} active neurons (the paper's 1.5B: {active:g})",
    ]
    listed = data[data["plan"].isin({*best["plan"], *papers["plan"]})]
    listed = listed.sort_values(["model", "l1", "gain"], ascending=[True, True, False])
    details = [_gain(line) for _, line in listed.iterrows()]
    verdict = HOLDS if enough and reached else PARTLY if some else FAILS
    return Finding("; ".join(ours), verdict, reasons, None, details, describe.devices(best["device"]))


def _of_the_fastest_plan(data: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Of each model and L1 value, the plan with the highest throughput: a slower one may take less memory."""
    speed = gains(rows, "throughput").assign(metric=data["metric"].iloc[0])
    known = dict(zip(plan_keys(speed), speed["percent"], strict=True))
    data = data.assign(speed=[known.get(key, math.nan) for key in plan_keys(data)])
    return data.sort_values(["speed", "gain"], ascending=False, kind="stable").drop_duplicates(["model", "l1"])


def _shortfall(same: pd.DataFrame) -> str:
    """The pair that is furthest below the paper's gain."""
    line = same.loc[same["short"].idxmax()]
    digits = int(signed(line["percent"]) == signed(line["published"]))
    ours, theirs = signed(line["percent"], digits), signed(line["published"], digits)
    return f"{line['model']} at L1 {l1_label(line['l1'])}: {ours}, the paper {theirs}"


def _gain(line: pd.Series) -> str:
    pair = f"{line['model']} at L1 {l1_label(line['l1'])}, {significant(line['mean_nnz'], 2)} non-zeros"
    eager = "" if pd.isna(line["eager_percent"]) else f", {signed(line['eager_percent'])} against eager"
    beside = "" if pd.isna(line["published"]) else f" (the paper {signed(line['published'])})"
    return f"{pair}, {line['series']}: {signed(line['percent'])} against {line['baseline']}{eager}{beside}."


def block(op: str, tokens: int, evidence: Evidence) -> Finding:
    """One block against the authors' public kernels."""
    rows = evidence.results.rows
    rows = where(rows[rows["pattern"].str.startswith("synthetic")], op=op, tokens=tokens, gated=True)
    rows = choose.whole_function(choose.made_for_speed(rows))
    same = rows[rows["device"].str.contains(paper.PUBLISHED_KERNELS_ON)]
    data = gains(choose.main_device(rows if same.empty else same), "time")
    data = where(data[data["mean_nnz"].round() == 29], hidden=2048, intermediate=5632)
    if data.empty:
        raise Untested("no row of this size")
    best = data.groupby("series")["ratio"].median().sort_values(ascending=False)
    details = [f"{series}: {ratio:.2f} times dense." for series, ratio in best.items()]
    verdict = FASTER if best.iloc[0] >= published_ratio(op, tokens) else SLOWER
    place = describe.devices(data["device"])
    return Finding(f"{best.iloc[0]:.2f} times dense with {best.index[0]}", verdict, details=details, place=place)


def published_ratio(op: str, tokens: int) -> float:
    """The speed of the authors' public kernels relative to dense."""
    known = where(paper.table("published_kernels_h200"), op=op, tokens=tokens, mean_nnz=29)
    return float(known["ratio"].iloc[0])


def devices(evidence: Evidence) -> Finding:
    timed = choose.made_for_speed(where(evidence.results.rows, op="model_training"))
    raise Untested(
        f"training of whole models was timed on {describe.devices(timed['device']) or 'no GPU'} only (figure 12)"
    )


def papers_watts() -> pd.Series:
    """The power of the GPU by the paper's table 1."""
    table = paper.table("table1_scales")
    return table["forward_tokens_per_ms"] * table["energy_mj_per_token"]


def power(evidence: Evidence) -> Finding:
    rows = choose.made_for_speed(where(evidence.results.rows, op=schema.WHOLE_MODELS))
    measurement = ["study", "item", "pattern", "device", "op", "backend", "plan", "tokens"]
    both = rows.pivot_table(index=measurement, columns="metric", values="value")
    watts = (both["throughput"] * both["energy"]).dropna() if {"throughput", "energy"} <= set(both) else pd.Series()
    ours = f"{span(watts, '{:.0f}'.format)} W on {describe.devices(rows['device'])}" if len(watts) else NOTHING
    holds = papers_watts().max() <= H100_PCIE_WATTS
    reasons = [] if holds else [f"the paper's power is above the card's limit of {H100_PCIE_WATTS} W"]
    return Finding(ours, HOLDS if holds else INCONSISTENT, reasons, details=_eager_on_the_papers_kind(rows))


def _eager_on_the_papers_kind(rows: pd.DataFrame) -> list[str]:
    """Speed and energy of eager dense forward passes on another card of the kind that the paper names."""
    rows = where(rows[rows["device"].str.contains(PAPERS_KIND)], op="model_forward", plan="dense", backend=schema.EAGER)
    ours = rows.groupby(["model", "metric"])["value"].mean().unstack("metric").dropna()
    dense = where(paper.table("table1_scales"), sparse="no")
    theirs = dense.set_index(dense["scale"].str.lower())
    return [
        f"{model}, eager dense on {describe.devices(rows['device'])}: {ours['throughput'][model]:.0f} tokens/ms with "
        f"{ours['energy'][model]:.2f} mJ/token (the paper {theirs['forward_tokens_per_ms'][model]:.0f} with "
        f"{theirs['energy_mj_per_token'][model]:.2f})."
        for model in choose.model_order(ours.index)
        if model in theirs.index and {"throughput", "energy"} <= set(ours)
    ]
