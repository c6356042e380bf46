"""Claims on speed, energy and memory, of whole models and of one block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.claims.evidence import (
    FAILS,
    HOLDS,
    INCONSISTENT,
    PARTLY,
    Evidence,
    Finding,
    Untested,
    barely_trained,
    graded,
)
from analysis.gains import gains, published
from analysis.render import NOTHING, signed, significant, span

PAPERS_KIND = "H100"  # its H100 PCIe and other cards of this name
PACKING = 2  # percent: what packing may cost where it is called free
H100_PCIE_WATTS = 350  # power limit in NVIDIA's data sheet of the card that the paper names


@dataclass(frozen=True)
class _Gains:
    """The gains of whole models over dense in one metric: of all plans, of the fastest plan, and of the paper's method
    with nothing compiled. `sign`: that of an improvement; `published`: the paper's gains; `rows`: the rows with L1."""

    sign: int
    published: pd.DataFrame
    rows: pd.DataFrame
    data: pd.DataFrame
    best: pd.DataFrame
    papers: pd.DataFrame


def _gains(op: str, metric: str, evidence: Evidence, gated: bool = True) -> _Gains:
    """L1 = 0 is left out: it is the subject of `slower_without`."""
    sign = 1 if metric in schema.LARGER_IS_BETTER else -1
    printed = papers_gains(op, metric, gated)
    rows = where(evidence.results.rows, op=op, activation="relu", gated=gated, modification="none")
    rows = choose.at_full_width(rows)
    rows = rows.assign(model=rows["model"].map(choose.scale))
    data = choose.main_device(gains(rows, metric), ["model", "l1"])
    data = data[data["l1"] != 0].merge(printed, on=["model", "l1"], how="left")
    if data.empty:
        kind = "" if gated else "non-gated "
        raise Untested(f"{kind}whole models with L1 were not timed with a GPU backend")
    data = data.assign(gain=sign * data["percent"], short=sign * (data["published"] - data["percent"]))
    papers = choose.papers_method(data)
    papers = papers[~papers["backend"].str.endswith(schema.COMPILED)].dropna(subset="eager_percent")
    # The plan with the highest throughput, in every metric: a slower one may take less memory.
    form = [*choose.RUN, "pattern", "device", "plan", "backup", "backend"]  # tokens of a step may differ by metric
    timed = gains(rows, "throughput")
    speed = dict(zip(choose.cells(timed, form), timed["percent"], strict=True))
    best = choose.against_the_fastest(data)
    best = best.assign(speed=[speed.get(key, math.nan) for key in choose.cells(best, form)])
    best = best.sort_values(["speed", "gain"], ascending=False, kind="stable").drop_duplicates(["model", "l1"])
    return _Gains(sign, printed, rows[rows["l1"] != 0], data, best, papers)


def papers_gains(op: str, metric: str, gated: bool = True) -> pd.DataFrame:
    """The paper's changes against dense in percent, `published`, by model and L1."""
    return published(op, gated)[["model", "l1", metric]].rename(columns={metric: "published"})


def whole_model(op: str, metric: str, evidence: Evidence, gated: bool = True) -> Finding:
    """The gain over dense, at the paper's pairs of model and nominal L1 value, and with as few active neurons as the
    paper's: how its coefficients act is open (`l1_factor`)."""
    measured = _gains(op, metric, evidence, gated)
    sign, printed, data, best = measured.sign, measured.published, measured.data, measured.best
    active = paper.fact(3, r"(\d+) at 2e-5")
    same, plain = (frame[frame["published"].notna()] for frame in (best, measured.papers))
    few, alike = (frame[frame["mean_nnz"] <= active] for frame in (best, measured.papers))
    theirs = where(printed, l1=choose.RECOMMENDED_L1).set_index("model")["published"]
    pairs = f"{len(same)} of the paper's {len(printed)} pairs"
    at, shown = (f"at {pairs}", same) if len(same) else ("at pairs without a number in the paper", best)
    papers_method = [
        span(plain["eager_percent"], signed) if len(plain) else "",
        f"{span(alike['eager_percent'], signed)} with {_active(alike)} active" if len(alike) else "",
    ]
    ours = [
        f"{span(shown['percent'], signed)} against the fastest dense implementation, {at}",
        f"the paper's method, nothing compiled: {', '.join(filter(None, papers_method))}" if any(papers_method) else "",
    ]

    enough, reached = 2 * len(same) >= len(printed), bool((same["short"] <= 0).all())
    nearest = best["percent_low"] if sign > 0 else best["percent_high"]  # of the spread, to no change; memory has none
    surely = sign * nearest.fillna(best["percent"]) > 0
    some = bool(surely.any() or (sign * (data["eager_percent"] - data["published"]) >= 0).any())
    by_its_method, by_its_method_alike = (
        len(frame) > 0 and bool((sign * frame["eager_percent"] > 0).mean() > 0.5) for frame in (plain, alike)
    )
    few = few[few["model"].isin(theirs.index)]
    short_alike = sign * (theirs.reindex(few["model"]).to_numpy(dtype="float64") - few["percent"])
    reached_alike = 2 * few["model"].nunique() >= len(theirs) and bool((short_alike <= 0).all())
    its_method = "does not gain at the nominal L1" if len(plain) else "was not timed"
    reasons = [
        "" if enough else f"{pairs} timed",
        "" if some else "no gain beyond its spread",
        "" if reached else _shortfall(same),
        "" if by_its_method else f"the paper's method {its_method}",
        "" if reached_alike and by_its_method_alike else f"not shown at {active:g} active",
        barely_trained(choose.longest_trained(measured.rows[measured.rows["model"].isin(shown["model"])])),
        f"{_active(shown)} active neurons (the paper's 1.5B: {active:g})",
    ]
    listed = data[data["plan"].isin({*best["plan"], *measured.papers["plan"]})]
    listed = listed.sort_values(["model", "l1", "gain"], ascending=[True, True, False])
    details = [_gain(line) for _, line in listed.iterrows()]
    holds = enough and reached and by_its_method and reached_alike and by_its_method_alike
    verdict = HOLDS if holds else PARTLY if some else FAILS
    place = describe.devices(best["device"])
    return Finding("; ".join(filter(None, ours)), verdict, reasons, None, details, place)


def _active(data: pd.DataFrame) -> str:
    return span(data["mean_nnz"], lambda value: significant(value, 2))


def growth(metrics: dict[str, tuple[str, str]], evidence: Evidence) -> Finding:
    """The gain of the largest model against that of the smallest, with the fastest plan, at the paper's L1 and at each
    other value with as many sizes. `metrics`: by the name of the claim on it, operation and metric."""
    met, parts, timed = {}, [], []
    for name, (op, metric) in metrics.items():
        title = name.replace("-", " ")
        try:
            measured = _gains(op, metric, evidence)
        except Untested:
            continue
        by_l1 = {l1: of.set_index("model") for l1, of in measured.best.groupby("l1")}
        by_l1 = {l1: of.loc[choose.by_size(of.index)] for l1, of in by_l1.items() if len(of) >= choose.FEWEST_SIZES}
        if choose.RECOMMENDED_L1 not in by_l1:
            continue
        met[f"{title} does not grow"] = all(_grows(of, measured.sign) for of in by_l1.values())
        best = by_l1[choose.RECOMMENDED_L1]
        parts.append(f"{title} {', '.join(map(signed, best['percent']))}")
        timed.append(best.assign(title=title))
    if not met:
        raise Untested(f"fewer than {choose.FEWEST_SIZES} sizes were timed at L1 {l1_label(choose.RECOMMENDED_L1)}")
    lines = pd.concat(timed)
    verdict, reasons = graded(met)
    details = [
        f"{line.title}, {line.Index}, {significant(line.mean_nnz, 2)} non-zeros: {signed(line.percent, 1)}."
        for line in lines.itertuples()
    ]
    reasons.append(f"{_active(lines)} active neurons")
    ours = f"{lines.index[0]} to {lines.index[-1]}: {'; '.join(parts)}"
    return Finding(ours, verdict, reasons, None, details, describe.devices(lines["device"]))


def _grows(by_size: pd.DataFrame, sign: int) -> bool:
    """Whether the last gain is larger than the first by more than the spread of both; memory has none."""
    ends = [sign * by_size[end].fillna(by_size["percent"]) for end in ("percent_low", "percent_high")]
    low, high = ends if sign > 0 else reversed(ends)
    return bool(low.iloc[-1] > high.iloc[0])


def _shortfall(same: pd.DataFrame) -> str:
    """The pair that is furthest below the paper's gain."""
    line = same.loc[same["short"].idxmax()]
    digits = int(signed(line["percent"]) == signed(line["published"]))
    ours, theirs = signed(line["percent"], digits), signed(line["published"], digits)
    return f"{line['model']} at L1 {l1_label(line['l1'])}: {ours}, the paper {theirs}"


def _gain(line: pd.Series) -> str:
    pair = f"{line['model']} at L1 {l1_label(line['l1'])}, {significant(line['mean_nnz'], 2)} non-zeros"
    eager = "" if pd.isna(line["eager_percent"]) else f", {signed(line['eager_percent'])} with nothing compiled"
    beside = "" if pd.isna(line["published"]) else f" (the paper {signed(line['published'])})"
    return f"{pair}, {line['series']}: {signed(line['percent'])} against {line['baseline']}{eager}{beside}."


def packing(evidence: Evidence) -> Finding:
    """Our gate product with ReLU and packing against the product alone (cuBLAS), with the most tokens measured."""
    rows, size = evidence.results.rows, ["device", "tokens", "hidden", "intermediate"]
    packed = where(choose.made_for_speed(rows), op="gate_pack", plan=paper.PLAN, metric="time")
    alone = where(rows, op="ceiling_matmul")
    best = {"packed": packed.groupby(size)["value"].min(), "rate": alone.groupby(size)["value"].max()}
    times = pd.DataFrame(best).dropna()
    if times.empty:
        raise Untested("the gate product was not timed with packing and alone, at the same size")
    times = times.reset_index().sort_values("tokens").groupby("device", as_index=False).last()
    product = 2 * times["tokens"] * times["hidden"] * times["intermediate"]
    times["alone"] = product.astype("float64") / (times["rate"] * 1e12) * 1e3
    times["cost"] = (times["packed"] / times["alone"] - 1) * 100
    lines = [
        f"{line.packed:.3g} ms with packing, {line.alone:.3g} ms alone, {int(line.tokens):,} tokens"
        for line in times.itertuples()
    ]
    costly = times[times["cost"] > PACKING]
    reasons = [f"{signed(line.cost)} on {describe.device(line.device)}" for line in costly.itertuples()]
    details = [
        f"{line}: {signed(cost, 1)}, {describe.device(name)}."
        for line, cost, name in zip(lines, times["cost"], times["device"], strict=True)
    ]
    verdict = FAILS if reasons else HOLDS
    return Finding(lines[0], verdict, reasons, None, details, describe.devices(times["device"]))


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
    """Speed and energy of uncompiled dense forward passes on another card of the kind that the paper names."""
    rows = where(rows[rows["device"].str.contains(PAPERS_KIND)], op="model_forward", plan="dense", backend=schema.EAGER)
    ours = rows.groupby(["model", "metric"])["value"].mean().unstack("metric").dropna()
    dense = where(paper.table("table1_scales"), sparse="no")
    theirs = dense.set_index(dense["scale"].str.lower())
    return [
        f"{model}, dense, nothing compiled, on {describe.devices(rows['device'])}: "
        f"{ours['throughput'][model]:.0f} tokens/ms with {ours['energy'][model]:.2f} mJ/token "
        f"(the paper {theirs['forward_tokens_per_ms'][model]:.0f} with {theirs['energy_mj_per_token'][model]:.2f})."
        for model in choose.model_order(ours.index)
        if model in theirs.index and {"throughput", "energy"} <= set(ours)
    ]
