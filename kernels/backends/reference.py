"""The sparse plans in plain torch, made of the operations in ../reference.py.

Inference: gate_pack, then gated_down (or down); nothing is saved. Training: gate_pack, twell_to_hybrid, then products
on the hybrid; the backward has the stored sparse activations. What is saved has shapes that depend on M, K and N only:
rows beyond the planned backup are spilled, counted in stats.overflow, and made again in the backward, so nothing is
lost. Shapes: M tokens, K hidden, N intermediate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference as ref
from ..formats import ELL, Hybrid
from ..formats.ell import NARROW_COLUMNS, column_dtype
from ..formats.hybrid import BACKUP_SHARE, IN_ELL, backup_capacity
from ..formats.twell import SLOTS
from ..registry import Availability, Backend, Forward, Request
from .probe import launch


def _forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    stats: bool,
    training: bool,
    capacity: int,
    backup: float | None,
) -> Forward:
    keep = ref.must_keep(x, w_gate, w_up, w_down)
    packed = ref.gate_pack(x, w_up if w_gate is None else w_gate, keep=keep)
    if training:
        y, l1, overflow, saved = _training(x, w_gate, w_up, w_down, packed, capacity, _backup_rows(x, backup))
    else:
        y, l1 = ref.down(packed, w_down) if w_gate is None else ref.gated_down(x, packed, w_up, w_down)
        overflow, saved = packed.overflowing(SLOTS), ()
    nonzeros, fired = ref.activity(packed) if stats else (None, None)
    return Forward(y.to(x.dtype), nonzeros, l1, fired, overflow, saved)


def _backup_rows(x: Tensor, share: float | None) -> int:
    return backup_capacity(x.shape[0], BACKUP_SHARE if share is None else share)


def _training(x, w_gate, w_up, w_down, packed, width, capacity):
    """(y, l1, overflow, saved). h is made of u as computed; what is saved is rounded to x's dtype."""
    g = ref.twell_to_hybrid(packed, width=min(width, w_up.shape[0]), capacity=capacity)
    activations = (g,)
    h = g
    if w_gate is not None:
        u = ref.dense_to_hybrid(x, w_up, g)
        h = ref.combine(torch.mul, g, u)
        activations = (g, u)
    small = [hybrid.spill(capacity) for hybrid in activations]
    overflow = (small[0].row_map < IN_ELL).sum()
    return ref.hybrid_to_dense(h, w_down.t()), ref.hybrid_l1(h), overflow, _to_saved(small, x.dtype)


def _to_saved(activations: Sequence[Hybrid], dtype: torch.dtype) -> list[Tensor]:
    """The pattern that they share, then each one's values."""
    first = activations[0]
    values = [part.to(dtype) for h in activations for part in (h.ell.values, h.backup)]
    return [first.ell.columns, first.ell.lengths, first.row_map, *values]


def _from_saved(saved: Sequence[Tensor], dense_width: int) -> list[Hybrid]:
    columns, lengths, row_map, *values = saved
    pairs = zip(values[::2], values[1::2], strict=True)
    return [Hybrid(ELL(columns, ell, lengths, dense_width), backup, row_map) for ell, backup in pairs]


def _saved_like(x: Tensor, w_gate: Tensor | None, w_up: Tensor, width: int, backup: float | None) -> list[Tensor]:
    tokens, neurons = x.shape[0], w_up.shape[0]
    width, capacity = min(width, neurons), _backup_rows(x, backup)
    return [
        x.new_empty(tokens, width, dtype=column_dtype(neurons)),
        x.new_empty(tokens, dtype=torch.int32),
        x.new_empty(tokens, dtype=torch.int32),
        *(
            x.new_empty(rows, n)
            for _ in range(1 if w_gate is None else 2)
            for rows, n in ((tokens, width), (capacity, neurons))
        ),
    ]


def _backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    saved: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    g, *rest = _from_saved(saved, w_up.shape[0])
    rows = _to_recompute(dy, dl1, w_down, g)
    gate = w_up if w_gate is None else w_gate
    g = g.with_rows(rows, _product(x[rows], gate).relu())
    if w_gate is None:
        gradients = ref.plain_backward(dy, dl1, x, w_up, w_down, g)
    else:
        u = rest[0].with_rows(rows, _product(x[rows], w_up))
        gradients = ref.gated_backward(dy, dl1, x, w_gate, w_up, w_down, g, u)
    return [value.to(x.dtype) if needed else None for value, needed in zip(gradients, needs, strict=True)]


def _product(x: Tensor, w: Tensor) -> Tensor:
    return (ref.wide(x) @ ref.wide(w).t()).to(x.dtype)


def _to_recompute(dy: Tensor, dl1: Tensor | None, w_down: Tensor, g: Hybrid) -> Tensor:
    """The rows that the backward needs whole and has not: those that were spilled, and those whose gradient is or may
    become infinite or NaN, which it then is for every neuron of the token, active or not."""
    peaks = w_down.abs().amax(0)
    suspect = ~ref.surely_finite(dy, peaks[peaks.isfinite()])
    if dl1 is not None:
        suspect |= ~dl1.isfinite()
    return ((suspect & (g.row_map == IN_ELL)) | (g.row_map < IN_ELL)).nonzero().squeeze(-1)


def _probe(device: torch.device) -> Availability:
    return launch(_forward, device, torch.float32)


def _supports(request: Request) -> str | None:
    if request.intermediate > NARROW_COLUMNS:
        return f"TwELL columns have 16 bits: intermediate size at most {NARROW_COLUMNS}, got {request.intermediate}"
    return None


BACKEND = Backend("reference", _probe, _supports, _forward, _backward, _saved_like)
