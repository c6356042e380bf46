"""All uses of torch's private names: there is no public equivalent, or it is too slow.

A call of few tokens on a GPU is bound by the host, where the public functions cost microseconds each.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """torch.compiler.is_exporting(), which torch 2.11 and older replace by True in every program that torch.compile
    traces."""
    return torch.compiler._is_exporting_flag


def current_cuda_device() -> int:
    """torch.cuda.current_device() without the check that CUDA is initialised."""
    return torch._C._cuda_getDevice()


def current_cuda_stream(device_index: int) -> int:
    """The handle of torch's current stream; torch.cuda.current_stream() creates an object at each call."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether a torch.func transformation (grad, vmap, ...) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward in it is one that activation checkpointing repeats."""
    return torch._C._current_graph_task_id() != -1


def is_observed() -> bool:
    """Whether something may observe operator calls: a mode, a torch.func transformation, or a trace. A default device
    is a mode, too, but changes only where new tensors go."""
    modes = torch._C._len_torch_function_stack()
    if modes and any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(modes)):
        return True
    return not has_values()


def has_values() -> bool:
    """Whether tensors have readable values: false in a transformation, a trace, or a mode (fake tensors)."""
    return not (torch._C._len_torch_dispatch_stack() or is_transformed() or torch._C._is_tracing())


def has_tangent(tensor: Tensor) -> bool:
    """Whether the tensor carries a forward-mode derivative."""
    return forward_ad.unpack_dual(tensor).tangent is not None
