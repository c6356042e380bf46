"""Makes torch's fused optimizers (fused=True) notice, and be noticed by, what this package does with weights.

They update the weights through their addresses. So they do not raise a weight's version, by which `finiteness.Version`
tells whether its values have changed; and they walk through weight, gradient and moments in the order of memory, which
is wrong for moments from before `make_neuron_major` gave the weight another layout. Importing this module registers two
hooks for the steps of all optimizers of the process: afterwards fused ones raise versions as all others do, and
beforehand their state and gradients get the layout of their weights. Steps of a CUDA graph's replays run no hooks, nor
do optimizers of other libraries that are not torch.optim.Optimizer or do not call their groups `fused`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .capacity import is_capturing
from .checks import PLAIN_TYPES


def _fused(optimizer: Optimizer) -> Iterator[list[Tensor]]:
    """Of each fused group, the plain parameters that a step changes."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            yield [weight for weight in group["params"] if weight.grad is not None and type(weight) in PLAIN_TYPES]


# Not traced: torch.compile breaks the graph at every fused update anyway, and this way it runs in compiled steps too.
@torch.compiler.disable
def raise_versions(optimizer: Optimizer, *_: Any) -> None:
    """Count the step as an in-place change of each parameter that it changed."""
    for weights in _fused(optimizer):
        torch.autograd.graph.increment_version(weights)


@torch.compiler.disable
@torch.no_grad()
def lay_out_alike(optimizer: Optimizer, *_: Any) -> None:
    """Give gradients and state the memory layout of their parameters. Raises RuntimeError where that is needed while a
    CUDA graph is captured: each replay would repeat it with the state as it is now."""
    for weights in _fused(optimizer):
        for weight in weights:
            state = optimizer.state.get(weight) or {}  # None where ZeroRedundancyOptimizer has another process's share
            wanted = None if weight.is_contiguous() else weight.stride()
            if (grad := weight.grad) is not None and not _has_layout(wanted, weight, grad):
                weight.grad = _laid_out(weight, grad)
            for name, value in state.items():
                if not _has_layout(wanted, weight, value):
                    state[name] = _laid_out(weight, value)


def _has_layout(stride: tuple[int, ...] | None, weight: Tensor, value: Any) -> bool:
    """Whether the value has these strides (None: is contiguous), or is no strided tensor of the weight's shape. In an
    order that makes it fast for the usual one."""
    return (
        not isinstance(value, Tensor)
        or (value.is_contiguous() if stride is None else value.stride() == stride)
        or value.shape != weight.shape
        or value.layout is not torch.strided
    )


def _laid_out(weight: Tensor, value: Tensor) -> Tensor:
    if is_capturing(weight):
        raise RuntimeError(
            f"the state of a fused optimizer has strides {value.stride()} and its parameter {weight.stride()}: run a "
            "step after make_neuron_major, or another change of a weight's layout, before capturing one in a CUDA graph"
        )
    return torch.empty_like(weight, dtype=value.dtype, device=value.device).copy_(value)


register_optimizer_step_pre_hook(lay_out_alike)
register_optimizer_step_post_hook(raise_versions)
