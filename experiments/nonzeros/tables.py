"""Makes tables of the counters of activity: the parquet files that figures are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    rates = [layer.fired_N.cpu().double() / layer.tokens for layer in layers]
    parts = [
        pandas.DataFrame({"layer": index, "neuron": range(len(rate_N)), "rate": rate_N})
        for index, rate_N in enumerate(rates)
    ]
    return pandas.concat(parts, ignore_index=True)


def _histogram(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    """Tokens by their number of non-zeros; counts that no token has are left out."""
    parts = []
    for index, layer in enumerate(layers):
        tokens_N1 = layer.histogram_N1.cpu()
        (nonzeros,) = tokens_N1.nonzero(as_tuple=True)
        parts.append(pandas.DataFrame({"layer": index, "nonzeros": nonzeros, "tokens": tokens_N1[nonzeros]}))
    return pandas.concat(parts, ignore_index=True)


def _by_position(layers: Sequence[LayerActivity]) -> pandas.DataFrame:
    parts = []
    for index, layer in enumerate(layers):
        sums_S, tokens_S = layer.position_S.cpu(), layer.position_tokens_S.cpu()
        read = tokens_S > 0
        mean = sums_S[read].double() / tokens_S[read]
        (position,) = read.nonzero(as_tuple=True)
        columns = {"layer": index, "position": position, "mean": mean, "tokens": tokens_S[read]}
        parts.append(pandas.DataFrame(columns))
    return pandas.concat(parts, ignore_index=True)


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
