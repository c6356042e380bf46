"""Hot-exempt L1: the neurons of a layer that fire most often pay no L1 penalty.

Sparse kernels compute such neurons by dense products anyway, so a penalty on them costs quality and saves no time. The
others can pay a larger one. Ours, not the paper's.

Shapes: L layers, N neurons.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.models.llama import FeedForward

EVERY = 25  # steps between two choices
KEPT = 0.6  # weight of the earlier firing rates in each update of the moving average: about 0.98 for each step
TOKENS = 16_384  # tokens of a step on which rates are measured


class HotExemption:
    """The L1 weight of each neuron: 0 for the share `exempt` of each layer with the highest firing rate, 1 for others.

    The rates are a moving average, updated every `EVERY` steps; until the first update no neuron is exempt.
    """

    def __init__(self, blocks: Sequence[FeedForward], exempt: float) -> None:
        neurons = blocks[0].up_proj.weight.shape[0]
        self.count = round(exempt * neurons)
        self.rates_LN: Tensor | None = None
        self._weight_LN = torch.ones(len(blocks), neurons, device=blocks[0].up_proj.weight.device)
        for block, weight_N in zip(blocks, self._weight_LN, strict=True):
            block.l1_weight = weight_N  # a view: `_choose` writes into it, and compiled code keeps its addresses

    def update(self, rates_LN: Tensor) -> None:
        """Add the firing rates of a step, float [L, N], and choose the exempt neurons anew."""
        rates_LN = rates_LN.float()
        self._choose(rates_LN if self.rates_LN is None else torch.lerp(rates_LN, self.rates_LN, KEPT))

    def _choose(self, rates_LN: Tensor) -> None:
        self.rates_LN = rates_LN
        self._weight_LN.fill_(1.0).scatter_(1, rates_LN.topk(self.count, dim=1).indices, 0.0)

    def state(self) -> list[list[float]] | None:
        """The moving average as JSON values, which keep every bit of a float32."""
        return None if self.rates_LN is None else self.rates_LN.tolist()

    def restore(self, state: list[list[float]] | None) -> None:
        if state is not None:
            self._choose(torch.tensor(state, dtype=torch.float32, device=self._weight_LN.device))
