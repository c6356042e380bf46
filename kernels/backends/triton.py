"""Sparse plans in Triton, for NVIDIA GPUs from Ampere on (compute capability 8.0): TwELL packed in the epilogue of the
gate product, one fused pass over it, and in training a backward on the entries that this pass kept. See
`triton/twell.py` and `triton/backward.py`.

With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly: for tests.

NaN and Inf reach y as in plain torch, also where they meet a zero of the gate. Shapes: M tokens, K hidden, N neurons.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..kept import needed_capacity
from ..registry import Availability, Backend, HotSteps, Request
from . import gpu
from .probe import launch

_CAPABILITY = (8, 0)


@functools.cache
def _kernels() -> gpu.Kernels:
    """Imported when they are used: Triton need not be installed. They take w_down as [N, K]."""
    from ..triton import twell
    from ..triton.backward import backward

    def gate_pack(x, w_gate, w_up, w_down, *, stats, training):
        return twell.gate_pack(x, w_gate, w_up, w_down.t(), training=training)

    def gated_down(packed, x, w_gate, w_up, w_down, **options):
        return twell.gated_down(packed, x, w_gate, w_up, w_down.t(), **options)

    def gradients(dy, dl1, x, w_gate, w_up, w_down, kept, needs):
        return backward(dy, dl1, x, w_gate, w_up, w_down.t(), kept, needs)

    return gpu.Kernels(gate_pack, gated_down, gradients)


def _activate(*arguments):
    from ..triton.hot import activate

    return activate(*arguments)


def _derive(*arguments):
    from ..triton.hot import derive

    return derive(*arguments)


_HOT = HotSteps(gpu.on_own_device(_activate), gpu.on_own_device(_derive))
_forward, _backward, _saved_like = gpu.functions(_kernels, _HOT)


def _repeat(x, w_gate, w_up, w_down) -> Callable[[Tensor], Tensor] | None:
    from ..triton import twell

    if twell.INTERPRET or not gpu.as_they_are(x, w_gate, w_up, w_down):
        return None
    return gpu.on_own_device(gpu.on_own_device(twell.prepared)(x, w_gate, w_up, w_down.t()))


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

    return gpu.misfit(request, HIDDEN_STEP, MAX_HIDDEN, MAX_INTERMEDIATE)


BACKEND = Backend(
    "triton", _probe, _supports, _forward, _backward, _saved_like, hot=_HOT, repeat=_repeat, needed=needed_capacity
)
