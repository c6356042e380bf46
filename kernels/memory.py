"""How weights lie in memory. Shapes: K hidden, N intermediate."""

import torch
from torch import Tensor


def neuron_major(w_down: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """w_down [K, N] with the same shape and values, its memory neuron by neuron (strides (1, K)); itself if it is so.

    dtype: to cast to, in the same pass; None: its own. Differentiable. The sparse backends read the down weights by
    neuron. They copy any other w_down at each call, which is felt below some ten thousand tokens; plain products run as
    fast on either.
    """
    hidden = w_down.shape[0]
    if w_down.stride() == (1, hidden):
        return w_down if dtype is None else w_down.to(dtype)
    w_down_NK = w_down.t() if dtype is None else w_down.t().to(dtype, memory_format=torch.contiguous_format)
    return w_down_NK.contiguous().t()
