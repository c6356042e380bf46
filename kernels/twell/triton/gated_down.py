"""y = (g * (x up^T)) down on the pattern of g, in one pass: u and h never reach memory. Without a gate: y = g down.
SQUARED: g^2 in place of g. With SAVE, for training, what the backward needs is saved, entry by entry: g and u.

A warp (or ACROSS of them, for long rows) keeps a token's x and y in registers. For each non-zero, it reads one row of
up, for the dot product with x, and one of down, added to y. These reads take the time; they come from L2, or from L1
when a token at work on the same processor used the same rows just before.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Weights
from .numbers import high_half, is_finite, to_bits
from .tokens import all_parts, load_row, next_token, only_if, own_queue, parts_of, program_part, row_columns, store_row

_WINDOW = tl.constexpr(32)  # tiles looked up at a time


class Statistics(NamedTuple):
    """What is counted of a forward."""

    nonzeros: Tensor  # (M) i32
    l1: Tensor  # (M) f32
    fired: Tensor  # (N) u8, zero at the start


class GatedDown(NamedTuple):
    """The operands of `gated_down_kernel`."""

    x: Tensor  # (M, K) bf16
    weights: Weights  # (N, K) bf16, contiguous; l1: (N) f32
    words: Tensor  # (M, N/T, SLOTS) u32
    counts: Tensor  # (M, N/T) i32
    spilled: Tensor  # (M, N/T, T / 2) u32: pairs of bf16 bits
    y: Tensor  # (M, K) bf16
    overflow: Tensor  # i64, zero at the start: tiles with more non-zeros than slots, counted with statistics
    queue_counters: Tensor  # i32, zero at the start: see `own_queue`; with several parts instead, see `all_parts`
    partial: Tensor | None  # (M, parts, K) f32, with several parts
    partial_l1: Tensor | None  # (M, parts) f32, with several parts and statistics
    stats: Statistics | None
    saved: SavedCSR | None  # words as u32; rows filled by `reserve_kernel`; in state[2] whether some x is not finite
    x_stride: int
    M: int
    N: int


@triton.jit
def gated_down_kernel(
    p,  # GatedDown
    HOW: tl.constexpr,  # TokenConfig
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    SQUARED: tl.constexpr,
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    if HOW.chunk > 0:
        queue = own_queue(p.queue_counters, QUEUES, INTERPRET)
        token = next_token(p.queue_counters, queue, HOW.chunk)
        while token < p.M:
            _token((token, 0, 1), p, HOW, K, TILE, SLOTS, SQUARED, INTERPRET)
            token = next_token(p.queue_counters, queue, HOW.chunk)
    else:
        token, part = program_part(p.M, HOW.parts)
        parts = 1
        if HOW.parts > 1:
            parts = parts_of(_nonzeros(token, p.counts, tl.cdiv(p.N, TILE)), HOW.parts, HOW.share)
        if part < parts:
            _token((token, part, parts), p, HOW, K, TILE, SLOTS, SQUARED, INTERPRET)


@triton.jit
def _nonzeros(token, counts, tiles):
    total = 0
    for first in range(0, tiles, _WINDOW):
        tile = first + tl.arange(0, _WINDOW)
        total += tl.sum(tl.load(counts + token.to(tl.int64) * tiles + tile, mask=tile < tiles, other=0))
    return total


@triton.jit
def _token(
    share,  # (token, part of it, how many parts it has)
    p,
    HOW: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    SQUARED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    GATED: tl.constexpr = p.weights.gate is not None
    STATS: tl.constexpr = p.stats is not None
    SAVE: tl.constexpr = p.saved is not None
    LIST: tl.constexpr = 32  # entries looked up at a time
    tl.static_assert(TILE % LIST == 0, "a dense row is listed in whole pieces")
    token, part, parts = share
    columns = row_columns(K, HOW.across)
    row = token.to(tl.int64)
    x_row = tl.zeros(columns.shape, dtype=tl.bfloat16)
    if GATED or SAVE:
        x_row = load_row(p.x + row * p.x_stride, 0, columns, K, "evict_first")
    if SAVE:
        start = tl.load(p.saved.rows + row)
    sums = tl.zeros(columns.shape, dtype=tl.float32)
    l1_sum = tl.zeros((), dtype=tl.float32)
    tiles = tl.cdiv(p.N, TILE)
    first_cell = row * tiles
    spilled = p.spilled.to(tl.pointer_type(tl.uint16))
    index = tl.arange(0, LIST)
    total = 0
    for first in range(0, tiles, _WINDOW):
        tile = first + tl.arange(0, _WINDOW)
        count = tl.load(p.counts + first_cell + tile, mask=tile < tiles, other=0)
        over = (count > SLOTS).to(tl.int32)
        stored = tl.where(over > 0, 0, count)
        entries, overs = tl.sum(stored), tl.sum(over)
        end, over_end = tl.cumsum(stored, 0), tl.cumsum(over, 0)
        listed = total + entries
        # Lists of entries in slots first, then the dense rows of the tiles that overflowed, piece by piece.
        lists = tl.cdiv(entries, LIST)
        if HOW.parts > 1:
            lists = tl.cdiv(tl.maximum(entries - part, 0), LIST * parts)
        for step in range(0, lists + overs * (TILE // LIST)):
            if step < lists:
                in_window = step * LIST + index
                if HOW.parts > 1:
                    in_window = in_window * parts + part
                # The tile of an entry is the number of tiles that end before it.
                before = (end[:, None] <= in_window[None, :]).to(tl.int32)
                its_tile = tl.sum(before, 0)
                slot = in_window - tl.sum(before * stored[:, None], 0)
                valid = in_window < entries
                at = p.words + (first_cell + first) * SLOTS + its_tile * SLOTS + slot
                word = tl.load(at, mask=valid, other=0)
                rank, in_row = index, total + in_window
            else:
                dense = step - lists
                local_tile = tl.sum((over_end <= dense // (TILE // LIST)).to(tl.int32))
                column = local_tile * TILE + dense % (TILE // LIST) * LIST + index
                bits = tl.load(spilled + (first_cell + first) * TILE + column).to(tl.uint32)
                word = (bits << 16) | (first * TILE + column).to(tl.uint32)
                valid = bits != 0
                rank = tl.cumsum(valid.to(tl.int32), 0) - 1
                in_row = listed + rank
                if SAVE:
                    listed += tl.sum(valid.to(tl.int32))
                if HOW.parts > 1:
                    valid &= rank % parts == part
                    rank = rank // parts
            if STATS:
                flag = p.stats.fired + (word & 0xFFFF)
                old = tl.load(flag, mask=valid, other=1)
                tl.store(flag, 1, mask=old == 0)
            rank = tl.where(valid, rank, -1)
            u_list = tl.zeros(rank.shape, dtype=tl.float32)
            for i in range(0, tl.sum(valid.to(tl.int32))):
                entry = tl.sum(tl.where(rank == i, word, 0))
                first_weight = (entry & 0xFFFF).to(tl.int32) * K
                h = high_half(entry)
                if SQUARED:
                    h *= h
                d = load_row(p.weights.down, first_weight, columns, K, "evict_last")
                if GATED:
                    u = load_row(p.weights.up, first_weight, columns, K, "evict_last")
                    dot = tl.sum(tl.sum(x_row.to(tl.float32) * u.to(tl.float32), 0))
                    h *= dot
                    if SAVE:
                        u_list = tl.where(rank == i, dot, u_list)
                sums += h * d.to(tl.float32)
                size = tl.abs(h)
                if p.weights.l1 is not None:
                    size *= tl.load(p.weights.l1 + (entry & 0xFFFF))
                l1_sum += size
            if SAVE:
                has_room = only_if(start >= 0, valid)
                to = start.to(tl.int64) + in_row
                tl.store(p.saved.words + to, word, mask=has_room)
                if GATED:
                    u_bits = to_bits(u_list, INTERPRET).to(tl.bfloat16, bitcast=True)
                    tl.store(p.saved.u + to, u_bits, mask=has_room)
        total += tl.sum(count)
        if STATS:
            tl.atomic_add(p.overflow, overs.to(tl.int64), mask=(overs > 0) & (part == 0), sem="relaxed")
    if GATED or SAVE:
        # 0 * Inf is NaN: an input that is not finite makes every neuron outside the pattern NaN.
        bad = (tl.sum(tl.where(is_finite(x_row.to(tl.float32)), 0, 1)) > 0) & (total < p.N)
        if SAVE:
            tl.store(p.saved.rows + row, -1, mask=bad)
            tl.store(p.saved.state + 2, 1, mask=bad)
        if GATED:
            poison = tl.where(bad, float("nan"), 0.0)
            sums += poison
            l1_sum += poison
    last = True
    if HOW.parts > 1:
        sums, l1_sum, last = all_parts(sums, l1_sum, p, row, part, parts, K, HOW)
    store_row(p.y, sums, row, columns, last, K, INTERPRET)
    if STATS:
        tl.store(p.stats.nonzeros + row, total, mask=last)
        tl.store(p.stats.l1 + row, l1_sum, mask=last)


@triton.jit
def reserve_kernel(
    counts,  # (M, TILES) i32
    saved_rows,  # (2, M) i32: out: where each row's entries go, -1 where there is no room, and how many it has
    reserved,  # i64, zero at the start: entries so far
    overflow,  # i64, rows without room are added
    capacity,
    M,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gives each row room for its entries, ROWS rows at a time. Programs run in any order; no result depends on it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.arange(0, TILES_PADDED)
    mask = (row < M)[:, None] & (tile < TILES)[None, :]
    count = tl.sum(tl.load(counts + row.to(tl.int64)[:, None] * TILES + tile[None, :], mask=mask, other=0), 1)
    end = tl.cumsum(count, 0)
    total = tl.sum(count)
    end = end + tl.atomic_add(reserved, total.to(tl.int64), sem="relaxed")
    fits = end <= capacity
    tl.store(saved_rows + row, tl.where(fits, end - count, -1).to(tl.int32), mask=row < M)
    tl.store(saved_rows + M + row, count, mask=row < M)
    lost = tl.sum(((row < M) & ~fits).to(tl.int64))
    tl.atomic_add(overflow, lost, mask=lost > 0, sem="relaxed")
