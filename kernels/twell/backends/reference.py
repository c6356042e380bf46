"""The sparse plans in plain torch, made of the operations in ../reference.py.

Inference: gate_pack, then gated_down (or down); nothing is saved. Training: gate_pack, twell_to_hybrid, then products
on the hybrid; the backward has the stored sparse activations. What is saved has shapes that depend on M, K and N only:
rows beyond the planned backup are spilled, counted in stats.overflow, and made again in the backward, so nothing is
lost. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference as ref
from ..formats import ELL, Hybrid, TwELL
from ..formats.ell import NARROW_COLUMNS, column_dtype
from ..formats.hybrid import IN_ELL, backup_capacity
from ..formats.twell import SLOTS
from ..interface import Backend, Forward, Gradients, Needs, Options, Request, Weights
from .probe import launch


def _forward(x: Tensor, weights: Weights, options: Options) -> Forward:
    packed = ref.gate_pack(x, weights.pattern, keep=ref.not_finite(x))
    saved: Sequence[Tensor] = ()
    if options.training:
        y, l1, overflow, saved = _training(x, weights, packed, options)
    else:
        if weights.gate is not None:
            y, l1 = ref.gated_down(x, packed, weights.up, weights.down, options.activation, weights.l1)
        else:
            y, l1 = ref.down(packed, weights.down, options.activation, weights.l1)
        overflow = packed.overflowing(SLOTS)
    nonzeros, fired = ref.activity(packed) if options.stats else (None, None)
    return Forward(y.to(x.dtype), nonzeros, l1, fired, overflow, saved)


def _training(
    x: Tensor, weights: Weights, packed: TwELL, options: Options
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(y, l1, overflow, saved). h is made of u as computed; what is saved is rounded to x's dtype."""
    width, capacity = min(options.capacity, weights.up.shape[0]), backup_capacity(x.shape[0], options.backup)
    g = ref.twell_to_hybrid(packed, width=width, capacity=capacity)
    h = ref.combine(lambda g: ref.activated(g, options.activation), g)
    activations: tuple[Hybrid, ...] = (g,)
    if weights.gate is not None:
        u = ref.dense_to_hybrid(x, weights.up, g)
        h = ref.combine(torch.mul, h, u)
        activations = (g, u)
    small = [hybrid.spill(capacity) for hybrid in activations]
    overflow = (small[0].row_map < IN_ELL).sum()
    return ref.hybrid_to_dense(h, weights.down), ref.hybrid_l1(h, weights.l1), overflow, _to_saved(small, x.dtype)


def _to_saved(activations: Sequence[Hybrid], dtype: torch.dtype) -> list[Tensor]:
    """The pattern that they share, then each one's values."""
    first = activations[0]
    values = [part.to(dtype) for h in activations for part in (h.ell.values, h.backup)]
    return [first.ell.columns, first.ell.lengths, first.row_map, *values]


def _from_saved(saved: Sequence[Tensor], dense_width: int) -> list[Hybrid]:
    columns, lengths, row_map, *values = saved
    pairs = zip(values[::2], values[1::2], strict=True)
    return [Hybrid(ELL(columns, ell, lengths, dense_width), backup, row_map) for ell, backup in pairs]


def _saved_like(x: Tensor, weights: Weights, options: Options) -> list[Tensor]:
    tokens, neurons = x.shape[0], weights.up.shape[0]
    width, capacity = min(options.capacity, neurons), backup_capacity(tokens, options.backup)
    return [
        x.new_empty(tokens, width, dtype=column_dtype(neurons)),
        x.new_empty(tokens, dtype=torch.int32),
        x.new_empty(tokens, dtype=torch.int32),
        *(
            x.new_empty(rows, n)
            for _ in range(1 if weights.gate is None else 2)
            for rows, n in ((tokens, width), (capacity, neurons))
        ),
    ]


def _backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    weights: Weights,
    saved: Sequence[Tensor],
    needs: Needs,
    activation: str,
) -> Gradients:
    g, *rest = _from_saved(saved, weights.up.shape[0])
    rows = _to_recompute(dy, dl1, g)
    g = g.with_rows(rows, _product(x[rows], weights.pattern).relu())
    if weights.gate is None:
        gradients = ref.plain_backward(dy, dl1, x, weights, g, activation)
    else:
        u = rest[0].with_rows(rows, _product(x[rows], weights.up))
        gradients = ref.gated_backward(dy, dl1, x, weights, g, u, activation)
    pairs = zip(gradients, needs, strict=True)
    return Gradients(*(value.to(x.dtype) if value is not None and needed else None for value, needed in pairs))


def _product(x: Tensor, w: Tensor) -> Tensor:
    return (ref.wide(x) @ ref.wide(w).t()).to(x.dtype)


def _to_recompute(dy: Tensor, dl1: Tensor | None, g: Hybrid) -> Tensor:
    """The rows that the backward needs whole and has not: those that were spilled, and those whose gradient is not
    finite, which is then so for every neuron of the token, active or not."""
    nonfinite = ref.not_finite(dy)
    if dl1 is not None:
        nonfinite |= ~dl1.isfinite()
    return ((nonfinite & (g.row_map == IN_ELL)) | (g.row_map < IN_ELL)).nonzero().squeeze(-1)


def _supports(request: Request) -> str | None:
    if request.intermediate > NARROW_COLUMNS:
        return f"TwELL columns have 16 bits: intermediate size at most {NARROW_COLUMNS}, got {request.intermediate}"
    return None


_probe = functools.partial(launch, _forward, dtype=torch.float32)
BACKEND = Backend(_probe, _supports, _forward, _backward, _saved_like)
