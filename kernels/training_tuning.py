"""`autotune_training`: chooses each block's backend and hot neurons in training, by measuring forward and backward."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .hot import best_split, firing_rates
from .modules import SparseFeedForward, feed_forward_blocks
from .ops import sparse_ffn
from .registry import DENSE, is_sparse
from .silent import hooked
from .timing import quick_times
from .tuning import Alternative, Choice, Tuning, check_all_ran, check_names, checked_tokens, usable_backends

# Another alternative than the present one must be so much faster. It may cost a compilation, and torch.compile makes
# dense products about 4% faster than they are measured here.
_MARGIN = 0.95
# A capacity is a power of two, at least so many times the mean non-zeros, and at least so large.
_HEADROOM, _LEAST_CAPACITY = 2, 64

logger = logging.getLogger(__name__)


@torch.no_grad()
def autotune_training(model: nn.Module, *inputs: Any, backends: Sequence[str] | None = None, **named: Any) -> Tuning:
    """Choose the fastest backend, hot neurons and capacity for forward and backward of each SparseFeedForward.

    Call it now and then in a training, for instance every few hundred steps: at first dense products are faster, later
    each block is sparse as soon as that saves time on this device. Results and gradients stay the same up to rounding,
    whatever is chosen. Runs `model(*inputs, **named)` once, without gradients: give a micro-batch of the training. Then
    times each block alone on its own input, 0.1 s for each alternative: dense products, each sparse backend, and each
    with hot neurons by index. The present choice stays unless another is at least 5% faster. Leaves the random
    generators, gradients and weights as they are, and restores neurons that inference had left out.

    Where torch.distributed is initialized, all processes must call it. They choose alike, by the means over processes.
    A model compiled by torch.compile compiles the blocks that change anew.

    backends: sparse backends to try besides dense products; None: all that can train, except the reference. Those
        requested by name must be available in all processes alike.

    Raises ValueError for an unknown backend, for inputs without tokens, and for a model without blocks or one that does
    not run all of them. Raises BackendUnavailable for a backend that was requested by name but cannot train a block.
    """
    check_names(backends)
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to tune; `sparsify` puts them there")
    choices: dict[nn.Module, Choice] = {}

    def measure(block: nn.Module, x: Tensor) -> None:
        if block not in choices:
            assert isinstance(block, SparseFeedForward)
            checked_tokens(x)
            choices[block] = _choose(block, x, backends)

    for block in blocks:
        block.silent_suffix = block.hot_prefix = 0
    devices = {weight.device for weight in model.parameters() if weight.is_cuda}
    with (
        torch.random.fork_rng(devices=devices),
        hooked(blocks, measure),
        torch.compiler.set_stance("force_eager"),
    ):
        model(*inputs, **named)
    check_all_ran(len(choices), len(blocks))
    return Tuning(choices[block] for block in blocks)


def _choose(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None) -> Choice:
    pattern = (block.up_proj if block.gate_proj is None else block.gate_proj).weight
    rates_N = _mean_over_processes(firing_rates(x, pattern))
    nonzeros, neurons = rates_N.sum().item(), len(rates_N)
    hot = best_split(rates_N).neurons
    capacity = _capacity_for(nonzeros, neurons) if block.capacity_grows else block.capacity
    usable = usable_backends(block, x, backends, training=True)
    found = [Alternative(DENSE)] + [Alternative(name, by_index) for name in usable for by_index in (False, True)]
    alternatives = [each for each in found if len(hot) or not each.hot]
    calls = {each: _forward_backward(block, x, each, hot, capacity) for each in alternatives}
    times = _mean_over_processes(torch.tensor(list(quick_times(calls, x.device).values()), device=x.device))
    milliseconds = dict(zip(alternatives, times.tolist(), strict=True))
    present = Alternative(block.backend, block.hot is not None) if block.backend != DENSE else Alternative(DENSE)
    best = min(milliseconds, key=milliseconds.__getitem__)
    if milliseconds[best] >= _MARGIN * milliseconds.get(present, math.inf):
        best = present
    _apply(block, best, hot, capacity)
    return Choice(best.backend, len(hot) if best.hot else 0, nonzeros, milliseconds)


def _apply(block: SparseFeedForward, chosen: Alternative, hot: Tensor, capacity: int) -> None:
    if chosen.backend != block.backend:
        logger.info("a block runs %s instead of %s from now on", chosen, block.backend)
    block.backend, block.hot = chosen.backend, hot if chosen.hot else None
    # Raised at once, but lowered only if a quarter is enough: its tensors get other sizes.
    if is_sparse(chosen.backend) and not block.capacity / 4 < capacity <= block.capacity:
        block.capacity = capacity


def _capacity_for(nonzeros: float, neurons: int) -> int:
    return min(neurons, max(_LEAST_CAPACITY, 2 ** math.ceil(math.log2(max(1.0, _HEADROOM * nonzeros)))))


def _forward_backward(
    block: SparseFeedForward, x: Tensor, alternative: Alternative, hot: Tensor, capacity: int
) -> Callable[[], object]:
    """Forward and backward of the block, with the gradients that its training needs, of its statistics too."""

    def leaf(part: nn.Linear) -> Tensor:
        return part.weight.detach().requires_grad_(part.weight.requires_grad)

    x = x.detach().requires_grad_()
    gate = None if block.gate_proj is None else leaf(block.gate_proj)
    up, down = leaf(block.up_proj), leaf(block.down_proj)
    wanted = [tensor for tensor in (x, gate, up, down) if tensor is not None and tensor.requires_grad]
    dy = x.detach()

    def call() -> None:
        with torch.enable_grad():
            y, stats = sparse_ffn(
                *(x, gate, up, down),
                activation=block.activation,
                backend=alternative.backend,
                stats=block.stats_mode,
                capacity=capacity,
                hot=hot if alternative.hot else None,
                backup=block.backup if is_sparse(alternative.backend) else None,
            )
            outputs, gradients = [y], [dy.to(y.dtype)]
            if stats.l1 is not None:
                outputs, gradients = [*outputs, stats.l1], [*gradients, torch.ones_like(stats.l1)]
            torch.autograd.grad(outputs, wanted, gradients)

    return call


def _mean_over_processes(values: Tensor) -> Tensor:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        distributed.all_reduce(values)
        return values / distributed.get_world_size()
    return values
