"""Sparse plans in Triton, for NVIDIA GPUs from Ampere on (compute capability 8.0): TwELL packed in the epilogue of the
gate product, one fused pass over it, and in training a backward on the entries that this pass kept. See
`triton/twell.py` and `triton/backward.py`.

With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly: for tests.

NaN and Inf reach y as in plain torch, also where they meet a zero of the gate. Shapes: M tokens, K hidden, N neurons.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..kept import Kept
from ..memory import neuron_major
from ..registry import Availability, Backend, Forward, Request
from .probe import launch

_CAPABILITY = (8, 0)


def _forward(
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    *,
    stats: bool,
    training: bool,
    capacity: int = 0,
) -> Forward:
    from ..triton import twell

    keep = _saved_like(x_MK, w_gate_NK, w_up_NK, capacity) if training else None
    if x_MK.shape[0] == 0:
        return _nothing(x_MK, w_up_NK.shape[0], keep)
    with _on_device_of(x_MK):
        weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
        packed = twell.gate_pack(x_MK, *weights, training=training)
        y_MK, counts = twell.gated_down(packed, x_MK, *weights, stats=stats or training, keep=keep)
        if counts is None:
            return Forward(y_MK, None, None, None, None)
        nonzeros_M, l1_M, fired_N = counts
        return Forward(y_MK, nonzeros_M, l1_M.mean(), fired_N, packed.overflow, keep or ())


def _on_device_of(x: Tensor) -> AbstractContextManager:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _in_memory(w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights [N, K] neuron by neuron, as the kernels read them."""
    return (
        None if w_gate_NK is None else w_gate_NK.contiguous(),
        w_up_NK.contiguous(),
        neuron_major(w_down_KN).t(),
    )


def _nothing(x_MK: Tensor, intermediate: int, keep: Kept | None) -> Forward:
    return Forward(
        torch.empty_like(x_MK),
        x_MK.new_zeros(0, dtype=torch.int32),
        x_MK.new_zeros((), dtype=torch.float32),
        x_MK.new_zeros(intermediate, dtype=torch.bool),
        overflow=None,
        saved=keep or (),
    )


def _backward(
    dy_MK: Tensor,
    dl1: Tensor | None,
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    from ..triton.backward import backward

    if x_MK.shape[0] == 0:
        inputs = (x_MK, w_gate_NK, w_up_NK, w_down_KN)
        return [torch.zeros_like(t) if needed else None for t, needed in zip(inputs, needs, strict=True)]
    with _on_device_of(x_MK):
        weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
        return backward(dy_MK, dl1, x_MK, *weights, Kept(*saved), needs)


def _saved_like(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, capacity: int) -> Kept:
    return Kept.empty(x_MK, min(capacity, len(w_up_NK)), gated=w_gate_NK is not None)


def _probe(device: torch.device) -> Availability:
    try:
        from triton.errors import TritonError

        from ..triton.twell import HIDDEN_STEP, INTERPRET
    except ImportError as error:
        return Availability(False, f"Triton cannot be imported: {error}")
    if reason := _obstacle(device, INTERPRET):
        return Availability(False, reason)
    try:
        return launch(_forward, device, torch.bfloat16, hidden=HIDDEN_STEP)
    except TritonError as error:
        return Availability(False, f"a kernel does not compile: {type(error).__name__}: {error}")


def _obstacle(device: torch.device, interpreted: bool) -> str | None:
    """Why the kernels cannot run on this device, or None."""
    if interpreted:
        return None if device.type == "cpu" else f"with TRITON_INTERPRET=1 it needs the CPU, this is {device}"
    if device.type != "cuda":
        return f"it needs a CUDA device (or TRITON_INTERPRET=1), this is {device}"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip or capability < _CAPABILITY:
        return (
            f"it needs an NVIDIA GPU of compute capability 8.0 or more, {device} has {'.'.join(map(str, capability))}"
        )
    return None


def _supports(request: Request) -> str | None:
    from ..triton.twell import HIDDEN_STEP, MAX_HIDDEN, MAX_INTERMEDIATE

    if request.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {request.dtype}"
    if request.hidden % HIDDEN_STEP or request.hidden > MAX_HIDDEN:
        return f"the hidden size must be a multiple of {HIDDEN_STEP} up to {MAX_HIDDEN}, this is {request.hidden}"
    if request.intermediate > MAX_INTERMEDIATE:
        return f"the intermediate size must be at most {MAX_INTERMEDIATE}, this is {request.intermediate}"
    return None


BACKEND = Backend("triton", _probe, _supports, _forward, _backward, _saved_like)
