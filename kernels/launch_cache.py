"""Prepared launches, by the addresses and sizes that they are for: what a small call on a GPU spends its time on.

With few tokens an inference call is bound by the host, which spends most of its time on looking at the operands and
filling in launch parameters. A model repeats its calls: the weights stay, and torch's allocator gives x the memory that
it had before. With this cache an eager call of the Hopper backend takes about 20 us of host time instead of 32, and of
the Triton backend about 50 instead of 250 (NOTES.md).
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor

from . import registry, torch_internals
from .checks import under_autocast, wants_gradients
from .interface import Weights


class PreparedCall(NamedTuple):
    """A call with everything decided, x -> y, and the name of the backend that runs it."""

    run: Callable[[Tensor], Tensor]
    backend: str


class LaunchCache:
    """Everything that is kept by address: prepared calls, launches, and TMA descriptors.

    It holds no tensor. What lies at an address may have been replaced since; the launch is the same. When it is full it
    is emptied, and what is still in use comes back. `clear` gives the memory back, about a kilobyte an entry.
    """

    def __init__(self, most: int = 16384) -> None:
        self.most = most
        self._entries: dict[Hashable, Any] = {}
        self.get = self._entries.get

    def put(self, key: Hashable, value: Any) -> None:
        if len(self._entries) >= self.most:
            self._entries.clear()
        self._entries[key] = value

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()

    def count(self, kind: type) -> int:
        """How many entries are of this type."""
        return sum(isinstance(entry, kind) for entry in self._entries.values())


LAUNCHES = LaunchCache()


def call_key(
    backend: str, activation: str, finite: bool, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor]
) -> tuple | None:
    """What decides about an inference call without statistics and hot neurons, apart from values: the key of its
    `PreparedCall`. None where gradients are wanted, or the operands may be cast or have no memory.

    inputs: x, w_gate (or None), w_up and w_down, with which the dispatcher can be bypassed.
    """
    x, w_gate, w_up, w_down = inputs
    if wants_gradients(inputs) or torch_internals.in_forward_mode() or under_autocast(x.device.type):
        return None
    try:
        gate = None if w_gate is None else _identity(w_gate)
        return backend, activation, finite, _identity(x), gate, _identity(w_up), _identity(w_down)
    except RuntimeError:  # no storage, as of a sparse tensor: `check_problem` has more to say
        return None


def _identity(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def prepare(key: tuple, backend: str, activation: str, finite: bool, x: Tensor, weights: Weights) -> None:
    """Prepares this call for the next time, if the backend can. The operands have been checked, and are the key's."""
    make = registry.get(backend).prepare
    if make is None or not x.numel() or not x.is_contiguous():
        return
    if (run := make(x.reshape(-1, x.shape[-1]), weights, activation, finite)) is not None:
        LAUNCHES.put(key, PreparedCall(run, backend))
