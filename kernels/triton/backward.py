"""The backward through sparse activations in Triton, from what `twell.gated_down` kept of the forward.

Three steps: the kept entries are ordered by neuron; one pass over tokens makes dx, and du, dg and h of every entry; one
pass over neurons makes the weights' gradients. All deterministic. Shapes: M tokens, K hidden, N intermediate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..kept import Gradients, Kept
from ..memory import in_rows
from .token_gradients import token_gradients_kernel
from .transpose import BLOCK, mark_kernel, order_kernel, sum_up_kernel
from .twell import INTERPRET, LIST, TokenConfig, device, partial_sums, programs_for, token_config
from .weight_gradients import weight_gradients_kernel

_CROWD = 512  # neurons with more entries are taken first


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
    """Where each kept entry goes if they are ordered by neuron, then by token: see `transpose.py`."""

    masks: Tensor
    before: Tensor
    firsts: Tensor
    totals: Tensor
    order: Tensor


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    down_NK: Tensor,
    kept: Kept,
    needs: Sequence[bool],
    *,
    tokens_by: TokenConfig | None = None,
    weights_by: WeightConfig | None = None,
) -> Gradients:
    """Gradients from y's (dy, bfloat16 [M, K]) and from that of the mean over tokens of sum |h| (dl1, scalar or None).

    x: bfloat16 [M, K], M >= 1; weights: bfloat16 [N, K], contiguous, as in the forward. needs: which of x, w_gate,
    w_up, w_down. Where entries were not kept (more than the capacity), or NaN and Inf may be missing from them, all
    that they could have reached becomes NaN.
    """
    x, dy = in_rows(x), in_rows(dy)
    outputs = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else None
        for t, needed in zip((x, w_gate, w_up, down_NK), needs, strict=True)
    ]
    places = transpose(kept, len(x), len(w_up)) if any(needs[1:]) else None
    records = None if places is None else kept.words.new_empty((len(kept.words), 4))
    config = tokens_by or token_config(*x.shape, device(x.device).processors, backward=True)
    _token_gradients(dy, dl1, w_gate, w_up, down_NK, kept, outputs[0], places, records, config)
    if places is not None:
        _weight_gradients(x, dy, records, places, kept, outputs[1:], weights_by or weight_config(x.shape[1]))
    dx, dw_gate, dw_up, ddown_NK = outputs
    return Gradients(dx, dw_gate, dw_up, None if ddown_NK is None else ddown_NK.t())


def transpose(kept: Kept, tokens: int, intermediate: int) -> ByNeuron:
    """The order of the kept entries of so many tokens by neuron."""
    blocks = -(-tokens // BLOCK.value)
    masks = kept.words.new_zeros((blocks, intermediate), dtype=torch.int64)
    before = torch.empty_like(masks, dtype=torch.int32)
    firsts, totals, order = (kept.words.new_empty(intermediate) for _ in range(3))
    mark_kernel[(tokens,)](kept.words.view(torch.uint32), kept.rows, masks, tokens, intermediate, LIST=128, num_warps=1)
    rows, columns = (8, 64) if INTERPRET else (64, 32)
    sum_up_kernel[(-(-intermediate // columns),)](
        masks, before, totals, blocks, intermediate, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    order_kernel[(1,)](totals, firsts, order, intermediate, CROWD=_CROWD, COLUMNS=2048, num_warps=8)
    return ByNeuron(masks, before, firsts, totals, order)


def _token_gradients(
    dy: Tensor,
    dl1: Tensor | None,
    w_gate: Tensor | None,
    w_up: Tensor,
    down_NK: Tensor,
    kept: Kept,
    dx: Tensor | None,
    places: ByNeuron | None,
    records: Tensor | None,
    config: TokenConfig,
) -> None:
    (tokens, hidden), intermediate, processors = dy.shape, len(w_up), device(dy.device).processors
    turns = kept.words.new_zeros(1 + processors if config.chunk else tokens)
    unused = kept.state
    token_gradients_kernel[(programs_for(config, tokens, processors),)](
        dy,
        unused if w_gate is None else w_gate,
        w_up,
        down_NK,
        unused if dx is None else dx,
        kept.words.view(torch.uint32),
        kept.u,
        kept.rows,
        kept.state,
        unused if dl1 is None else dl1.to(torch.float32),
        *((unused,) * 4 if places is None else (records, places.masks, places.before, places.firsts)),
        turns,
        partial_sums(dy, config)[0],
        dy.stride(0),
        tokens,
        intermediate,
        K=hidden,
        GATED=w_gate is not None,
        HAS_L1=dl1 is not None,
        FOR_X=dx is not None,
        FOR_WEIGHTS=places is not None,
        CHUNK=config.chunk,
        PARTS=config.parts,
        SHARE=config.share,
        ACROSS=config.across,
        LIST=LIST,
        QUEUES=processors,
        INTERPRET=INTERPRET,
        num_warps=config.across,
        num_stages=1,
    )


def _weight_gradients(
    x: Tensor,
    dy: Tensor,
    records: Tensor,
    places: ByNeuron,
    kept: Kept,
    outputs: Sequence[Tensor | None],
    config: WeightConfig,
) -> None:
    hidden, intermediate = x.shape[1], len(places.order)
    dgate, dup, ddown = (kept.state if output is None else output for output in outputs)
    for_gate, for_up, for_down = (output is not None for output in outputs)
    weight_gradients_kernel[(intermediate * -(-hidden // config.slice_),)](
        x,
        dy,
        records,
        places.firsts,
        places.totals,
        places.order,
        kept.state,
        dup,
        dgate,
        ddown,
        x.stride(0),
        dy.stride(0),
        intermediate,
        K=hidden,
        FOR_UP=for_up,
        FOR_GATE=for_gate,
        FOR_DOWN=for_down,
        SLICE=config.slice_,
        AHEAD=config.ahead,
        INTERPRET=INTERPRET,
        num_warps=config.warps,
        num_stages=1,
    )
