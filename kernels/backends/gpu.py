"""What the backends made of the same GPU kernels share: gate_pack, gated_down, and a backward on the entries kept; in
training, if asked for, with a dense backup beside them (`heavy.py`).

Shapes: M tokens, K hidden, N intermediate.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..kept import EntryCount, Gradients, Kept
from ..memory import aligned, is_aligned, neuron_major
from ..registry import Forward, HotSteps, Request
from . import heavy
from .heavy import Backup


class Kernels(NamedTuple):
    """The three calls. weights: w_gate [N, K] or None, w_up [N, K], both contiguous, w_down [K, N], neuron-major.

    gate_pack(x, *weights, stats=, training=) -> what gated_down takes, with `counts` (int32 [M, tiles]; a row that is
        zeroed before gated_down is an empty one) and, if `stats`, `overflow` (int64 scalar).
    gated_down(packed, x, *weights, stats=, keep=) -> (y, (nonzeros [M], sums of |h| [M], fired [N]) if `stats`).
    backward(dy, dl1, x, *weights, kept, needs) -> Gradients.
    """

    gate_pack: Callable[..., object]
    gated_down: Callable[..., tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]]
    backward: Callable[..., Gradients]


def functions(load: Callable[[], Kernels], steps: HotSteps) -> tuple[Callable, Callable, Callable]:
    """(forward, backward, saved_like) of a `registry.Backend`; `load` is called for the kernels when they are used.
    steps: the backend's own."""

    def forward(
        x_MK: Tensor,
        w_gate_NK: Tensor | None,
        w_up_NK: Tensor,
        w_down_KN: Tensor,
        *,
        stats: bool,
        training: bool,
        capacity: int,
        backup: float | None,
    ) -> Forward:
        saved = saved_like(x_MK, w_gate_NK, w_up_NK, capacity, backup) if training else ()
        if x_MK.shape[0] == 0:
            return _nothing(x_MK, w_up_NK.shape[0], saved)
        kernels = load()
        with _on_device_of(x_MK):
            weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
            packed = kernels.gate_pack(x_MK, *weights, stats=stats, training=training)
            keep, taken = _parts(saved) if training else (None, None)
            taken_nonzeros = None if taken is None else heavy.take_out(packed.counts, taken)
            y_MK, counts = kernels.gated_down(packed, x_MK, *weights, stats=stats or training, keep=keep)
            if counts is None:
                return Forward(y_MK, None, None, None, None)
            nonzeros_M, l1_M, fired_N = counts
            if taken is not None:
                fired_N = heavy.forward(taken, taken_nonzeros, x_MK, *weights, y_MK, counts, steps)
            count = None if keep is None else EntryCount.queued(keep)
            return Forward(y_MK, nonzeros_M, l1_M.mean(), fired_N, packed.overflow, saved, count)

    def backward(
        dy_MK: Tensor,
        dl1: Tensor | None,
        x_MK: Tensor,
        w_gate_NK: Tensor | None,
        w_up_NK: Tensor,
        w_down_KN: Tensor,
        saved: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        if x_MK.shape[0] == 0:
            inputs = (x_MK, w_gate_NK, w_up_NK, w_down_KN)
            return [torch.zeros_like(t) if needed else None for t, needed in zip(inputs, needs, strict=True)]
        with _on_device_of(x_MK):
            weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
            keep, taken = _parts(saved)
            gradients = load().backward(dy_MK, dl1, x_MK, *weights, keep, needs)
            if taken is not None:
                heavy.add_gradients(gradients, taken, dy_MK, dl1, x_MK, *weights, steps)
            return gradients

    def saved_like(
        x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, capacity: int, backup: float | None
    ) -> tuple[Tensor, ...]:
        gated = w_gate_NK is not None
        keep = Kept.empty(x_MK, min(capacity, len(w_up_NK)), gated=gated)
        return (*keep, *Backup.empty(x_MK, w_up_NK, backup, gated=gated)) if backup else keep

    return forward, backward, saved_like


def _parts(saved: Sequence[Tensor]) -> tuple[Kept, Backup | None]:
    """What a training forward saves: the entries kept and, if there is one, the dense backup."""
    count = len(Kept._fields)
    return Kept(*saved[:count]), Backup(*saved[count:]) if len(saved) > count else None


def misfit(request: Request, hidden_step: int, max_hidden: int, max_intermediate: int) -> str | None:
    """Why a block of this dtype and these sizes is none for the kernels, or None: `supports` of a backend."""
    if request.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {request.dtype}"
    if request.hidden % hidden_step or request.hidden > max_hidden:
        return f"the hidden size must be a multiple of {hidden_step} up to {max_hidden}, this is {request.hidden}"
    if request.intermediate > max_intermediate:
        return f"the intermediate size must be at most {max_intermediate}, this is {request.intermediate}"
    return None


def on_own_device(function: Callable) -> Callable:
    """The function with the device of its first argument, a tensor, as the current one."""

    def call(first: Tensor, *others: object) -> object:
        with _on_device_of(first):
            return function(first, *others)

    return call


_HERE = nullcontext()


def _on_device_of(x: Tensor) -> AbstractContextManager:
    # _cuda_getDevice() is torch.cuda.current_device() without looking for a GPU again.
    return _HERE if not x.is_cuda or x.device.index == torch._C._cuda_getDevice() else torch.cuda.device(x.device)


def _in_memory(w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights neuron by neuron, as the kernels read them; themselves where they are so."""
    gate = None if w_gate_NK is None else aligned(w_gate_NK.contiguous())
    return gate, aligned(w_up_NK.contiguous()), aligned(neuron_major(w_down_KN))


def as_they_are(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> bool:
    """Whether the kernels read these very tensors, not copies. Makes none itself."""
    rows = [t for t in (x_MK, w_gate_NK, w_up_NK, w_down_KN.t()) if t is not None]
    return all(t.is_contiguous() and is_aligned(t) for t in rows)


def _nothing(x_MK: Tensor, intermediate: int, saved: Sequence[Tensor]) -> Forward:
    return Forward(
        torch.empty_like(x_MK),
        x_MK.new_zeros(0, dtype=torch.int32),
        x_MK.new_zeros((), dtype=torch.float32),
        x_MK.new_zeros(intermediate, dtype=torch.bool),
        overflow=None,
        saved=saved,
    )
