"""What the GPU backends save of a training forward.

Shapes: M tokens, K hidden, N intermediate, E entries of capacity.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..capacity import EntryCount, is_capturing, read_count
from ..interface import Options, Weights


class SavedCSR(NamedTuple):
    """The activations as a CSR matrix of at most E entries. Rows lie wherever there was room: none can be too long.

    words: int32 [E]: bfloat16 bits of g << 16 | neuron; u: bfloat16 [E] (empty without a gate); rows: int32 [2, M]:
    where a row's entries start (-1: they are not saved) and how many it has; state: int32 [3]: the number of entries
    (int64), then whether some token's x is not finite.
    """

    words: Tensor
    u: Tensor
    rows: Tensor
    state: Tensor

    @classmethod
    def empty(cls, x: Tensor, weights: Weights, options: Options) -> "SavedCSR":
        """For x [M, K] and E = M * capacity entries."""
        tokens, gated = x.shape[0], weights.gate is not None
        entries = tokens * min(options.capacity, weights.up.shape[0])
        return cls(
            x.new_empty(entries, dtype=torch.int32),
            x.new_empty(entries if gated else 0, dtype=torch.bfloat16),
            x.new_empty((2, tokens), dtype=torch.int32),
            x.new_zeros(3, dtype=torch.int32),
        )

    @property
    def room(self) -> int:
        """Entries that fit; the kernels index them with 31 bits, and look up to 64 ahead."""
        return min(len(self.words), 2**31 - 64)

    @property
    def nonfinite_at(self) -> int:
        """The address of the flag in `state`."""
        return self.state.data_ptr() + 8

    def addresses(self) -> tuple[int, int, int, int, int, int]:
        """The addresses of words, u, rows, the number of entries and the flag; and the room."""
        parts = (self.words.data_ptr(), self.u.data_ptr(), self.rows.data_ptr(), self.state.data_ptr())
        return (*parts, self.nonfinite_at, self.room)

    def entry_count(self) -> EntryCount | None:
        """Entry count of the forward just queued on the current stream; None while a CUDA graph is captured."""
        return None if is_capturing(self.state) else EntryCount(self.state)


def needed_capacity(saved: Sequence[Tensor], count: EntryCount | None) -> int | None:
    """The capacity, in entries per token, that a training forward would have needed; None where it had enough.

    saved: what the forward saved, the CSR matrix first. count: that forward's; without it the device is asked, which
    waits for everything queued. While a CUDA graph is captured the answer is None.
    """
    csr = SavedCSR(*saved[: len(SavedCSR._fields)])
    tokens = csr.rows.shape[1]
    if not tokens or is_capturing(csr.state):
        return None
    entries = read_count(csr.state) if count is None else count.entries()
    return -(-entries // tokens) if entries > csr.room else None
