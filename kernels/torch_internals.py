"""torch's private names, all in this file: each is here because nothing public answers, or answers in time.

A call of few tokens on a GPU is bound by the host, where the public ways cost microseconds each.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def current_cuda_device() -> int:
    """torch.cuda.current_device() without checking again that CUDA is initialised."""
    return torch._C._cuda_getDevice()


def current_cuda_stream(device_index: int) -> int:
    """The handle of torch's current stream; torch.cuda.current_stream() makes an object at each call."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a torch.func transformation (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_observed() -> bool:
    """Whether something may see operators as they are called: a mode, a torch.func transformation, or a trace."""
    return bool(torch._C._len_torch_function_stack() or not has_values())


def has_values() -> bool:
    """Whether tensors have values that may be read: false in a transformation, a trace, or a mode (fake tensors)."""
    return not (torch._C._len_torch_dispatch_stack() or is_transformed() or torch._C._is_tracing())


def has_tangent(tensor: Tensor) -> bool:
    """Whether the tensor carries a forward-mode derivative."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def version_of(tensor: Tensor) -> int:
    """How often in-place operations have changed the tensor, its base, or another view of it. Raises RuntimeError for
    an inference tensor, which has none."""
    return tensor._version
