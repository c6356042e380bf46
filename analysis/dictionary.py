"""The data dictionary: every table of a folder of results, with what a row is, and the type, unit and meaning of each
column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from analysis import render, schema


class Column(NamedTuple):
    """A column; `name` may stand for several: `layer_<i>`."""

    name: str
    kind: str
    unit: str
    meaning: str


class Table(NamedTuple):
    """A table of a folder of results: its file, what one of its rows is, and its columns."""

    file: str
    row: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """The names of its columns, without those that stand for several."""
        return [column.name for column in self.columns if "<" not in column.name]


PACKING = (
    "A mask has one bit for each neuron, 1 where it fires for the token; `numpy.packbits` made its bytes, so that the "
    "first neuron is the highest bit of the first byte, and the last byte ends in zeros where N is no multiple of 8. "
    "`analysis.explorer.unpack_masks(table, layer, neurons)` returns them as booleans [tokens, neurons]. `table` is "
    "that of one run, and `neurons` its column `neurons` in `nonzeros_by_layer`."
)

_SHARE, _MEAN = "fraction", "neurons/token"
_UNITS = {
    "tokens": "tokens", "tokens_trained": "tokens",
    "tokens_per_parameter": "tokens/parameter", "prompt_tokens": "tokens", "batch": "sequences", "hidden": "neurons",
    "intermediate": "neurons", "hot": "neurons", "silent": "neurons", "screened": "neurons", "backup": _SHARE,
    "mean_nnz": _MEAN, "step": "optimizer steps", "value": "column unit", "low": "column unit", "high": "column unit",
}  # fmt: skip
_QUANTILES = ("1", "5", "25", "50", "75", "95", "99", "99.9")


def _described(*names: str) -> tuple[Column, ...]:
    known = {column.name: column for column in schema.COLUMNS}
    return tuple(Column(name, known[name].kind, _UNITS.get(name, ""), known[name].meaning) for name in names)


_RUN = _described("study", "item", "model", "l1")
_LAYER = _described("layer")[0]._replace(meaning="index of the layer, from 0")
_STEP = _described("step")[0]._replace(meaning="optimizer step, from 1")
_TOKEN_ID = Column("token_id", "int", "", "id in the vocabulary of the model's tokenizer")
_TEXT = Column("text", "str", "", "the token as text")
_NEURON = Column("neuron", "int", "", "index of the neuron in the layer, from 0")


TABLES: Mapping[str, Table] = {
    "rows": Table("rows.csv", "one measurement", _described(*schema.NAMES)),
    "settings": Table(
        "settings.csv", "one option of a training",
        (
            *_described("study", "item"),
            Column("key", "str", "", "the option's name, as in a configuration: training.sequence_length"),
            Column("value", "str", "", "its value as text"),
        ),
    ),
    "curves": Table(
        "curves.parquet", "one logged number of a training",
        (
            *_described("study", "item", "model", "l1", "activation", "gated", "modification"), _STEP,
            Column("tokens", "int", "tokens", "training tokens up to this step"),
            _LAYER._replace(meaning="index of the layer, from 0; empty for the whole model"),
            Column("metric", "str", "", "what was logged: cross_entropy, nonzeros, learning_rate, ..."),
            Column("value", "float", "", "the number"),
        ),
    ),
    "by_layer": Table(
        "nonzeros_by_layer.parquet", "one layer of one run",
        (
            *_RUN, _LAYER, Column("neurons", "int", "neurons", "N: neurons of the layer"),
            Column("tokens", "int", "tokens", "held-out tokens that were read"),
            Column("mean", "float", _MEAN, "mean non-zeros per token"),
            Column("max", "int", _MEAN, "non-zeros of the token with the most"),
            *(Column(f"p{q}", "int", _MEAN, f"percentile {q} of the non-zeros over tokens") for q in _QUANTILES),
            Column("silent_fraction", "float", _SHARE, "neurons that fired for none of the tokens"),
            Column("hot_share", "float", _SHARE, "share of all non-zeros in the most active tenth of the neurons"),
        ),
    ),
    "by_neuron": Table(
        "nonzeros_by_neuron.parquet", "one neuron of one layer of one run",
        (*_RUN, _LAYER, _NEURON, Column("rate", "float", _SHARE, "share of the tokens for which the neuron fires")),
    ),
    "histogram": Table(
        "nonzeros_histogram.parquet", "one number of non-zeros that some token has in a layer",
        (
            *_RUN, _LAYER, Column("nonzeros", "int", _MEAN, "this number"),
            Column("tokens", "int", "tokens", "tokens with exactly this number"),
        ),
    ),
    "by_position": Table(
        "nonzeros_by_position.parquet", "one position in the sequence, in one layer",
        (
            *_RUN, _LAYER, Column("position", "int", "tokens", "position in the sequence, from 0"),
            Column("mean", "float", _MEAN, "mean non-zeros of the tokens there"),
            Column("tokens", "int", "tokens", "how many tokens were there"),
        ),
    ),
    "by_token": Table(
        "nonzeros_by_token.parquet", "one token of the vocabulary",
        (
            *_RUN, _TOKEN_ID, _TEXT, Column("count", "int", "tokens", "how often it occurred"),
            Column("frequency", "float", _SHARE, "its share of the text; built folders hold tokens from 1/2^14 on"),
            Column("mean", "float", _MEAN, "mean non-zeros over its occurrences and over layers"),
            Column("layer_<i>", "float", _MEAN, "the same in layer i"),
        ),
    ),
    "unions": Table(
        "nonzeros_unions.parquet", "one size of a group of consecutive tokens, in one layer",
        (
            *_RUN, _LAYER, Column("group", "int", "tokens", "tokens in the group"),
            Column("mean", "float", "neurons/group", "neurons that any token of the group activates"),
            Column("fraction", "float", _SHARE, "the same over N"),
        ),
    ),
    "masks": Table(
        "nonzeros_masks.parquet", "one token of the beginning of the text, in the text's order",
        (
            *_RUN, Column("index", "int", "", "place of the token in the text, from 0"), _TOKEN_ID, _TEXT,
            Column("position", "int", "tokens", "its position in the sequence, from 0"),
            Column("layer_<i>", "bytes", "bits", "the mask of layer i, packed; empty for a run without this layer"),
        ),
    ),
    "in_training": Table(
        "nonzeros_in_training.parquet", "one neuron at one recorded step of a training",
        (
            *_RUN, _STEP._replace(meaning="optimizer step: the powers of two, and the last one"),
            Column("tokens", "int", "tokens", "held-out tokens that were read, the same at every step"),
            _LAYER, _NEURON,
            Column("rate", "float", _SHARE, "share of these tokens for which the neuron fires"),
        ),
    ),
}  # fmt: skip


def markdown() -> str:
    """Every table of a folder of results, and the metrics of its rows, as a page."""
    parts = ["# Data dictionary\n", "The tables of a folder of results, such as `paper_figures/h200`.\n"]
    for name, table in TABLES.items():
        parts += [f"## {table.file}\n", f"One row: {table.row}.\n"]
        parts += [f"{PACKING}\n"] if name == "masks" else []
        parts.append(render.markdown(pd.DataFrame(table.columns, columns=["column", "type", "unit", "meaning"])))
        if name == "rows":
            metrics = [(f"`{metric}`", about.unit, about.meaning) for metric, about in schema.METRICS.items()]
            operations = [(f"`{op}`", meaning) for op, meaning in schema.OPS.items()]
            backends = [(f"`{backend}`", meaning) for backend, meaning in schema.BACKENDS.items()]
            plans = [(f"`{plan}`", schema.WORDS[plan], meaning) for plan, meaning in schema.PLANS.items()]
            parts += [
                "Metrics, the column `metric`:\n",
                render.markdown(pd.DataFrame(metrics, columns=["metric", "unit", "meaning"])),
                "Operations, the column `op`:\n",
                render.markdown(pd.DataFrame(operations, columns=["op", "meaning"])),
                "Backends, the columns `backend` and `baseline`:\n",
                render.markdown(pd.DataFrame(backends, columns=["backend", "meaning"])),
                "Plans, the column `plan`, with their words in tables and figures:\n",
                render.markdown(pd.DataFrame(plans, columns=["plan", "word", "meaning"])),
            ]
    return "\n".join(parts)
