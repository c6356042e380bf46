"""Tables for an owner of GPUs: sparse against dense, for whole models, blocks, layers and trainings.

Every ratio compares two measurements of one run; above 1, the first is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from analysis import choose, schema
from analysis.choose import where
from analysis.figures.drawn import NotMeasured
from analysis.figures.frontier import DENSE, KINDS
from analysis.figures.frontier import points as frontier_points
from analysis.figures.kernels_in_training import sparse_over_dense
from analysis.figures.narrow import DENSE as FEWER
from analysis.figures.narrow import points
from analysis.gains import published
from analysis.load import Results
from analysis.render import INTERVAL
from analysis.summary import summary

MODEL = ["model", "l1", "device"]
DENSE_FORMS = {
    schema.TRANSFORMERS: "transformers",
    schema.EAGER: "eager",
    "dense_compiled": "compiled",
    "dense_compiled_layers": "compiled",
    "dense_twell": "compiled",
}
SLOWER_FOR_LACK_OF_MEMORY = 0.95  # of the speed of our eager form; with room they are 1% to 2% apart
SPARSE_FORMS = {"by_layer": "fastest", "twell": "papers", "hybrid": "papers"}


def _forms(rows: pd.DataFrame, op: str) -> pd.DataFrame:
    """Values by model, L1, device and tokens (rows), and by metric and form (columns). Forms: dense transformers,
    eager and compiled, the fastest if there are two; fastest (each layer dense or sparse) and papers, the paper's
    method, both also compiled."""
    rows = choose.made_for_speed(choose.relu_runs(where(rows, op=op)))
    rows = choose.longest_trained(rows[rows["value"].notna() & rows["l1"].notna()])
    compiled = rows["backend"].str.endswith(schema.COMPILED) & (rows["plan"] != "dense")
    form = rows["plan"].map(SPARSE_FORMS).where(rows["plan"] != "dense", rows["backend"].map(DENSE_FORMS))
    behind = rows["baseline"].ne(rows["backend"]) & rows["baseline"].map(DENSE_FORMS).eq(form)
    named = rows.assign(form=form.mask(behind) + pd.Series("_compiled", rows.index).where(compiled, ""))
    named = named.dropna(subset="form")
    wide = named.pivot_table(index=[*MODEL, "tokens"], columns=["metric", "form"], values="value")
    wide["active", "mean"] = named.groupby([*MODEL, "tokens"])["mean_nnz"].mean()
    return wide


def _compared(wide: pd.DataFrame, metric: str, form: str, base: str) -> pd.DataFrame:
    """`form` over `base` by model, L1 and device: `ratio`, and `tokens`, the fewest that both were measured with: with
    the most, a step may fill the memory and say little about speed."""
    if not {(metric, form), (metric, base)} <= set(wide.columns):
        return pd.DataFrame(columns=["ratio", "tokens"], dtype="float64")
    ratio = (wide[metric, form] / wide[metric, base]).dropna().rename("ratio")
    return ratio.reset_index("tokens").groupby(level=MODEL).first()


def _ratio(wide: pd.DataFrame, metric: str, form: str, base: str) -> pd.Series:
    return _compared(wide, metric, form, base)["ratio"]


def _lines(wide: Sequence[pd.DataFrame], columns: dict[str, pd.Series]) -> pd.DataFrame:
    """One line for each model, L1 and device that has any of these numbers, from small to large models."""
    wide = [forms for forms in wide if len(forms)]
    table = pd.DataFrame(columns).dropna(how="all") if wide else pd.DataFrame()
    if table.empty:
        return pd.DataFrame()
    active = pd.concat([forms["active", "mean"] for forms in wide])
    table.insert(0, "active", active.groupby(level=MODEL).first())
    table = table.rename_axis(MODEL).reset_index()
    return table.sort_values(["l1", "model", "device"], key=_in_order, ignore_index=True)


def _in_order(column: pd.Series) -> pd.Series:
    """Sort key: models by their size, "0.5b" before "1b"."""
    return column.map(choose.by_size(column).index) if column.name == "model" else column


def models(results: Results) -> pd.DataFrame:
    """Whole trained models with torch.compile on both sides, each layer dense or sparse: speed and energy of the
    forward pass, speed and memory of a training step, over the compiled dense model."""
    forward, step = (_forms(results.rows, op) for op in schema.WHOLE_MODELS)
    pair = ("fastest_compiled", "compiled")
    return _lines(
        (forward, step),
        {
            "forward_speed": _ratio(forward, "throughput", *pair),
            "forward_energy_pct": (_ratio(forward, "energy", *pair) - 1) * 100,
            "step_speed": _ratio(step, "throughput", *pair),
            "step_memory_pct": (_ratio(step, "peak_memory", *pair) - 1) * 100,
            "step_tokens": _compared(step, "throughput", *pair)["tokens"],
        },
    )


def uncompiled(results: Results, op: str, second: str) -> pd.DataFrame:
    """Whole models with nothing compiled, as in the paper: each layer dense or sparse, and the paper's method, over
    the same model with this package's dense block and over unmodified transformers; and the paper's own numbers.
    `second`: the metric beside speed."""
    wide = _forms(results.rows, op)
    plain, eager = (("throughput", form) for form in ("transformers", "eager"))
    if {plain, eager} <= set(wide.columns):  # steps of plain transformers that fill the memory say nothing about speed
        wide.loc[wide[plain] < SLOWER_FOR_LACK_OF_MEMORY * wide[eager], [plain]] = math.nan
    name = f"{second}_pct"
    columns = {
        "fastest_over_eager": _ratio(wide, "throughput", "fastest", "eager"),
        "papers_over_eager": _ratio(wide, "throughput", "papers", "eager"),
        "papers_over_transformers": _ratio(wide, "throughput", "papers", "transformers"),
        name: (_ratio(wide, second, "papers", "transformers") - 1) * 100,
    }
    if op == "model_training":
        columns["step_tokens"] = _compared(wide, "throughput", "fastest", "eager")["tokens"]
    table = _lines([wide], columns)
    if table.empty:
        return table
    theirs = published(op).rename(columns={"throughput": "published", second: f"published_{name}"})
    table = table.merge(theirs, on=["model", "l1"], how="left")
    return table.assign(published=1 + table["published"] / 100)


PLAIN, HOT, SORTED = ("twell", "csr"), tuple(schema.HOT_PLANS.values()), tuple(schema.ORDERED_PLANS.values())


def blocks(results: Results, op: str) -> pd.DataFrame:
    """One block on synthetic patterns, with the most tokens measured: time of the fastest dense form, and the speed of
    every neuron sparse, hot, sorted, with backup, of Triton, and of FP8 products, with their error."""
    every = where(results.rows, op=op, metric="time")
    every = every[every["pattern"].str.startswith("synthetic") & every["value"].notna()]
    every = every.assign(mean_nnz=every["mean_nnz"].round())
    rows = choose.made_for_speed(every)
    if rows.empty:
        return pd.DataFrame()
    size = ["device", "gated", "hidden", "intermediate"]
    rows = rows[rows["tokens"].eq(rows.groupby(size)["tokens"].transform("max"))]
    by = [*size, "tokens", "mean_nnz"]
    hopper, fp8 = where(rows, backend="hopper"), where(every, plan=schema.FP8).groupby(by)
    columns = {
        "dense_ms": where(rows, plan="dense").groupby(by)["value"].min(),
        "plain": where(hopper, plan=PLAIN).groupby(by)["ratio"].median(),
        "hot_ratio": where(hopper, plan=HOT).groupby(by)["ratio"].median(),
        "sorted_ratio": where(hopper, plan=SORTED).groupby(by)["ratio"].median(),
        "backup_ratio": choose.papers_method(where(hopper, plan="hybrid")).groupby(by)["ratio"].median(),
        "triton": where(rows, backend="triton", plan=PLAIN).groupby(by)["ratio"].median(),
        schema.FP8: fp8["ratio"].median(),
        "fp8_error_pct": fp8["check_error"].max() * 100,
    }
    table = pd.DataFrame(columns).dropna(subset="plain")
    table = table.reset_index().dropna(axis="columns", how="all")
    return table.assign(gated=table["gated"].map({True: "yes", False: "no"}))


def tuned(results: Results) -> pd.DataFrame:
    """One block after `autotune`, by the tokens of a call: speed over the fastest dense form for each number of
    non-zeros, outside and inside a CUDA graph."""
    rows = where(results.rows, op=("ffn_tuned", "ffn_tuned_graph"), metric="time", plan="by_layer")
    if rows.empty:
        return pd.DataFrame()
    nonzeros = rows["mean_nnz"].astype(float)
    nominal = nonzeros[rows["tokens"].eq(rows["tokens"].max())].unique()
    of_calls = nonzeros.map(lambda value: min(nominal, key=lambda name: abs(math.log(value / name))))
    graph = rows["op"].str.endswith("graph").map({True: "yes", False: "no"})
    speed = rows["ratio"].map("{:.2f}".format).mask(rows["backend"].eq("dense"), "dense")
    rows = rows.assign(graph=graph, nominal=of_calls, speed=speed)
    by = ["device", "graph", "tokens"]
    table = rows.pivot_table(index=by, columns="nominal", values="speed", aggfunc="last").fillna("")
    table.columns = [f"about {nonzeros:,.0f} active" for nonzeros in table.columns]
    return table.reset_index()


def layers_together(results: Results) -> pd.DataFrame:
    """All blocks of each trained model, forward, their times added up: speed over dense with every neuron
    sparse, hot, sorted, and of sorted and dense blocks without silent neurons."""
    rows = where(results.rows, op="ffn_forward", metric="time").dropna(subset=["layer", "value"])
    rows = choose.made_for_speed(rows)
    if rows.empty:
        return pd.DataFrame()
    run = [*MODEL, "step", "item"]
    times = rows.groupby([*run, "layer", "plan"], dropna=False)["value"].min().unstack()
    total = times.groupby(level=run, dropna=False).sum(min_count=1)
    counts = rows.groupby(run, dropna=False)
    table = pd.DataFrame(
        {
            "layers": counts["layer"].nunique(),
            "fewest": counts["mean_nnz"].min(),
            "most": counts["mean_nnz"].max(),
            **{plan: total["dense"] / total[plan] for plan in total.columns if plan != "dense"},
        }
    )
    order = ["twell", "twell_hot", "twell_ordered", "dense_live", "twell_live"]
    table = table.reset_index().sort_values(["l1", "model", "step", "device"], key=_in_order)
    return table[[*MODEL, "step", "layers", "fewest", "most", *(name for name in order if name in table)]]


def trainings_compared(results: Results) -> pd.DataFrame:
    """Whole trainings whose layers may become sparse, each over the dense one of its seed on the same device: speed of
    the whole training without its first step, which compiles, and peak memory."""
    try:
        pairs = sparse_over_dense(results).reset_index(drop=True)
    except NotMeasured:
        return pd.DataFrame()
    memory = where(results.rows, op="train", layer=None, metric="peak_memory").set_index(["study", "item"])["value"]
    own, dense = (
        memory.reindex(pd.MultiIndex.from_frame(pairs[["study", item]])).reset_index(drop=True)
        for item in ("item", "against")
    )
    return pairs[[*MODEL, "seed", "whole_speed"]].assign(step_memory_pct=(own / dense - 1) * 100)


def lengths(results: Results) -> pd.DataFrame:
    """Models that were trained for several numbers of tokens: what L1 does with the length of training."""
    shown = ["model", "l1", "tokens_trained_m", "cross_entropy", "nonzeros", "dead_pct"]
    table = summary(results).reindex(columns=["activation", "modification", *shown])
    plain = table[table["activation"].eq("relu") & table["modification"].eq("none")]
    several = plain.groupby(["model", "l1"])["tokens_trained_m"].transform("nunique") > 1
    return plain.loc[several, shown].sort_values(["model", "l1", "tokens_trained_m"])


def random_ids(results: Results) -> pd.DataFrame:
    """Forward of trained models that were timed on text and on random token ids: active neurons, of the whole model and
    of each block, the whole model's speed with the fastest sparse plan, and in FP8 on text, with its error."""
    by = [*MODEL, "study", "item", "layer"]
    fp8 = where(results.rows, op="model_forward", metric="time", plan=schema.FP8).groupby(by, dropna=False)
    columns: dict[str, pd.Series] = {}
    for name, ending in (("text", ""), ("random", "_random_ids")):
        rows = where(results.rows, op=(f"model_forward{ending}", f"ffn_forward{ending}"), metric="time")
        rows = choose.made_for_speed(rows[rows["model"].ne("") & rows["value"].notna()])
        sparse = rows[rows["plan"].ne("dense")]
        whole = sparse[sparse["layer"].isna()]
        columns[f"{name}_active"] = sparse.groupby(by, dropna=False)["mean_nnz"].mean()
        columns[f"{name}_speed"] = whole.groupby(by, dropna=False)["ratio"].max()
    columns |= {schema.FP8: fp8["ratio"].max(), "fp8_error_pct": fp8["check_error"].max() * 100}
    table = pd.DataFrame(columns).dropna(subset=["text_active", "random_active"]).reset_index()
    return table.drop(columns=["study", "item"]).sort_values([*MODEL, "layer"], na_position="first")


def frontier(results: Results) -> pd.DataFrame:
    """The points of figure J: ways to train a model, each trained and timed. Verdict: whether a sparse model's held-out
    loss differs from that of dense models of its time by more than the 95% interval over seeds."""
    columns = {
        "scale": "model", "kind": "kind", "l1": "l1", "intermediate": "intermediate", "seeds": "seeds",
        "change": "loss_change_pct", "train_change": "train_loss_change_pct", "time": "forward_pct",
        "beyond": "beyond_dense_pct", "beyond_ci95": "beyond_dense_pct_ci95",
        "train_beyond": "train_beyond_dense_pct",
    }  # fmt: skip
    table = _of_points(results, frontier_points, "beyond", "beyond_high", columns)
    if "beyond_dense_pct_ci95" in table:
        change, half = table["beyond_dense_pct"], table["beyond_dense_pct_ci95"]
        table["verdict"] = np.select([change < -half, change > half, change.abs() <= half], ["win", "loss", "draw"], "")
    return table


def frontier_costs(results: Results) -> pd.DataFrame:
    """What the models of figure J cost, in percent of dense."""
    columns = {
        "scale": "model", "kind": "kind", "l1": "l1", "intermediate": "intermediate", "seeds": "seeds",
        "energy": "run_energy_pct", "blocks": "blocks_pct", "pruned": "pruned_pct", "step": "training_step_pct",
        "memory": "step_memory_of_dense_pct", "own_steps": "own_steps_pct",
        "own_memory": "own_memory_pct",
    }  # fmt: skip
    return _of_points(results, frontier_points, "beyond", "beyond_high", columns)


def narrow(results: Results) -> pd.DataFrame:
    """The points of figure H: sparse models, and dense ones with fewer neurons, all trained on the same tokens."""
    columns = {
        "kind": "kind", "l1": "l1", "neurons": "neurons", "seeds": "seeds", "change": "loss_change_pct",
        "change_ci95": "loss_change_pct_ci95", "train_change": "train_loss_change_pct", "live": "live_pct",
        "time": "time_pct", "pruned": "time_pruned_pct",
    }  # fmt: skip
    return _of_points(results, points, "change", "high", columns)


def sizes(results: Results) -> pd.DataFrame:
    """Hot-exempt L1 by size of model: the neurons that it leaves active, beside those of the dense ReLU model that ends
    at the same cross-entropy, by linear interpolation between the widths of figures H and J."""
    data = pd.DataFrame({"scale": pd.Series(dtype="str")})
    for points_of in (frontier_points, points):  # a size that is in both: from J
        with contextlib.suppress(NotMeasured):
            found = points_of(results).rename(columns={"neurons": "intermediate"})
            found = found.assign(scale=found["model"].map(choose.scale))
            data = pd.concat([data, found[~found["scale"].isin(data["scale"])]], ignore_index=True)
    if data.empty:
        return data
    own = where(data, kind=KINDS["hot_exempt"])
    same = []
    for line in own.itertuples():
        dense = where(data, scale=line.scale, kind=(FEWER, DENSE)).sort_values("intermediate", ascending=False)
        width = np.nan  # where a narrower model is better, no width has this loss
        if dense["change"].is_monotonic_increasing:
            width = np.interp(line.change, dense["change"], dense["intermediate"], left=np.nan, right=np.nan)
        same.append(width / line.intermediate * 100)
    table = own.assign(same_loss_pct=same).rename(columns={"change": "loss_change_pct"})
    by = ["model", "l1"]
    active = where(summary(results), modification="hot_exempt").sort_values("seeds").drop_duplicates(by, keep="last")
    table = table.merge(active[[*by, "active_pct"]], on=by, validate="many_to_one")
    table = table.sort_values(["l1", "intermediate"], ignore_index=True)
    columns = ["model", "l1", "seeds", "loss_change_pct", "active_pct", "same_loss_pct"]
    return table[columns].astype({"seeds": "Int64"})


def _of_points(
    results: Results, points_of: Callable[[Results], pd.DataFrame], name: str, high: str, columns: dict[str, str]
) -> pd.DataFrame:
    """These columns of a figure's points under other names, with half the 95% interval of one that ends at `high`."""
    try:
        data = points_of(results)
    except NotMeasured:
        return pd.DataFrame()
    table = data.assign(**{name + INTERVAL: data[high] - data[name]})[list(columns)].rename(columns=columns)
    return table.astype({"seeds": "Int64"}).dropna(axis="columns", how="all")
