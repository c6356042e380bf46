"""The block by FP8 products (e4m3), what a user of a GPU that has them tries first. It is not exact: timed beside the
other forms, with its error, and is the baseline of none.

One scale for each row of the weights, made once, and for each token's x and h, made in each call. torch.compile fuses
scales and roundings with the activation. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.run.torch_internals import fp8_product
from twell.testing import Problem

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
# Relative error of y: numbers have 3 bits behind the point, and activations near zero change sign. Nonsense gives 1.
TOLERANCE = 0.25
_STEP = 16  # both sizes of a product must be multiples of it
_CAPABILITY = (8, 9)


def misfit(problem: Problem) -> str:
    """Why this form cannot run the problem on its device; empty if it can."""
    neurons, hidden = problem.w_up.shape
    device = problem.x.device
    if problem.x.dtype != torch.bfloat16:
        return f"FP8 products give bfloat16, not {problem.x.dtype}"
    if neurons % _STEP or hidden % _STEP:
        return f"FP8 products need sizes that are multiples of {_STEP}, got K={hidden}, N={neurons}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"FP8 products need compute capability {'.'.join(map(str, _CAPABILITY))}"
    return ""


def quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(values, FP8 [R, C], scales, float32 [R, 1]) whose product is `rows` up to rounding."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (rows.float() / scales).to(DTYPE), scales


def prepare(problem: Problem) -> tuple[Any, ...]:
    """Operands of `forward`, tensors or None: x and the quantised weights, w_down by rows [K, N]."""
    x, w_gate, w_up, w_down = problem
    gate = (None, None) if w_gate is None else quantised(w_gate)
    return x, *gate, *quantised(w_up), *quantised(w_down.contiguous())


def forward(
    x_MK: Tensor,
    gate: Tensor | None,
    gate_scales: Tensor | None,
    up: Tensor,
    up_scales: Tensor,
    *down: Tensor,
    activation: Callable[[Tensor], Tensor] = F.relu,
) -> tuple[Tensor, None]:
    """(y [M, K], no L1 term) of the operands that `prepare` makes."""
    x = quantised(x_MK)
    h_MN = fp8_product(*x, up, up_scales)
    if gate is None or gate_scales is None:
        h_MN = activation(h_MN)
    else:
        h_MN = activation(fp8_product(*x, gate, gate_scales)) * h_MN
    return fp8_product(*quantised(h_MN), *down), None


compiled = torch.compile(forward, dynamic=False)
