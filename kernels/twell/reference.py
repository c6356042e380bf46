"""Every operation of the paper's sparse plans in plain torch: the definition that every backend is compared with.

Products accumulate in float32 (float64 for float64 input). Shapes: M tokens, K hidden, N intermediate, E entries.

Skipping zeros must not hide what is wrong with a token: in plain torch, a zero activation times a NaN or an infinity is
NaN. So an entry is stored if it is not zero, or if its token's x is not finite. All later steps read stored entries
only: a neuron whose weights are not finite shows where it fires.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import Hybrid, TwELL
from .formats.capacity import GROW
from .formats.hybrid import WIDTH
from .formats.layout import Entries, in_use
from .formats.twell import SLOTS, TILE
from .interface import RELU, RELU2, Gradients, Weights

CHUNK = 2**18  # numbers gathered at a time, so that they stay in the cache: 1 MB of float32


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the accumulation dtype of its products."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def not_finite(rows: Tensor) -> Tensor:
    """bool [M]: the rows of a [M, K] with an Inf or NaN."""
    return ~rows.isfinite().all(1)


# Packing and conversion


def gate_pack(x: Tensor, w_gate: Tensor, *, tile: int = TILE, slots: int = SLOTS, keep: Tensor | None = None) -> TwELL:
    """relu(x w_gate^T) in TwELL, rounded to x's dtype: the first launch of both plans. x: [M, K], w_gate: [N, K] (w_up
    of a non-gated block). More slots are made where `slots` per tile are too few. keep: bool [M], the tokens of which
    zeros are stored too."""
    gate_MN = (wide(x) @ wide(w_gate).t()).relu().to(x.dtype)
    whole_MN = None if keep is None else keep.unsqueeze(-1).expand_as(gate_MN)
    return TwELL.from_dense(gate_MN, tile, slots, on_overflow=GROW, keep=whole_MN)


def activity(packed: TwELL) -> tuple[Tensor, Tensor]:
    """(nonzeros int32 [M], fired bool [N]): entries that are not an explicit zero, by token and by neuron."""
    tokens, neurons = packed.shape
    entries = packed.entries()
    active = entries.values != 0
    nonzeros = torch.bincount(entries.rows[active], minlength=tokens).to(torch.int32)
    return nonzeros, torch.bincount(entries.columns[active], minlength=neurons) > 0


def twell_to_hybrid(packed: TwELL, *, width: int = WIDTH, capacity: int | None = None) -> Hybrid:
    """The same entries as a Hybrid, for training; a backup of `capacity` rows grows where these are too few."""
    entries, shape = packed.entries(), packed.shape
    return Hybrid.from_dense(entries.dense(shape), width, capacity, on_overflow=GROW, keep=entries.mask(shape))


def hybrid_transpose(h: Hybrid) -> Hybrid:
    """[M, N] -> [N, M] with the same entries; neurons active for many tokens go to the backup."""
    entries, shape = h.entries(), h.shape
    return Hybrid.from_dense(entries.dense(shape).t(), on_overflow=GROW, keep=entries.mask(shape).t())


def combine(function: Callable[..., Tensor], first: Hybrid, *others: Hybrid) -> Hybrid:
    """`function` on the values of hybrids that share one pattern, in the accumulation dtype."""
    hybrids = (first, *others)
    values = function(*(wide(h.ell.values) for h in hybrids))
    return Hybrid(replace(first.ell, values=values), function(*(wide(h.backup) for h in hybrids)), first.row_map)


# Products. All return the accumulation dtype.


def _sampled(a: Tensor, b: Tensor, entries: Entries) -> Tensor:
    """[E]: a[row] . b[column] for each entry. a: [M, K], b: [N, K]."""
    a, b = wide(a), wide(b)
    step = max(1, CHUNK // a.shape[1])
    pairs = zip(entries.rows.split(step), entries.columns.split(step), strict=True)
    return torch.cat([torch.linalg.vecdot(a[rows], b[columns]) for rows, columns in pairs])


def _accumulate(entries: Entries, b: Tensor, rows: int) -> Tensor:
    """[rows, K]: for each row the sum of value * b[column] over its entries, which come row by row. b: [N, K]."""
    offsets = torch.searchsorted(entries.rows, torch.arange(rows, device=b.device))
    return F.embedding_bag(entries.columns, wide(b), offsets, mode="sum", per_sample_weights=wide(entries.values))


def activated(g: Tensor, activation: str) -> Tensor:
    """The activation of z from g = relu(z), in the accumulation dtype."""
    return wide(g).square() if activation == RELU2 else wide(g)


def gated_down(
    x: Tensor,
    packed: TwELL,
    up_NK: Tensor,
    down_NK: Tensor,
    activation: str = RELU,
    l1_weight_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [M, K], l1): for each entry the dot product of x with its row of up, times the gate, times its row of down, in
    one pass (the second launch of inference); l1 is the mean over tokens of sum l1_weight |h|. u is never stored."""
    entries = packed.entries()
    h = entries._replace(values=activated(entries.values, activation) * _sampled(x, up_NK, entries))
    return _accumulate(h, down_NK, x.shape[0]), _mean_l1(h, x.shape[0], l1_weight_N)


def down(
    packed: TwELL, down_NK: Tensor, activation: str = RELU, l1_weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y [M, K], l1) of the non-gated block: h in TwELL times the dense down weights."""
    entries, tokens = packed.entries(), packed.shape[0]
    h = entries._replace(values=activated(entries.values, activation))
    return _accumulate(h, down_NK, tokens), _mean_l1(h, tokens, l1_weight_N)


def dense_to_hybrid(a: Tensor, b: Tensor, pattern: Hybrid) -> Hybrid:
    """a b^T restricted to the pattern [M, N]; rows in the backup are whole. a: [M, K], b: [N, K]."""
    ell = pattern.ell
    values = wide(a).new_zeros(ell.values.shape)
    values[in_use(ell.lengths, ell.width)] = _sampled(a, b, ell.entries())
    backup = wide(a).new_zeros(pattern.backup.shape)
    rows, index = pattern.in_backup()
    backup[index] = wide(a[rows]) @ wide(b).t()
    return Hybrid(replace(ell, values=values), backup, pattern.row_map)


def hybrid_to_dense(h: Hybrid, b: Tensor) -> Tensor:
    """h b: [M, N] times [N, K]. Raises CapacityError while rows of h are spilled."""
    h.require_complete()
    out = _accumulate(h.ell.entries(), b, h.shape[0])
    rows, index = h.in_backup()
    out[rows] = wide(h.backup[index]) @ wide(b)
    return out


def _mean_l1(entries: Entries, tokens: int, l1_weight_N: Tensor | None) -> Tensor:
    size = wide(entries.values).abs()
    return (size if l1_weight_N is None else size * l1_weight_N[entries.columns]).sum() / max(tokens, 1)


def hybrid_l1(h: Hybrid, l1_weight_N: Tensor | None = None) -> Tensor:
    """Mean over tokens of sum l1_weight |h|; 0 for zero tokens."""
    return _mean_l1(h.entries(), h.shape[0], l1_weight_N)


# Backward, on stored sparse activations only. Gradients in the accumulation dtype.


def hidden_gradient(dy: Tensor, dl1: Tensor | None, weights: Weights, h: Hybrid) -> Hybrid:
    """dh = dy down^T on the pattern of h, plus the L1 term's gradient there: dl1 l1_weight sign(h) / M."""
    dh = dense_to_hybrid(dy, weights.down, h)
    if dl1 is None:
        return dh
    per_token = wide(dl1) / max(h.shape[0], 1)
    if weights.l1 is None:
        return combine(lambda dh, h: dh + per_token * h.sign(), dh, h)
    slope = dense_to_hybrid(per_token.expand(h.shape[0], 1), weights.l1[:, None], h)
    return combine(lambda dh, h, slope: dh + slope * h.sign(), dh, h, slope)


def activation_gradient(gradient: Tensor, g: Tensor, activation: str) -> Tensor:
    """The gradient of z from the gradient of its activation; g = relu(z). Zero where the ReLU is zero; as in torch, the
    gradient passes where g is NaN."""
    if activation == RELU2:
        gradient = gradient * (2 * g)
    return gradient.masked_fill(g <= 0, 0)


def gated_backward(
    dy: Tensor, dl1: Tensor | None, x: Tensor, weights: Weights, g: Hybrid, u: Hybrid, activation: str = RELU
) -> Gradients:
    """Gradients of y and l1 from g = relu(x gate^T) and u = x up^T on one pattern. dy: [M, K], dl1: scalar."""
    h = combine(lambda g, u: activated(g, activation) * u, g, u)
    dh = hidden_gradient(dy, dl1, weights, h)
    du = combine(lambda dh, g: dh * activated(g, activation), dh, g)
    dg = combine(lambda dh, u, g: activation_gradient(dh * u, g, activation), dh, u, g)
    return Gradients(
        hybrid_to_dense(du, weights.up) + hybrid_to_dense(dg, weights.pattern),
        hybrid_to_dense(hybrid_transpose(dg), x),
        hybrid_to_dense(hybrid_transpose(du), x),
        hybrid_to_dense(hybrid_transpose(h), dy),
    )


def plain_backward(
    dy: Tensor, dl1: Tensor | None, x: Tensor, weights: Weights, g: Hybrid, activation: str = RELU
) -> Gradients:
    """The same for the non-gated block, from g = relu(x up^T)."""
    h = combine(lambda g: activated(g, activation), g)
    dh = hidden_gradient(dy, dl1, weights, h)
    du = combine(lambda dh, g: activation_gradient(dh, g, activation), dh, g)
    return Gradients(
        hybrid_to_dense(du, weights.up),
        None,
        hybrid_to_dense(hybrid_transpose(du), x),
        hybrid_to_dense(hybrid_transpose(h), dy),
    )
