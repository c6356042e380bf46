"""Hot neurons: neurons that fire so often that dense products are cheaper for them than a sparse backend.

Firing rates differ by orders of magnitude, so a few neurons account for a large share of the non-zeros. The cost of a
sparse backend is per non-zero, that of a dense product per neuron: a neuron should be hot if its rate is above the
ratio of the two costs. The result is exact for any choice of neurons (`hot_split.py`).

Shapes: M tokens, K hidden, N intermediate, H hot neurons.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# On an H200, in inference and in training: a neuron's columns of the dense products cost as much as RATE non-zeros per
# token, and the split itself costs as much as OVERHEAD non-zeros per token.
RATE, OVERHEAD = 0.0125, 4.0
MULTIPLE = 128  # of H: columns of an output tile of a dense product
SAMPLE = 8192


class HotSplit(NamedTuple):
    """Hot neurons, int64 [H], sorted, and the saving from computing them densely, in non-zeros per token."""

    neurons: Tensor
    saved: float


@torch.no_grad()
def hot_neurons(
    x: Tensor, w_gate: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> Tensor:
    """The neurons to compute by dense products, int64 [H], sorted. H is a multiple of `multiple`; 0 if nothing is
    saved.

    x: [..., K], representative inputs of the block; w_gate: [N, K] (w_up of a non-gated block). Waits for the device.
    See `best_split` for the other arguments and the errors.
    """
    return best_split(firing_rates(x, w_gate), rate=rate, overhead=overhead, multiple=multiple).neurons


@torch.no_grad()
def firing_rates(x: Tensor, w_gate: Tensor) -> Tensor:
    """The share of tokens for which each neuron fires, float32 [N], measured on at most SAMPLE evenly spaced tokens.

    x: [..., K]; w_gate: [N, K]. All 0 if there are no tokens.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    x_MK = x_MK[:: max(1, -(-x_MK.shape[0] // SAMPLE))]
    return (F.linear(x_MK, w_gate.to(x.dtype)) > 0).sum(0) / max(x_MK.shape[0], 1)


def best_split(
    rates_N: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> HotSplit:
    """The neurons with the highest rates, in the number (a multiple of `multiple`) that saves most; none if none saves.

    rate: the firing rate above which dense products are cheaper; overhead: the cost of the split itself, in non-zeros
    per token. Waits for the device. Raises ValueError for a rate outside 0..1 and for a multiple below 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, got {rate}")
    if type(multiple) is not int or multiple < 1:
        raise ValueError(f"multiple must be an integer of at least 1, got {multiple!r}")
    rates_N, order_N = rates_N.sort(descending=True)
    saved = ((rates_N - rate).cumsum(0)[multiple - 1 :: multiple] - overhead).tolist()
    best = max(range(len(saved)), key=saved.__getitem__, default=0)
    if not saved or saved[best] <= 0:
        return HotSplit(order_N[:0], 0.0)
    return HotSplit(order_N[: (best + 1) * multiple].sort().values, saved[best])
