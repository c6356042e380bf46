"""What the GPU backends keep of a training forward, and what their backward gives.

Shapes: M tokens, K hidden, N intermediate, E entries of capacity.
"""

import weakref
from collections.abc import Sequence
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
        return (*(t.data_ptr() for t in self), self.room)

    @property
    def room(self) -> int:
        """Entries that fit; the kernels index them with 31 bits."""
        return min(len(self.words), 2**31 - 1)


def _entries_in(state: Tensor) -> int:
    return int(state[:2].view(torch.int64))


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class EntryCount:
    """How many entries a training forward had to save, on its way to the host.

    The copy to pinned memory and the event behind it are queued with the forward, so that asking later waits for that
    forward only, and not for what has been queued since.
    """

    __slots__ = ("__weakref__", "_event", "_state", "growth")

    def __init__(self, state: Tensor) -> None:
        self.growth: CapacityGrowth | None = None
        if state.is_cuda:
            self._state = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
            self._state.copy_(state, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._state, self._event = state.clone(), None

    @classmethod
    def queued(cls, kept: Kept) -> "EntryCount | None":
        """Of the forward just queued on the current stream; None while a CUDA graph is captured."""
        return None if _is_capturing(kept.state) else cls(kept.state)

    def entries(self) -> int:
        """Waits for the forward."""
        if self._event is not None:
            self._event.synchronize()
        return _entries_in(self._state)


def needed_capacity(saved: Sequence[Tensor], count: EntryCount | None) -> int | None:
    """The capacity, in entries per token, that a training forward would have needed; None where it had enough.

    saved: what the forward saved, a `Kept` first. count: that forward's; without it the device is asked, which waits
    for everything queued. While a CUDA graph is captured nothing can be asked, and the answer is None.
    """
    kept = Kept(*saved[: len(Kept._fields)])
    tokens = kept.rows.shape[1]
    if not tokens or _is_capturing(kept.state):
        return None
    entries = _entries_in(kept.state) if count is None else count.entries()
    return -(-entries // tokens) if entries > kept.room else None


class CapacityGrowth:
    """What a module learns from its backward passes about the capacity that it needs.

    It may be raised only between calls: under activation checkpointing a call is made again in the backward, and must
    then save tensors of the same shapes. So it waits until no forward of the module waits for its backward.
    """

    def __init__(self) -> None:
        self._needed = 0
        self._open: weakref.WeakSet[EntryCount] = weakref.WeakSet()

    def opened(self, count: EntryCount) -> None:
        """A forward whose backward may follow. The autograd graph holds the count: both vanish together."""
        count.growth = self
        self._open.add(count)

    def closed(self, count: EntryCount, needed: int | None) -> None:
        """Its backward found that it would have needed this capacity; None: it had enough."""
        self._open.discard(count)
        self._needed = max(self._needed, needed or 0)

    def due(self) -> int:
        """The capacity that the calls so far needed, once; 0 if it was enough, or as long as one is open."""
        if not self._needed or len(self._open):
            return 0
        needed, self._needed = self._needed, 0
        return needed

    def __reduce__(self) -> tuple:
        return CapacityGrowth, ()  # copies and pickles of a module begin anew


class Gradients(NamedTuple):
    """dx [M, K]; dw_gate, dw_up [N, K]; dw_down [K, N], neuron-major in memory. bfloat16; None where not needed."""

    x: Tensor | None
    w_gate: Tensor | None
    w_up: Tensor | None
    w_down: Tensor | None
