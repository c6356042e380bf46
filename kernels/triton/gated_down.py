"""y = (g * (x up^T)) down on the pattern of g, in one pass: u and h never reach memory. Without a gate: y = g down.

A team of warps keeps a token's x and y in registers. For each non-zero, a warp (or ACROSS of them, for long rows) reads
one row of up, for the dot product with x, and one of down, added to y. These reads are the time; they come from L2, or
from L1 when a token at work on the same processor used the same rows just before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import smid

from .numbers import high_half, is_finite, to_bits

# A processor's queue is one word: the chunk of tokens that it is at, from 1 on, and how many were asked for. There is
# room for one more from each program on a processor than a chunk has: they are at most 32.
QUEUE_STEP = tl.constexpr(128)


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
    suspect,  # (N) u8: neurons whose up or down weights are not all finite
    suspects,  # (SUSPECT_COUNTS) i32: numbers that add up to how many these are
    queues,  # (1 + QUEUES) i32, zero at the start: the next chunk, and each processor's queue
    x_stride,
    M,
    N,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK: tl.constexpr,  # neighbouring tokens that go to one processor; 0: a program takes one token
    TEAM: tl.constexpr,  # non-zeros at a time
    ACROSS: tl.constexpr,  # warps side by side along the hidden size
    LIST: tl.constexpr,  # entries looked up at a time
    WINDOW: tl.constexpr,  # tiles looked up at a time
    SUSPECT_COUNTS: tl.constexpr,
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    spilled = spilled.to(tl.pointer_type(tl.uint16))
    suspicious = tl.max(tl.load(suspects + tl.arange(0, SUSPECT_COUNTS))) > 0
    queue = queues + 1
    if not INTERPRET:
        queue += smid() % QUEUES
    token = tl.program_id(0)
    if CHUNK > 0:
        tl.static_assert(CHUNK <= 64, "a queue counts to less than QUEUE_STEP")
        token = _next_token(queues, queue, CHUNK)
    while token < M:
        _token(
            token, x, up, down, words, counts, spilled, y, overflow, nonzeros, l1, fired, suspect, suspicious, x_stride,
            N, K, TILE, SLOTS, GATED, STATS, TEAM, ACROSS, LIST, WINDOW, INTERPRET,
        )  # fmt: skip
        token = _next_token(queues, queue, CHUNK) if CHUNK > 0 else M


@triton.jit
def _next_token(next_chunk, queue, CHUNK: tl.constexpr):
    """The next token for this program; past the last one when there is none.

    The programs on a processor draw tokens from its queue. The first to find it empty brings the next chunk, while the
    others wait: if each brought one, neighbouring tokens would no longer run together.
    """
    token = tl.full((), -1, tl.int32)
    while token < 0:
        ticket = tl.atomic_add(queue, 1, sem="relaxed")
        chunk, taken = ticket // QUEUE_STEP, ticket % QUEUE_STEP
        if (chunk > 0) & (taken < CHUNK):
            token = (chunk - 1) * CHUNK + taken
        elif taken == tl.where(chunk > 0, CHUNK, 0):
            fresh = tl.atomic_add(next_chunk, 1, sem="relaxed")
            token = fresh * CHUNK
            tl.atomic_xchg(queue, (fresh + 1) * QUEUE_STEP + 1, sem="relaxed")
        else:
            while tl.atomic_add(queue, 0, sem="relaxed") // QUEUE_STEP == chunk:
                pass
    return token


@triton.jit
def _token(
    token,
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
    suspect,
    suspicious,
    x_stride,
    N,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    GATED: tl.constexpr,
    STATS: tl.constexpr,
    TEAM: tl.constexpr,
    ACROSS: tl.constexpr,
    LIST: tl.constexpr,
    WINDOW: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # The layout that Triton gives (PIECES, TEAM, WIDTH): a warp reads WIDTH / ACROSS neighbouring numbers at once, the
    # others of a team have other non-zeros, and the pieces are in a thread's registers.
    WIDTH: tl.constexpr = 256 * ACROSS
    PIECES: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, WIDTH))
    place = tl.arange(0, PIECES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = place < K
    row = token.to(tl.int64)
    x_row = tl.zeros((PIECES, 1, WIDTH), dtype=tl.bfloat16)
    if GATED:
        x_row = _load(x + row * x_stride, place, inside, K, PIECES * WIDTH, "evict_first")
    sums = tl.zeros((PIECES, TEAM, WIDTH), dtype=tl.float32)
    l1_sum = tl.zeros((1, TEAM, 1), dtype=tl.float32)
    tiles = tl.cdiv(N, TILE)
    first_cell = row * tiles
    index = tl.arange(0, LIST)
    total = 0
    for first in range(0, tiles, WINDOW):
        tile = first + tl.arange(0, WINDOW)
        count = tl.load(counts + first_cell + tile, mask=tile < tiles, other=0)
        total += tl.sum(count)
        over = (count > SLOTS).to(tl.int32)
        stored = tl.where(over > 0, 0, count)
        entries, overs = tl.sum(stored), tl.sum(over)
        end, over_end = tl.cumsum(stored, 0), tl.cumsum(over, 0)
        # Lists of entries in slots first, then the dense rows of the tiles that overflowed, piece by piece.
        lists = tl.cdiv(entries, LIST)
        for step in range(0, lists + overs * (TILE // LIST)):
            if step < lists:
                place_in_window = step * LIST + index
                # The tile of an entry is the number of tiles that end before it.
                before = (end[:, None] <= place_in_window[None, :]).to(tl.int32)
                its_tile = tl.sum(before, 0)
                slot = place_in_window - tl.sum(before * stored[:, None], 0)
                valid = place_in_window < entries
                at = words + (first_cell + first) * SLOTS + its_tile * SLOTS + slot
                word = tl.load(at, mask=valid, other=0)
                rank = index
            else:
                dense = step - lists
                local_tile = tl.sum((over_end <= dense // (TILE // LIST)).to(tl.int32))
                column = local_tile * TILE + dense % (TILE // LIST) * LIST + index
                bits = tl.load(spilled + (first_cell + first) * TILE + column).to(tl.uint32)
                word = (bits << 16) | (first * TILE + column).to(tl.uint32)
                valid = bits != 0
                rank = tl.cumsum(valid.to(tl.int32), 0) - 1
            if STATS:
                flag = fired + (word & 0xFFFF)
                old = tl.load(flag, mask=valid, other=1)
                tl.store(flag, 1, mask=old == 0)
            rank = tl.where(valid, rank, -1)
            sums, l1_sum = _use(
                word, rank, tl.sum(valid.to(tl.int32)), x_row, up, down, place, inside, sums, l1_sum,
                K, GATED, TEAM, PIECES * WIDTH,
            )  # fmt: skip
        if STATS and overs > 0:
            tl.atomic_add(overflow, overs.to(tl.int64), sem="relaxed")
    if suspicious:
        # 0 * Inf is NaN: neurons that the pattern leaves out count all the same where their weights are not finite.
        for first in range(0, N, LIST):
            neuron = first + index
            missing = tl.load(suspect + neuron, mask=neuron < N, other=0) > 0
            if tl.sum(missing.to(tl.int32)) > 0:
                missing &= ~_stored(neuron, missing, first_cell, words, counts, spilled, TILE, SLOTS)
                rank = tl.where(missing, tl.cumsum(missing.to(tl.int32), 0) - 1, -1)
                sums, l1_sum = _use(
                    neuron.to(tl.uint32), rank, tl.sum(missing.to(tl.int32)), x_row, up, down, place, inside, sums,
                    l1_sum, K, GATED, TEAM, PIECES * WIDTH,
                )  # fmt: skip
    result = tl.sum(sums, 1)
    l1_total = tl.sum(l1_sum)
    if GATED:
        # 0 * Inf is NaN: an input that is not finite spoils every neuron that the pattern leaves out.
        bad = tl.sum(tl.where(is_finite(x_row.to(tl.float32)), 0, 1)) > 0
        poison = tl.where(bad & (total < N), float("nan"), 0.0)
        result += poison
        l1_total += poison
    out = tl.arange(0, PIECES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(y + row * K + out, to_bits(result, INTERPRET).to(tl.bfloat16, bitcast=True), mask=out < K)
    if STATS:
        tl.store(nonzeros + row, total)
        tl.store(l1 + row, l1_total)


@triton.jit
def _use(
    word,
    rank,
    count,
    x_row,
    up,
    down,
    place,
    inside,
    sums,
    l1_sum,
    K: tl.constexpr,
    GATED: tl.constexpr,
    TEAM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Adds `count` entries: those words of a list whose rank is 0 to count - 1."""
    # Three dimensions throughout, so that every number stays in the warp that it belongs to.
    member = tl.arange(0, TEAM)[None, :, None]
    for first in range(0, count, TEAM):
        mine = first + member
        entry = tl.sum(tl.where(rank[None, None, :] == mine, word[None, None, :], 0), 2, keep_dims=True)
        rows = (entry & 0xFFFF).to(tl.int32) * K + place
        mask = inside
        if TEAM > 1:
            mask = inside & (mine < count)
        h = high_half(entry)
        d = _load(down, rows, mask, K, PADDED if TEAM == 1 else 0, "evict_last")
        if GATED:
            u = _load(up, rows, mask, K, PADDED if TEAM == 1 else 0, "evict_last")
            products = x_row.to(tl.float32) * u.to(tl.float32)
            h *= tl.sum(tl.sum(products, 0, keep_dims=True), 2, keep_dims=True)
        sums += h * d.to(tl.float32)
        l1_sum += tl.abs(h)
    return sums, l1_sum


@triton.jit
def _load(at, offsets, mask, K: tl.constexpr, PADDED: tl.constexpr, EVICT: tl.constexpr):
    """Numbers of rows of K. No mask is needed where a row fills its PADDED places."""
    if K == PADDED:
        return tl.load(at + offsets, eviction_policy=EVICT)
    return tl.load(at + offsets, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def _stored(neuron, asked, first_cell, words, counts, spilled, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Which of these neurons this token has an entry for, among those asked for."""
    cell = first_cell + neuron // TILE
    count = tl.load(counts + cell, mask=asked, other=0)
    over = count > SLOTS
    bits = tl.load(spilled + cell * TILE + neuron % TILE, mask=asked & over, other=0)
    slot = tl.arange(0, SLOTS)[:, None]
    used = (slot < count[None, :]) & (~over & asked)[None, :]
    word = tl.load(words + cell[None, :] * SLOTS + slot, mask=used, other=0)
    found = used & ((word & 0xFFFF).to(tl.int32) == neuron[None, :])
    return (bits != 0) | (tl.max(found.to(tl.int32), 0) > 0)
