"""Computes a block's hot neurons by dense products and the others by a sparse backend.

The result is exact for any choice of neurons; `hot.py` chooses them. Shapes: M tokens, K hidden, N intermediate, H hot
neurons.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .interface import RELU2, Backend, Forward, Gradients, HotRows, HotSteps, Needs, Options, Weights
from .memory import in_pieces


def gather(hot: Tensor, weights: Weights, cold: bool) -> HotRows:
    """The rows of the hot neurons, and never the others."""
    gate, up = weights.gate, weights.up
    down = weights.down.index_select(0, hot)
    if gate is None:
        return HotRows(up.index_select(0, hot), down)
    inner = up.new_empty((2 * hot.shape[0], up.shape[1]))
    for w, rows in zip((gate, up), inner.chunk(2), strict=True):
        torch.index_select(w, 0, hot, out=rows)
    return HotRows(inner, down)


def scatter(hot: Tensor, inner: Tensor | None, down: Tensor | None, gradients: Gradients) -> None:
    """The hot neurons' rows take their place in the gradients of the weights."""
    parts = [] if inner is None else list(inner.split(hot.shape[0]))
    parts = [*[None] * (2 - len(parts)), *parts, down]
    for gradient, rows in zip(gradients[1:], parts, strict=True):
        if gradient is not None and rows is not None:
            gradient.index_copy_(0, hot, rows)


def _silenced(weights: Weights, hot: Tensor) -> Weights:
    """The weights with the hot rows of the pattern zeroed: such a neuron never fires. The other rows are only read."""
    if weights.gate is None:
        return weights._replace(up=weights.up.index_fill(0, hot, 0))
    return weights._replace(gate=weights.gate.index_fill(0, hot, 0))


def activate(
    pre: Tensor, hot: Tensor, gated: bool, rest: Forward, activation: str, l1_weight_H: Tensor | None = None
) -> tuple[Tensor, Forward]:
    """h [M, H], and `rest` with the hot neurons added to its statistics, if it has any.

    pre: [M, 2H], the gate's products and those of up, of which it becomes g = relu(gate) and u in place; without a gate
    [M, H], which becomes g, and h as well where nothing is squared.
    """
    g_MH, u_MH = pre.chunk(2, 1) if gated else (pre, None)
    g_MH.relu_()
    h_MH = hidden_of(g_MH, u_MH, activation)
    if rest.nonzeros is None or rest.l1 is None or rest.fired is None:
        return h_MH, rest
    active_MH = g_MH != 0
    size_MH = h_MH.abs() if l1_weight_H is None else h_MH.abs() * l1_weight_H
    return h_MH, rest._replace(
        # A token with NaN fires every neuron in both parts.
        nonzeros=(rest.nonzeros + active_MH.sum(1, dtype=torch.int32)).clamp_(max=rest.fired.shape[0]),
        l1=(rest.l1 + size_MH.sum(1, dtype=rest.l1.dtype)).mean()
        if rest.l1.dim()
        else rest.l1 + size_MH.sum(dtype=rest.l1.dtype) / max(pre.shape[0], 1),
        fired=rest.fired.index_copy(0, hot, rest.fired[hot] | active_MH.any(0)),
    )


def hidden_of(g: Tensor, u: Tensor | None, activation: str) -> Tensor:
    """h of g = relu(z) and u; without a gate and a square it is g itself."""
    a = g.square() if activation == RELU2 else g
    if u is None:
        return a
    return a.mul_(u) if activation == RELU2 else a * u


def before_activation(gradient: Tensor, g: Tensor, activation: str) -> Tensor:
    """The gradient of z, from that of the activation, which may be overwritten; g = relu(z)."""
    if activation == RELU2:
        gradient.mul_(g * 2)
    return torch.ops.aten.threshold_backward(gradient, g, 0)


def derive(
    dh: Tensor,
    activated: Tensor,
    dl1: Tensor | None,
    gated: bool,
    activation: str,
    l1_weight_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of the input of `activate`, and h.

    dh: [M, H], may be overwritten; activated: `pre` after `activate`; dl1: the gradient of the mean over tokens
    of sum |h|, or None.
    """
    g_MH, u_MH = activated.chunk(2, 1) if gated else (activated, None)
    h_MH = hidden_of(g_MH, u_MH, activation)
    if dl1 is not None:
        per_token = dl1 / max(dh.shape[0], 1) * (1 if l1_weight_H is None else l1_weight_H)
        dh.addcmul_(h_MH.sign(), per_token.to(dh.dtype))
    if u_MH is None:
        return before_activation(dh, g_MH, activation), h_MH
    d = torch.empty_like(activated)
    dg_MH, du_MH = d.chunk(2, 1)
    torch.mul(dh, g_MH.square() if activation == RELU2 else g_MH, out=du_MH)
    dg_MH.copy_(before_activation(dh.mul_(u_MH), g_MH, activation))
    return d, h_MH


def _steps(backend: Backend) -> HotSteps:
    return backend.hot or HotSteps(activate, derive, gather, scatter)


def forward(backend: Backend, x: Tensor, weights: Weights, hot: Tensor, options: Options) -> Forward:
    """`backend.forward` with the hot neurons' part added. The last saved tensor holds their g and u, [M, 2H]; without a
    gate their g, [M, H]."""
    hot, steps = hot.contiguous(), _steps(backend)  # kernels read the indices as an array
    # The tokens of a dense backup compute all neurons of the weights that they are given.
    own = steps.gather(hot, weights, not options.backup and bool(x.shape[0]) and hot.shape[0] < weights.up.shape[0])
    if own.cold is None:
        rest = backend.forward(x, _silenced(weights, hot), options)
    else:
        rest = backend.forward(x, weights, options, own.cold)
    l1_weight_H = None if weights.l1 is None else weights.l1[hot]
    gated = weights.gate is not None
    gate, up = own.inner.chunk(2) if gated else (None, own.inner)

    def add(x: Tensor, rest: Forward) -> Forward:
        pre = F.linear(x, own.inner)
        h_MH, whole = steps.activate(pre, hot, gated, rest, options.activation, l1_weight_H)
        return whole._replace(y=rest.y.addmm_(h_MH, own.down), saved=(*rest.saved, pre) if options.training else ())

    if options.stats or options.training:
        return add(x, rest)
    return _add_in_pieces(add, x, rest, Weights(gate, up, own.down), options.activation, steps)


def _add_in_pieces(
    add: Callable[[Tensor, Forward], Forward], x: Tensor, rest: Forward, hot: Weights, activation: str, steps: HotSteps
) -> Forward:
    """add(x, rest), which adds the hot neurons to y, for y alone: the products of a piece are in memory, and where the
    backend computes h at once it does so."""
    for piece, y in in_pieces(x, rest.y):
        h_MH = None if hot.gate is None else steps.hidden(piece, hot.gate, hot.up, activation)
        if h_MH is None:
            add(piece, rest._replace(y=y))
        else:
            y.addmm_(h_MH, hot.down)
    return rest


def add_prefix(backend: Backend, x: Tensor, hot: Weights, rest: Forward, activation: str) -> Forward:
    """Add a prefix of H hot neurons to `rest`, without gradients.

    rest: the forward of the other neurons, overwritten; its statistics are those of a block whose prefix never fired.
    hot: the prefix's weights, slices [H, K].
    """
    gated, steps = hot.gate is not None, _steps(backend)
    inner = [w for w in (hot.gate, hot.up) if w is not None]

    def add(x: Tensor, rest: Forward) -> Forward:
        neurons = torch.arange(hot.up.shape[0], device=x.device)
        pre = x.new_empty((x.shape[0], len(inner) * hot.up.shape[0]))
        for w, out in zip(inner, pre.chunk(len(inner), 1), strict=True):
            torch.mm(x, w.t(), out=out)
        h_MH, whole = steps.activate(pre, neurons, gated, rest, activation, hot.l1)
        return whole._replace(y=rest.y.addmm_(h_MH, hot.down))

    return add(x, rest) if rest.nonzeros is not None else _add_in_pieces(add, x, rest, hot, activation, steps)


def saved_like(backend: Backend, x: Tensor, weights: Weights, hot: Tensor, options: Options) -> Sequence[Tensor]:
    """Tensors that the backward needs, as `backend.saved_like` returns them."""
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
    """Gradients, as `backend.backward` returns them, of both parts."""
    hot, steps = hot.contiguous(), _steps(backend)
    own = steps.gather(hot, weights, False)
    *rest, activated = saved
    given = (
        weights if backend.reads_saved_only is not None and backend.reads_saved_only(rest) else _silenced(weights, hot)
    )
    gradients = backend.backward(dy, dl1, x, given, rest, needs, activation)
    l1_weight_H = None if weights.l1 is None else weights.l1[hot]
    d, h_MH = steps.derive(dy @ own.down.t(), activated, dl1, weights.gate is not None, activation, l1_weight_H)
    if gradients.x is not None:
        gradients.x.addmm_(d, own.inner)
    inner = d.t() @ x if needs.gate or needs.up else None
    down = None if gradients.down is None else h_MH.t() @ dy
    steps.scatter(hot, inner, down, gradients)
    return gradients
