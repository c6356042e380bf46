"""Figure 7: the tokens that activate the fewest and the most neurons, and non-zeros by position."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import choose, describe
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import NotMeasured, Sketch, figure
from analysis.figures.layers import GATHER, at_recommended
from analysis.load import Results

SHOWN = 12
RAREST = 2.0**-14  # rarer tokens are left out, as in the paper
SYMBOLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", " ": "␣"}


@figure(
    "7",
    "figure07_tokens_and_positions",
    "tokens with the fewest and most non-zeros, and non-zeros by position",
    "Non-zeros at the recommended L1, on held-out text. (a) Mean over layers; tokens with a frequency below 2^-14 "
    "are left out; ␣ is a space. (b) Mean over sequences; both axes are logarithmic.",
)
def tokens_and_positions(results: Results) -> Sketch:
    tokens, positions = at_recommended(results, "by_token"), at_recommended(results, "by_position")
    positions = positions.merge(tokens[choose.RUN].drop_duplicates(), on=choose.RUN)
    tokens, positions = choose.first_seed(tokens), choose.first_seed(positions)
    if tokens.empty or positions.empty:
        raise NotMeasured("nonzeros_by_token and nonzeros_by_position at the recommended L1 value", GATHER)
    frequent = tokens[tokens["frequency"] >= RAREST].sort_values("mean", kind="stable")
    shown = min(SHOWN, len(frequent) // 2)
    extremes = pd.concat([frequent.head(shown).assign(group="fewest"), frequent.tail(shown).assign(group="most")])
    picture, ((left, right),) = style.panels(1, 2, 3.6, width_ratios=[1, 1.15])
    _token_panel(left, extremes, shown)
    _position_panel(right, positions)
    of_tokens = extremes[["model", "l1", "group", "token_id", "text", "count", "frequency", "mean"]]
    by_position = positions[["model", "l1", "layer", "position", "mean", "tokens"]]
    data = pd.concat([of_tokens.assign(panel="tokens"), by_position.assign(panel="positions")], ignore_index=True)
    run = positions.iloc[0]
    counted = where(results.rows, op="nonzeros", metric="nonzeros", **run[choose.RUN])["tokens"].max()
    named = f"{run['model']}, L1 {l1_label(run['l1'])}, {describe.seeds(positions['seed'])}"
    return Sketch(picture, data, named + ("." if pd.isna(counted) else f": {counted:,.0f} tokens."))


def readable(text: str) -> str:
    """A token as a visible string: ␣ for a space, runs of spaces counted, characters that the font may lack escaped."""
    shown = re.sub(" {4,}", lambda run: f"␣×{len(run[0])}", text)
    shown = "".join(SYMBOLS.get(c, c if _printable(c) else f"\\u{ord(c):04x}") for c in shown) or "(empty)"
    return shown if len(shown) <= 14 else shown[:13] + "…"


def _printable(character: str) -> bool:
    dash_or_quote = 0x2010 <= ord(character) <= 0x2027
    return character in "␣×" or (character.isprintable() and (ord(character) < 0x250 or dash_or_quote))


def _token_panel(axes: Axes, extremes: pd.DataFrame, shown: int) -> None:
    """A dot for each token, the most active on top. (The length of a bar means nothing on a log axis.)"""
    rows = extremes.iloc[::-1].reset_index(drop=True)
    at = np.array([i + (0.8 if i >= shown else 0) for i in range(len(rows))])
    for index, group in enumerate(("fewest", "most")):
        chosen = (rows["group"] == group).to_numpy()
        look = style.category(index) | {"linestyle": ""}
        axes.plot(rows.loc[chosen, "mean"], at[chosen], label=f"{group} non-zeros", **look)
    axes.set_yticks(at, [readable(text) for text in rows["text"]], fontsize=6.8, family="DejaVu Sans Mono")
    axes.invert_yaxis()
    axes.set(title="(a) by token", xlabel="mean non-zeros (neurons/token)", ylabel="token")
    if rows["mean"].min() > 0:
        style.log_axis(axes.xaxis)
    style.legend_below(axes)


def _position_panel(axes: Axes, positions: pd.DataFrame) -> None:
    layers = sorted(set(positions["layer"]))
    for layer in layers:
        line = where(positions, layer=layer).sort_values("position")
        label = "one layer" if layer == layers[0] else None
        axes.plot(line["position"] + 1, line["mean"], color="#9aa0a6", linewidth=0.6, alpha=0.8, label=label)
    mean = positions.groupby("position")["mean"].mean()
    axes.plot(mean.index + 1, mean, color=style.CATEGORIES[0], linewidth=2, label="mean over layers")
    axes.set(
        title="(b) by position", xlabel="position in the sequence (tokens)", ylabel="mean non-zeros (neurons/token)"
    )
    style.log_axis(axes.xaxis)
    style.room_for_labels(axes)
    style.log_axis(axes.yaxis)
    style.legend_below(axes)
