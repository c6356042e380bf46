"""Sparse plans in CUDA C++ for Hopper GPUs (H100, H200): TwELL packed in the epilogue of the gate product, one fused
pass over it, and in training a backward on the entries that this pass kept. See `hopper/twell.py` and
`hopper/backward.py`.

NaN and Inf reach y as in plain torch, also where they meet a zero of the gate. Shapes: M tokens, K hidden, N neurons.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hopper import twell
from ..hopper.backward import backward
from ..hopper.compiler import CompileError
from ..hopper.driver import DriverError
from ..hopper.twell import HIDDEN_STEP, MAX_HIDDEN, MAX_INTERMEDIATE
from ..kept import Kept
from ..memory import neuron_major
from ..registry import Availability, Backend, Forward, Request

_CAPABILITY = (9, 0)


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
    if x_MK.shape[0] == 0:
        return _nothing(x_MK, w_gate_NK, w_up_NK, training)
    if x_MK.device.index != torch._C._cuda_getDevice():  # torch.cuda.current_device() without looking for a GPU again
        with torch.cuda.device(x_MK.device):
            return _forward(x_MK, w_gate_NK, w_up_NK, w_down_KN, stats=stats, training=training, capacity=capacity)
    keep = Kept.empty(x_MK, min(capacity, len(w_up_NK)), gated=w_gate_NK is not None) if training else None
    weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
    packed = twell.gate_pack(x_MK, *weights, count_overflow=stats, training=training)
    y_MK, counts = twell.gated_down(packed, x_MK, *weights, stats=stats or training, keep=keep)
    if counts is None:
        return Forward(y_MK, None, None, None, None)
    nonzeros_M, l1_M, fired_N = counts
    return Forward(y_MK, nonzeros_M, l1_M.mean(), fired_N, packed.overflow, keep or ())


def _in_memory(w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights neuron by neuron, as the kernels read them; themselves where they are so."""
    return None if w_gate_NK is None else w_gate_NK.contiguous(), w_up_NK.contiguous(), neuron_major(w_down_KN)


def _nothing(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, training: bool) -> Forward:
    return Forward(
        torch.empty_like(x_MK),
        x_MK.new_zeros(0, dtype=torch.int32),
        x_MK.new_zeros((), dtype=torch.float32),
        x_MK.new_zeros(len(w_up_NK), dtype=torch.bool),
        overflow=None,
        saved=Kept.empty(x_MK, 0, gated=w_gate_NK is not None) if training else (),
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
    if x_MK.shape[0] == 0:
        inputs = (x_MK, w_gate_NK, w_up_NK, w_down_KN)
        return [torch.zeros_like(t) if needed else None for t, needed in zip(inputs, needs, strict=True)]
    with torch.cuda.device(x_MK.device):
        weights = _in_memory(w_gate_NK, w_up_NK, w_down_KN)
        return backward(dy_MK, dl1, x_MK, *weights, Kept(*saved), needs)


def _saved_like(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, capacity: int) -> Sequence[Tensor]:
    return Kept.empty(x_MK, min(capacity, len(w_up_NK)), gated=w_gate_NK is not None)


def _probe(device: torch.device) -> Availability:
    if device.type != "cuda":
        return Availability(False, f"it needs a CUDA device, this is {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return Availability(
            False, f"it needs compute capability 9.0 (Hopper), {device} has {'.'.join(map(str, capability))}"
        )
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError as error:
        return Availability(False, f"cuda-bindings cannot be imported: {error}")
    try:
        return _checked_launch(device)
    except (CompileError, DriverError) as error:
        return Availability(False, str(error))


def _checked_launch(device: torch.device) -> Availability:
    """Runs a tiny problem with whole numbers, whose answer is exact in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 64), (8, 64), (8, 64), (64, 8))
    x, gate, up, down = ((torch.rand(shape, generator=generator) < 0.1).to(device, torch.bfloat16) for shape in shapes)
    wanted = (torch.relu(x @ gate.t()) * (x @ up.t())) @ down.t()
    got = _forward(x, gate, up, down, stats=False, training=False).y
    if not torch.equal(got, wanted):
        return Availability(False, "a tiny test launch gave a wrong result")
    return Availability(True, "a tiny test launch gave the right result")


def _supports(request: Request) -> str | None:
    if request.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {request.dtype}"
    if request.hidden % HIDDEN_STEP or request.hidden > MAX_HIDDEN:
        return f"the hidden size must be a multiple of {HIDDEN_STEP} up to {MAX_HIDDEN}, this is {request.hidden}"
    if request.intermediate > MAX_INTERMEDIATE:
        return f"the intermediate size must be at most {MAX_INTERMEDIATE}, this is {request.intermediate}"
    return None


BACKEND = Backend("hopper", _probe, _supports, _forward, _backward, _saved_like)
