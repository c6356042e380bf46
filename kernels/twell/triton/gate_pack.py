"""TwELL(relu(x w^T)): the gate product on tensor cores, packed in the epilogue."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .numbers import relu_pairs


def _put_asm() -> str:
    """PTX of `_put`. $1: the address, $2 to $5: the pairs, $6: the first column, $7: whether they fit; $0: nothing.

    Most threads have nothing to store, and often all of a warp, which then skips it. (Besides, before a scattered
    tl.store, Triton 3.6 has threads exchange addresses and masks through shared memory.)
    """
    puts = ""
    for i, (pair, select) in enumerate((pair, select) for pair in ("$2", "$3", "$4", "$5") for select in (0, 1)):
        word = f"and.b32 word, {pair}, 0xffff0000;" if select else f"shl.b32 word, {pair}, 16;"
        puts += f"""
            {word}
            setp.ne.u32 here, word, 0;
            add.u32 word, word, column;
            @here st.global.b32 [at], word;
            @here add.u64 at, at, 4;
            {"add.u32 column, column, 1;" if i < 7 else ""}"""
    return f"""{{
            .reg .b32 word, column;
            .reg .b64 at;
            .reg .pred here;
            mov.u32 $0, 0;
            or.b32 word, $2, $3;
            or.b32 column, $4, $5;
            or.b32 word, word, column;
            setp.eq.u32 here, word, 0;
            @here bra done;
            setp.eq.u32 here, $7, 0;
            @here bra done;
            mov.b64 at, $1;
            mov.u32 column, $6;{puts}
        done:
        }}"""


_PUT = tl.constexpr(_put_asm())


class GatePack(NamedTuple):
    """What `gate_pack_kernel` writes, and the sizes."""

    words: Tensor  # (M, N/T, SLOTS) u32: bf16 bits << 16 | column
    counts: Tensor  # (M, N/T) i32
    spilled: Tensor  # (M, N/T, T / 2) u32: a tile's dense row in pairs, where it has more than SLOTS non-zeros
    queue_counters: Tensor  # (max(1 + QUEUES, M)) i32, zeroed here for the kernels that follow, as is
    overflow: Tensor  # i64
    x_stride: int
    w_stride: int
    M: int
    N: int


@triton.jit
def gate_pack_kernel(
    x,  # (M, K) bf16, or its tensor descriptor with blocks (ROWS, STEP)
    w,  # (N, K) bf16, or its tensor descriptor with blocks (TILE, STEP)
    p,  # GatePack
    HOW: tl.constexpr,  # GateConfig
    K: tl.constexpr,
    FULL: tl.constexpr,  # the last tile is as wide as the others
    QUEUES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    TILE: tl.constexpr = HOW.tile
    ROWS: tl.constexpr = HOW.rows
    STEP: tl.constexpr = HOW.step
    if tl.program_id(0) == 0:
        tl.store(p.overflow, 0)
    counters = tl.maximum(1 + QUEUES, p.M)
    for first in range(tl.program_id(0) * 256, counters, tl.num_programs(0) * 256):
        index = first + tl.arange(0, 256)
        tl.store(p.queue_counters + index, 0, mask=index < counters)
    column_tiles = tl.cdiv(p.N, TILE)
    tiles = tl.cdiv(p.M, ROWS) * column_tiles
    # Column tiles run fastest: the programs at work share a few row blocks of x, and w stays in L2.
    # If a program takes several, they are one pipeline: the next one's operands load during the epilogue.
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=HOW.persistent):
        first_row, column_tile = (index // column_tiles) * ROWS, index % column_tiles
        sums = tl.zeros((ROWS, TILE), dtype=tl.float32)
        for k in range(0, K, STEP):
            if HOW.descriptors:  # operands come through TMA
                a = x.load([first_row, k])
                b = w.load([column_tile * TILE, k])
            else:
                a = _rows(x, p.x_stride, first_row, p.M, k, K, ROWS, STEP)
                b = _rows(w, p.w_stride, column_tile * TILE, p.N, k, K, TILE, STEP)
            if INTERPRET:
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b.T, sums)
        low, high = tl.split(tl.reshape(sums, (ROWS, TILE // 2, 2)))
        pairs = relu_pairs(low, high, INTERPRET)
        if not FULL:
            column = column_tile * TILE + tl.arange(0, TILE // 2) * 2
            pairs = tl.where((column < p.N)[None, :], pairs, 0)
            pairs = tl.where((column + 1 < p.N)[None, :], pairs, pairs & 0xFFFF)
        _pack(pairs, p, first_row, column_tile, TILE, HOW.slots, ROWS, INTERPRET)


@triton.jit
def _rows(matrix, stride, first, rows, k, K: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """COUNT rows from `first` on, columns k to k + STEP. Rows past the end repeat the last one, and their
    results are not stored."""
    row = tl.minimum(first + tl.arange(0, COUNT), rows - 1).to(tl.int64)
    column = k + tl.arange(0, STEP)
    at = matrix + row[:, None] * stride + column[None, :]
    if K % STEP == 0:
        return tl.load(at)
    return tl.load(at, mask=column[None, :] < K, other=0.0)


@triton.jit
def _pack(
    pairs,  # (ROWS, TILE / 2) u32: two neighbouring columns
    p,
    first_row,
    column_tile,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    # A thread gets eight neighbouring columns of either half of a row. It counts them alone; only its two counts, as
    # the halves of one word, are scanned.
    left, right = tl.split(tl.permute(tl.reshape(pairs, (ROWS, 2, TILE // 4)), (0, 2, 1)))
    left, right = _quarters(left, ROWS, TILE // 4), _quarters(right, ROWS, TILE // 4)
    both = _bytes(left) | (_bytes(right) << 16)
    total, start = tl.sum(both, 1), tl.cumsum(both, 1) - both
    count = ((total & 0xFFFF) + (total >> 16)) // 4

    row = tl.arange(0, ROWS)
    here = first_row + row < p.M
    column_tiles = tl.cdiv(p.N, TILE)
    # 64 bits for where the tile is, 32 for what is inside it.
    cell = first_row.to(tl.int64) * column_tiles + column_tile
    tl.store(p.counts + cell + row * column_tiles, count, mask=here)
    over = (here & (count > SLOTS))[:, None]
    at = (row * (column_tiles * (TILE // 2)))[:, None] + tl.arange(0, TILE // 4)[None, :]
    tl.store(p.spilled + cell * (TILE // 2) + at, _whole(left, ROWS, TILE // 4), mask=over)
    tl.store(p.spilled + cell * (TILE // 2) + TILE // 4 + at, _whole(right, ROWS, TILE // 4), mask=over)

    fits = (here & (count <= SLOTS))[:, None]
    to = (p.words + cell * SLOTS).to(tl.pointer_type(tl.uint8))
    at = (row * (column_tiles * SLOTS * 4))[:, None] + (start & 0xFFFF)
    right_at = (row * (column_tiles * SLOTS * 4) + (total & 0xFFFF))[:, None] + (start >> 16)
    column = column_tile * TILE + tl.arange(0, TILE // 16)[None, :] * 8
    _put(to, at, left, fits, column, INTERPRET)
    _put(to, right_at, right, fits, column + TILE // 2, INTERPRET)


@triton.jit
def _quarters(pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs 0, 4, 8, ... of a row; 1, 5, 9, ...; and so on."""
    p02, p13 = tl.split(tl.reshape(pairs, (ROWS, PAIRS // 4, 2, 2)))
    p0, p2 = tl.split(p02)
    p1, p3 = tl.split(p13)
    return p0, p1, p2, p3


@triton.jit
def _whole(quarters, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs of a row, from their quarters."""
    p0, p1, p2, p3 = quarters
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (ROWS, PAIRS))


@triton.jit
def _bytes(quarters):
    """How many bytes the entries in eight columns take; int32."""
    p0, p1, p2, p3 = quarters
    both = (_flags(p0) + _flags(p1)) + (_flags(p2) + _flags(p3))
    return ((both & 0xFFFF) + (both >> 16)).to(tl.int32)


@triton.jit
def _flags(pairs):
    """In each half of a word: 4, the bytes of an entry, if it is not zero. The halves have no sign bit (ReLU), so
    the addition does not carry from one to the other."""
    return ((pairs + 0x7FFF7FFF) >> 13) & 0x00040004


@triton.jit
def _put(to, at, quarters, fits, column, INTERPRET: tl.constexpr):
    """Stores the non-zeros of these pairs, the first of which is column `column`, from byte `at` on, if they fit."""
    p0, p1, p2, p3 = quarters
    if INTERPRET:
        at = _put_pair(to, at.to(tl.uint32), p0, fits, column)
        at = _put_pair(to, at, p1, fits, column + 2)
        at = _put_pair(to, at, p2, fits, column + 4)
        at = _put_pair(to, at, p3, fits, column + 6)
    else:
        tl.inline_asm_elementwise(
            _PUT, "=r,l,r,r,r,r,r,r", [(to + at).to(tl.int64), p0, p1, p2, p3, column, fits.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _put_pair(to, at, pairs, fits, column):
    """Stores the non-zeros of these pairs from byte `at` on; returns the byte for the next one."""
    flags = tl.where(fits, _flags(pairs), 0)
    tl.store((to + at).to(tl.pointer_type(tl.uint32)), (pairs << 16) | column, mask=(flags & 4) != 0)
    at += flags & 4
    tl.store((to + at).to(tl.pointer_type(tl.uint32)), (pairs & 0xFFFF0000) | (column + 1), mask=flags >= 0x10000)
    return at + (flags >> 16)
