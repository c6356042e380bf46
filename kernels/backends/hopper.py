"""Sparse plans in CUDA C++ for Hopper GPUs (H100, H200): TwELL packed in the epilogue of the gate product, one fused
pass over it, and in training a backward on the entries that this pass kept. See `hopper/twell.py` and
`hopper/backward.py`.

NaN and Inf reach y as in plain torch, also where they meet a zero of the gate. Shapes: M tokens, K hidden, N neurons.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..hopper import hot, twell
from ..hopper.backward import backward
from ..hopper.twell import HIDDEN_STEP, MAX_HIDDEN, MAX_INTERMEDIATE
from ..kept import needed_capacity
from ..registry import Availability, Backend, HotSteps, Request
from . import gpu
from .probe import launch

_CAPABILITY = (9, 0)
_PROBE_NEURONS = 8


def _gate_pack(*operands: Tensor | None, stats: bool, training: bool) -> twell.PackedGate:
    return twell.gate_pack(*operands, count_overflow=stats, training=training)


_KERNELS = gpu.Kernels(_gate_pack, twell.gated_down, backward)
_HOT = HotSteps(gpu.on_own_device(hot.activate), gpu.on_own_device(hot.derive))
_forward, _backward, _saved_like = gpu.functions(lambda: _KERNELS, _HOT)


def _repeat(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> Callable[[Tensor], Tensor] | None:
    operands = (x, w_gate, w_up, w_down)
    return gpu.on_own_device(twell.Repeated(*operands)) if gpu.as_they_are(*operands) else None


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
    # A kernel that does not compile or load is a RuntimeError, which `launch` reports.
    return launch(_forward, device, torch.bfloat16, hidden=HIDDEN_STEP, intermediate=_PROBE_NEURONS)


def _supports(request: Request) -> str | None:
    return gpu.misfit(request, HIDDEN_STEP, MAX_HIDDEN, MAX_INTERMEDIATE)


BACKEND = Backend(
    "hopper", _probe, _supports, _forward, _backward, _saved_like, hot=_HOT, repeat=_repeat, needed=needed_capacity
)
