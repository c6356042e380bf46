"""The definition that every other backend is compared with (being written: the sparse plans follow)."""

from ..registry import Backend
from . import dense

_WIDE = {}


def _wide(*tensors):
    import torch

    return [t if t is None else t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _forward(x, w_gate, w_up, w_down, *, stats, training):
    result = dense._forward(*_wide(x, w_gate, w_up, w_down), stats=stats, training=training)
    return result._replace(y=result.y.to(x.dtype))


def _backward(dy, dl1, x, w_gate, w_up, w_down, saved, needs):
    gradients = dense._backward(*_wide(dy, dl1, x, w_gate, w_up, w_down), saved, needs)
    return tuple(g if g is None else g.to(x.dtype) for g in gradients)


def _saved_like(x, w_gate, w_up):
    return dense._saved_like(*_wide(x, w_gate, w_up))


BACKEND = Backend("reference", dense._probe, dense._supports, _forward, _backward, _saved_like)
