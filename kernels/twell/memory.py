"""The layout of weights in memory, and calls in pieces. Shapes: M tokens, K hidden, N intermediate."""

import torch
from torch import Tensor

SCREENS_FROM = 24576  # tokens from which on screening pays for its passes over x and over the weights
PIECE = 32768  # tokens that a forward for y alone takes at a time: enough to fill a GPU, and all that need workspace


def neuron_major(w_down: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """w_down [K, N] with the same shape and values, stored neuron by neuron (strides (1, K)); itself if it already is.

    dtype: cast to this dtype in the same pass; None: keep the dtype. Differentiable. The sparse backends read the down
    weights by neuron and copy a w_down with any other layout at each call, which costs noticeable time below about ten
    thousand tokens. Dense products are equally fast with both layouts. Raises ValueError unless it has two dimensions.
    """
    if w_down.ndim != 2:
        raise ValueError(f"w_down must have shape [hidden, intermediate], got {list(w_down.shape)}")
    hidden = w_down.shape[0]
    if w_down.stride() == (1, hidden):
        return w_down if dtype is None else w_down.to(dtype)
    w_down_NK = w_down.t() if dtype is None else w_down.t().to(dtype, memory_format=torch.contiguous_format)
    return w_down_NK.contiguous().t()


def is_aligned(tensor: Tensor) -> bool:
    """Whether it starts at a multiple of 16 bytes, as the GPU kernels' loads require. Allocations do, views may not."""
    return tensor.data_ptr() % 16 == 0


def aligned(tensor: Tensor) -> Tensor:
    """The tensor itself if it is aligned, else a copy with the same strides."""
    return tensor if is_aligned(tensor) else tensor.clone()


def is_in_rows(matrix: Tensor) -> bool:
    """Whether its rows are contiguous and start at multiples of 16 bytes (16-bit elements), as TMA requires."""
    row_stride, stride = matrix.stride()
    return stride == 1 and row_stride % 8 == 0 and row_stride >= matrix.shape[1] and is_aligned(matrix)


def in_rows(matrix: Tensor) -> Tensor:
    """The matrix itself if it `is_in_rows`, else a copy."""
    return matrix if is_in_rows(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def in_pieces(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The rows of both [M, K], `PIECE` tokens at a time; views."""
    if x.shape[0] <= PIECE:  # saves the time on the host
        return [(x, y)]
    return list(zip(x.split(PIECE), y.split(PIECE), strict=True))
