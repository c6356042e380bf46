"""Computes from saved masks which neurons fire together, in plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

# Correlations of neurons that fire more rarely than RAREST or more often than MOST_FREQUENT mean nothing.
RAREST, MOST_FREQUENT = 0.01, 0.9


def layers_of(table: pd.DataFrame) -> list[int]:
    """The layers of one run's masks, in ascending order."""
    names = [name for name in table if name.startswith("layer_") and table[name].notna().all()]
    return sorted(int(name.removeprefix("layer_")) for name in names)


def unpack_masks(table: pd.DataFrame, layer: int, neurons: int | None = None) -> np.ndarray:
    """Which neurons of a layer fire for each token: bool [tokens, neurons].

    Args:
        table: the table `masks` of one run, or some of its tokens.
        neurons: N; without it, N rounded up to a multiple of 8.
    """
    if table.empty:
        return np.zeros((0, neurons or 0), dtype=bool)
    packed_TB = np.frombuffer(b"".join(table[f"layer_{layer}"]), dtype=np.uint8).reshape(len(table), -1)
    return np.unpackbits(packed_TB, axis=1, count=neurons).astype(bool)


def correlation(mask_TN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The neurons with firing rates between RAREST and MOST_FREQUENT: their indices [n], and the correlation of firing
    over tokens for each pair (Pearson's r of 0 and 1, also called phi), float64 [n, n], 0 on the diagonal."""
    rate_N = mask_TN.mean(0)
    (index_n,) = np.nonzero((rate_N >= RAREST) & (rate_N <= MOST_FREQUENT))
    active_Tn = mask_TN[:, index_n].astype(np.float32)
    rate_n = active_Tn.mean(0, dtype=np.float64)
    both_nn = (active_Tn.T @ active_Tn) / max(len(active_Tn), 1)
    deviation_n = np.sqrt(rate_n * (1 - rate_n))
    phi_nn = (both_nn - np.outer(rate_n, rate_n)) / np.outer(deviation_n, deviation_n)
    np.fill_diagonal(phi_nn, 0)
    return index_n, phi_nn


def strongest(phi_nn: np.ndarray, count: int) -> np.ndarray:
    """The (up to) `count` rows of `phi_nn` with the largest maxima, ordered so that neurons that fire together are
    neighbours: by the second eigenvector of the graph Laplacian (Fiedler)."""
    if not len(phi_nn):
        return np.zeros(0, dtype=np.int64)
    chosen = np.sort(np.argsort(-phi_nn.max(1), kind="stable")[:count])
    weights = np.clip(phi_nn[np.ix_(chosen, chosen)], 0, None) + 1e-6
    np.fill_diagonal(weights, 0)
    _, vectors = np.linalg.eigh(np.diag(weights.sum(1)) - weights)
    fiedler = vectors[:, min(1, len(chosen) - 1)]
    # The sign of an eigenvector is arbitrary: make its largest entry positive, so that the order is reproducible.
    fiedler = fiedler * np.sign(fiedler[np.abs(fiedler).argmax()] or 1)
    return chosen[np.argsort(fiedler.round(9), kind="stable")]


def overlap(mask_TN: np.ndarray, position_T: np.ndarray, distances: Sequence[int]) -> dict[int, float]:
    """By distance, the mean Jaccard overlap of the active neurons of two tokens of one sequence so far apart; by 0,
    that of tokens from distant parts of the text (chance). Pairs without active neurons are left out, and distances
    without pairs."""
    bits_TB = np.packbits(mask_TN, axis=1)
    found = {0: _jaccard(bits_TB, np.roll(bits_TB, len(bits_TB) // 2, axis=0))}
    for distance in distances:
        same = position_T[distance:] == position_T[:-distance] + distance
        found[distance] = _jaccard(bits_TB[:-distance][same], bits_TB[distance:][same])
    return {distance: value for distance, value in found.items() if value is not None}


def _jaccard(first_TB: np.ndarray, second_TB: np.ndarray) -> float | None:
    either_T = np.bitwise_count(first_TB | second_TB).sum(1)
    both_T = np.bitwise_count(first_TB & second_TB).sum(1)[either_T > 0]
    return float((both_T / either_T[either_T > 0]).mean()) if len(both_T) else None
