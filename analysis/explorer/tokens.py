"""Tokens and their non-zeros: search, running text in colour, and classes of tokens."""

from __future__ import annotations

import re

import altair as alt
import pandas as pd

from analysis.explorer import masks
from analysis.explorer.chart import MONO, Sketch, choice, layer_choice, nested, records, search_box, short, view
from analysis.explorer.runs import ALL_LAYERS, about, initial, layer_name, of_run
from analysis.figures import style
from analysis.figures.tokens import RAREST, readable
from analysis.load import Results

LISTED = 30  # tokens of the search
READ = 380  # tokens of the running text
LINE = 96  # characters
LEAST_SHARE = 0.1  # percent of the tokens: rarer classes are left out
CHARACTER, ROW = 7.4, 19  # pixels
LEAST, MOST, FREQUENT = "most non-zeros first", "fewest non-zeros first", "most frequent first"

# English words of the closed classes: articles, pronouns, prepositions, conjunctions, auxiliaries, particles.
_WORDS = """
    a about above across after against all along also although am among an and another any are around as at be because
    been before behind being below beneath beside between beyond both but by can could did do does doing down during
    each either every few for from had has have having he her hers him his how however i if in into is it its itself may
    me might mine more most much must my neither no nor not of off on once one only onto or other our ours out over own
    same shall she should since so some such than that the their theirs them themselves then there these they this those
    through to too toward under until up upon us very was we were what when where whether which while who whom whose why
    will with within without would yet you your yours"""
FUNCTION_WORDS = frozenset(_WORDS.split())
CLASSES = (
    "special token", "line break, indentation", "number", "punctuation", "function word", "word, capitalised", "word",
    "part of a word", "other script",
)  # fmt: skip


def class_of(text: str) -> str:
    """The class of a token, one of CLASSES, from its text alone, without a leading space."""
    bare = text.strip(" ")
    if re.fullmatch(r"<[|/]?\w+[|]?>|\[[A-Z]+\]", bare):
        return "special token"
    if not text.strip():
        return "line break, indentation"
    if re.fullmatch(r"[\d.,]*\d[\d.,]*", bare):
        return "number"
    letters = re.sub(r"[\W\d_]", "", bare)
    if not letters:
        return "punctuation"
    if not letters.isascii():
        return "other script"
    if not text.startswith((" ", "\n", "\t")) and not letters[0].isupper():
        return "part of a word"
    if bare.lower() in FUNCTION_WORDS:
        return "function word"
    return "word, capitalised" if letters[0].isupper() else "word"


@view("explorer-search", "Tokens by their non-zeros", "by_token")
def search(results: Results, runs: pd.DataFrame) -> Sketch:
    table, layers = _tokens_of(results, runs)
    token = table["text"].map(readable) + " (" + table["token_id"].astype(str) + ")"
    columns = {"run": table["label"], "token": token, "count": table["count"], "values": table["values"]}
    order = choice("order", [LEAST, MOST, FREQUENT])
    chart = (
        alt.Chart(nested(pd.DataFrame(columns), "run"), width=480, height=alt.Step(14))
        .transform_filter("datum.run === run")
        .transform_flatten(["token", "count", "values"])
        .transform_filter("indexof(lower(replace(datum.token, /␣/g, ' ')), lower(find)) >= 0")
        .transform_calculate(mean=_value(layers))
        .transform_filter("isValid(datum.mean)")
        .transform_calculate(key=f"order === '{LEAST}' ? -datum.mean : order === '{MOST}' ? datum.mean : -datum.count")
        .transform_window(place="row_number()", sort=[alt.SortField("key"), alt.SortField("token")])
        .transform_filter(f"datum.place <= {LISTED}")
        .mark_bar(color=style.CATEGORIES[0])
        .encode(
            x=alt.X("mean:Q", title="mean non-zeros (neurons/token)"),
            y=alt.Y("token:N", sort=alt.EncodingSortField("place"), title=None, axis=alt.Axis(labelFont=MONO)),
            tooltip=["token:N", "mean:Q", alt.Tooltip("count:Q", title="occurrences", format=",")],
        )
        .add_params(search_box("token contains"), order, *_choices(results, runs, layers))
    )
    caption = (
        f"The first {LISTED} tokens that contain the typed text, with their ids; ␣ is a space. Means over a token's "
        f"occurrences, for tokens with a frequency of at least 1/2^14. {about(results, runs)}"
    )
    return Sketch(chart, caption)


@view("explorer-text", "Running text, coloured by non-zeros", "masks", "by_neuron")
def reading(results: Results, runs: pd.DataFrame) -> Sketch:
    neurons = of_run(results, "by_neuron", runs).groupby(["label", "layer"]).size()
    parts, layers = [], {}
    for label, table in of_run(results, "masks", runs).groupby("label", sort=False):
        table = table.sort_values("index", kind="stable").head(READ)
        own = masks.layers_of(table)
        layers[label] = len(own)
        counts = [masks.unpack_masks(table, layer, neurons[label, layer]).sum(1) for layer in own]
        means = sum(counts) / len(counts)
        values = pd.Series([[short(mean), *map(int, one)] for mean, *one in zip(means, *counts, strict=True)])
        part = _laid_out(table["text"])
        token = part.pop("token")
        told = {"position": table["position"].to_numpy()[token] + 1, "values": values[token].to_numpy()}
        parts.append(part.assign(run=label, **told))
    data = pd.concat(parts, ignore_index=True)
    lines = int(data["line"].max()) + 1
    base = (
        alt.Chart(nested(data, "run"))
        .transform_filter("datum.run === run")
        .transform_flatten([name for name in data if name != "run"])
        .transform_calculate(below="datum.line + 1")
        .transform_calculate(count=_value(layers))
        .encode(
            y=alt.Y("line:Q", scale=alt.Scale(domain=[0, lines], reverse=True, nice=False, zero=False), axis=None),
            tooltip=[alt.Tooltip("shown:N", title="token"), alt.Tooltip("count:Q", title="non-zeros"), "position:Q"],
        )
    )
    x = alt.X("column:Q", scale=alt.Scale(domain=[0, LINE], nice=False), axis=None)
    boxes = base.mark_rect(strokeWidth=2).encode(
        x=x, x2="end:Q", y2="below:Q",
        color=alt.Color("count:Q", scale=alt.Scale(scheme={"name": "oranges", "extent": [0.0, 0.8]}),
                        title="non-zeros", legend=alt.Legend(orient="top", gradientLength=300)),
        stroke=alt.condition(f"find !== '' && indexof(lower(datum.shown), {_AS_SHOWN}) >= 0",
                             alt.value("#0072b2"), alt.value("white")),
    )  # fmt: skip
    # Vega strips leading white space: draw the text from its first letter on.
    texts = base.mark_text(align="left", baseline="middle", font=MONO, fontSize=11).transform_calculate(
        middle="datum.line + 0.5",
        start="datum.column + length(datum.shown) - length(replace(datum.shown, regexp('^\u00a0+'), ''))",
    )
    texts = texts.encode(x=alt.X("start:Q", axis=None), y=alt.Y("middle:Q", axis=None), text="shown:N")
    chart = (boxes + texts).properties(width=LINE * CHARACTER, height=lines * ROW)
    chart = chart.add_params(search_box("frame tokens with"), *_choices(results, runs, layers))
    caption = f"The first {READ} held-out tokens; ⏎ ends a line. All layers: the mean over layers."
    return Sketch(chart, caption)


@view("explorer-classes", "Non-zeros by class of token", "by_token")
def classes(results: Results, runs: pd.DataFrame) -> Sketch:
    table, layers = _tokens_of(results, runs)
    table = table.assign(kind=table["text"].map(class_of))
    rows = []
    for (label, kind), of_kind in table.groupby(["label", "kind"], sort=False):
        weights = of_kind["count"].to_numpy()
        known = [list(column) for column in zip(*of_kind["values"], strict=True)]
        values = [short(sum(w * v for w, v in zip(weights, one, strict=True)) / weights.sum()) for one in known]
        total = table.loc[table["label"] == label, "count"].sum()
        examples = " ".join(of_kind.sort_values("count", ascending=False)["text"].head(6).map(readable))
        share = 100 * weights.sum() / total
        if share >= LEAST_SHARE:
            rows.append({"run": label, "kind": kind, "values": values, "share": share, "examples": examples})
    base = (
        alt.Chart(records(pd.DataFrame(rows)), height=230)
        .transform_filter("datum.run === run")
        .transform_calculate(mean=_value(layers))
        .mark_bar(color=style.CATEGORIES[0])
        .encode(
            y=alt.Y("kind:N", sort=list(CLASSES), title=None),
            tooltip=["kind:N", "mean:Q", alt.Tooltip("share:Q", title="of the tokens (%)"), "examples:N"],
        )
    )
    left = base.encode(x=alt.X("mean:Q", title="mean non-zeros (neurons/token)")).properties(width=330)
    right = base.encode(x=alt.X("share:Q", title="of the tokens (%)"), color=alt.value("#9aa0a6"))
    right = right.encode(y=alt.Y("kind:N", sort=list(CLASSES), title=None, axis=None)).properties(width=210)
    chart = (left | right).add_params(*_choices(results, runs, layers))
    caption = (
        "Classes are assigned from the token's text alone (function words: closed classes of English, such as articles "
        "and prepositions) and weighted by occurrences, for tokens with a frequency of at least 1/2^14. "
        f"{about(results, runs)}"
    )
    return Sketch(chart, caption)


def _tokens_of(results: Results, runs: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, int]]:
    """The runs' frequent tokens, with `values` (the mean over layers, then each layer), and each run's number of
    layers."""
    table = of_run(results, "by_token", runs)
    table = table[table["frequency"] >= RAREST].reset_index(drop=True)
    parts, layers = [], {}
    for label, of_label in table.groupby("label", sort=False):
        own = masks.layers_of(of_label)
        layers[label] = len(own)
        columns = ["mean", *(f"layer_{layer}" for layer in own)]
        values = [[short(value) for value in row] for row in of_label[columns].to_numpy()]
        parts.append(of_label.assign(values=pd.Series(values, index=of_label.index)))
    return pd.concat(parts, ignore_index=True), layers


def _choices(results: Results, runs: pd.DataFrame, layers: dict[str, int]) -> tuple[alt.Parameter, alt.Parameter]:
    """`layers`: their number for each run."""
    first = initial(results, runs)
    one = layer_choice(range(max(layers.values())), range(layers[first]), ALL_LAYERS)
    return choice("run", runs["label"], first), one


def _value(layers: dict[str, int]) -> str:
    """The Vega expression that selects the chosen layer's value from `values`."""
    names = [ALL_LAYERS, *map(layer_name, range(max(layers.values())))]
    return f"datum.values[indexof({names!r}, layer)]"


def _laid_out(texts: pd.Series) -> pd.DataFrame:
    """The layout of tokens on lines of at most LINE characters: token (index), shown, line, column, end. A token
    that continues after a line break has several rows."""
    rows, line, column = [], 0, 0
    for token, text in enumerate(texts):
        pieces = [f"{piece}\n" for piece in text.split("\n")]
        pieces[-1] = pieces[-1][:-1]
        for piece in pieces if len(pieces) == 1 or pieces[-1] else pieces[:-1]:
            shown = "".join(_SHOWN.get(c, c if c.isprintable() else "·") for c in piece)
            shown = (shown if len(shown) <= 40 else f"{shown[:39]}…") or "∅"
            if column and column + len(shown) > LINE:
                line, column = line + 1, 0
            end = min(column + len(shown), LINE)
            rows.append({"token": token, "shown": shown, "line": line, "column": column, "end": end})
            line, column = (line + 1, 0) if piece.endswith("\n") else (line, end)
    return pd.DataFrame(rows)


# Vega would collapse several plain spaces into one.
_SHOWN = {"\n": "⏎", "\t": "→", " ": "\u00a0"}
_AS_SHOWN = "replace(lower(find), regexp(' ', 'g'), '\u00a0')"  # Vega: what is typed, with its spaces so
