"""y = (g * (x up^T)) down on the pattern of g, in one pass: u and h never reach memory. Without a gate: y = g down.
SQUARED: g^2 in place of g. With SAVE, for training, what the backward needs is saved, entry by entry: g and u.

A warp (or ACROSS of them, for long rows) keeps a token's x and y in registers. For each non-zero, it reads one row of
up, for the dot product with x, and one of down, added to y. These reads take the time; they come from L2, or from L1
when a token at work on the same processor used the same rows just before.
"""

import triton
import triton.language as tl

from .numbers import high_half, is_finite, to_bits
from .tokens import all_parts, load_row, next_token, only_if, own_queue, parts_of, program_part, store_row


@triton.jit
def gated_down_kernel(
    x,  # (M, K) bf16
    up,  # (N, K) bf16, contiguous
    down,  # (N, K) bf16, contiguous
    words,  # (M, N/T, SLOTS) u32
    counts,  # (M, N/T) i32
    spilled,  # (M, N/T, T / 2) u32: pairs of bf16 bits
    y,  # (M, K) bf16
    overflow,  # i64, STATS only, zero at the start: tiles with more non-zeros than slots
    nonzeros,  # (M) i32, STATS only
    l1,  # (M) f32, STATS only
    fired,  # (N) u8, STATS only, zero at the start
    queue_counters,  # i32, zero at the start: see `own_queue`; with PARTS > 1 instead, see `all_parts`
    partial,  # (M, PARTS, K) f32, PARTS > 1 only
    partial_l1,  # (M, PARTS) f32, PARTS > 1 and STATS only
    saved_words,  # SAVE only, as the next four: see `SavedCSR`. u32
    saved_u,  # bf16, GATED only
    saved_rows,  # (2, M) i32, filled by `reserve_kernel`
    state,  # (3) i32; here whether some token's x is not finite
    x_stride,
    M,
    N,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    STATS: tl.constexpr,
    SAVE: tl.constexpr,
    CHUNK: tl.constexpr,  # neighbouring tokens that go to one processor; 0: a program takes a part of one token
    PARTS: tl.constexpr,
    SHARE: tl.constexpr,
    ACROSS: tl.constexpr,  # warps side by side along the hidden size
    LIST: tl.constexpr,  # entries looked up at a time
    WINDOW: tl.constexpr,  # tiles looked up at a time
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tl.static_assert(TILE % LIST == 0, "a dense row is listed in whole pieces")
    spilled = spilled.to(tl.pointer_type(tl.uint16))
    if CHUNK > 0:
        queue = own_queue(queue_counters, QUEUES, INTERPRET)
        token = next_token(queue_counters, queue, CHUNK)
        while token < M:
            _token(
                token, 0, 1, x, up, down, words, counts, spilled, y, overflow, nonzeros, l1, fired, partial,
                partial_l1, queue_counters, saved_words, saved_u, saved_rows, state, x_stride, M, N,
                K, TILE, SLOTS, GATED, SQUARED, STATS, SAVE, 1, ACROSS, LIST, WINDOW, INTERPRET,
            )  # fmt: skip
            token = next_token(queue_counters, queue, CHUNK)
    else:
        token, part = program_part(M, PARTS)
        parts = 1
        if PARTS > 1:
            parts = parts_of(_nonzeros(token, counts, tl.cdiv(N, TILE), WINDOW), PARTS, SHARE)
        if part < parts:
            _token(
                token, part, parts, x, up, down, words, counts, spilled, y, overflow, nonzeros, l1, fired, partial,
                partial_l1, queue_counters, saved_words, saved_u, saved_rows, state, x_stride, M, N,
                K, TILE, SLOTS, GATED, SQUARED, STATS, SAVE, PARTS, ACROSS, LIST, WINDOW, INTERPRET,
            )  # fmt: skip


@triton.jit
def _nonzeros(token, counts, tiles, WINDOW: tl.constexpr):
    total = 0
    for first in range(0, tiles, WINDOW):
        tile = first + tl.arange(0, WINDOW)
        total += tl.sum(tl.load(counts + token.to(tl.int64) * tiles + tile, mask=tile < tiles, other=0))
    return total


@triton.jit
def _token(
    token,
    part,
    parts,
    x,
    up,
    down,
    words,
    counts,
    spilled,
    y,
    overflow,
    nonzeros,
    l1,
    fired,
    partial,
    partial_l1,
    queue_counters,
    saved_words,
    saved_u,
    saved_rows,
    state,
    x_stride,
    M,
    N,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    STATS: tl.constexpr,
    SAVE: tl.constexpr,
    PARTS: tl.constexpr,
    ACROSS: tl.constexpr,
    LIST: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # A warp reads WIDTH / ACROSS neighbouring numbers at once; the pieces are in a thread's registers.
    WIDTH: tl.constexpr = 256 * ACROSS
    PIECES: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, WIDTH))
    columns = tl.arange(0, PIECES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = columns < K
    row = token.to(tl.int64)
    x_row = tl.zeros((PIECES, WIDTH), dtype=tl.bfloat16)
    if GATED or SAVE:
        x_row = load_row(x + row * x_stride, columns, inside, K, PIECES * WIDTH, "evict_first")
    if SAVE:
        start = tl.load(saved_rows + row)
    sums = tl.zeros((PIECES, WIDTH), dtype=tl.float32)
    l1_sum = tl.zeros((), dtype=tl.float32)
    tiles = tl.cdiv(N, TILE)
    first_cell = row * tiles
    index = tl.arange(0, LIST)
    total = 0
    for first in range(0, tiles, WINDOW):
        tile = first + tl.arange(0, WINDOW)
        count = tl.load(counts + first_cell + tile, mask=tile < tiles, other=0)
        over = (count > SLOTS).to(tl.int32)
        stored = tl.where(over > 0, 0, count)
        entries, overs = tl.sum(stored), tl.sum(over)
        end, over_end = tl.cumsum(stored, 0), tl.cumsum(over, 0)
        listed = total + entries
        # Lists of entries in slots first, then the dense rows of the tiles that overflowed, piece by piece.
        lists = tl.cdiv(entries, LIST)
        if PARTS > 1:
            lists = tl.cdiv(tl.maximum(entries - part, 0), LIST * parts)
        for step in range(0, lists + overs * (TILE // LIST)):
            if step < lists:
                in_window = step * LIST + index
                if PARTS > 1:
                    in_window = in_window * parts + part
                # The tile of an entry is the number of tiles that end before it.
                before = (end[:, None] <= in_window[None, :]).to(tl.int32)
                its_tile = tl.sum(before, 0)
                slot = in_window - tl.sum(before * stored[:, None], 0)
                valid = in_window < entries
                at = words + (first_cell + first) * SLOTS + its_tile * SLOTS + slot
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
                if PARTS > 1:
                    valid &= rank % parts == part
                    rank = rank // parts
            if STATS:
                flag = fired + (word & 0xFFFF)
                old = tl.load(flag, mask=valid, other=1)
                tl.store(flag, 1, mask=old == 0)
            rank = tl.where(valid, rank, -1)
            sums, l1_sum, u = _use(
                word, rank, tl.sum(valid.to(tl.int32)), x_row, up, down, columns, inside, sums, l1_sum,
                K, GATED, SQUARED, SAVE, PIECES * WIDTH,
            )  # fmt: skip
            if SAVE:
                has_room = only_if(start >= 0, valid)
                to = start.to(tl.int64) + in_row
                tl.store(saved_words + to, word, mask=has_room)
                if GATED:
                    tl.store(saved_u + to, to_bits(u, INTERPRET).to(tl.bfloat16, bitcast=True), mask=has_room)
        total += tl.sum(count)
        if STATS:
            tl.atomic_add(overflow, overs.to(tl.int64), mask=(overs > 0) & (part == 0), sem="relaxed")
    if GATED or SAVE:
        # 0 * Inf is NaN: an input that is not finite makes every neuron outside the pattern NaN.
        bad = (tl.sum(tl.where(is_finite(x_row.to(tl.float32)), 0, 1)) > 0) & (total < N)
        if SAVE:
            tl.store(saved_rows + row, -1, mask=bad)
            tl.store(state + 2, 1, mask=bad)
        if GATED:
            poison = tl.where(bad, float("nan"), 0.0)
            sums += poison
            l1_sum += poison
    last = True
    if PARTS > 1:
        sums, l1_sum, last = all_parts(
            sums, l1_sum, partial, partial_l1, queue_counters, row, columns, part, parts, K, PARTS, STATS
        )
    store_row(y, sums, row, columns, last, K, INTERPRET)
    if STATS:
        tl.store(nonzeros + row, total, mask=last)
        tl.store(l1 + row, l1_sum, mask=last)


@triton.jit
def _use(
    word,
    rank,
    count,
    x_row,
    up,
    down,
    columns,
    inside,
    sums,
    l1_sum,
    K: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    SAVE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Adds `count` entries: those words of a list whose rank is 0 to count - 1. Also gives their u, with SAVE."""
    u_list = tl.zeros(rank.shape, dtype=tl.float32)
    for i in range(0, count):
        entry = tl.sum(tl.where(rank == i, word, 0))
        first = (entry & 0xFFFF).to(tl.int32) * K
        h = high_half(entry)
        if SQUARED:
            h *= h
        d = load_row(down, first + columns, inside, K, PADDED, "evict_last")
        if GATED:
            u = load_row(up, first + columns, inside, K, PADDED, "evict_last")
            dot = tl.sum(tl.sum(x_row.to(tl.float32) * u.to(tl.float32), 0))
            h *= dot
            if SAVE:
                u_list = tl.where(rank == i, dot, u_list)
        sums += h * d.to(tl.float32)
        l1_sum += tl.abs(h)
    return sums, l1_sum, u_list


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
