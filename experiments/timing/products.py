"""How fast this CPU multiplies bfloat16."""

from __future__ import annotations

from timeit import repeat

import torch

SIZE, REPETITIONS = 256, 3
SLOW = 3.0  # times as long as in float32: below, another dtype gains little


def bfloat16_slowdown() -> float:
    """How many times as long as a float32 product a bfloat16 product takes on this CPU: below 1 with AMX, about 10
    where torch has no vector instructions for it (without AVX-512). The fastest of some repetitions of a small one."""
    bfloat16, float32 = (_seconds(dtype) for dtype in (torch.bfloat16, torch.float32))
    return bfloat16 / float32


def _seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(SIZE, SIZE, dtype=dtype)
    return min(repeat(lambda: matrix @ matrix.T, number=1, repeat=REPETITIONS))  # as in a linear layer
