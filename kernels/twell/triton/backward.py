"""The backward through sparse activations in Triton, from what `inference.gated_down` saved of the forward: the three
steps of `hopper/backward.py`, as deterministic."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Gradients, Needs, Weights
from ..memory import in_rows
from .inference import INTERPRET, device, partial_sums, programs_for, token_config
from .token_gradients import TokenGradients, token_gradients_kernel
from .transpose import BLOCK, ByNeuron, mark_kernel, order_kernel, sum_up_kernel
from .weight_gradients import weight_gradients_kernel

_FREQUENT = 512  # neurons with more entries are taken first


@dataclass(frozen=True)
class WeightConfig:
    """How the pass over neurons runs: `slice_` columns a program, 256 of them a warp, and `ahead` records in flight."""

    slice_: int
    ahead: int

    @property
    def warps(self) -> int:
        return max(1, self.slice_ // 256)


def weight_config(hidden: int) -> WeightConfig:
    """The configuration of the pass over neurons."""
    return WeightConfig(slice_=min(1024, max(32, triton.next_power_of_2(hidden))), ahead=8)


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    weights: Weights,
    saved: SavedCSR,
    needs: Needs,
    *,
    squared: bool = False,
) -> Gradients:
    """`backward` of `adapter.Kernels`."""
    x, dy = in_rows(x), in_rows(dy)
    gradients = Gradients.empty(x, weights, needs)
    sm_count = device(x.device).sm_count
    saved = saved._replace(state=saved.state.clone())  # set where some token's dy is not finite
    by_neuron = transpose(saved, len(x), len(weights.up)) if needs.weights else None
    records = saved.words.new_empty((len(saved.words), 4)) if needs.weights else None
    config = token_config(x.shape[0], x.shape[1], sm_count, backward=True)
    operands = TokenGradients(
        dy,
        weights,
        gradients.x,
        saved=saved._replace(words=saved.words.view(torch.uint32)),
        dl1=None if dl1 is None else dl1.to(torch.float32),
        by_neuron=by_neuron,
        records=records,
        queue_counters=saved.words.new_zeros(1 + sm_count if config.chunk else len(x)),
        partial=partial_sums(dy, config)[0],
        partial_l1=None,
        dy_stride=dy.stride(0),
        M=len(x),
        N=len(weights.up),
    )
    token_gradients_kernel[(programs_for(config, len(x), sm_count),)](
        operands,
        HOW=config,
        K=x.shape[1],
        SQUARED=squared,
        QUEUES=sm_count,
        INTERPRET=INTERPRET,
        num_warps=config.across,
        num_stages=1,
    )
    if by_neuron is not None:
        how = weight_config(x.shape[1])
        weight_gradients_kernel[(len(weights.up) * -(-x.shape[1] // how.slice_),)](
            x,
            dy,
            records,
            by_neuron,
            saved.state,
            gradients,
            x.stride(0),
            dy.stride(0),
            len(weights.up),
            K=x.shape[1],
            SLICE=how.slice_,
            AHEAD=how.ahead,
            INTERPRET=INTERPRET,
            num_warps=how.warps,
            num_stages=1,
        )
    return gradients


def transpose(saved: SavedCSR, tokens: int, intermediate: int) -> ByNeuron:
    """Orders the saved entries of `tokens` tokens by neuron."""
    blocks = -(-tokens // BLOCK.value)
    masks = saved.words.new_zeros((blocks, intermediate), dtype=torch.int64)
    before = torch.empty_like(masks, dtype=torch.int32)
    by_neuron = ByNeuron(masks, before, *(saved.words.new_empty(intermediate) for _ in range(3)))
    mark_kernel[(tokens,)](
        saved.words.view(torch.uint32), saved.rows, masks, tokens, intermediate, LIST=128, num_warps=1
    )
    rows, columns = (8, 64) if INTERPRET else (64, 32)
    sum_up_kernel[(-(-intermediate // columns),)](
        by_neuron, blocks, intermediate, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    order_kernel[(1,)](by_neuron, intermediate, FREQUENT=_FREQUENT, COLUMNS=2048, num_warps=8)
    return by_neuron
