"""Makes tables of the counters of activity: the parquet files that figures are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas
import torch

from experiments.nonzeros.counters import LayerActivity, MaskRecorder

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


def tables(
    layers: Sequence[LayerActivity], token_count_V: torch.Tensor, decode: Callable[[int], str], recorder: MaskRecorder
) -> dict[str, pandas.DataFrame]:
    """by_layer, by_neuron, histogram, by_position, by_token and unions; masks, if any were kept.

    Args:
        token_count_V: int64, how often each token was read.
        decode: token id -> its text.
    """
    masks = _masks(recorder, decode)
    return {
        "by_layer": _by_layer(layers),
        "by_neuron": _by_neuron(layers),
        "histogram": _histogram(layers),
        "by_position": _by_position(layers),
        "by_token": _by_token(layers, token_count_V, decode),
        "unions": _unions(layers),
        **({"masks": masks} if len(masks) else {}),
    }


def _by_layer(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    rows = []
    for index, layer in enumerate(layers):
        quantiles = zip(QUANTILES, layer.quantiles(QUANTILES), strict=True)
        rows.append(
            {
                "layer": index,
                "neurons": len(layer.fired_N),
                "tokens": layer.tokens,
                "mean": layer.mean(),
                "max": layer.maximum(),
                **{f"p{100 * share:g}": value for share, value in quantiles},
                "silent_fraction": layer.silent_fraction(),
                "hot_share": layer.hot_share(),
            }
        )
    return pandas.DataFrame(rows)


def _by_neuron(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    """Share of the tokens for which each neuron fires."""
    return _together(
        {"neuron": range(len(layer.fired_N)), "rate": layer.fired_N.cpu().double() / layer.tokens} for layer in layers
    )


def _together(columns: Iterable[dict[str, Any]]) -> pandas.DataFrame:
    """One table of the columns of each layer, in layer order."""
    parts = [pandas.DataFrame({"layer": index, **of_layer}) for index, of_layer in enumerate(columns)]
    return pandas.concat(parts, ignore_index=True)


def _histogram(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    """Tokens by their number of non-zeros; counts that no token has are left out."""
    counts = [layer.histogram_N1.cpu() for layer in layers]
    return _together({"nonzeros": count.nonzero()[:, 0], "tokens": count[count > 0]} for count in counts)


def _by_position(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    """Mean non-zeros at each position that was read."""
    sums = [(layer.position_S.cpu(), layer.position_tokens_S.cpu()) for layer in layers]
    return _together(
        {"position": range(len(tokens_S)), "mean": sum_S.double() / tokens_S, "tokens": tokens_S}
        for sum_S, tokens_S in sums
    ).query("tokens > 0")


def _by_token(
    layers: Sequence[LayerActivity], token_count_V: torch.Tensor, decode: Callable[[int], str]
) -> pandas.DataFrame:
    """Every token that was read: mean non-zeros over its occurrences, averaged over layers and of each layer."""
    (ids,) = token_count_V.nonzero(as_tuple=True)
    count = token_count_V[ids]
    means = {f"layer_{i}": (layer.token_V.cpu()[ids].double() / count).numpy() for i, layer in enumerate(layers)}
    columns = {
        "token_id": ids,
        "text": [decode(token) for token in ids.tolist()],
        "count": count,
        "frequency": count.double() / int(token_count_V.sum()),
        "mean": sum(means.values()) / len(means),
    }
    return pandas.DataFrame({**columns, **means})


def _unions(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    rows = [
        {"layer": index, "group": group, "mean": mean, "fraction": mean / len(layer.fired_N)}
        for index, layer in enumerate(layers)
        for group, mean in layer.unions().items()
    ]
    return pandas.DataFrame(rows, columns=["layer", "group", "mean", "fraction"])


def _masks(recorder: MaskRecorder, decode: Callable[[int], str]) -> pandas.DataFrame:
    """The first tokens of the text in order, each with its bit-packed neurons of every layer (layer_<i>, bytes)."""
    ids, positions = recorder.tokens()
    table = pandas.DataFrame(
        {
            "index": range(len(ids)),
            "token_id": ids,
            "text": [decode(token) for token in ids.tolist()],
            "position": positions,
        }
    )
    for layer, packed_TB in recorder.masks().items():
        table[f"layer_{layer}"] = [row.tobytes() for row in packed_TB]
    return table
