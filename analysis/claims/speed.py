"""Claims on speed, energy and memory, of whole models and of one block."""

from __future__ import annotations

import math
from functools import partial

import pandas as pd

from analysis import choose, describe, paper, schema
from analysis.choose import l1_label, where
from analysis.claims.evidence import (
    ENOUGH,
    FAILS,
    FASTER,
    HOLDS,
    INCONSISTENT,
    LISTED,
    PARTLY,
    SLOWER,
    Check,
    Claim,
    Evidence,
    Finding,
    Untested,
)
from analysis.gains import gains, published
from analysis.measures import plan_keys
from analysis.render import device, signed, significant, span

WHOLE_MODELS = {"model_forward": "forward passes of whole models", "model_training": "training steps of whole models"}
PAPERS_KIND = "H100"  # its H100 PCIe and other cards of this name
AS_FEW = 1.5  # times the active neurons of the paper's model
H100_PCIE_WATTS = 350  # power limit in NVIDIA's data sheet of the card that the paper names


def _speed(op: str, metric: str, statement: str, evidence: Evidence) -> Check:
    """A gain of whole models over dense: larger is better for throughput, smaller for the other metrics."""
    sign = 1 if metric in schema.LARGER_IS_BETTER else -1
    printed = published(op)[["model", "l1", metric]].rename(columns={metric: "published"})
    yield Claim(
        statement,
        f"{signed(printed['published'].min())} to {signed(printed['published'].max())}, by scale and L1",
        "we timed at least half of the paper's pairs of scale and L1, and at each of them the gain of our fastest plan "
        "(over the fastest dense form of the same run) is at least the paper's (over eager transformers); partly: a "
        "gain beyond its spread, or over eager transformers one that is at least the paper's",
    )
    rows = choose.relu_runs(where(evidence.results.rows, op=op))
    data = choose.main_device(gains(rows, metric), ["model", "l1"])
    if data.empty:
        raise Untested(f"{WHOLE_MODELS[op]} were not timed with a GPU backend")
    # L1 = 0 is the subject of `slower_without`.
    data = data[data["l1"] != 0].assign(gain=lambda rows: sign * rows["percent"])
    if data.empty:
        raise Untested(f"{WHOLE_MODELS[op]} were timed at L1 = 0 only")
    fastest = choose.against_the_fastest(data)
    best = _of_the_fastest_plan(fastest, rows)
    best = best.assign(uncompiled=_uncompiled(best, data))
    best = best.merge(printed, on=["model", "l1"], how="left").sort_values("gain", ascending=False, kind="stable")
    elsewhere = describe.elsewhere(best)
    on = (", on " + elsewhere).mask(elsewhere == "", "")
    best = best.assign(about=_lengths(best, evidence.results.rows) + on)
    same, other = best[best["published"].notna()], best[best["published"].isna()]
    reached = 2 * len(same) >= len(printed) and bool((same["gain"] >= sign * same["published"]).all())
    parts = [_gains(same, f"at {len(same)} of the paper's {len(printed)} pairs of scale and L1")] if len(same) else []
    parts += [_gains(other, "at pairs without a number in the paper")] if len(other) else []
    parts += _with_the_papers_plan(data)
    nearest = best["percent_low"] if sign > 0 else best["percent_high"]  # of the spread, to no change; memory has none
    surely = sign * nearest.fillna(best["percent"]) > 0
    eager = sign * best["eager_percent"] >= sign * best["published"]
    verdict = HOLDS if reached else PARTLY if bool((surely | eager).any()) else FAILS
    return Finding("; ".join(parts), describe.devices(best["device"]), verdict)


def _of_the_fastest_plan(data: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Of each model and L1 value, the plan with the highest throughput: a slower one may take less memory."""
    speed = gains(rows, "throughput").assign(metric=data["metric"].iloc[0])
    known = dict(zip(plan_keys(speed), speed["percent"], strict=True))
    data = data.assign(speed=[known.get(key, math.nan) for key in plan_keys(data)])
    return data.sort_values(["speed", "gain"], ascending=False, kind="stable").drop_duplicates(["model", "l1"])


def _uncompiled(best: pd.DataFrame, data: pd.DataFrame) -> list[float]:
    """Against eager transformers, what each of `best` reached with nothing compiled, if it was: in the same run, or in
    one with eager products only."""
    eager = dict(zip(plan_keys(data), data["eager_percent"], strict=True))
    names = ["model", "l1", "plan", "backend"]
    apart = data[data["baseline"] == schema.EAGER].groupby(names)["eager_percent"].mean()
    plain = best.assign(backend=best["backend"].str.removesuffix(schema.COMPILED))
    keys = zip(plan_keys(plain), plain[names].itertuples(index=False, name=None), best["backend"], strict=True)
    return [
        eager.get(run, apart.get(alone, math.nan)) if was.endswith(schema.COMPILED) else math.nan
        for run, alone, was in keys
    ]


def _gains(best: pd.DataFrame, at: str) -> str:
    """Gains in words, the largest first; of many, the range and both ends."""
    if len(best) <= LISTED:
        return f"{at}: {', '.join(_gain(line) for _, line in best.iterrows())}"
    changes = best["percent"]
    return (
        f"{at}: {signed(changes.min())} to {signed(changes.max())}, at best {_gain(best.iloc[0])}, at worst "
        f"{_gain(best.iloc[-1])}"
    )


def _gain(line: pd.Series) -> str:
    eager = "" if pd.isna(line["eager_percent"]) else f", against eager {signed(line['eager_percent'])}"
    if not pd.isna(line["uncompiled"]):
        plain = f"with nothing compiled {signed(line['uncompiled'])}"
        eager += f" ({plain})" if eager else f" ({plain} against eager)"
    digits = int(signed(line["percent"]) == signed(line["published"]))
    beside = "" if pd.isna(line["published"]) else f", the paper {signed(line['published'], digits)}"
    at = f"{line['model']} at {l1_label(line['l1'])}, {significant(line['mean_nnz'], 2)} non-zeros{line['about']}"
    return f"{signed(line['percent'], digits)}{eager}{beside} ({at})"


def _with_the_papers_plan(data: pd.DataFrame) -> list[str]:
    """In words, the gains of the paper's plan with nothing compiled, as in the paper's comparison: where about as few
    neurons are active as in its model, and elsewhere."""
    plain = choose.papers_plan(data)
    plain = plain[~plain["backend"].str.endswith(schema.COMPILED)].dropna(subset="eager_percent")
    few = plain["mean_nnz"] <= AS_FEW * paper.fact(3, r"(\d+) at 2e-5")
    parts = [
        f"{span(own['eager_percent'], signed)} at {span(own['mean_nnz'], partial(significant, digits=2))} non-zeros"
        for own in (plain[few], plain[~few])
        if len(own)
    ]
    return [f"with the paper's plan and nothing compiled, against eager {', '.join(parts)}"] if parts else []


def _lengths(timed: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """How long each timed model was trained: tokens per parameter if these are fewer than ENOUGH, or the steps of a
    checkpoint whose training has no rows."""
    trained = choose.trainings(rows)
    texts = []
    for line in timed.itertuples():
        per = where(trained, model=line.model, l1=line.l1, step=line.step)["tokens_per_parameter"].dropna()
        if len(per):
            texts.append(f", {significant(per.max(), 2)} tokens per parameter" if per.max() < ENOUGH else "")
        else:
            texts.append("" if pd.isna(line.step) else f", after {int(line.step):,} steps only")
    return pd.Series(texts, timed.index, dtype=object)


forward_speed = partial(_speed, "model_forward", "throughput", "The forward pass is faster")

forward_energy = partial(_speed, "model_forward", "energy", "The forward pass takes less energy")

training_speed = partial(_speed, "model_training", "throughput", "Training is faster")

training_memory = partial(_speed, "model_training", "peak_memory", "Training takes less memory")


def _blocks(op: str, words: str, tokens: int, evidence: Evidence) -> Check:
    known = where(paper.table("published_kernels_h200"), op=op, tokens=tokens, mean_nnz=29).iloc[0]
    yield Claim(
        f"One block, {words}, at 29 non-zeros and {tokens:,} tokens (their public kernels, measured by us on an "
        f"{paper.PUBLISHED_KERNELS_ON})",
        f"{known['ratio']:.2f} times the speed of dense",
        "no claim of the paper: are our kernels at least as fast?",
    )
    rows = evidence.results.rows
    rows = where(rows[rows["pattern"].str.startswith("synthetic")], op=op, tokens=tokens, gated=True)
    rows = choose.whole_function(choose.made_for_speed(rows))
    same = rows[rows["device"].str.contains(paper.PUBLISHED_KERNELS_ON)]
    data = gains(choose.main_device(rows if same.empty else same), "time")
    data = where(data[data["mean_nnz"].round() == 29], hidden=2048, intermediate=5632)
    if data.empty:
        raise Untested("no row of this size")
    best = data.groupby("series")["ratio"].median().sort_values(ascending=False)
    ours = ", ".join(f"{ratio:.2f} with {series}" for series, ratio in best.items())
    return Finding(ours, device(data["device"].iloc[0]), FASTER if best.iloc[0] >= known["ratio"] else SLOWER)


forward_block = partial(_blocks, "ffn_forward", "forward", 131072)

training_block = partial(_blocks, "ffn_training", "forward and backward", 16384)


def devices(evidence: Evidence) -> Check:
    yield Claim(
        "The training speedup is larger on an RTX PRO 6000 than on an H100 PCIe", "larger", "larger on a second device"
    )
    timed = choose.made_for_speed(where(evidence.results.rows, op="model_training"))
    if timed.empty:
        raise Untested("no GPU rows")
    kinds = describe.devices(timed["device"])
    both = timed.groupby(["model", "l1"], dropna=False)["device"].nunique().max() > 1
    if both:
        raise Untested(f"training steps of whole models were timed on {kinds} only (figure 12)")
    raise Untested(f"training steps of no model were timed on two GPUs ({kinds}); figure 12 has one block on two")


def power(evidence: Evidence) -> Check:
    table = paper.table("table1_scales")
    watts = table["forward_tokens_per_ms"] * table["energy_mj_per_token"]
    yield Claim(
        f"The forward pass was measured on an H100 PCIe (a card limited to {H100_PCIE_WATTS} W)",
        f"the power in table 1, tokens/ms times mJ/token, is {watts.min():.0f} to {watts.max():.0f} W",
        f"the power in the paper's table is at most {H100_PCIE_WATTS} W (a check of the paper's own numbers)",
    )
    rows = choose.made_for_speed(where(evidence.results.rows, op=schema.WHOLE_MODELS))
    of_one = ["study", "item", "pattern", "device", "op", "backend", "plan", "tokens"]
    both = rows.pivot_table(index=of_one, columns="metric", values="value")
    own = (both["throughput"] * both["energy"]).dropna() if {"throughput", "energy"} <= set(both) else pd.Series()
    names = describe.devices(rows["device"])
    ours = (
        [f"our forward passes and training steps: {own.min():.0f} to {own.max():.0f} W on {names}"] if len(own) else []
    )
    ours += _eager_on_the_papers_kind(rows, table)
    return Finding(
        "; ".join(ours) or "–", "table 1 of the paper", HOLDS if watts.max() <= H100_PCIE_WATTS else INCONSISTENT
    )


def _eager_on_the_papers_kind(rows: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """In words, speed and energy of eager dense forward passes on another card of the kind that the paper names."""
    own = where(rows[rows["device"].str.contains(PAPERS_KIND)], op="model_forward", plan="dense", backend=schema.EAGER)
    ours = own.groupby(["model", "metric"])["value"].mean().unstack("metric")
    dense = where(table, sparse="no")
    theirs = dense.set_index(dense["scale"].str.lower())
    texts = [
        f"{model} {ours['throughput'][model]:.0f} tokens/ms with {ours['energy'][model]:.2f} mJ/token (the paper "
        f"{theirs['forward_tokens_per_ms'][model]:.0f} with {theirs['energy_mj_per_token'][model]:.2f})"
        for model in choose.model_order(ours.index)
        if model in theirs.index and {"throughput", "energy"} <= set(ours)
    ]
    return [f"eager dense on {describe.devices(own['device'])}: {', '.join(texts)}"] if texts else []
