"""The block as plain dense products in the input's dtype, with the statistics at next to no cost.

What training on a CPU uses, and the yardstick for the others. NaN and Inf behave as in plain torch because this is
plain torch. Shapes: M tokens, K hidden, N intermediate.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..registry import Availability, Backend, Forward, Request
from .probe import launch

BYTE_BLOCK = 128  # columns whose count of active ones fits in a byte


def _forward(
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
    if w_gate_NK is None:
        g_MN = h_MN = F.linear(x_MK, w_up_NK).relu_()
        saved = (h_MN,)
    else:
        g_MN, u_MN = F.linear(x_MK, w_gate_NK).relu_(), F.linear(x_MK, w_up_NK)
        # h is one product away from g and u: saving two [M, N] instead of torch's three.
        h_MN, saved = g_MN * u_MN, (g_MN, u_MN)
    y_MK = F.linear(h_MN, w_down_KN)
    counts = _statistics(g_MN, h_MN) if stats else (None, None, None)
    return Forward(y_MK, *counts, overflow=None, saved=saved if training else ())


def _statistics(g_MN: Tensor, h_MN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nonzeros int32 [M], l1 scalar, fired bool [N])."""
    tokens, neurons = g_MN.shape
    # As bytes, not by !=, any() or a sum of bools: on a CPU those are not vectorised and take 5 to 50 times as long.
    active_MN = g_MN.to(torch.bool).view(torch.uint8)
    block = math.gcd(neurons, BYTE_BLOCK)
    nonzeros_M = active_MN.view(tokens, neurons // block, block).sum(-1, dtype=torch.uint8).sum(-1, dtype=torch.int32)
    fired_N = (active_MN.amax(0) if tokens else active_MN.new_zeros(neurons)).to(torch.bool)
    l1 = h_MN.abs().sum(dtype=torch.promote_types(h_MN.dtype, torch.float32)) / max(tokens, 1)
    return nonzeros_M, l1, fired_N


def traced(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor, *, stats: bool) -> Forward:
    """The same as differentiable plain torch: under torch.compile, which fuses what it can see into."""
    g_MN = F.linear(x_MK, w_up_NK if w_gate_NK is None else w_gate_NK).relu()
    h_MN = g_MN if w_gate_NK is None else g_MN * F.linear(x_MK, w_up_NK)
    y_MK = F.linear(h_MN, w_down_KN)
    if not stats:
        return Forward(y_MK, None, None, None, overflow=None)
    active_MN = g_MN != 0
    l1 = h_MN.abs().sum(dtype=torch.promote_types(h_MN.dtype, torch.float32)) / max(h_MN.shape[0], 1)
    return Forward(y_MK, active_MN.sum(-1, dtype=torch.int32), l1, active_MN.any(0), overflow=None)


def _backward(
    dy_MK: Tensor,
    dl1: Tensor | None,
    x_MK: Tensor,
    w_gate_NK: Tensor | None,
    w_up_NK: Tensor,
    w_down_KN: Tensor,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    needs_x, needs_gate, needs_up, needs_down = needs
    if w_gate_NK is None:
        (h_MN,) = saved
    else:
        g_MN, u_MN = saved
        h_MN = g_MN * u_MN
    dw_down_KN = dy_MK.t() @ h_MN if needs_down else None
    dh_MN = dy_MK @ w_down_KN
    if dl1 is not None:
        dh_MN.addcmul_(h_MN.sign_() if w_gate_NK is not None else h_MN.sign(), _per_token(dl1, x_MK))
    if w_gate_NK is None:
        du_MN = torch.ops.aten.threshold_backward(dh_MN, h_MN, 0)
        dx_MK = du_MN @ w_up_NK if needs_x else None
        return dx_MK, None, du_MN.t() @ x_MK if needs_up else None, dw_down_KN
    du_MN = torch.mul(dh_MN, g_MN, out=h_MN)
    dg_MN = torch.ops.aten.threshold_backward(dh_MN.mul_(u_MN), g_MN, 0)
    dx_MK = torch.addmm(du_MN @ w_up_NK, dg_MN, w_gate_NK) if needs_x else None
    dw_gate_NK = dg_MN.t() @ x_MK if needs_gate else None
    dw_up_NK = du_MN.t() @ x_MK if needs_up else None
    return dx_MK, dw_gate_NK, dw_up_NK, dw_down_KN


def _per_token(dl1: Tensor, x_MK: Tensor) -> Tensor:
    """dl1/d|h| of the mean over tokens, in the dtype of the products."""
    return (dl1 / max(x_MK.shape[0], 1)).to(x_MK.dtype)


def _saved_like(
    x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, capacity: int, backup: float | None
) -> tuple[Tensor, ...]:
    count = 1 if w_gate_NK is None else 2
    return tuple(x_MK.new_empty(x_MK.shape[0], w_up_NK.shape[0]) for _ in range(count))


def _probe(device: torch.device) -> Availability:
    return launch(_forward, device, torch.float32)


def _supports(request: Request) -> str | None:
    return None


BACKEND = Backend("dense", _probe, _supports, _forward, _backward, _saved_like, sparse=False)
