"""Hot neurons: those that fire so often that dense products are cheaper for them, beside a sparse backend for the rest.

Firing rates differ by orders of magnitude, so that a few neurons have a large share of the non-zeros. A sparse backend
pays for each non-zero, a dense product for each neuron: the split costs the least where a neuron's rate is the ratio of
the two. It is exact whatever neurons are chosen. Shapes: M tokens, K hidden, N intermediate, H hot neurons.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .registry import Backend, Forward, HotSteps

# On an H200, in inference and in training alike: a neuron's columns of the dense products cost as much as RATE
# non-zeros per token, and the split itself as much as OVERHEAD.
RATE, OVERHEAD = 0.016, 4.0
MULTIPLE = 128  # of H: columns of an output tile of a dense product
SAMPLE = 8192


class HotSplit(NamedTuple):
    """Hot neurons, int64 [H], sorted, and the non-zeros per token that leaving them to dense products is worth."""

    neurons: Tensor
    saved: float


@torch.no_grad()
def hot_neurons(
    x: Tensor, w_gate: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> Tensor:
    """The neurons to leave to dense products, int64 [H], sorted. H is a multiple of `multiple`, 0 if it does not pay.

    x: [..., K], representative inputs of the block; w_gate: [N, K] (w_up of a non-gated block). Waits for the device.
    See `best_split` for the rest, and for what is raised.
    """
    return best_split(firing_rates(x, w_gate), rate=rate, overhead=overhead, multiple=multiple).neurons


@torch.no_grad()
def firing_rates(x: Tensor, w_gate: Tensor) -> Tensor:
    """Share of the tokens for which each neuron fires, float32 [N]; of at most some thousand tokens, evenly spread.

    x: [..., K]; w_gate: [N, K]. All 0 without tokens.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    x_MK = x_MK[:: max(1, -(-x_MK.shape[0] // SAMPLE))]
    return (F.linear(x_MK, w_gate.to(x.dtype)) > 0).sum(0) / max(x_MK.shape[0], 1)


def best_split(
    rates_N: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD, multiple: int = MULTIPLE
) -> HotSplit:
    """The busiest neurons, as many (a multiple of `multiple`) as save most; none, and 0.0, where nothing is saved.

    rate: of firing, from which dense products are cheaper for a neuron; overhead: non-zeros per token that the split
    itself costs. Waits for the device. Raises ValueError for a rate outside 0..1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate must lie between 0 and 1, got {rate}")
    rates_N, order_N = rates_N.sort(descending=True)
    saved = ((rates_N - rate).cumsum(0)[multiple - 1 :: multiple] - overhead).tolist()
    best = max(range(len(saved)), key=saved.__getitem__, default=0)
    if not saved or saved[best] <= 0:
        return HotSplit(order_N[:0], 0.0)
    return HotSplit(order_N[: (best + 1) * multiple].sort().values, saved[best])


def saved_by(rates_N: Tensor, hot: Tensor, *, rate: float = RATE, overhead: float = OVERHEAD) -> float:
    """What a choice made earlier saves now, in non-zeros per token; negative where it costs more than it saves."""
    return float((rates_N[hot] - rate).sum()) - overhead


class _Parts(NamedTuple):
    """The block's weights, split: w_gate and w_up with the hot rows of the pattern zeroed; and the hot neurons' own:
    `inner` [2H, K], those of the gate and then of up, or without a gate [H, K], and `down` [H, K]."""

    w_gate: Tensor | None
    w_up: Tensor
    inner: Tensor
    down: Tensor


def _split(w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, hot: Tensor) -> _Parts:
    # A zero row of the pattern's weights is a neuron that never fires; the others' memory is only read.
    down = w_down.t().index_select(0, hot)
    if w_gate is None:
        return _Parts(None, w_up.index_fill(0, hot, 0), w_up.index_select(0, hot), down)
    inner = w_up.new_empty((2 * hot.shape[0], w_up.shape[1]))
    for w, rows in zip((w_gate, w_up), inner.chunk(2), strict=True):
        torch.index_select(w, 0, hot, out=rows)
    return _Parts(w_gate.index_fill(0, hot, 0), w_up, inner, down)


def activate(pre: Tensor, hot: Tensor, gated: bool, rest: Forward) -> tuple[Tensor, Forward]:
    """h [M, H], and `rest` with what it counted of the hot neurons too, if it counts.

    pre: [M, 2H], the gate's products and those of up, of which it becomes g = relu(gate) and u in place; without a gate
    [M, H], which becomes h.
    """
    g_MH, u_MH = pre.chunk(2, 1) if gated else (pre, None)
    g_MH.relu_()
    h_MH = g_MH * u_MH if gated else g_MH
    if rest.nonzeros is None:
        return h_MH, rest
    active_MH = g_MH != 0
    return h_MH, rest._replace(
        # A token with NaN fires every neuron on both sides.
        nonzeros=(rest.nonzeros + active_MH.sum(1, dtype=torch.int32)).clamp_(max=rest.fired.shape[0]),
        l1=rest.l1 + h_MH.abs().sum(dtype=rest.l1.dtype) / max(pre.shape[0], 1),
        fired=rest.fired.index_copy(0, hot, rest.fired[hot] | active_MH.any(0)),
    )


def derive(dh: Tensor, activated: Tensor, dl1: Tensor | None, gated: bool) -> tuple[Tensor, Tensor]:
    """The gradient of what `activate` was given, and h.

    dh: [M, H], which may be overwritten; activated: what became of `pre`; dl1: the gradient of the mean over tokens of
    sum |h|, or None.
    """
    g_MH, u_MH = activated.chunk(2, 1) if gated else (activated, None)
    h_MH = g_MH * u_MH if gated else g_MH
    if dl1 is not None:
        dh.addcmul_(h_MH.sign(), (dl1 / max(dh.shape[0], 1)).to(dh.dtype))
    if not gated:
        return torch.ops.aten.threshold_backward(dh, g_MH, 0), h_MH
    d = torch.empty_like(activated)
    dg_MH, du_MH = d.chunk(2, 1)
    torch.mul(dh, g_MH, out=du_MH)
    dg_MH.copy_(torch.ops.aten.threshold_backward(dh.mul_(u_MH), g_MH, 0))
    return d, h_MH


def _own(backend: Backend) -> HotSteps:
    return backend.hot or HotSteps(activate, derive)


def forward(
    backend: Backend,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor,
    *,
    stats: bool,
    training: bool,
    capacity: int,
    backup: float | None,
) -> Forward:
    """As `backend.forward`, with the hot neurons' part added. What is saved ends with their g and u, [M, 2H]; without a
    gate with their h, [M, H]."""
    hot = hot.contiguous()  # kernels read the indices one behind the other
    parts = _split(w_gate, w_up, w_down, hot)
    how = {"stats": stats, "training": training, "capacity": capacity, "backup": backup}
    rest = backend.forward(x, parts.w_gate, parts.w_up, w_down, **how)
    pre = F.linear(x, parts.inner)
    h_MH, whole = _own(backend).activate(pre, hot, w_gate is not None, rest)
    return whole._replace(y=rest.y.addmm_(h_MH, parts.down), saved=(*rest.saved, pre) if training else ())


def saved_like(
    backend: Backend,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    hot: Tensor,
    capacity: int,
    backup: float | None,
) -> Sequence[Tensor]:
    """As `backend.saved_like`."""
    own = x.new_empty((x.shape[0], hot.shape[0] * (1 if w_gate is None else 2)))
    return (*backend.saved_like(x, w_gate, w_up, capacity, backup), own)


def backward(
    backend: Backend,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    """As `backend.backward`."""
    parts = _split(w_gate, w_up, w_down, hot)
    *rest, own = saved
    dx, dw_gate, dw_up, dw_down = backend.backward(dy, dl1, x, parts.w_gate, parts.w_up, w_down, rest, needs)
    d, h_MH = _own(backend).derive(dy @ parts.down.t(), own, dl1, w_gate is not None)
    if needs[0]:
        dx.addmm_(d, parts.inner)
    if needs[1] or needs[2]:
        for gradient, rows in zip((dw_up, dw_gate), reversed((d.t() @ x).split(hot.shape[0])), strict=False):
            if gradient is not None:
                gradient.index_copy_(0, hot, rows)
    if needs[3]:
        dw_down.t().index_copy_(0, hot, h_MH.t() @ dy)
    return dx, dw_gate, dw_up, dw_down
