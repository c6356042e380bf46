"""Computes a block's hot neurons by dense products and the others by a sparse backend.

The result is exact for any choice of neurons; `hot.py` chooses them. Shapes: M tokens, K hidden, N intermediate, H hot
neurons.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .interface import RELU2, Backend, Forward, Gradients, HotSteps, Needs, Options, Weights


class _Hot(NamedTuple):
    """The hot neurons' weights. inner: [2H, K], rows of the gate and then of up, or without a gate [H, K]; down:
    [H, K]."""

    inner: Tensor
    down: Tensor


def _hot_rows(weights: Weights, hot: Tensor) -> _Hot:
    gate, up, _ = weights
    down = weights.down.index_select(0, hot)
    if gate is None:
        return _Hot(up.index_select(0, hot), down)
    inner = up.new_empty((2 * hot.shape[0], up.shape[1]))
    for w, rows in zip((gate, up), inner.chunk(2), strict=True):
        torch.index_select(w, 0, hot, out=rows)
    return _Hot(inner, down)


def _silenced(weights: Weights, hot: Tensor) -> Weights:
    """The weights with the hot rows of the pattern zeroed: such a neuron never fires. The other rows are only read."""
    if weights.gate is None:
        return weights._replace(up=weights.up.index_fill(0, hot, 0))
    return weights._replace(gate=weights.gate.index_fill(0, hot, 0))


def activate(pre: Tensor, hot: Tensor, gated: bool, rest: Forward, activation: str) -> tuple[Tensor, Forward]:
    """h [M, H], and `rest` with the hot neurons added to its statistics, if it has any.

    pre: [M, 2H], the gate's products and those of up, of which it becomes g = relu(gate) and u in place; without a gate
    [M, H], which becomes g, and h as well where nothing is squared.
    """
    g_MH, u_MH = pre.chunk(2, 1) if gated else (pre, None)
    g_MH.relu_()
    h_MH = _hidden(g_MH, u_MH, activation)
    if rest.nonzeros is None or rest.l1 is None or rest.fired is None:
        return h_MH, rest
    active_MH = g_MH != 0
    return h_MH, rest._replace(
        # A token with NaN fires every neuron in both parts.
        nonzeros=(rest.nonzeros + active_MH.sum(1, dtype=torch.int32)).clamp_(max=rest.fired.shape[0]),
        l1=rest.l1 + h_MH.abs().sum(dtype=rest.l1.dtype) / max(pre.shape[0], 1),
        fired=rest.fired.index_copy(0, hot, rest.fired[hot] | active_MH.any(0)),
    )


def _hidden(g_MH: Tensor, u_MH: Tensor | None, activation: str) -> Tensor:
    a_MH = g_MH.square() if activation == RELU2 else g_MH
    return a_MH if u_MH is None else a_MH * u_MH


def derive(dh: Tensor, activated: Tensor, dl1: Tensor | None, gated: bool, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of the input of `activate`, and h.

    dh: [M, H], may be overwritten; activated: `pre` after `activate`; dl1: the gradient of the mean over tokens
    of sum |h|, or None.
    """
    g_MH, u_MH = activated.chunk(2, 1) if gated else (activated, None)
    h_MH = _hidden(g_MH, u_MH, activation)
    if dl1 is not None:
        dh.addcmul_(h_MH.sign(), (dl1 / max(dh.shape[0], 1)).to(dh.dtype))
    slope = g_MH * 2 if activation == RELU2 else None
    if u_MH is None:
        d = dh if slope is None else dh.mul_(slope)
        return torch.ops.aten.threshold_backward(d, g_MH, 0), h_MH
    d = torch.empty_like(activated)
    dg_MH, du_MH = d.chunk(2, 1)
    torch.mul(dh, g_MH if slope is None else g_MH.square(), out=du_MH)
    dh.mul_(u_MH)
    if slope is not None:
        dh.mul_(slope)
    dg_MH.copy_(torch.ops.aten.threshold_backward(dh, g_MH, 0))
    return d, h_MH


def _steps(backend: Backend) -> HotSteps:
    return backend.hot or HotSteps(activate, derive)


def forward(backend: Backend, x: Tensor, weights: Weights, hot: Tensor, options: Options) -> Forward:
    """`backend.forward` with the hot neurons' part added. The last saved tensor holds their g and u, [M, 2H]; without a
    gate their g, [M, H]."""
    hot = hot.contiguous()  # kernels read the indices as an array
    own = _hot_rows(weights, hot)
    # The tokens of a dense backup compute all neurons of the weights that they are given.
    if backend.cold is not None and options.backup is None and x.shape[0] and hot.shape[0] < weights.up.shape[0]:
        rest = backend.forward(x, weights, options, backend.cold(weights, hot))
    else:
        rest = backend.forward(x, _silenced(weights, hot), options)
    pre = F.linear(x, own.inner)
    h_MH, whole = _steps(backend).activate(pre, hot, weights.gate is not None, rest, options.activation)
    return whole._replace(y=rest.y.addmm_(h_MH, own.down), saved=(*rest.saved, pre) if options.training else ())


def add_prefix(x: Tensor, hot: Weights, rest: Forward, activation: str, steps: HotSteps | None) -> Forward:
    """Add a prefix of H hot neurons to `rest`, without gradients.

    rest: the forward of the other neurons, overwritten; its statistics are those of a block whose prefix never fired.
    hot: the prefix's weights, slices [H, K]. steps: None for steps in plain torch, which can be traced.
    """
    gated = hot.gate is not None
    inner = [w for w in (hot.gate, hot.up) if w is not None]
    if steps is None:
        pre = torch.cat([F.linear(x, w) for w in inner], 1)
    else:
        pre = x.new_empty((x.shape[0], len(inner) * hot.up.shape[0]))
        for w, out in zip(inner, pre.chunk(len(inner), 1), strict=True):
            torch.mm(x, w.t(), out=out)
    neurons = torch.arange(hot.up.shape[0], device=x.device)
    h_MH, whole = (activate if steps is None else steps.activate)(pre, neurons, gated, rest, activation)
    return whole._replace(y=rest.y.addmm_(h_MH, hot.down))


def saved_like(backend: Backend, x: Tensor, weights: Weights, hot: Tensor, options: Options) -> Sequence[Tensor]:
    """As `backend.saved_like`."""
    own = x.new_empty((x.shape[0], hot.shape[0] * (1 if weights.gate is None else 2)))
    return (*backend.saved_like(x, weights, options), own)


def backward(
    backend: Backend,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    weights: Weights,
    hot: Tensor,
    saved: Sequence[Tensor],
    needs: Needs,
    activation: str,
) -> Gradients:
    """As `backend.backward`."""
    own = _hot_rows(weights, hot)
    *rest, activated = saved
    gradients = backend.backward(dy, dl1, x, _silenced(weights, hot), rest, needs, activation)
    d, h_MH = _steps(backend).derive(dy @ own.down.t(), activated, dl1, weights.gate is not None, activation)
    if gradients.x is not None:
        gradients.x.addmm_(d, own.inner)
    if needs.gate or needs.up:
        *gate_rows, up_rows = (d.t() @ x).split(hot.shape[0])
        for gradient, rows in ((gradients.up, up_rows), *((gradients.gate, rows) for rows in gate_rows)):
            if gradient is not None:
                gradient.index_copy_(0, hot, rows)
    if gradients.down is not None:
        gradients.down.index_copy_(0, hot, h_MH.t() @ dy)
    return gradients
