"""Sparse plans in Triton, for NVIDIA GPUs from Ampere on (compute capability 8.0): TwELL packed in the epilogue of the
gate product, one fused pass over it, and in training a backward on the entries that this pass saved. See
`triton/inference.py` and `triton/backward.py`.

With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU, slowly: for tests.

NaN and Inf in x reach y as in plain torch, also where the gate is zero. Shapes: M tokens, K hidden, N neurons.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import hot_split
from ..gpu import adapter
from ..gpu.saved_csr import needed_capacity
from ..interface import RELU2, Availability, Backend, Forward, HotSteps, Weights
from .probe import launch

_CAPABILITY = (8, 0)
_HIDDEN_STEP = 16
_MOST_FEW = 64  # tokens of the kernels for few: with more, dense products are faster (docs/log/2026-11-22.md)


def _takes_few(tokens: int, hidden: int) -> bool:
    return 0 < tokens <= _MOST_FEW


@functools.cache
def _kernels() -> adapter.Kernels:
    """Imported when they are used: Triton need not be installed."""
    from ..triton import few, inference
    from ..triton.backward import backward

    return adapter.Kernels(inference.gate_pack, inference.gated_down, backward, _takes_few, few.forward)


def _activate(*arguments: Any) -> tuple[Tensor, Forward]:
    from ..triton.hot_steps import activate

    return activate(*arguments)


def _derive(*arguments: Any) -> tuple[Tensor, Tensor]:
    from ..triton.hot_steps import derive

    return derive(*arguments)


_HOT = HotSteps(adapter.on_own_device(_activate), adapter.on_own_device(_derive), hot_split.gather, hot_split.scatter)
_forward, _backward = adapter.forward_and_backward(_kernels, _HOT)


def _prepare(x: Tensor, weights: Weights, activation: str) -> Callable[[Tensor], Tensor] | None:
    from ..triton import few, inference

    if inference.INTERPRET or not adapter.are_read_in_place(x, weights):
        return None
    make = few.prepared if _takes_few(*x.shape) else inference.prepared
    return adapter.on_own_device(adapter.on_own_device(make)(x, weights, activation == RELU2))


def _probe(device: torch.device) -> Availability:
    try:
        from triton.errors import TritonError

        from ..triton.inference import INTERPRET
    except ImportError as error:
        return Availability(False, f"Triton cannot be imported: {error}")
    if reason := device_misfit(device, INTERPRET):
        return Availability(False, reason)
    try:
        return launch(_forward, device, torch.bfloat16, hidden=_HIDDEN_STEP)
    except TritonError as error:
        return Availability(False, f"a kernel does not compile: {type(error).__name__}: {error}")


def device_misfit(device: torch.device, interpreted: bool) -> str | None:
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


BACKEND = Backend(
    _probe,
    functools.partial(adapter.misfit, hidden_step=_HIDDEN_STEP),
    _forward,
    _backward,
    adapter.saved_like,
    hot=_HOT,
    prepare=_prepare,
    needed_capacity=needed_capacity,
    few_tokens=_takes_few,
    reads_saved_only=adapter.reads_saved_only,
)
