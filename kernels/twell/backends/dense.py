"""The block as plain dense products in the input's dtype, with the statistics at next to no cost.

What training on a CPU uses, and the yardstick for the others. NaN and Inf behave as in plain torch because this is
plain torch, but for inference on a GPU: one kernel for the activation, or on Hopper for h, has the same roundings.
Shapes: M tokens, K hidden, N intermediate.
"""

import functools
import importlib.util
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import registry
from ..hot_split import before_activation, hidden_of
from ..interface import RELU, RELU2, SILU, Backend, Forward, Gradients, Needs, Options, Weights
from ..launch_cache import LAUNCHES
from ..memory import is_in_rows
from .probe import launch

H_AT_ONCE = 4096  # tokens from which on one kernel makes h faster than torch
BYTE_BLOCK = 128  # columns whose count of active ones fits in a byte
_LOADED = "h_at_once"  # with a device and an activation: the launch cache's key once that kernel is loaded there
PIECE = 16384  # tokens whose gradients are computed at once where the forward saved nothing: some 70 KB a token


def _forward(x_MK: Tensor, weights: Weights, options: Options) -> Forward:
    if not options.training and not options.stats:
        return Forward(inference(x_MK, weights.gate, weights.up, weights.down.t(), options.activation))
    g_MN, *up = saved = _saved(x_MK, weights)
    h_MN = hidden_of(g_MN, up[0] if up else None, options.activation)
    y_MK = F.linear(h_MN, weights.down.t())
    nonzeros_M, l1, fired_N = _statistics(g_MN, h_MN, weights.l1) if options.stats else (None, None, None)
    return Forward(y_MK, nonzeros_M, l1, fired_N, saved=saved if options.training else ())


def _saved(x_MK: Tensor, weights: Weights) -> tuple[Tensor, ...]:
    """(g [M, N], with a gate also u [M, N]): before the square and the product, two instead of torch's three (four with
    a square)."""
    g_MN = F.linear(x_MK, weights.pattern).relu_()
    return (g_MN,) if weights.gate is None else (g_MN, F.linear(x_MK, weights.up))


def inference(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor, activation: str) -> Tensor:
    """y alone, of x of any shape [..., K]. On Hopper h comes from one kernel where there are many tokens; on a GPU that
    Triton can use, the activation is one kernel, as torch.compile would make it."""
    if w_gate_NK is not None and x_MK.is_cuda and makes_h_at_once(x_MK, w_gate_NK, w_up_NK, activation):
        h_MN = h_at_once(x_MK, w_gate_NK, w_up_NK, activation)
        if h_MN is not None:
            return F.linear(h_MN, w_down_KN)
    if w_gate_NK is None:
        z_MN, u_MN = F.linear(x_MK, w_up_NK), None
    else:
        z_MN, u_MN = F.linear(x_MK, w_gate_NK), F.linear(x_MK, w_up_NK)
    if not ((u_MN is not None or activation == RELU2) and z_MN.is_cuda and _fused(z_MN, u_MN, activation)):
        z_MN = hidden_of(z_MN.relu_(), u_MN, activation)
    return F.linear(z_MN, w_down_KN)


def makes_h_at_once(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, activation: str) -> bool:
    """Whether `inference` makes h in one kernel, if the weights' layout allows it: with a gate and many tokens, in
    bfloat16 on Hopper. A CUDA graph that is captured has it if a call came before: no kernel can be loaded then. That
    kernel does not round relu's square, which it leaves to others; nor silu, which only rivals ask for."""
    if w_gate_NK is None or activation not in (RELU, SILU) or math.prod(x_MK.shape[:-1]) < H_AT_ONCE:
        return False
    if any(t.dtype is not torch.bfloat16 for t in (x_MK, w_gate_NK, w_up_NK)):
        return False
    captured = not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()
    if captured and LAUNCHES.get((_LOADED, x_MK.device, activation)) is None:
        return False
    intermediate, hidden = map(operator.index, w_up_NK.shape)  # under torch.compile they may be symbols
    return registry.can_run("hopper", x_MK.device, x_MK.dtype, hidden, intermediate)


def h_at_once(x_MK: Tensor, w_gate_NK: Tensor, w_up_NK: Tensor, activation: str) -> Tensor | None:
    """h with both products and the activation (relu or silu) in one Hopper kernel, where `makes_h_at_once`; None for a
    layout that it cannot read."""
    if not (is_in_rows(w_gate_NK) and is_in_rows(w_up_NK)):
        return None
    from . import hopper

    h_MN = hopper.h_at_once(x_MK.reshape(-1, x_MK.shape[-1]), w_gate_NK, w_up_NK, activation)
    if h_MN is None:
        return None
    LAUNCHES.put((_LOADED, x_MK.device, activation), True)
    return h_MN.view(*x_MK.shape[:-1], -1)


def _fused(z_MN: Tensor, u_MN: Tensor | None, activation: str) -> bool:
    """Puts h in place of z by one kernel, if that can be used."""
    if z_MN.dtype is not torch.bfloat16 or not all(t is None or t.is_contiguous() for t in (z_MN, u_MN)):
        return False
    if not _has_triton(z_MN.device):
        return False
    from ..triton import activation as fused

    return fused.apply_(z_MN, u_MN, squared=activation == RELU2)


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Whether Triton is installed and our kernels are made for this device."""
    from .triton import device_misfit

    return importlib.util.find_spec("triton") is not None and device_misfit(device, interpreted=False) is None


def _statistics(g_MN: Tensor, h_MN: Tensor, l1_weight_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(nonzeros int32 [M], l1 scalar, fired bool [N])."""
    tokens, neurons = g_MN.shape
    # As bytes, not by !=, any() or a sum of bools: on a CPU those are not vectorised and take 5 to 50 times as long.
    active_MN = g_MN.to(torch.bool).view(torch.uint8)
    block = math.gcd(neurons, BYTE_BLOCK)
    nonzeros_M = active_MN.view(tokens, neurons // block, block).sum(-1, dtype=torch.uint8).sum(-1, dtype=torch.int32)
    fired_N = (active_MN.amax(0) if tokens else active_MN.new_zeros(neurons)).to(torch.bool)
    wide = torch.promote_types(h_MN.dtype, torch.float32)
    size_MN = h_MN.abs()
    total = size_MN.sum(dtype=wide) if l1_weight_N is None else size_MN.sum(0, dtype=wide) @ l1_weight_N
    return nonzeros_M, total / max(tokens, 1), fired_N


def traced(x_MK: Tensor, weights: Weights, activation: str, *, stats: bool) -> Forward:
    """The same as differentiable plain torch: under torch.compile, which fuses what it can see into."""
    g_MN = F.linear(x_MK, weights.pattern).relu()
    a_MN = g_MN.square() if activation == RELU2 else g_MN
    h_MN = a_MN if weights.gate is None else a_MN * F.linear(x_MK, weights.up)
    y_MK = F.linear(h_MN, weights.down.t())
    if not stats:
        return Forward(y_MK)
    active_MN, wide = g_MN != 0, torch.promote_types(h_MN.dtype, torch.float32)
    size_MN = h_MN.abs() if weights.l1 is None else h_MN.abs() * weights.l1
    l1 = size_MN.sum(dtype=wide) / max(h_MN.shape[0], 1)
    return Forward(y_MK, active_MN.sum(-1, dtype=torch.int32), l1, active_MN.any(0))


def _backward(
    dy_MK: Tensor,
    dl1: Tensor | None,
    x_MK: Tensor,
    weights: Weights,
    saved: Sequence[Tensor],
    needs: Needs,
    activation: str,
) -> Gradients:
    gate_NK, up_NK, down_NK, l1_weight_N = weights
    g_MN, u_MN = saved if gate_NK is not None else (saved[0], None)
    h_MN = hidden_of(g_MN, u_MN, activation)
    ddown_NK = None
    if needs.down:  # in the layout of the weight, which it then need not be copied to
        ddown_NK = h_MN.t() @ dy_MK if down_NK.is_contiguous() else (dy_MK.t() @ h_MN).t()
    dh_MN = dy_MK @ down_NK.t()
    if dl1 is not None:
        # d l1 / d|h|, of the mean over tokens
        slope = dl1 / max(x_MK.shape[0], 1) * (1 if l1_weight_N is None else l1_weight_N)
        dh_MN.addcmul_(h_MN.sign() if h_MN is g_MN else h_MN.sign_(), slope.to(x_MK.dtype))
    if gate_NK is None or u_MN is None:
        du_MN = before_activation(dh_MN, g_MN, activation)
        dx_MK = du_MN @ up_NK if needs.x else None
        return Gradients(dx_MK, None, du_MN.t() @ x_MK if needs.up else None, ddown_NK)
    a_MN = torch.mul(g_MN, g_MN, out=h_MN) if activation == RELU2 else g_MN
    du_MN = torch.mul(dh_MN, a_MN, out=h_MN)
    dg_MN = before_activation(dh_MN.mul_(u_MN), g_MN, activation)
    dx_MK = torch.addmm(du_MN @ up_NK, dg_MN, gate_NK) if needs.x else None
    dgate_NK = dg_MN.t() @ x_MK if needs.gate else None
    dup_NK = du_MN.t() @ x_MK if needs.up else None
    return Gradients(dx_MK, dgate_NK, dup_NK, ddown_NK)


def _saved_like(x_MK: Tensor, weights: Weights, options: Options) -> tuple[Tensor, ...]:
    count = 1 if weights.gate is None else 2
    return tuple(x_MK.new_empty(x_MK.shape[0], weights.up.shape[0]) for _ in range(count))


def gradients(
    dy_MK: Tensor, dl1: Tensor | None, x_MK: Tensor, weights: Weights, needs: Needs, activation: str
) -> Gradients:
    """Gradients from the block's inputs alone, for a forward that saved too little; of many tokens in pieces, whose
    gradients of weights add up in float32 (float64 where they are that)."""
    tokens = x_MK.shape[0]
    if tokens <= PIECE:
        return _backward(dy_MK, dl1, x_MK, weights, _saved(x_MK, weights), needs, activation)
    dx_MK = torch.empty_like(x_MK) if needs.x else None
    sums: list[Tensor | None] = [None, None, None]
    for start in range(0, tokens, PIECE):
        rows = slice(start, start + PIECE)
        x, dy = x_MK[rows], dy_MK[rows]
        share = None if dl1 is None else dl1 * (x.shape[0] / tokens)  # of the mean over all tokens
        piece = _backward(dy, share, x, weights, _saved(x, weights), needs, activation)
        if dx_MK is not None and piece.x is not None:
            dx_MK[rows] = piece.x
        for i, gradient in enumerate(piece[1:]):
            if gradient is not None:
                total = sums[i]
                wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                sums[i] = wide if total is None else total.add_(wide)
    return Gradients(dx_MK, *(None if total is None else total.to(x_MK.dtype) for total in sums))


_probe = functools.partial(launch, _forward, dtype=torch.float32)
BACKEND = Backend(_probe, lambda request: None, _forward, _backward, _saved_like, sparse=False)
