"""Leaves hot neurons out of the packed gate product (see `hot_split.py`): the product of the others' rows, copied side
by side, with a table of the neurons that they belong to."""

import functools

import torch
from torch import Tensor

from ..interface import Cold, Weights
from ..memory import in_rows
from . import driver, twell
from .params import ColdRowsParams

_WARPS, _PADDING = 16, 256


def cold(weights: Weights, hot: Tensor) -> Cold:
    """The rows of the pattern's weights (bfloat16 [N, K], K a multiple of 64) that are not hot.

    hot: int64 [H], contiguous, distinct, H < N; where they are not distinct, every row is NaN.
    """
    w = in_rows(weights.pattern)
    (intermediate, hidden), count = w.shape, hot.shape[0]
    left = intermediate - count
    rows = w.new_empty((left, hidden))
    neurons = torch.empty(-(-left // _PADDING) * _PADDING, dtype=torch.uint16, device=w.device)
    parameters = ColdRowsParams(
        hot=hot.data_ptr(),
        w=w.data_ptr(),
        rows=rows.data_ptr(),
        neurons=neurons.data_ptr(),
        stride=w.stride(0) * 2,
        H=count,
        N=intermediate,
        K=hidden,
    )
    index = w.device.index
    _kernel(index, -(-intermediate // 1024) * 2048).prepare(twell.processors(index), driver.stream(index), parameters)()
    return Cold(rows, neurons)


MACROS = {"WARPS": _WARPS}


@functools.cache
def _kernel(device_index: int, list_bytes: int) -> driver.Kernel:
    return driver.Kernel("cold_rows", MACROS, device_index, threads=_WARPS * 32, shared_bytes=list_bytes)
