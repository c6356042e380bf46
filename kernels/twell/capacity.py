"""Detects a training forward with more non-zeros than its capacity, and grows the capacity of modules."""

import math
import weakref

import torch
from torch import Tensor

HEADROOM, LEAST_CAPACITY = 2, 64


def capacity_for(nonzeros: float, neurons: int) -> int:
    """The capacity of a block with this mean of non-zeros per token: a power of two, which keeps the number of
    allocation sizes small, and at least HEADROOM times the mean, since micro-batches differ; or all of its neurons."""
    return min(neurons, max(LEAST_CAPACITY, 2 ** math.ceil(math.log2(max(1.0, HEADROOM * nonzeros)))))


def fitted(present: int, wanted: int) -> int:
    """The capacity where one is wanted: raised at once, but lowered only if a quarter of the present one is enough,
    since what is saved gets other sizes."""
    return present if present / 4 < wanted <= present else wanted


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's current stream. The host must not wait then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class EntryCount:
    """An asynchronous copy to the host of the number of entries that a training forward had to save.

    The copy to pinned memory and an event after it are queued with the forward. Reading the count later waits for that
    forward only, not for work queued since.
    """

    __slots__ = ("__weakref__", "_event", "_word", "growth")

    def __init__(self, word: Tensor) -> None:
        """word: int32 [2] or more, whose first 8 bytes are the count as int64, written on the current stream."""
        self.growth: CapacityGrowth | None = None
        self._event: torch.cuda.Event | None = None
        if word.is_cuda:
            self._word = torch.empty(word.shape, dtype=word.dtype, device="cpu", pin_memory=True)
            self._word.copy_(word, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._word = word.clone()

    def entries(self) -> int:
        """The count. Waits for the forward."""
        if self._event is not None:
            self._event.synchronize()
        return read_count(self._word)


def read_count(word: Tensor) -> int:
    """The int64 at the start of an int32 tensor. On a GPU, waits for everything queued."""
    return int(word[:2].view(torch.int64))


class CapacityGrowth:
    """Records the capacity that a module's backward passes found necessary.

    A capacity may change only between calls: activation checkpointing repeats a call in the backward and expects it to
    save tensors of the same shapes. So `due` reports a value only while no forward of the module waits for its
    backward.
    """

    def __init__(self) -> None:
        self._needed = 0
        self._open: weakref.WeakSet[EntryCount] = weakref.WeakSet()

    def opened(self, count: EntryCount) -> None:
        """Register a forward whose backward may follow. Only the autograd graph keeps the count alive."""
        count.growth = self
        self._open.add(count)

    def closed(self, count: EntryCount, needed: int | None) -> None:
        """Called by the backward with the capacity that the forward would have needed; None if it was enough."""
        self._open.discard(count)
        self._needed = max(self._needed, needed or 0)

    def due(self) -> int:
        """The capacity that past calls needed, reported once; 0 if it was enough, or while a forward waits."""
        if not self._needed or len(self._open):
            return 0
        needed, self._needed = self._needed, 0
        return needed

    def __reduce__(self) -> tuple:
        return CapacityGrowth, ()  # copies and pickles of a module start without a record
