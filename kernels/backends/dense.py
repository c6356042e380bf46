"""The block as plain dense products in the input's dtype, with the statistics at next to no cost.

What training on a CPU uses, and the yardstick for the others. NaN and Inf behave as in plain torch because this is
plain torch. Shapes: M tokens, K hidden, N intermediate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..registry import Availability, Backend, Forward, Request


def _forward(
    x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor, *, stats: bool, training: bool
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
    wide = torch.promote_types(h_MN.dtype, torch.float32)
    # A 0/1 mask in g's dtype: on a CPU, comparing into bool and summing that takes three times as long.
    active_MN = torch.ne(g_MN, 0, out=torch.empty_like(g_MN))
    nonzeros_M = active_MN.sum(-1, dtype=torch.float32).to(torch.int32)
    fired_N = active_MN.amax(0) != 0 if g_MN.shape[0] else g_MN.new_zeros(g_MN.shape[1], dtype=torch.bool)
    l1 = h_MN.abs().sum(dtype=wide) / max(h_MN.shape[0], 1)
    return nonzeros_M, l1, fired_N


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


def _saved_like(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor) -> tuple[Tensor, ...]:
    count = 1 if w_gate_NK is None else 2
    return tuple(x_MK.new_empty(x_MK.shape[0], w_up_NK.shape[0]) for _ in range(count))


def _probe(device: torch.device) -> Availability:
    return Availability(True, "plain torch products run on every device")


def _supports(request: Request) -> str | None:
    return None


BACKEND = Backend("dense", _probe, _supports, _forward, _backward, _saved_like)
