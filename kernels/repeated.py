"""Calls for inference that come again: recognised by where their operands lie, and made with everything decided.

With few tokens the host's time is what counts, and most of it goes into looking at the operands. A model repeats its
calls: the weights stay, and torch's allocator gives x the memory that it had before.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.autograd import forward_ad

from . import registry
from .checks import under_autocast, wants_gradients

MOST = 8192


class Known(NamedTuple):
    """What makes a call again, x -> y, and the backend that does it."""

    call: Callable[[Tensor], Tensor]
    backend: str


# By `place`. No tensor is kept; what lies at an address may be another one than before, the call is the same.
known: dict[tuple | None, Known] = {}


def place(backend: str, inputs: tuple[Tensor | None, ...]) -> tuple | None:
    """All that decides about a call without statistics and hot neurons but values; None where gradients are wanted, or
    the operands could be cast or have no memory.

    inputs: x, w_gate (or None), w_up, w_down, as nobody watches them.
    """
    x, w_gate, w_up, w_down = inputs
    if wants_gradients(inputs) or forward_ad._current_level >= 0 or under_autocast(x.device.type):
        return None
    try:
        return backend, _where(x), None if w_gate is None else _where(w_gate), _where(w_up), _where(w_down)
    except RuntimeError:  # sparse, for instance: `check_problem` has more to say
        return None


def _where(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def remember(at: tuple, backend: str, inputs: tuple[Tensor | None, ...]) -> None:
    """Prepare for the same call again, where the backend can. The inputs have been checked, and are those of `at`."""
    x, *weights = inputs
    repeat = registry.get(backend).repeat
    if repeat is None or not x.numel() or not x.is_contiguous():
        return
    if (call := repeat(x.reshape(-1, x.shape[-1]), *weights)) is not None:
        if len(known) >= MOST:  # addresses that may be long gone; what is in use comes back
            known.clear()
        known[at] = Known(call, backend)
