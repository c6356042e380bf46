"""The expected gain of a feed-forward block that was not timed, from the rows of blocks of its shape that were.

The ratio of dense to sparse time is interpolated between measured blocks: in the logarithm of their non-zeros and, for
plans that compute hot neurons densely, in the share of the non-zeros in the most active tenth of the neurons. A
prediction is the value at the block of a line (or plane) through the logarithms of the measured ratios, of which the
near ones weigh most. Shapes, numbers of tokens and non-zeros beyond the measured ones are refused, and plans whose
held-out layers are predicted badly.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pandas as pd

from analysis import choose, schema
from analysis.choose import where
from analysis.explorer.chart import Absent
from analysis.figures.layer_speed import OF_A_LAYER
from analysis.gains import gains
from analysis.load import Results
from analysis.render import significant

FORWARD, TRAINING = ("ffn_forward",), ("ffn_training_stack", "ffn_training")  # of several, the first one measured
HOT = {*schema.HOT_PLANS.values(), *schema.ORDERED_PLANS.values()}  # plans whose time depends on the hot share
GROUP = ["op", "device", "plan", "backend", "tokens"]
# Distances between blocks are in these units; a plan with hot neurons needs a measured block within REACH of them.
LOG_NONZEROS, HOT_SHARE, REACH = 0.5, 0.2, 1.5
SLACK = 0.01  # of a measured range
MOST_ERROR_PCT = 10.0  # median over the held-out layers of a plan
AXES = {"mean_nnz": "non-zeros", "hot_share": "hot share"}
USUAL_TOKENS = 16_384  # of the command that measures a shape
AROUND = (0.8, 1.25)  # times the non-zeros asked for: those that the command measures
# The synthetic patterns of `twell.testing.make_problem`: log-normal firing rates of the neurons that are not dead.
DEAD, RATE_SPREAD, HIGHEST_RATE, HOTTEST = 0.3, 1.0, 0.6, 0.1


def expected_gain(
    results: Results,
    hidden: int,
    intermediate: int,
    active: float,
    hot_share: float,
    *,
    gated: bool = True,
) -> pd.DataFrame | Absent:
    """What a block would gain from each sparse plan on each device, forward, and forward and backward.

    Args:
        hidden, intermediate: K and N.
        active: mean share of the neurons that are active for a token.
        hot_share: share of all non-zeros in the most active tenth of the neurons. Blocks on synthetic patterns alone
            stand for every share.

    Returns:
        op, device, plan, backend; tokens in one call, of each operation and device those measured most; ratio, the
        expected dense time over sparse time; dense_ms and time_ms; blocks, the number of measured blocks; refused: why
        there is no ratio. `Absent` for a shape that was not measured, with the commands that measure it and read the
        rows.

    Raises:
        ValueError: `active` or `hot_share` is no share.
    """
    for name, share in (("active", active), ("hot_share", hot_share)):
        if not 0 < share <= 1:
            raise ValueError(f"{name} is a share, above 0 and at most 1, got {share}")
    blocks = measured_blocks(results)
    nonzeros = active * intermediate
    alike = where(blocks, hidden=hidden, intermediate=intermediate, gated=gated)
    if alike.empty:
        around = ",".join(f"{nonzeros * factor:.4g}" for factor in AROUND)
        command = (
            f'python -m experiments.bench_kernels "ops=[{FORWARD[0]},{TRAINING[0]}]" hidden={hidden} '
            f'intermediate={intermediate} gated={str(gated).lower()} "mean_nnz=[{around}]" '
            f'"tokens=[{USUAL_TOKENS}]" "backends=[hopper,hopper+hot,hopper+ordered,triton]" '
            "&& TWELL_RESULTS=runs/local/bench_kernels jupyter lab notebooks/your_model.ipynb"
        )
        shape = f"{'gated' if gated else 'non-gated'} blocks with K = {hidden:,} and N = {intermediate:,}"
        return Absent("expected-gain", "Expected gain", f"times of {shape}", command)
    lines = []
    for ops in (FORWARD, TRAINING):
        for _, of_device in where(alike, op=ops).groupby("device", sort=False):
            op = next(op for op in ops if op in set(of_device["op"]))
            of_op = where(of_device, op=op)
            calls = of_op["tokens"].value_counts().sort_index(ascending=False)
            for key, group in where(of_op, tokens=calls.idxmax()).groupby(GROUP, sort=False):
                ratio, refused = _predict(group, nonzeros, hot_share)
                if (error := _held_out(group).median()) > MOST_ERROR_PCT:
                    ratio, refused = math.nan, f"held-out layers are predicted with a median error of {error:.0f}%"
                dense_ms = math.nan if refused else group["dense_ms"].median()
                times = {"ratio": ratio, "dense_ms": dense_ms, "time_ms": dense_ms / ratio}
                named = dict(zip(GROUP, key, strict=True))
                lines.append(named | times | {"blocks": len(group), "refused": refused})
    return pd.DataFrame(lines).round({"dense_ms": 3})


def measured_blocks(results: Results) -> pd.DataFrame:
    """The timed blocks on devices that have kernels made for speed: GROUP, hidden, intermediate, gated, mean_nnz,
    ratio, dense_ms, hot_share, and run, the trained model of a layer ("synthetic": none)."""
    rows = where(choose.whole_function(results.rows), op=(*FORWARD, *TRAINING), metric="time")
    data = gains(choose.made_for_speed(rows[rows["mean_nnz"].notna()]), "time")
    layer = data["pattern"].str.extract(OF_A_LAYER)
    shares = where(results.rows, op="nonzeros", metric="hot_share").dropna(subset="value")
    # A pattern names the checkpoint, or the item whose masks were read.
    known = {
        (name, str(place)): value
        for column in ("pattern", "item")
        for name, place, value in shares[[column, "layer", "value"]].itertuples(index=False)
    }
    data = data.assign(run=layer["trained"].fillna("synthetic"), dense_ms=data["value"] * data["ratio"])
    trained = [known.get(key, math.nan) for key in zip(layer["trained"], layer["place"], strict=True)]
    made_up = data["pattern"].str.startswith("synthetic")
    synthetic = [
        synthetic_hot_share(nonzeros, int(neurons)) if yes else math.nan
        for yes, nonzeros, neurons in zip(made_up, data["mean_nnz"], data["intermediate"], strict=True)
    ]
    data = data.assign(hot_share=pd.Series(trained, index=data.index).where(~made_up, synthetic))
    return data.dropna(subset="hot_share")[
        [*GROUP, "hidden", "intermediate", "gated", "mean_nnz", "ratio", "dense_ms", "hot_share", "run"]
    ].reset_index(drop=True)


def held_out_errors(results: Results) -> pd.DataFrame:
    """How well layers of trained models are predicted by all other blocks, those of the same model left out: for each
    operation, device and plan the layers, how many are refused, and the error of the predicted ratio, in percent of
    the measured one (median, 90th percentile, largest)."""
    lines = []
    by = [*GROUP, "hidden", "intermediate", "gated"]
    for key, group in measured_blocks(results).groupby(by, sort=False):
        trained, error = group[group["run"] != "synthetic"], _held_out(group)
        if len(error):
            names = dict(zip(by, key, strict=True))
            counts = {"models": trained["run"].nunique(), "layers": len(trained), "refused": len(trained) - len(error)}
            sizes = {"median_pct": error.median(), "p90_pct": error.quantile(0.9), "max_pct": error.max()}
            lines.append(names | counts | sizes)
    columns = [*by, "models", "layers", "refused", "median_pct", "p90_pct", "max_pct"]
    return pd.DataFrame(lines, columns=columns).round({"median_pct": 1, "p90_pct": 1, "max_pct": 1})


def _held_out(group: pd.DataFrame) -> pd.Series:
    """The error in percent of each trained layer that the blocks of other runs predict. `group`: blocks of one plan."""
    trained = group[group["run"] != "synthetic"]
    predicted = [
        _predict(group[group["run"] != block.run], block.mean_nnz, block.hot_share)[0] for block in trained.itertuples()
    ]
    return 100 * (pd.Series(predicted, index=trained.index, dtype="float64") / trained["ratio"] - 1).abs().dropna()


def synthetic_hot_share(nonzeros: float, neurons: int) -> float:
    """The share of the non-zeros in the most active tenth of the neurons of a synthetic pattern."""
    alive = round((1 - DEAD) * neurons)
    normal = np.array([NormalDist().inv_cdf((place + 0.5) / alive) for place in range(alive)])
    rates = np.exp(RATE_SPREAD * normal)
    low, high = 0.0, nonzeros
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * rates, HIGHEST_RATE).sum() < nonzeros else (low, middle)
    rates = np.minimum(high * rates, HIGHEST_RATE)
    return float(rates[-round(HOTTEST * neurons) :].sum() / rates.sum())


def _predict(group: pd.DataFrame, nonzeros: float, hot_share: float) -> tuple[float, str]:
    """The expected ratio and "", or NaN and the reason. `group`: measured blocks of one plan."""
    if group.empty:
        return math.nan, "not measured"
    axes = {"mean_nnz": nonzeros}
    if group["plan"].iloc[0] in HOT and (group["run"] != "synthetic").any():
        axes["hot_share"] = hot_share
    for name, value in axes.items():
        least, most = group[name].min(), group[name].max()
        if not least * (1 - SLACK) <= value <= most * (1 + SLACK):
            return math.nan, f"measured with {AXES[name]} from {significant(least)} to {significant(most)}"
    away = [np.log(group["mean_nnz"].to_numpy(dtype=float) / nonzeros) / LOG_NONZEROS]
    if "hot_share" in axes:
        away.append((group["hot_share"].to_numpy(dtype=float) - hot_share) / HOT_SHARE)
    distance = np.linalg.norm(away, axis=0)
    if "hot_share" in axes and distance.min() > REACH:
        near = group.iloc[int(distance.argmin())]
        shown = [f"{AXES[name]} {significant(near[name])}" for name in axes]
        return math.nan, f"the nearest measured block has {' and '.join(shown)}"
    weight = 1 / (0.01 + distance**2) ** 2
    terms = np.column_stack([np.ones(len(group)), *away])
    # Few or equal blocks do not determine the slopes, which are then small.
    small = np.diag([0.0] + [1e-3] * len(away)) * weight.sum()
    weighted = terms * weight[:, None]
    logarithm = np.linalg.solve(weighted.T @ terms + small, weighted.T @ np.log(group["ratio"].to_numpy(dtype=float)))
    return float(np.exp(logarithm[0])), ""
