"""The token's side of the backward on the pattern of g, one pass: dx, and du, dg, h of every entry.

    dh = dy down^T + dl1 / M sign(h)     du = dh g     dg = dh u     dx = du up + dg gate

Without a gate: du = dh, dx = du up. SQUARED: g^2 in place of g, and dg, or without a gate du, times 2 g. A warp (or
ACROSS of them) keeps a token's dy and dx in registers, and reads for each entry one row of down, of up and of gate.
"""

import triton
import triton.language as tl

from .numbers import high_half, is_finite
from .tokens import all_parts, load_row, next_token, own_queue, parts_of, program_part, store_row
from .transpose import record_index


@triton.jit
def token_gradients_kernel(
    dy,  # (M, K) bf16
    gate,  # (N, K) bf16, contiguous, GATED only
    up,  # (N, K) bf16, contiguous
    down,  # (N, K) bf16, contiguous
    dx,  # (M, K) bf16, FOR_X only
    saved_words,  # the next four: see `SavedCSR`. u32
    saved_u,  # bf16, GATED only
    saved_rows,  # (2, M) i32
    state,  # (3) i32; whether some token's x, or (set here) its dy, is not finite
    dl1,  # f32, HAS_L1 only
    records,  # (E, 4) i32: token and the bits of du, dg, h, by neuron; FOR_WEIGHTS only, as the next three
    masks,  # (blocks, N) i64
    before,  # (blocks, N) i32
    firsts,  # (N) i32
    queue_counters,  # i32, zero at the start: see `own_queue`; with PARTS > 1 instead, see `all_parts`
    partial,  # (M, PARTS, K) f32, PARTS > 1 only
    dy_stride,
    M,
    N,
    K: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_L1: tl.constexpr,
    FOR_X: tl.constexpr,
    FOR_WEIGHTS: tl.constexpr,
    CHUNK: tl.constexpr,  # neighbouring tokens that go to one processor; 0: a program takes a part of one token
    PARTS: tl.constexpr,
    SHARE: tl.constexpr,
    ACROSS: tl.constexpr,  # warps side by side along the hidden size
    LIST: tl.constexpr,  # entries whose records are made at a time
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    per_token = 0.0
    if HAS_L1:
        per_token = tl.load(dl1) / M
    if CHUNK > 0:
        queue = own_queue(queue_counters, QUEUES, INTERPRET)
        token = next_token(queue_counters, queue, CHUNK)
        while token < M:
            _token(
                token, 0, 1, tl.load(saved_rows + M + token), per_token, dy, gate, up, down, dx, saved_words, saved_u,
                saved_rows, state, records, masks, before, firsts, partial, queue_counters, dy_stride, N,
                K, GATED, SQUARED, HAS_L1, FOR_X, FOR_WEIGHTS, 1, ACROSS, LIST, INTERPRET,
            )  # fmt: skip
            token = next_token(queue_counters, queue, CHUNK)
    else:
        token, part = program_part(M, PARTS)
        entries = tl.load(saved_rows + M + token)
        parts = parts_of(entries, PARTS, SHARE)
        if part < parts:
            _token(
                token, part, parts, entries, per_token, dy, gate, up, down, dx, saved_words, saved_u,
                saved_rows, state, records, masks, before, firsts, partial, queue_counters, dy_stride, N,
                K, GATED, SQUARED, HAS_L1, FOR_X, FOR_WEIGHTS, PARTS, ACROSS, LIST, INTERPRET,
            )  # fmt: skip


@triton.jit
def _token(
    token,
    part,
    parts,
    entries,
    per_token,
    dy,
    gate,
    up,
    down,
    dx,
    saved_words,
    saved_u,
    saved_rows,
    state,
    records,
    masks,
    before,
    firsts,
    partial,
    queue_counters,
    dy_stride,
    N,
    K: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    HAS_L1: tl.constexpr,
    FOR_X: tl.constexpr,
    FOR_WEIGHTS: tl.constexpr,
    PARTS: tl.constexpr,
    ACROSS: tl.constexpr,
    LIST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    WIDTH: tl.constexpr = 256 * ACROSS
    PIECES: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, WIDTH))
    columns = tl.arange(0, PIECES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = columns < K
    row = token.to(tl.int64)
    dy_row = load_row(dy + row * dy_stride, columns, inside, K, PIECES * WIDTH, "evict_first")
    start = tl.load(saved_rows + row)
    bad = (start < 0) | (tl.sum(tl.where(is_finite(dy_row.to(tl.float32)), 0, 1)) > 0)
    if HAS_L1:
        bad |= ~is_finite(per_token)
    entries = tl.where(start < 0, 0, entries)
    own_words, own_u = saved_words + start.to(tl.int64), saved_u + start.to(tl.int64)
    sums = tl.zeros((PIECES, WIDTH), dtype=tl.float32)
    index = tl.arange(0, LIST)
    mine = tl.cdiv(tl.maximum(entries - part, 0), parts)
    for done in range(0, mine, LIST):
        count = tl.minimum(mine - done, LIST)
        products = tl.zeros((LIST,), dtype=tl.float32)
        for i in range(0, count):
            at = (done + i) * parts + part
            word = tl.load(own_words + at)
            first = (word & 0xFFFF).to(tl.int32) * K
            d = load_row(down, first + columns, inside, K, PIECES * WIDTH, "evict_last")
            # All three rows are on their way before the product is needed.
            if FOR_X:
                u_row = load_row(up, first + columns, inside, K, PIECES * WIDTH, "evict_last")
                if GATED:
                    g_row = load_row(gate, first + columns, inside, K, PIECES * WIDTH, "evict_last")
            product = tl.sum(tl.sum(dy_row.to(tl.float32) * d.to(tl.float32), 0))
            products = tl.where(index == i, product, products)
            if FOR_X:
                u = 1.0
                if GATED:
                    u = tl.load(own_u + at).to(tl.float32)
                du, dg, _ = _entry(product, high_half(word), u, per_token, GATED, SQUARED, HAS_L1)
                sums += du * u_row.to(tl.float32)
                if GATED:
                    sums += dg * g_row.to(tl.float32)
        if FOR_WEIGHTS:
            valid = index < count
            at = (done + index) * parts + part
            word = tl.load(own_words + at, mask=valid, other=0)
            u = 1.0
            if GATED:
                u = tl.load(own_u + at, mask=valid, other=0.0).to(tl.float32)
            du, dg, h = _entry(products, high_half(word), u, per_token, GATED, SQUARED, HAS_L1)
            neuron = (word & 0xFFFF).to(tl.int32)
            to = records + record_index(neuron, row, masks, before, firsts, N, valid).to(tl.int64) * 4
            tl.store(to, token, mask=valid)
            tl.store(to + 1, du.to(tl.int32, bitcast=True), mask=valid)
            if GATED:
                tl.store(to + 2, dg.to(tl.int32, bitcast=True), mask=valid)
            tl.store(to + 3, h.to(tl.int32, bitcast=True), mask=valid)
    tl.store(state + 2, 1, mask=bad)
    if FOR_X:
        sums += tl.where(bad, float("nan"), 0.0)
        last = True
        if PARTS > 1:
            none = tl.zeros((), dtype=tl.float32)
            sums, _, last = all_parts(
                sums, none, partial, partial, queue_counters, row, columns, part, parts, K, PARTS, False
            )
        store_row(dx, sums, row, columns, last, K, INTERPRET)


@triton.jit
def _entry(product, g, u, per_token, GATED: tl.constexpr, SQUARED: tl.constexpr, HAS_L1: tl.constexpr):
    """(du, dg, h) of entries with this product of dy and down."""
    active = g
    if SQUARED:
        active = g * g
    h = active
    if GATED:
        h = active * u
    dh = product
    if HAS_L1:
        dh += tl.where(h > 0, per_token, tl.where(h < 0, -per_token, h))  # NaN stays NaN
    du, dg = dh, dh
    if GATED:
        du, dg = dh * active, dh * u
    if SQUARED:
        if GATED:
            dg *= 2 * g
        else:
            du *= 2 * g
    return du, dg, h
