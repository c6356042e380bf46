"""A block's neurons by how often they fire, the hot ones in front and the silent ones at the end, and how many hot
ones `autotune` and the benchmarks try.

Shapes: M tokens, K hidden, N intermediate.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .hot import MULTIPLE, RATE, firing_rates

RATES = (RATE / 2, RATE, 2 * RATE)  # firing rates from which on neurons are tried as hot ones
KEPT_MULTIPLE = 64  # of the neurons that are kept where silent ones are left out
BlockWeights = tuple[Tensor | None, Tensor, Tensor]  # w_gate, w_up, w_down as `sparse_ffn` takes them


class FiringOrder(NamedTuple):
    """neurons: int64 [N], a permutation: most active first, those that never fired last. prefixes: numbers of neurons
    in front to try as hot ones, ascending, none of them 0. kept: how many, in front, remain where the silent ones are
    left out: all that fired, and as many more as make a multiple of KEPT_MULTIPLE (at most N)."""

    neurons: Tensor
    prefixes: tuple[int, ...]
    kept: int

    def reordered(self, weights: BlockWeights) -> BlockWeights:
        """Copies of the weights with the neurons in this order, the down weights neuron-major."""
        gate, up, down = weights
        order = self.neurons
        return None if gate is None else gate[order], up[order], down.t()[order].t()


@torch.no_grad()
def firing_order(x: Tensor, w_gate: Tensor, fired: Tensor) -> FiringOrder:
    """The order of a block's neurons on representative inputs, of which the rates are measured as `firing_rates` does.

    x: [..., K]; w_gate: [N, K] (w_up of a non-gated block); fired: bool [N], over all of x, as in `FFNStats`: a neuron
    that the sample of `firing_rates` misses is not silent. Waits for the device.
    """
    rates, neurons = firing_rates(x, w_gate), w_gate.shape[0]
    order = torch.where(fired, rates, -1).argsort(descending=True, stable=True)
    prefixes = sorted({int((rates > rate).sum()) // MULTIPLE * MULTIPLE for rate in RATES} - {0})
    kept = max(1, -(-int(fired.sum()) // KEPT_MULTIPLE)) * KEPT_MULTIPLE
    return FiringOrder(order, tuple(prefixes), min(neurons, kept))


def first_neurons(weights: BlockWeights, count: int) -> BlockWeights:
    """The weights of the first `count` neurons: slices, which share memory with the whole."""
    gate, up, down = weights
    return None if gate is None else gate[:count], up[:count], down[:, :count]
