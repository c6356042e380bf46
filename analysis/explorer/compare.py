"""Two runs side by side."""

from __future__ import annotations

import contextlib
from typing import Any

import altair as alt
import pandas as pd

from analysis.choose import where
from analysis.explorer.chart import Sketch, choice, layer_choice, nested, records, short, view, zoom
from analysis.explorer.nonzeros import DETAILS, NONZEROS, every_layer, histogram_of, positions_of
from analysis.explorer.runs import RUN, about, gathered, in_most_tables, initial, of_first_model, of_run
from analysis.figures import style
from analysis.figures.drawn import NotMeasured
from analysis.figures.tokens import RAREST, readable
from analysis.load import Results

TOKENS = 600  # the most frequent ones
SIZE: dict[str, Any] = {"width": 330, "height": 240}
EITHER = "datum.run === first || datum.run === second"


@view("explorer-two-runs", "Two runs side by side", "by_layer")
def two_runs(results: Results, runs: pd.DataFrame) -> Sketch:
    names = list(runs["label"])
    panels = []
    for draw in (_by_layer, _positions, _histogram, _scatter):
        with contextlib.suppress(NotMeasured):
            panels.append(draw(results, runs))
    rows = [alt.hconcat(*panels[at : at + 2]) for at in range(0, len(panels), 2)]
    # Of the first model: the run without L1 (of several, the one in the most tables), and the recommended one.
    first = second = initial(results, runs)
    others = of_first_model(runs)
    if len(others := others[others["label"] != second]):
        first = in_most_tables(results, others)
    chart = alt.vconcat(*rows).resolve_scale(color="shared")
    chart = chart.add_params(choice("first", names, first, "first run"), choice("second", names, second, "second run"))
    caption = (
        f"Blue: the first run, orange: the second. Token by token: the {TOKENS} most frequent tokens, for runs of one "
        f"tokenizer. {about(results, runs)}"
    )
    return Sketch(chart, caption, ("first + ' and ' + second",))


def _lines(data: pd.DataFrame, title: str, name: str, x: Any, y: Any, tooltip: list[Any], *keys: str) -> Any:
    """`keys`: those of `nested` besides the run."""
    colour = alt.Color(
        "side:N", scale=alt.Scale(domain=["first", "second"], range=list(style.CATEGORIES[:2])), title="run",
        legend=alt.Legend(orient="bottom"),
    )  # fmt: skip
    return (
        alt.Chart(nested(data, "run", *keys), title=title, **SIZE)
        .transform_filter(EITHER)
        .transform_flatten([column for column in data if column not in ("run", *keys)])
        .transform_calculate(side="datum.run === first ? 'first' : 'second'")
        .mark_line(point={"size": 18})
        .encode(x=x, y=y, color=colour, tooltip=["run:N", *tooltip])
        .add_params(zoom(name))
    )


def _by_layer(results: Results, runs: pd.DataFrame) -> Any:
    table = of_run(results, "by_layer", runs).rename(columns={"label": "run"})
    shown = [name for name in DETAILS if name in table]
    tooltip = ["layer:Q", "mean:Q", *(alt.Tooltip(f"{name}:Q", title=DETAILS[name]) for name in shown)]
    x = alt.X("layer:Q", axis=alt.Axis(tickMinStep=1, format="d"))
    y = alt.Y("mean:Q", scale=alt.Scale(type="log"), title="mean non-zeros (log)")
    return _lines(
        table.loc[table["mean"] > 0, ["run", "layer", "mean", *shown]], "by layer", "layer_zoom", x, y, tooltip
    )


def _positions(results: Results, runs: pd.DataFrame) -> Any:
    groups = _table(results, runs, "by_position").groupby("label", sort=False)
    data = pd.concat([positions_of(of_label).assign(run=label) for label, of_label in groups], ignore_index=True)
    x = alt.X("position:Q", scale=alt.Scale(type="log", nice=False), title="position (tokens, log)")
    y = alt.Y("mean:Q", scale=alt.Scale(type="log"), title="mean non-zeros, all layers (log)")
    return _lines(data[data["mean"] > 0], "by position", "place_zoom", x, y, ["position:Q", "mean:Q"])


def _histogram(results: Results, runs: pd.DataFrame) -> Any:
    table = _table(results, runs, "histogram")
    data = every_layer(table, histogram_of)
    data["middle"] = (data["low"] + data["high"] - 1) / 2
    # The share in a bin depends on the bin's width, and each run has its own bins: the mean of the counts in it.
    data["density"] = data["share"] / (data["high"] - data["low"])
    x = alt.X("middle:Q", title=NONZEROS)
    y = alt.Y("density:Q", scale=alt.Scale(type="log"), title="tokens (% for each count, log)")
    data, tooltip = data[data["density"] > 0], ["low:Q", "high:Q", "density:Q"]
    lines = _lines(data, "over tokens, in the chosen layer", "count_zoom", x, y, tooltip, "layer")
    layers = layer_choice(table["layer"], where(table, label=table["label"].iloc[0])["layer"])
    return lines.transform_filter("datum.layer === layer").add_params(layers)


def _table(results: Results, runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """`of_run` of a table that may lack some of the runs. Raises `NotMeasured` if it lacks all of them."""
    known = runs.merge(gathered(results, name)[RUN], on=RUN)
    if known.empty:
        raise NotMeasured(f"nonzeros_{name}.parquet of these runs")
    return of_run(results, name, known)


def _scatter(results: Results, runs: pd.DataFrame) -> Any:
    tokens = _tokens(results, runs)
    known = records(pd.DataFrame({"known": [sorted({run for means in tokens["means"] for run in means})]}))
    absent = (
        alt.Chart(known)
        .transform_filter("indexof(datum.known, first) < 0 || indexof(datum.known, second) < 0")
        .mark_text(color=style.MUTED)
        .encode(x=alt.value(165), y=alt.value(120), text=alt.value("not gathered for both of these runs"))
    )
    points = (
        alt.Chart(records(tokens), title="token by token, mean over layers", **SIZE)
        .transform_calculate(x="datum.means[first]", y="datum.means[second]")
        .transform_filter("isValid(datum.x) && isValid(datum.y)")
        .mark_circle(size=26, opacity=0.55, color=style.CATEGORIES[2])
        .encode(
            x=alt.X("x:Q", title="non-zeros in the first run"),
            y=alt.Y("y:Q", title="non-zeros in the second run"),
            tooltip=["token:N", alt.Tooltip("x:Q", title="first"), alt.Tooltip("y:Q", title="second"), "frequency:Q"],
        )
        .add_params(zoom("token_zoom"))
    )
    return points + absent


def _tokens(results: Results, runs: pd.DataFrame) -> pd.DataFrame:
    """One line for each token: its text, and `means`, a mapping of runs to mean non-zeros."""
    table = _table(results, runs, "by_token")
    table = table[table["frequency"] >= RAREST]
    key = ["token_id", "text"]
    frequent = table.groupby(key)["frequency"].max().nlargest(TOKENS).reset_index()
    rows = []
    table = table.drop(columns="frequency").merge(frequent, on=key)
    for (_, text, frequency), of_token in table.groupby([*key, "frequency"]):
        means = {label: short(mean) for label, mean in zip(of_token["label"], of_token["mean"], strict=True)}
        rows.append({"token": readable(text), "frequency": frequency, "means": means})
    return pd.DataFrame(rows)
