"""Whether a training forward had more non-zeros than its capacity: how the host learns it, and what follows."""

import weakref

import torch
from torch import Tensor


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's current stream: the host can learn nothing then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class EntryCount:
    """How many entries a training forward had to save, on its way to the host.

    The copy to pinned memory and an event behind it are queued with the forward. Asking later waits for that forward
    only, and not for what has been queued since.
    """

    __slots__ = ("__weakref__", "_event", "_word", "growth")

    def __init__(self, word: Tensor) -> None:
        """word: int32 [2] or more, the count as int64 first. Being filled on the current stream."""
        self.growth: CapacityGrowth | None = None
        self._event: torch.cuda.Event | None = None
        if word.is_cuda:
            self._word = torch.empty(word.shape, dtype=word.dtype, pin_memory=True)
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
    """The int64 at the start of an int32 tensor. Waits for everything queued, if it is on a GPU."""
    return int(word[:2].view(torch.int64))


class CapacityGrowth:
    """What a module learns from its backward passes about the capacity that it needs.

    A capacity may change only between calls: activation checkpointing repeats a call in the backward, and expects it to
    save tensors of the same shapes. So `due` answers only when no forward of the module is waiting for its backward.
    """

    def __init__(self) -> None:
        self._needed = 0
        self._open: weakref.WeakSet[EntryCount] = weakref.WeakSet()

    def opened(self, count: EntryCount) -> None:
        """A forward whose backward may follow. Only the autograd graph holds the count, so they vanish together."""
        count.growth = self
        self._open.add(count)

    def closed(self, count: EntryCount, needed: int | None) -> None:
        """The backward found that the forward would have needed this capacity; None: it had enough."""
        self._open.discard(count)
        self._needed = max(self._needed, needed or 0)

    def due(self) -> int:
        """The capacity that past calls needed, reported once; 0 if theirs was enough, or while a forward waits."""
        if not self._needed or len(self._open):
            return 0
        needed, self._needed = self._needed, 0
        return needed

    def __reduce__(self) -> tuple:
        return CapacityGrowth, ()  # copies and pickles of a module begin anew
