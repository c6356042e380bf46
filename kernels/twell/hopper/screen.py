"""Neurons that rarely fire, in inference: their gate product in int8, with a bound of what int8 loses.

Where the product may be positive, `gate_pack` marks the entry, and `gated_down` computes it; a product in int8 takes
half the time. Outlier channels would make the bound loose: they are divided by powers of two in x, by which the weights
are multiplied. Nothing is kept between calls. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..interface import Weights
from ..launch_cache import LAUNCHES
from ..memory import SCREENS_FROM, in_rows
from . import driver
from .params import QuantiseParams

TILE = 256  # neurons and tokens: screened neurons begin with a tile, norms have room for whole ones
_WARPS, _SAMPLE = 8, 256  # tokens, and neurons, by which channels are scaled
_MOST = 2.0**32  # the factors' square


class Rows(NamedTuple):
    """Rows as quantise.cu describes them. values: int8 [M, K]; norms: float32 [M, 2], M rounded up to whole tiles."""

    values: Tensor
    norms: Tensor


class Screen(NamedTuple):
    """The neurons from `first` on, a multiple of TILE, and the factors of the channels of x, bfloat16 [K]."""

    first: int
    weights: Rows
    factors: Tensor


def screen(x: Tensor, weights: Weights, count: int) -> Screen | None:
    """For the last `count` neurons; None if these have no whole tile, or where it does not pay: without a gate, and for
    fewer than `SCREENS_FROM` tokens. x: bfloat16 [M, K]."""
    w = weights.pattern
    first = -(-(w.shape[0] - count) // TILE) * TILE
    if first >= w.shape[0] or weights.gate is None or x.shape[0] < SCREENS_FROM:
        return None
    rare = in_rows(w[first:])
    divide, multiply = channel_factors(x, rare)
    return Screen(first, quantised(rare, multiply), divide)


def channel_factors(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Powers of two for the channels of x and of w, bfloat16 [K], the second the reciprocal of the first, so that
    channels of large x and of large w take as much of the range. x: bfloat16 [M, K]; w: bfloat16 [N, K]."""
    of_x, of_w = (torch.linalg.vector_norm(_sample(rows), dim=0, dtype=torch.float32) for rows in (x, w))
    ratios = (of_x / of_w).nan_to_num_(1, _MOST, 0).clamp_(1 / _MOST, _MOST)
    halves = ratios.view(torch.int32).add_(1 << 23) >> 24  # 64 + half the exponent, from the bits of a float32
    divide, multiply = ((exponents << 7).short().view(torch.bfloat16) for exponents in (191 - halves, 63 + halves))
    return divide, multiply


def _sample(rows: Tensor) -> Tensor:
    step = -(-rows.shape[0] // _SAMPLE)
    return rows[step // 2 :: step]  # not the first tokens of sequences


def quantised(x: Tensor, factors: Tensor) -> Rows:
    """The rows of x * factors. x: bfloat16 [M, K], `in_rows`, K a multiple of 64; factors: bfloat16 [K]."""
    (tokens, hidden), index = x.shape, x.device.index
    rows = Rows(
        torch.empty((tokens, hidden), dtype=torch.int8, device=x.device),
        torch.empty((-(-tokens // TILE) * TILE, 2), dtype=torch.float32, device=x.device),
    )
    addresses = x.data_ptr(), factors.data_ptr(), rows.values.data_ptr(), rows.norms.data_ptr()
    _launch((quantise_kernel(index, hidden), driver.stream(index), x.stride(0), tokens, addresses))()
    return rows


@LAUNCHES.kept
def _launch(arguments: tuple) -> driver.Launch:
    """Prepared launch, kept like that of `gate_pack`."""
    kernel, stream, x_stride, tokens, (x, factors, rows, norms) = arguments
    parameters = QuantiseParams(x=x, factors=factors, rows=rows, norms=norms, x_stride=x_stride * 2, M=tokens)
    return kernel.prepare(-(-tokens // _WARPS), stream, parameters)


def quantise_macros(hidden: int) -> dict[str, int]:
    """How `quantise` is compiled."""
    return {"K": hidden, "WARPS": _WARPS}


@functools.cache
def quantise_kernel(device_index: int, hidden: int) -> driver.Kernel:
    return driver.Kernel("quantise", quantise_macros(hidden), device_index, threads=_WARPS * 32)
