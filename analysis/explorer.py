"""Non-zeros by layer, position and token: the same three panels in the notebook and on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import choose
from analysis.choose import l1_label, where
from analysis.figures import style
from analysis.figures.drawn import Drawn, lay_out
from analysis.figures.layers import GATHER
from analysis.figures.tokens import RAREST, readable
from analysis.load import Results

BINS = 48
POSITIONS = 64
TOKENS = 10
NEEDED = ("histogram", "by_position", "by_token")
Item = tuple[str, str]  # study and item


def runs(results: Results) -> dict[str, Item]:
    """Label -> (study, item) of every run with all tables that the explorer shows, by model, mitigation and L1.

    Raises:
        LookupError: there is none.
    """
    if any(name not in results.nonzeros for name in NEEDED):
        raise LookupError(f"no non-zeros were gathered; {GATHER} makes them")
    item = ["study", "item"]
    gathered = results.nonzeros[NEEDED[0]][item].drop_duplicates()
    for name in NEEDED[1:]:
        gathered = gathered.merge(results.nonzeros[name][item].drop_duplicates(), on=item)
    columns = ["study", "item", "model", "modification", "l1"]
    items = where(results.rows, op="nonzeros")[columns].drop_duplicates().merge(gathered, on=item)
    items = items.sort_values(["study", "model", "modification", "l1"], key=_rank, kind="stable")
    several = items["study"].nunique() > 1
    return {_label(run, several): (run.study, run.item) for run in items.itertuples()}


def _rank(column: pd.Series) -> pd.Series:
    return column if column.name != "modification" else column.map(list(choose.MODIFICATIONS).index)


def _label(run: Any, with_study: bool) -> str:
    study = f"{run.study}: " if with_study else ""
    changed = "" if run.modification == "none" else f", {choose.MODIFICATIONS[run.modification]}"
    return f"{study}{run.model}, L1 {l1_label(run.l1)}{changed}"


def _of(table: pd.DataFrame, item: Item) -> pd.DataFrame:
    return where(table, study=item[0], item=item[1])


def panels(results: Results, item: Item, layer: int | None = None) -> dict[str, pd.DataFrame]:
    """What to draw for one run and one layer (None: all layers).

    Returns:
        histogram: nonzeros (upper end of the bin), share of the tokens; positions: position, mean;
        tokens: text, mean of the tokens with the fewest and the most non-zeros.

    Raises:
        LookupError: nothing was gathered for that item or layer.
    """
    chosen = {name: _of(results.nonzeros[name], item) for name in NEEDED}
    column = "mean" if layer is None else f"layer_{layer}"
    if chosen["histogram"].empty or column not in chosen["by_token"]:
        raise LookupError(f"no non-zeros of {item!r}, layer {layer}")
    if layer is not None:
        chosen |= {name: where(chosen[name], layer=layer) for name in ("histogram", "by_position")}
    return {
        "histogram": _histogram(chosen["histogram"]),
        "positions": _positions(chosen["by_position"]),
        "tokens": _tokens(chosen["by_token"], column),
    }


def _histogram(histogram: pd.DataFrame) -> pd.DataFrame:
    """Share of the tokens in at most BINS bins of equal width from 0 to the largest count."""
    largest = int(histogram.loc[histogram["tokens"] > 0, "nonzeros"].max())
    width = max(1, -(-(largest + 1) // BINS))
    bins = (histogram["nonzeros"] // width).clip(upper=largest // width)
    tokens = histogram["tokens"].groupby(bins).sum()
    return pd.DataFrame({"nonzeros": (tokens.index + 1) * width - 1, "share": tokens.to_numpy() / tokens.sum()})


def _positions(by_position: pd.DataFrame) -> pd.DataFrame:
    """Mean at up to POSITIONS positions, evenly spaced on a log axis."""
    means = by_position.groupby("position")["mean"].mean()
    wanted = np.unique(np.geomspace(1, len(means), POSITIONS).astype(int)) - 1
    return means.iloc[wanted].rename_axis("position").reset_index()


def _tokens(by_token: pd.DataFrame, column: str) -> pd.DataFrame:
    frequent = by_token[by_token["frequency"] >= RAREST].sort_values([column, "token_id"])
    shown = min(TOKENS, len(frequent) // 2)
    extremes = pd.concat([frequent.head(shown), frequent.tail(shown)])
    return pd.DataFrame({"text": extremes["text"].map(readable), "mean": extremes[column]}).reset_index(drop=True)


def layers(results: Results, item: Item) -> list[int]:
    """The layers of a run."""
    return sorted(int(layer) for layer in set(_of(results.nonzeros["histogram"], item)["layer"]))


def draw(results: Results, item: Item, layer: int | None = None) -> Drawn:
    """The three panels of one run and one layer (None: all layers) as a figure."""
    data = panels(results, item, layer)
    with style.applied():
        picture = _picture(data)
        lay_out(picture)
    which = "all layers" if layer is None else f"layer {layer}"
    label = next(label for label, known in runs(results).items() if known == item)
    caption = f"{label}, {which}: share of the tokens by non-zeros, mean by position, tokens with the fewest and most."
    frame = pd.concat([frame.assign(panel=name) for name, frame in data.items()], ignore_index=True)
    return Drawn("", "explorer", "Explorer", caption, picture, frame)


def _picture(data: dict[str, pd.DataFrame]) -> Figure:
    picture, (axes,) = style.panels(1, 3, 2.8, width_ratios=[1, 1, 1])
    histogram, positions, tokens = data["histogram"], data["positions"], data["tokens"]
    width = histogram["nonzeros"].diff().median() if len(histogram) > 1 else 1
    axes[0].bar(histogram["nonzeros"], histogram["share"] * 100, width=width, color=style.CATEGORIES[0])
    axes[0].set(title="tokens by non-zeros", xlabel="non-zeros (neurons/token)", ylabel="tokens (%)")
    axes[1].plot(positions["position"] + 1, positions["mean"], color=style.CATEGORIES[0])
    axes[1].set(title="by position", xlabel="position (tokens)", ylabel="mean non-zeros")
    style.log_axis(axes[1].xaxis)
    if len(positions) and positions["mean"].min() > 0:
        style.log_axis(axes[1].yaxis)
    axes[2].barh(range(len(tokens)), tokens["mean"], color=style.CATEGORIES[1], hatch="////", edgecolor="white")
    axes[2].set_yticks(range(len(tokens)), tokens["text"], fontsize=6, family="DejaVu Sans Mono")
    axes[2].grid(visible=False, axis="y")
    axes[2].set(title="by token", xlabel="mean non-zeros")
    return picture


def interactive(results: Results, show: Callable[[object], None]) -> None:
    """In a notebook: the panels of the last run, as a picture that stays when the notebook is read without a kernel,
    and under it the same with controls for run and layer. `show` is IPython's `display`."""
    import ipywidgets  # only notebooks need it

    try:
        items = runs(results)
    except LookupError as absent:
        show(str(absent))
        return
    last = list(items.values())[-1]
    show(draw(results, last))
    run = ipywidgets.Dropdown(options=items, value=last, description="run")
    layer = ipywidgets.Dropdown(options=_layer_choices(results, last), description="layer")
    run.observe(lambda change: setattr(layer, "options", _layer_choices(results, change["new"])), names="value")
    picture = ipywidgets.HTML()

    def redraw(_: object = None) -> None:
        picture.value = draw(results, run.value, layer.value)._repr_html_()

    for control in (run, layer):
        control.observe(redraw, names="value")
    redraw()
    show(ipywidgets.VBox([ipywidgets.HBox([run, layer]), picture]))


def _layer_choices(results: Results, item: Item) -> list[tuple[str, int | None]]:
    return [("all", None), *((str(layer), layer) for layer in layers(results, item))]


def page_data(results: Results) -> list[dict]:
    """The panels of every run and layer as plain lists, rounded, for the page's explorer."""
    try:
        items = runs(results)
    except LookupError:
        return []
    return [
        {
            "label": label,
            "layers": [_plain(results, item, layer) for layer in (None, *layers(results, item))],
        }
        for label, item in items.items()
    ]


def _plain(results: Results, item: Item, layer: int | None) -> dict:
    data = panels(results, item, layer)
    return {
        "name": "all layers" if layer is None else f"layer {layer}",
        "histogram": _pairs(data["histogram"], "nonzeros", "share"),
        "positions": _pairs(data["positions"], "position", "mean"),
        "tokens": _pairs(data["tokens"], "text", "mean"),
    }


def _pairs(frame: pd.DataFrame, first: str, second: str) -> list[list]:
    return [[a, float(f"{b:.4g}")] for a, b in zip(frame[first].tolist(), frame[second].tolist(), strict=True)]
