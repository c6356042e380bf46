"""A cache of prepared launches, keyed by the addresses and sizes of their operands.

With few tokens, an inference call is bound by the host, which spends most of its time checking operands and filling in
launch parameters. A model repeats its calls: the weights stay in place, and torch's allocator gives x the same memory
again. With this cache an eager call takes two thirds of the host time with the Hopper backend, and a fifth with the
Triton backend (docs/log/2026-11-22.md).
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from . import registry
from .interface import Weights
from .memory import PIECE


class LaunchCache:
    """Prepared calls, launches and TMA descriptors, keyed by address.

    It keeps no tensor alive. The tensor at an address may have been replaced since, but the launch is the same. A full
    cache is emptied, and entries in use are prepared again. `clear` frees the memory, about a kilobyte per entry.
    """

    def __init__(self) -> None:
        self.most = 16384
        self._entries: dict[Hashable, Any] = {}
        self.get = self._entries.get

    def put(self, key: Hashable, value: Any) -> None:
        if len(self._entries) >= self.most and key not in self._entries:
            self._entries.clear()
        self._entries[key] = value

    def kept(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, whose one argument is hashable, with its results kept here under it."""

        @functools.wraps(make)
        def call(key: Any) -> Any:
            if (found := self.get(key)) is None:
                found = make(key)
                self.put(key, found)
            return found

        return call

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()


LAUNCHES = LaunchCache()


def call_key(backend: str, activation: str, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> tuple | None:
    """The call key of an inference call without statistics and hot neurons (`is_inference` is true): everything but the
    values of its operands. None if operands have no memory.

    inputs: x, w_gate (or None), w_up and w_down, with which the dispatcher can be bypassed.
    """
    x, w_gate, w_up, w_down = inputs
    try:
        gate = None if w_gate is None else _identity(w_gate)
        return backend, activation, _identity(x), gate, _identity(w_up), _identity(w_down)
    except RuntimeError:  # no storage, as of a sparse tensor: `check_problem` has more to say
        return None


def _identity(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def is_prepared_for(x: Tensor) -> bool:
    """Whether calls with x [..., K] are prepared; in pieces they take longer on the device than on the host."""
    return 0 < x.numel() <= PIECE * x.shape[-1] and x.is_contiguous()


def prepare(key: tuple, backend: str, activation: str, x: Tensor, weights: Weights) -> None:
    """Prepare this call for its next repetition, if the backend can. The operands are checked and match the key."""
    make = registry.get(backend).prepare
    if make is None or not is_prepared_for(x):
        return
    if (run := make(x.reshape(-1, x.shape[-1]), weights, activation)) is not None:
        LAUNCHES.put(key, run)
