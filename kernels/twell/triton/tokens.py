"""How tokens are assigned to programs: many through queues of neighbours, few in parts. A program is one warp, or
ACROSS warps side by side along the hidden size.

With queues, the programs learn on which processor they run and draw tokens from its queue, so that neighbours, which
share weight rows, find them in L1. With parts, a token of up to SHARE entries is one program's; longer ones are dealt
to up to PARTS programs, entry by entry in turn, and the last of them to finish adds their sums, in order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import smid

from .numbers import to_bits

# A processor's queue is one word: the chunk of tokens that it is at, from 1 on, and how many were asked for. There is
# room for one more from each program on a processor than a chunk has: they are at most 32.
QUEUE_STEP = tl.constexpr(128)


@triton.jit
def own_queue(queues, QUEUES: tl.constexpr, INTERPRET: tl.constexpr):
    """The queue of the processor that this program runs on. queues: (1 + QUEUES) i32, zero at the start: the next
    chunk, and each processor's queue."""
    queue = queues + 1
    if not INTERPRET:
        queue += smid() % QUEUES
    return queue


@triton.jit
def next_token(next_chunk, queue, CHUNK: tl.constexpr):
    """The next token for this program; past the last one when there is none.

    The programs on a processor draw tokens from its queue. The first to find it empty brings the next chunk, while the
    others wait: if each brought one, neighbouring tokens would no longer run together.
    """
    tl.static_assert(CHUNK <= 64, "a queue counts to less than QUEUE_STEP")
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
def parts_of(entries, PARTS: tl.constexpr, SHARE: tl.constexpr):
    """Into how many parts a token of so many entries is cut."""
    return tl.minimum(tl.maximum(tl.cdiv(entries, SHARE), 1), PARTS)


@triton.jit
def program_part(M, PARTS: tl.constexpr):
    """(token, part) of this program. The last parts, which only long tokens have, come first."""
    program = tl.program_id(0)
    return program % M, PARTS - 1 - program // M


@triton.jit
def row_columns(K: tl.constexpr, ACROSS: tl.constexpr):
    """The columns of a row of K, (pieces, 256 * ACROSS): a warp reads neighbouring numbers at once, and the pieces are
    in a thread's registers. Those past the end are to be masked."""
    WIDTH: tl.constexpr = 256 * ACROSS
    PIECES: tl.constexpr = triton.next_power_of_2(triton.cdiv(K, WIDTH))
    return tl.arange(0, PIECES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_row(at, first, columns, K: tl.constexpr, EVICT: tl.constexpr):
    """A row of K, `first` elements after this address, with zeros in the columns past its end."""
    if columns.shape[0] * columns.shape[1] == K:
        return tl.load(at + (first + columns), eviction_policy=EVICT)
    return tl.load(at + (first + columns), mask=columns < K, other=0.0, eviction_policy=EVICT)


@triton.jit
def all_parts(sums, l1, p, row, part, parts, K: tl.constexpr, HOW: tl.constexpr):
    """What a program has of a token, its sums (float32, at `row_columns`) and, with `p.partial_l1`, that of |h|.
    Returns those of the whole token, and whether this program has them: the last one to finish.

    p: with `partial`, (M, HOW.parts, K) f32; `partial_l1`, (M, HOW.parts) f32 or None; and `queue_counters`, (M) i32,
    zero at the start.
    """
    last = parts == 1
    columns = row_columns(K, HOW.across)
    if parts > 1:
        at = p.partial + row * HOW.parts * K + columns
        tl.store(at + part * K, sums, mask=columns < K)
        if p.partial_l1 is not None:
            tl.store(p.partial_l1 + row * HOW.parts + part, l1)
        tl.debug_barrier()  # one thread counts for all
        last = tl.atomic_add(p.queue_counters + row, 1, sem="acq_rel") == parts - 1
        if last:
            sums = tl.zeros_like(sums)
            l1 = tl.zeros((), dtype=tl.float32)
            for i in range(0, parts):
                sums += tl.load(at + i * K, mask=columns < K, other=0.0, cache_modifier=".cg")
                if p.partial_l1 is not None:
                    l1 += tl.load(p.partial_l1 + row * HOW.parts + i, cache_modifier=".cg")
    return sums, l1, last


@triton.jit
def only_if(condition, mask):
    """A mask of many elements where a scalar condition holds, else an empty one."""
    # The interpreter of Triton 3.9 makes integers of a condition that it spreads over a mask, and refuses such a mask.
    return (mask & condition) != 0


@triton.jit
def store_row(result, sums, row, columns, here, K: tl.constexpr, INTERPRET: tl.constexpr):
    """Stores a token's sums (float32), which belong to `columns` of its row, in the result (bf16), if `here`."""
    bits = to_bits(sums, INTERPRET).to(tl.bfloat16, bitcast=True)
    tl.store(result + row * K + columns, bits, mask=only_if(here, columns < K))
