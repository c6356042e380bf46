"""The elementwise steps for hot neurons in Triton (see `hot_split.py`). A program takes one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import RELU2, Forward
from .inference import INTERPRET
from .numbers import to_bits

_COLUMNS = 1024  # at once


@triton.jit
def hot_forward_kernel(
    pre,  # (M, 2H) bf16, or without a gate (M, H): in place
    h,  # (M, H) bf16, GATED or SQUARED only
    hot,  # (H) i64
    nonzeros,  # (M) i32, STATS only: added to
    l1,  # (M) f32, STATS only
    l1_weight,  # (H) f32, or None
    fired,  # (N) u8, STATS only: added to
    H,
    N,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    STATS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pre += token * H * (2 if GATED else 1)
    counts = tl.zeros((COLUMNS,), dtype=tl.int32)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < H
        g = tl.load(pre + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.where(g <= 0, 0.0, g)
        product = g * g if SQUARED else g
        if GATED:
            product *= tl.load(pre + H + column, mask=inside, other=0.0).to(tl.float32)
        if GATED or SQUARED:
            tl.store(h + token * H + column, to_bits(product, INTERPRET).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(pre + column, to_bits(g, INTERPRET).to(tl.bfloat16, bitcast=True), mask=inside)
        if STATS:
            active = inside & (g != 0)
            counts += active.to(tl.int32)
            size = tl.abs(product)
            if l1_weight is not None:
                size *= tl.load(l1_weight + column, mask=inside, other=0.0)
            sums += size
            tl.store(fired + tl.load(hot + column, mask=inside, other=0), 1, mask=active)
    if STATS:
        # A token with NaN fires every neuron, hot or not.
        tl.store(nonzeros + token, tl.minimum(tl.load(nonzeros + token) + tl.sum(counts), N))
        tl.store(l1 + token, tl.sum(sums))


@triton.jit
def hot_backward_kernel(
    dh,  # (M, H) bf16
    activated,  # (M, 2H) bf16: g and u; without a gate (M, H): g
    d,  # as activated: out: dg and du; du
    h,  # (M, H) bf16, GATED or SQUARED only: out
    dl1,  # f32, or None
    l1_weight,  # (H) f32, or None
    M,
    H,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    both = token * H * (2 if GATED else 1)
    for first in range(0, H, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < H
        g = tl.load(activated + both + column, mask=inside, other=0.0).to(tl.float32)
        active = g * g if SQUARED else g
        slope = 2 * g if SQUARED else 1.0
        product = active
        if GATED:
            u = tl.load(activated + both + H + column, mask=inside, other=0.0).to(tl.float32)
            product = active * u
        gradient = tl.load(dh + token * H + column, mask=inside, other=0.0).to(tl.float32)
        if dl1 is not None:
            slope_of_l1 = tl.load(dl1) / M
            if l1_weight is not None:
                slope_of_l1 *= tl.load(l1_weight + column, mask=inside, other=0.0)
            sign = tl.where(product > 0, 1.0, tl.where(product < 0, -1.0, 0.0))  # of NaN 0, as in torch
            gradient += slope_of_l1 * sign
        if GATED:
            dg = to_bits(tl.where(g <= 0, 0.0, gradient * u * slope), INTERPRET)
            du = to_bits(gradient * active, INTERPRET)
            tl.store(d + both + column, dg.to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(d + both + H + column, du.to(tl.bfloat16, bitcast=True), mask=inside)
        else:
            du = to_bits(tl.where(g <= 0, 0.0, gradient * slope), INTERPRET)
            tl.store(d + both + column, du.to(tl.bfloat16, bitcast=True), mask=inside)
        if GATED or SQUARED:
            tl.store(h + token * H + column, to_bits(product, INTERPRET).to(tl.bfloat16, bitcast=True), mask=inside)


def activate(
    pre: Tensor, neurons: Tensor, gated: bool, rest: Forward, activation: str, l1_weight: Tensor | None = None
) -> tuple[Tensor, Forward]:
    """`hot_split.activate` in bfloat16; what `rest` counted is added to in place."""
    tokens, count = pre.shape[0], neurons.shape[0]
    squared = activation == RELU2
    h = pre.new_empty((tokens, count)) if gated or squared else pre
    stats = rest.nonzeros is not None
    l1_M = pre.new_zeros(tokens, dtype=torch.float32) if stats else pre
    fired_N = pre if rest.fired is None else rest.fired.view(torch.uint8)
    if tokens:
        hot_forward_kernel[(tokens,)](
            pre,
            h,
            neurons,
            pre if rest.nonzeros is None else rest.nonzeros,
            l1_M,
            l1_weight,
            fired_N,
            count,
            fired_N.shape[0],
            GATED=gated,
            SQUARED=squared,
            STATS=stats,
            COLUMNS=_columns(count),
            INTERPRET=INTERPRET,
            num_warps=4,
        )
    return h, rest if rest.l1 is None else rest._replace(l1=rest.l1 + l1_M.sum() / max(tokens, 1))


def derive(
    dh: Tensor, activated: Tensor, dl1: Tensor | None, gated: bool, activation: str, l1_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`hot_split.derive` in bfloat16."""
    tokens, count = dh.shape
    squared = activation == RELU2
    d, h = torch.empty_like(activated), torch.empty_like(dh) if gated or squared else activated
    if tokens:
        hot_backward_kernel[(tokens,)](
            dh,
            activated,
            d,
            h,
            None if dl1 is None else dl1.to(torch.float32),
            l1_weight,
            tokens,
            count,
            GATED=gated,
            SQUARED=squared,
            COLUMNS=_columns(count),
            INTERPRET=INTERPRET,
            num_warps=4,
        )
    return d, h


def _columns(count: int) -> int:
    return min(_COLUMNS, triton.next_power_of_2(max(count, 1)))
