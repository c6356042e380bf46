"""The dense backup of the paper's hybrid format, beside kernels that pay for each non-zero: in training, the tokens
with the most non-zeros are computed by dense products, and saved whole.

A row that is computed densely is exact whatever it holds, so the choice of tokens changes no result beyond rounding.
Their number depends on M only. Shapes: M tokens, K hidden, N intermediate, C tokens in the backup.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..formats.hybrid import backup_capacity
from ..interface import Forward, Gradients, HotSteps, Weights


class DenseBackup(NamedTuple):
    """What the backward needs of the C tokens. tokens: int64 [C], ascending; activated: bfloat16 [C, 2N], g (after the
    ReLU, before any square) and then u; without a gate [C, N], g."""

    tokens: Tensor
    activated: Tensor

    @classmethod
    def empty(cls, x: Tensor, weights: Weights, share: float) -> "DenseBackup":
        """For this share of x's tokens, rounded up."""
        rows, neurons = backup_capacity(x.shape[0], share), weights.up.shape[0]
        columns = neurons if weights.gate is None else 2 * neurons
        return cls(x.new_empty(rows, dtype=torch.int64), x.new_empty((rows, columns)))


def take_out(counts: Tensor, backup: DenseBackup) -> Tensor:
    """Fills `backup.tokens` with those that have the most non-zeros, and empties their rows of the packed gate.

    counts: int32 [M, tiles], which `gated_down` is going to read: zeroed for these tokens. Returns their sums before,
    int32 [C].
    """
    nonzeros_M = counts.sum(1, dtype=torch.int32)
    most = nonzeros_M.topk(len(backup.tokens), sorted=False).indices
    backup.tokens.copy_(most.sort().values)  # so that memory is read in order
    counts.index_fill_(0, backup.tokens, 0)
    return nonzeros_M.index_select(0, backup.tokens)


def forward(
    backup: DenseBackup,
    nonzeros_C: Tensor,
    x: Tensor,
    weights: Weights,
    y: Tensor,
    counts: tuple[Tensor, Tensor, Tensor],
    steps: HotSteps,
    activation: str,
) -> Tensor:
    """Fills `backup.activated`; overwrites these tokens' rows of y and their numbers in `counts`.

    nonzeros_C: from `take_out`: counted as those of the other tokens are, which says exactly how much room they take.
    counts: nonzeros int32 [M], sums of |h| float32 [M], fired bool [N] by the other tokens. Returns fired [N] by all.
    """
    gated, (nonzeros_M, l1_M, fired_N) = weights.gate is not None, counts
    x_CK = x.index_select(0, backup.tokens)
    inner = [w for w in (weights.gate, weights.up) if w is not None]
    for w, out in zip(inner, backup.activated.chunk(len(inner), 1), strict=True):
        torch.mm(x_CK, w.t(), out=out)
    neurons = torch.arange(len(weights.up), device=x.device)
    nothing = Forward(y, torch.zeros_like(nonzeros_C), l1_M.new_zeros(()), fired_N, None)
    h_CN, own = steps.activate(backup.activated, neurons, gated, nothing, activation, weights.l1)
    assert own.l1 is not None, "counted, as `nothing` is"
    assert own.fired is not None, "as above"
    y.index_copy_(0, backup.tokens, F.linear(h_CN, weights.down.t()))
    nonzeros_M.index_copy_(0, backup.tokens, nonzeros_C)
    l1_M.index_copy_(0, backup.tokens, own.l1.expand(len(x_CK)))  # their mean for each: only the sum is used
    return own.fired


def add_gradients(
    gradients: Gradients,
    backup: DenseBackup,
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    weights: Weights,
    steps: HotSteps,
    activation: str,
) -> None:
    """Adds these tokens' part to `gradients`, those of the other tokens, in place; their rows of dx are overwritten.

    dl1: gradient of the mean over all M tokens of sum |h|, scalar or None.
    """
    dy_CK, x_CK = dy.index_select(0, backup.tokens), x.index_select(0, backup.tokens)
    # `derive` takes the gradient of the mean over the tokens that it is given.
    dl1 = None if dl1 is None else dl1 * (len(x_CK) / len(x))
    gated = weights.gate is not None
    d, h_CN = steps.derive(dy_CK @ weights.down.t(), backup.activated, dl1, gated, activation, weights.l1)
    dg_CN, du_CN = (None, d) if weights.gate is None else d.chunk(2, 1)
    if gradients.x is not None:
        dx_CK = du_CN @ weights.up
        if dg_CN is not None and weights.gate is not None:
            dx_CK.addmm_(dg_CN, weights.gate)
        gradients.x.index_copy_(0, backup.tokens, dx_CK)
    for gradient, left, right in (
        (gradients.gate, dg_CN, x_CK),
        (gradients.up, du_CN, x_CK),
        (gradients.down, h_CN, dy_CK),
    ):
        if gradient is not None and left is not None:
            gradient.addmm_(left.t(), right)
