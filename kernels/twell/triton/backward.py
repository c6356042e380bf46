"""The backward through sparse activations in Triton, from what `twell.gated_down` saved of the forward.

Three steps: the saved entries are ordered by neuron; one pass over tokens makes dx, and du, dg and h of every entry;
one pass over neurons makes the weights' gradients. All deterministic. Shapes: M tokens, K hidden, N intermediate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Gradients, Needs, Weights
from ..memory import in_rows
from .token_gradients import token_gradients_kernel
from .transpose import BLOCK, mark_kernel, order_kernel, sum_up_kernel
from .twell import INTERPRET, LIST, TokenConfig, device, partial_sums, programs_for, token_config
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


class ByNeuron(NamedTuple):
    """The order of the saved entries by neuron, then by token: see `transpose.py`."""

    masks: Tensor
    before: Tensor
    firsts: Tensor
    totals: Tensor
    order: Tensor


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    weights: Weights,
    saved: SavedCSR,
    needs: Needs,
    *,
    squared: bool = False,
    tokens_by: TokenConfig | None = None,
    weights_by: WeightConfig | None = None,
) -> Gradients:
    """Gradients from y's (dy, bfloat16 [M, K]) and from that of the mean over tokens of sum |h| (dl1, scalar or None).

    x: bfloat16 [M, K], M >= 1; weights: bfloat16 [N, K], contiguous, as in the forward. Where entries are missing (more
    than the capacity, or of a token whose x or dy is not finite), all that they could have reached becomes NaN.
    squared: the activation is relu(z)^2; what is saved is relu(z) all the same.
    """
    x, dy = in_rows(x), in_rows(dy)
    wanted = zip((x, *weights), needs, strict=True)
    gradients = Gradients(
        *(
            torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and needed else None
            for t, needed in wanted
        )
    )
    config = tokens_by or token_config(x.shape[0], x.shape[1], device(x.device).sm_count, backward=True)
    if not needs.weights:
        _token_gradients(dy, dl1, weights, saved, gradients.x, None, None, config, squared)
        return gradients
    by_neuron = transpose(saved, len(x), len(weights.up))
    records = saved.words.new_empty((len(saved.words), 4))
    _token_gradients(dy, dl1, weights, saved, gradients.x, by_neuron, records, config, squared)
    _weight_gradients(x, dy, records, by_neuron, saved, gradients, weights_by or weight_config(x.shape[1]))
    return gradients


def transpose(saved: SavedCSR, tokens: int, intermediate: int) -> ByNeuron:
    """Orders the saved entries of `tokens` tokens by neuron."""
    blocks = -(-tokens // BLOCK.value)
    masks = saved.words.new_zeros((blocks, intermediate), dtype=torch.int64)
    before = torch.empty_like(masks, dtype=torch.int32)
    firsts, totals, order = (saved.words.new_empty(intermediate) for _ in range(3))
    mark_kernel[(tokens,)](
        saved.words.view(torch.uint32), saved.rows, masks, tokens, intermediate, LIST=128, num_warps=1
    )
    rows, columns = (8, 64) if INTERPRET else (64, 32)
    sum_up_kernel[(-(-intermediate // columns),)](
        masks, before, totals, blocks, intermediate, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    order_kernel[(1,)](totals, firsts, order, intermediate, FREQUENT=_FREQUENT, COLUMNS=2048, num_warps=8)
    return ByNeuron(masks, before, firsts, totals, order)


def _token_gradients(
    dy: Tensor,
    dl1: Tensor | None,
    weights: Weights,
    saved: SavedCSR,
    dx: Tensor | None,
    by_neuron: ByNeuron | None,
    records: Tensor | None,
    config: TokenConfig,
    squared: bool,
) -> None:
    (tokens, hidden), intermediate, sm_count = dy.shape, len(weights.up), device(dy.device).sm_count
    queue_counters = saved.words.new_zeros(1 + sm_count if config.chunk else tokens)
    unused = saved.state
    token_gradients_kernel[(programs_for(config, tokens, sm_count),)](
        dy,
        unused if weights.gate is None else weights.gate,
        weights.up,
        weights.down,
        unused if dx is None else dx,
        saved.words.view(torch.uint32),
        saved.u,
        saved.rows,
        saved.state,
        unused if dl1 is None else dl1.to(torch.float32),
        *((unused,) * 4 if by_neuron is None else (records, by_neuron.masks, by_neuron.before, by_neuron.firsts)),
        queue_counters,
        partial_sums(dy, config)[0],
        dy.stride(0),
        tokens,
        intermediate,
        K=hidden,
        GATED=weights.gate is not None,
        SQUARED=squared,
        HAS_L1=dl1 is not None,
        FOR_X=dx is not None,
        FOR_WEIGHTS=by_neuron is not None,
        CHUNK=config.chunk,
        PARTS=config.parts,
        SHARE=config.share,
        ACROSS=config.across,
        LIST=LIST,
        QUEUES=sm_count,
        INTERPRET=INTERPRET,
        num_warps=config.across,
        num_stages=1,
    )


def _weight_gradients(
    x: Tensor,
    dy: Tensor,
    records: Tensor,
    by_neuron: ByNeuron,
    saved: SavedCSR,
    gradients: Gradients,
    config: WeightConfig,
) -> None:
    hidden, intermediate, unused = x.shape[1], len(by_neuron.order), saved.state
    weight_gradients_kernel[(intermediate * -(-hidden // config.slice_),)](
        x,
        dy,
        records,
        by_neuron.firsts,
        by_neuron.totals,
        by_neuron.order,
        saved.state,
        unused if gradients.up is None else gradients.up,
        unused if gradients.gate is None else gradients.gate,
        unused if gradients.down is None else gradients.down,
        x.stride(0),
        dy.stride(0),
        intermediate,
        K=hidden,
        FOR_UP=gradients.up is not None,
        FOR_GATE=gradients.gate is not None,
        FOR_DOWN=gradients.down is not None,
        SLICE=config.slice_,
        AHEAD=config.ahead,
        INTERPRET=INTERPRET,
        num_warps=config.warps,
        num_stages=1,
    )
