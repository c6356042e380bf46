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
def hot_neurons(x: Tensor, w_gate: Tensor) -> Tensor:
    """The neurons to compute by dense products, int64 [H], sorted, H a multiple of MULTIPLE; none if nothing is saved.

    x: [..., K], representative inputs of the block; w_gate: [N, K] (w_up of a non-gated block). Waits for the device.
    """
    return best_split(firing_rates(x, w_gate)).neurons


@torch.no_grad()
def firing_rates(x: Tensor, w_gate: Tensor) -> Tensor:
    """The share of tokens for which each neuron fires, float32 [N], measured on at most SAMPLE evenly spaced tokens.

    x: [..., K]; w_gate: [N, K]. All 0 if there are no tokens.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    x_MK = x_MK[:: max(1, -(-x_MK.shape[0] // SAMPLE))]
    return (F.linear(x_MK, w_gate.to(x.dtype)) > 0).sum(0) / max(x_MK.shape[0], 1)


def best_split(rates_N: Tensor) -> HotSplit:
    """The neurons with the highest rates, in the number (a multiple of MULTIPLE) that saves most; none if none saves.
    Waits for the device."""
    rates_N, order_N = rates_N.sort(descending=True)
    saved = ((rates_N - RATE).cumsum(0)[MULTIPLE - 1 :: MULTIPLE] - OVERHEAD).tolist()
    best = max(range(len(saved)), key=saved.__getitem__, default=0)
    if not saved or saved[best] <= 0:
        return HotSplit(order_N[:0], 0.0)
    return HotSplit(order_N[: (best + 1) * MULTIPLE].sort().values, saved[best])
