"""What the GPU backends keep of a training forward, and what their backward gives.

Shapes: M tokens, K hidden, N intermediate, E entries of capacity.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """What the backward needs of a training forward, E entries at most: a CSR matrix whose rows lie wherever there was
    room, so that no row can be too long.

    words: int32 [E]: bfloat16 bits of g << 16 | neuron; u: bfloat16 [E] (empty without a gate); rows: int32 [2, M]:
    where a row's entries start (-1: they were not kept) and how many it has; state: int32 [4]: how many entries there
    are (int64), whether weights, and whether inputs of tokens, are not all finite.
    """

    words: Tensor
    u: Tensor
    rows: Tensor
    state: Tensor

    @classmethod
    def empty(cls, x: Tensor, capacity: int, *, gated: bool) -> "Kept":
        """For x [M, K] and E = M * capacity entries."""
        tokens, entries = x.shape[0], x.shape[0] * capacity
        return cls(
            x.new_empty(entries, dtype=torch.int32),
            x.new_empty(entries if gated else 0, dtype=torch.bfloat16),
            x.new_empty((2, tokens), dtype=torch.int32),
            x.new_zeros(4, dtype=torch.int32),
        )

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Of the four parts, and E."""
        return (*(t.data_ptr() for t in self), len(self.words))


class Gradients(NamedTuple):
    """dx [M, K]; dw_gate, dw_up [N, K]; dw_down [K, N], neuron-major in memory. bfloat16; None where not needed."""

    x: Tensor | None
    w_gate: Tensor | None
    w_up: Tensor | None
    w_down: Tensor | None
