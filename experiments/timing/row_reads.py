"""A Triton kernel that only reads rows at random: the ceiling of every plan that reads weight rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_rows(
    table, picks, sums, words, PICKS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PICKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # unrolled, so that this many rows are in flight
            row = tl.load(picks + program * PICKS + first + i)
            total += tl.load(table + row * words + column, mask=column < words, other=0)
    # In int64, since Triton's interpreter refuses a sum that overflows int32.
    tl.store(sums + program, tl.sum(total.to(tl.int64)).to(tl.int32))


def sum_rows(table: Tensor, picks: Tensor, *, warps: int, at_once: int) -> Tensor:
    """For each line of `picks`, the sum (modulo 2^32) of the 32-bit words of the table's rows that it names.

    Integers are exact in any order and cheap to add, so that the reads take the time.

    Args:
        table: [rows, K], contiguous, at most 8 GB; a row is a multiple of 4 bytes.
        picks: int32 [programs, count], rows of the table; one program takes one line.
        warps: of a program.
        at_once: rows that a program reads before it waits for them; divides count.

    Returns:
        int32 [programs].
    """
    words = table.view(torch.int32)
    programs, count = picks.shape
    sums = torch.empty(programs, dtype=torch.int32, device=table.device)
    block = triton.next_power_of_2(words.shape[1])
    _sum_rows[programs,](
        words, picks, sums, words.shape[1], PICKS=count, AT_ONCE=at_once, BLOCK=block, num_warps=warps
    )  # fmt: skip
    return sums


def exact_sums(table: Tensor, picks: Tensor) -> Tensor:
    """What `sum_rows` must give, in plain torch."""
    of_rows = table.view(torch.int32).sum(1, dtype=torch.int64)
    # A sum in int64, cut to its lower 32 bits, is the sum modulo 2^32.
    return of_rows[picks].sum(1).to(torch.int32)
