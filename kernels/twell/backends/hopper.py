"""Sparse plans in CUDA C++ for Hopper GPUs (H100, H200): TwELL packed in the epilogue of the gate product, one fused
pass over it, and in training a backward on the entries that this pass saved. See `hopper/inference.py` and
`hopper/backward.py`. Inference with few tokens has kernels of its own, `hopper/few.py`.

NaN and Inf in x reach y as in plain torch, also where the gate is zero. Shapes: M tokens, K hidden, N neurons.
"""

from collections.abc import Callable, Hashable
from functools import partial

import torch
from torch import Tensor

from ..gpu import adapter
from ..gpu.saved_csr import needed_capacity
from ..hopper import few, hot_steps, inference, screen
from ..hopper.backward import backward
from ..interface import RELU2, Availability, Backend, HotSteps, Request, Weights
from ..memory import PIECE
from .probe import launch

_CAPABILITY = (9, 0)
_HIDDEN_STEP = 64
_PROBE_NEURONS = 8

_KERNELS = adapter.Kernels(inference.gate_pack, inference.gated_down, backward, few.takes, few.forward, screen.screen)

h_at_once = adapter.on_own_device(hot_steps.hidden)
_HOT = HotSteps(
    activate=adapter.on_own_device(hot_steps.activate),
    derive=adapter.on_own_device(hot_steps.derive),
    gather=adapter.on_own_device(hot_steps.gather),
    scatter=adapter.on_own_device(hot_steps.scatter),
    hidden=h_at_once,
)
_forward, _backward = adapter.forward_and_backward(lambda: _KERNELS, _HOT)


def _prepare(x: Tensor, weights: Weights, activation: str) -> Callable[[Tensor], Tensor] | None:
    if not adapter.are_read_in_place(x, weights):
        return None
    make = few.PreparedFew if few.takes(*x.shape) else inference.PreparedForward
    return adapter.on_own_device(make(x, weights, squared=activation == RELU2))


def _kernels(request: Request, screened: bool) -> dict[Hashable, Callable[[], object]]:
    index = torch.cuda.current_device() if request.device.index is None else request.device.index
    hidden, neurons, squared = request.hidden, request.intermediate, request.activation == RELU2
    count, switches = inference.sm_count(index), inference.Switches(request.gated, squared)
    loads: dict[Hashable, Callable[[], object]] = {}
    if request.gated:
        loads["hot_hidden", index, request.activation] = partial(hot_steps.hidden_kernel, index, request.activation)
    else:
        hot = ("hot_forward", index, False, squared, False, False)
        loads[hot] = partial(hot_steps.kernel, *hot)
    if screened:
        loads["quantise", index, hidden] = partial(screen.quantise_kernel, index, hidden)
        loads["gate_pack", index, inference.WIDE, True] = partial(
            inference.gate_pack_kernel, index, inference.WIDE, True
        )
    for tokens in (2**i for i in range(PIECE.bit_length())):
        if few.takes(tokens, hidden):
            kind = few.kind(tokens)
            loads["few", index, hidden, neurons, switches, kind] = partial(
                few.plan, index, tokens, hidden, neurons, request.gated, squared
            )
            continue
        tiling = inference.tiling_for(tokens, neurons, count)
        parts = inference.parts_for(tokens, hidden, count)
        loads["gate_pack", index, tiling, False] = partial(inference.gate_pack_kernel, index, tiling, False)
        kinds = [(tiling, parts, switches)]
        if screened:
            kinds.append((inference.WIDE, parts, switches._replace(screened=True)))
        for each in kinds:
            loads["gated_down", index, hidden, *each] = partial(inference.gated_down_kernel, index, hidden, *each)
    return loads


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
    return launch(_forward, device, torch.bfloat16, hidden=_HIDDEN_STEP, intermediate=_PROBE_NEURONS)


BACKEND = Backend(
    _probe,
    partial(adapter.misfit, hidden_step=_HIDDEN_STEP),
    _forward,
    _backward,
    adapter.saved_like,
    screens=True,
    hot=_HOT,
    prepare=_prepare,
    needed_capacity=needed_capacity,
    few_tokens=few.takes,
    reads_saved_only=adapter.reads_saved_only,
    kernels=_kernels,
)
