"""How weights lie in memory. Shapes: K hidden, N intermediate."""

from torch import Tensor


def neuron_major(w_down: Tensor) -> Tensor:
    """w_down [K, N] with the same shape and values, its memory neuron by neuron (strides (1, K)); itself if it is so.

    The sparse backends read the down weights by neuron. They copy any other w_down at each call, which is felt below
    some ten thousand tokens; plain products run as fast on either.
    """
    hidden = w_down.shape[0]
    return w_down if w_down.stride() == (1, hidden) else w_down.t().contiguous().t()
