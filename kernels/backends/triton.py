"""The paper's inference plan in Triton, for NVIDIA GPUs from Ampere on (compute capability 8.0): TwELL packed in the
epilogue of the gate product, then one fused pass over it. See `triton/twell.py`. No training yet.

With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly: for tests.

NaN and Inf reach y as in plain torch, also where they meet a zero of the gate. Shapes: M tokens, K hidden, N neurons.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from ..memory import neuron_major
from ..registry import Availability, Backend, Forward, Request
from .probe import launch

_CAPABILITY = (8, 0)


def _forward(
    x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor, *, stats: bool, training: bool
) -> Forward:
    from ..triton import twell

    if x_MK.shape[0] == 0:
        return _nothing(x_MK, w_up_NK.shape[0])
    with torch.cuda.device(x_MK.device) if x_MK.is_cuda else nullcontext():
        weights = w_gate_NK, w_up_NK.contiguous(), neuron_major(w_down_KN).t()
        packed = twell.gate_pack(x_MK, *weights)
        y_MK, counts = twell.gated_down(packed, x_MK, *weights, stats=stats)
    if counts is None:
        return Forward(y_MK, None, None, None, None)
    nonzeros_M, l1_M, fired_N = counts
    return Forward(y_MK, nonzeros_M, l1_M.mean(), fired_N, packed.overflow)


def _nothing(x_MK: Tensor, intermediate: int) -> Forward:
    return Forward(
        torch.empty_like(x_MK),
        x_MK.new_zeros(0, dtype=torch.int32),
        x_MK.new_zeros((), dtype=torch.float32),
        x_MK.new_zeros(intermediate, dtype=torch.bool),
        overflow=None,
    )


def _backward(*args) -> tuple[Tensor | None, ...]:
    raise RuntimeError("the triton backend has no backward: `supports` must not let training through")


def _saved_like(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor) -> tuple[Tensor, ...]:
    return ()


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

    if request.training:
        return "it has no training kernels yet"
    if request.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {request.dtype}"
    if request.hidden % HIDDEN_STEP or request.hidden > MAX_HIDDEN:
        return f"the hidden size must be a multiple of {HIDDEN_STEP} up to {MAX_HIDDEN}, this is {request.hidden}"
    if request.intermediate > MAX_INTERMEDIATE:
        return f"the intermediate size must be at most {MAX_INTERMEDIATE}, this is {request.intermediate}"
    return None


BACKEND = Backend("triton", _probe, _supports, _forward, _backward, _saved_like)
