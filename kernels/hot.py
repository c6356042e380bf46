"""Hot neurons: those that fire so often that dense products are cheaper for them than a sparse backend.

Firing rates differ by orders of magnitude, so that a few neurons have a large share of the non-zeros. A sparse backend
pays for each non-zero, a dense product for each neuron: a neuron should be hot if its rate is above the ratio of
the two. The result is exact whatever neurons are chosen (`hot_split.py`).

Shapes: M tokens, K hidden, N intermediate, H hot neurons.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# On an H200, in inference and in training alike: a neuron's columns of the dense products cost as much as RATE
# non-zeros per token, and the split itself as much as OVERHEAD.
RATE, OVERHEAD = 0.016, 4.0
MULTIPLE = 128  # of H: columns of an output tile of a dense product
SAMPLE = 8192


class HotSplit(NamedTuple):
    """Hot neurons, int64 [H], sorted, and the non-zeros per token that leaving them to dense products is worth."""

    neurons: Tensor
    saved: float


@torch.no_grad()
def hot_neurons(
    x: Tensor, w_gate: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> Tensor:
    """The neurons to leave to dense products, int64 [H], sorted. H is a multiple of `multiple`, 0 if they save nothing.

    x: [..., K], representative inputs of the block; w_gate: [N, K] (w_up of a non-gated block). Waits for the device.
    See `best_split` for the rest, and for what is raised.
    """
    return best_split(firing_rates(x, w_gate), rate=rate, overhead=overhead, multiple=multiple).neurons


@torch.no_grad()
def firing_rates(x: Tensor, w_gate: Tensor) -> Tensor:
    """Share of the tokens for which each neuron fires, float32 [N], measured on at most SAMPLE tokens, evenly spread.

    x: [..., K]; w_gate: [N, K]. All 0 without tokens.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    x_MK = x_MK[:: max(1, -(-x_MK.shape[0] // SAMPLE))]
    return (F.linear(x_MK, w_gate.to(x.dtype)) > 0).sum(0) / max(x_MK.shape[0], 1)


def best_split(
    rates_N: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> HotSplit:
    """The neurons with the highest rates, as many (a multiple of `multiple`) as save most; none if that saves nothing.

    rate: the firing rate above which dense products are cheaper; overhead: non-zeros per token that the split
    itself costs. Waits for the device. Raises ValueError for a rate outside 0..1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, got {rate}")
    rates_N, order_N = rates_N.sort(descending=True)
    saved = ((rates_N - rate).cumsum(0)[multiple - 1 :: multiple] - overhead).tolist()
    best = max(range(len(saved)), key=saved.__getitem__, default=0)
    if not saved or saved[best] <= 0:
        return HotSplit(order_N[:0], 0.0)
    return HotSplit(order_N[: (best + 1) * multiple].sort().values, saved[best])


def saved_by(rates_N: Tensor, hot: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD) -> float:
    """Non-zeros per token that an earlier choice saves at these rates; negative if it costs more than it saves."""
    return float((rates_N[hot] - rate).sum()) - overhead
