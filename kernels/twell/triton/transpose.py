"""The order of the saved entries by neuron, then by token.

Three launches. The tokens of a neuron are bits of a mask for each BLOCK of tokens, so the order never depends on
timing. An entry's index is then `first` of its neuron, `before` of its block, and the bits below its token's: see
`record_index`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(64)


class ByNeuron(NamedTuple):
    """The order of the saved entries by neuron, then by token."""

    masks: Tensor  # (blocks, N) i64: which tokens of a block have the neuron
    before: Tensor  # (blocks, N) i32: the neuron's entries in blocks before
    firsts: Tensor  # (N) i32: the entries of neurons before
    totals: Tensor  # (N) i32: the neuron's entries
    order: Tensor  # (N) i32: the neurons, those with more than FREQUENT entries first


@triton.jit
def mark_kernel(
    saved_words,  # u32: neurons in the lower halves
    saved_rows,  # (2, M) i32
    masks,  # (blocks, N) i64, zero at the start: out
    M,
    N,
    LIST: tl.constexpr,
):
    row = tl.program_id(0)
    start, entries = tl.load(saved_rows + row), tl.load(saved_rows + M + row)
    bit = tl.full((), 1, tl.int64) << (row % BLOCK).to(tl.int64)
    own = masks + (row // BLOCK).to(tl.int64) * N
    for first in range(0, tl.where(start < 0, 0, entries), LIST):
        index = first + tl.arange(0, LIST)
        word = tl.load(saved_words + start.to(tl.int64) + index, mask=index < entries, other=0)
        tl.atomic_or(own + (word & 0xFFFF).to(tl.int32), bit, mask=index < entries, sem="relaxed")


@triton.jit
def sum_up_kernel(
    by_neuron,  # ByNeuron: before and totals are written
    blocks,
    N,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    carried = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        mask = (row < blocks)[:, None] & (column < N)[None, :]
        count = bits_in(tl.load(by_neuron.masks + at, mask=mask, other=0))
        tl.store(by_neuron.before + at, carried[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        carried += tl.sum(count, 0)
    tl.store(by_neuron.totals + column, carried, mask=column < N)


@triton.jit
def order_kernel(
    by_neuron,  # ByNeuron: firsts and order are written
    N,
    FREQUENT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    entries, frequent = 0, 0
    for start in range(0, N, COLUMNS):
        neuron = start + tl.arange(0, COLUMNS)
        total = tl.load(by_neuron.totals + neuron, mask=neuron < N, other=0)
        tl.store(by_neuron.firsts + neuron, entries + tl.cumsum(total, 0) - total, mask=neuron < N)
        entries += tl.sum(total)
        frequent += tl.sum((total > FREQUENT).to(tl.int32))
    many = 0
    for start in range(0, N, COLUMNS):
        neuron = start + tl.arange(0, COLUMNS)
        total = tl.load(by_neuron.totals + neuron, mask=neuron < N, other=0)
        is_frequent = (total > FREQUENT).to(tl.int32)
        ahead = many + tl.cumsum(is_frequent, 0) - is_frequent
        place = tl.where(is_frequent > 0, ahead, frequent + neuron - ahead)
        tl.store(by_neuron.order + place, neuron, mask=neuron < N)
        many += tl.sum(is_frequent)


@triton.jit
def record_index(neuron, row, by_neuron, N, mask):
    """The index in that order of the entries of these neurons in this row (i64)."""
    at = (row // BLOCK) * N + neuron
    below = (tl.full((), 1, tl.int64) << (row % BLOCK)) - 1
    rank = bits_in(tl.load(by_neuron.masks + at, mask=mask, other=0) & below)
    first = tl.load(by_neuron.firsts + neuron, mask=mask, other=0)
    return first + tl.load(by_neuron.before + at, mask=mask, other=0) + rank


@triton.jit
def bits_in(word):
    """How many bits of an int64 are set, as int32."""
    return _bits_in_half(word.to(tl.uint32)) + _bits_in_half((word >> 32).to(tl.uint32))


@triton.jit
def _bits_in_half(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)
