"""The token's side of the backward on the pattern of g, one pass: dx, and du, dg, h of every entry.

    dh = dy down^T + dl1 / M l1_weight sign(h)     du = dh g     dg = dh u     dx = du up + dg gate

Without a gate: du = dh, dx = du up. SQUARED: g^2 in place of g, and dg, or without a gate du, times 2 g. A warp (or
ACROSS of them) keeps a token's dy and dx in registers, and reads for each entry one row of down, of up and of gate.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Weights
from .numbers import high_half, is_finite
from .tokens import all_parts, load_row, next_token, own_queue, parts_of, program_part, row_columns, store_row
from .transpose import ByNeuron, record_index


class TokenGradients(NamedTuple):
    """The operands of `token_gradients_kernel`."""

    dy: Tensor  # (M, K) bf16
    weights: Weights  # (N, K) bf16, contiguous; l1: (N) f32
    dx: Tensor | None  # (M, K) bf16
    saved: SavedCSR  # words as u32; in state[2] whether some token's x, or (set here) its dy, is not finite: a copy
    dl1: Tensor | None  # f32
    by_neuron: ByNeuron | None
    records: Tensor | None  # (E, 4) i32: token and the bits of du, dg, h, by neuron; with by_neuron
    queue_counters: Tensor  # i32, zero at the start: see `own_queue`; with several parts instead, see `all_parts`
    partial: Tensor | None  # (M, parts, K) f32, with several parts
    partial_l1: None
    dy_stride: int
    M: int
    N: int


@triton.jit
def token_gradients_kernel(
    p,  # TokenGradients
    HOW: tl.constexpr,  # TokenConfig
    K: tl.constexpr,
    SQUARED: tl.constexpr,
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if HOW.chunk > 0:
        queue = own_queue(p.queue_counters, QUEUES, INTERPRET)
        token = next_token(p.queue_counters, queue, HOW.chunk)
        while token < p.M:
            entries = tl.load(p.saved.rows + p.M + token)
            _token((token, 0, 1), entries, p, HOW, K, SQUARED, INTERPRET)
            token = next_token(p.queue_counters, queue, HOW.chunk)
    else:
        token, part = program_part(p.M, HOW.parts)
        entries = tl.load(p.saved.rows + p.M + token)
        parts = parts_of(entries, HOW.parts, HOW.share)
        if part < parts:
            _token((token, part, parts), entries, p, HOW, K, SQUARED, INTERPRET)


@triton.jit
def _token(
    share,  # (token, part of it, how many parts it has)
    entries,
    p,
    HOW: tl.constexpr,
    K: tl.constexpr,
    SQUARED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    GATED: tl.constexpr = p.weights.gate is not None
    HAS_L1: tl.constexpr = p.dl1 is not None
    FOR_X: tl.constexpr = p.dx is not None
    LIST: tl.constexpr = 32  # entries whose records are made at a time
    token, part, parts = share
    columns = row_columns(K, HOW.across)
    row = token.to(tl.int64)
    dy_row = load_row(p.dy + row * p.dy_stride, 0, columns, K, "evict_first")
    start = tl.load(p.saved.rows + row)
    bad = (start < 0) | (tl.sum(tl.where(is_finite(dy_row.to(tl.float32)), 0, 1)) > 0)
    per_token = 0.0
    if HAS_L1:
        per_token = tl.load(p.dl1) / p.M
        bad |= ~is_finite(per_token)
    entries = tl.where(start < 0, 0, entries)
    words = p.saved.words + start.to(tl.int64)
    if GATED:
        saved_u = p.saved.u + start.to(tl.int64)
    sums = tl.zeros(columns.shape, dtype=tl.float32)
    index = tl.arange(0, LIST)
    mine = tl.cdiv(tl.maximum(entries - part, 0), parts)
    for done in range(0, mine, LIST):
        count = tl.minimum(mine - done, LIST)
        products = tl.zeros((LIST,), dtype=tl.float32)
        for i in range(0, count):
            at = (done + i) * parts + part
            word = tl.load(words + at)
            first = (word & 0xFFFF).to(tl.int32) * K
            d = load_row(p.weights.down, first, columns, K, "evict_last")
            # All three rows are on their way before the product is needed.
            if FOR_X:
                u_row = load_row(p.weights.up, first, columns, K, "evict_last")
                if GATED:
                    g_row = load_row(p.weights.gate, first, columns, K, "evict_last")
            product = tl.sum(tl.sum(dy_row.to(tl.float32) * d.to(tl.float32), 0))
            products = tl.where(index == i, product, products)
            if FOR_X:
                u = 1.0
                if GATED:
                    u = tl.load(saved_u + at).to(tl.float32)
                slope = per_token
                if HAS_L1 and p.weights.l1 is not None:
                    slope *= tl.load(p.weights.l1 + (word & 0xFFFF))
                du, dg, _ = _entry(product, high_half(word), u, slope, GATED, SQUARED, HAS_L1)
                sums += du * u_row.to(tl.float32)
                if GATED:
                    sums += dg * g_row.to(tl.float32)
        if p.by_neuron is not None:
            valid = index < count
            at = (done + index) * parts + part
            word = tl.load(words + at, mask=valid, other=0)
            u = 1.0
            if GATED:
                u = tl.load(saved_u + at, mask=valid, other=0.0).to(tl.float32)
            slope = per_token
            if HAS_L1 and p.weights.l1 is not None:
                slope *= tl.load(p.weights.l1 + (word & 0xFFFF), mask=valid, other=0.0)
            du, dg, h = _entry(products, high_half(word), u, slope, GATED, SQUARED, HAS_L1)
            neuron = (word & 0xFFFF).to(tl.int32)
            to = p.records + record_index(neuron, row, p.by_neuron, p.N, valid).to(tl.int64) * 4
            tl.store(to, token, mask=valid)
            tl.store(to + 1, du.to(tl.int32, bitcast=True), mask=valid)
            if GATED:
                tl.store(to + 2, dg.to(tl.int32, bitcast=True), mask=valid)
            tl.store(to + 3, h.to(tl.int32, bitcast=True), mask=valid)
    tl.store(p.saved.state + 2, 1, mask=bad)
    if FOR_X:
        sums += tl.where(bad, float("nan"), 0.0)
        last = True
        if HOW.parts > 1:
            none = tl.zeros((), dtype=tl.float32)
            sums, _, last = all_parts(sums, none, p, row, part, parts, K, HOW)
        store_row(p.dx, sums, row, columns, last, K, INTERPRET)


@triton.jit
def _entry(product, g, u, slope, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_L1: tl.constexpr):
    """(du, dg, h) of entries with this product of dy and down. slope: of the L1 term by |h|."""
    active = g
    if SQUARED:
        active = g * g
    h = active
    if GATED:
        h = active * u
    dh = product
    if HAS_L1:
        dh += tl.where(h > 0, slope, tl.where(h < 0, -slope, h))  # NaN stays NaN
    du, dg = dh, dh
    if GATED:
        du, dg = dh * active, dh * u
    if SQUARED:
        if GATED:
            dg *= 2 * g
        else:
            du *= 2 * g
    return du, dg, h
