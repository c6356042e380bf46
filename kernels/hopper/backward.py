"""The backward through sparse activations on Hopper, from what `twell.gated_down` kept of the forward.

Three steps: the kept entries are ordered by neuron; one pass over tokens makes dx, and du, dg and h of every entry; one
pass over neurons makes the weights' gradients. All deterministic. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kept import Gradients, Kept
from ..memory import in_rows
from . import driver, twell

_BLOCK, _RANGE, _COUNTERS, _TRANSPOSE_THREADS = 64, 8192, 8, 512
_WARPS = {"token_gradients": 8, "weight_gradients": 12}
_SLICE = 256
# Neurons with more than CROWD records are taken by a whole CTA.
TRANSPOSE_MACROS = {"RANGE": _RANGE, "CROWD": 256}
WEIGHT_MACROS = {"WARPS": _WARPS["weight_gradients"], "SLICE": _SLICE, "AHEAD": 8, "CROWD": TRANSPOSE_MACROS["CROWD"]}


def backward(
    dy: Tensor,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    kept: Kept,
    needs: Sequence[bool],
) -> Gradients:
    """Gradients from y's (dy, bfloat16 [M, K]) and from that of the mean over tokens of sum |h| (dl1, scalar or None).

    x, weights: bfloat16, as in the forward; w_gate and w_up contiguous, w_down neuron-major in memory. needs: which of
    x, w_gate, w_up, w_down. Where entries were not kept (more than the capacity), or NaN and Inf may be missing from
    them, all that they could have reached becomes NaN.
    """
    (tokens, hidden), intermediate, device = x.shape, w_up.shape[0], x.device.index
    stream, gated, needs_weights = driver.stream(device), w_gate is not None, any(needs[1:])
    x, dy = in_rows(x), in_rows(dy)
    inputs = (x, w_gate, w_up, w_down)
    gradients = [torch.empty_like(t) if needed else None for t, needed in zip(inputs, needs, strict=True)]
    scratch = _Scratch.empty(x, intermediate, len(kept.words), needs_weights)
    if needs_weights:
        _transpose(scratch, kept, tokens, intermediate, stream)
    scalar = None if dl1 is None else dl1.to(torch.float32)
    macros = token_macros(hidden, tokens, twell.processors(device))
    _token_kernel(device, hidden, gated, tuple(macros.items())).prepare(
        min(twell.processors(device), tokens),
        stream,
        *driver.addresses(dy, w_gate, w_up, w_down, gradients[0], kept.words, kept.u, kept.rows),
        *driver.addresses(scratch.place, scratch.records, scalar, scratch.link),
        scratch.counters.data_ptr() + 4 * 4,
        kept.state.data_ptr() + 8,
        dy.stride(0) * 2,
        tokens,
        twell.chunk_for(tokens, macros["PARTS"], twell.processors(device)),
    )()
    if needs_weights:
        _weight_kernel(device, hidden, gated).prepare(
            twell.processors(device),
            stream,
            *driver.addresses(x, dy, scratch.records, scratch.ends, scratch.crowded, scratch.counters),
            kept.state.data_ptr() + 8,
            *driver.addresses(gradients[2], gradients[1], gradients[3]),
            x.stride(0) * 2,
            dy.stride(0) * 2,
            intermediate,
        )()
    return Gradients(*gradients)


class _Scratch(NamedTuple):
    """Memory of one backward; the names are those of the kernels' parameters."""

    link: Tensor
    counters: Tensor
    counts: Tensor | None
    before: Tensor | None
    ends: Tensor | None
    crowded: Tensor | None
    place: Tensor | None
    records: Tensor | None

    @classmethod
    def empty(cls, x: Tensor, intermediate: int, entries: int, needs_weights: bool) -> "_Scratch":
        tokens = x.shape[0]
        ints = functools.partial(x.new_empty, dtype=torch.int32)
        if not needs_weights:
            return cls(ints(tokens), x.new_zeros(_COUNTERS, dtype=torch.int32), *(None,) * 6)
        blocks = -(-tokens // _BLOCK)
        return cls(
            ints(tokens),
            ints(_COUNTERS),
            x.new_empty((blocks, intermediate), dtype=torch.uint8),
            ints((blocks, intermediate)),
            ints(intermediate),
            ints(intermediate),
            ints(entries),
            ints((entries, 4)),
        )


def _transpose(scratch: _Scratch, kept: Kept, tokens: int, intermediate: int, stream: int) -> None:
    """Where each kept entry goes if they are ordered by neuron, then by token."""
    by_block, by_neuron = -(-tokens // _BLOCK), -(-intermediate // _TRANSPOSE_THREADS)
    for step, grid in enumerate((by_block, by_neuron, by_block)):
        _transpose_kernel(kept.words.device.index, step).prepare(
            grid,
            stream,
            *driver.addresses(kept.words, kept.rows, scratch.counts, scratch.before, scratch.ends),
            *driver.addresses(scratch.place, scratch.crowded, scratch.counters),
            tokens,
            intermediate,
        )()


@functools.cache
def _transpose_kernel(device_index: int, step: int) -> driver.Kernel:
    macros = TRANSPOSE_MACROS | {"STEP": step}
    shared_bytes = 0 if step == 1 else 2 * 4 * _RANGE
    return driver.Kernel(
        "transpose", macros, device_index, "8Q2i", threads=_TRANSPOSE_THREADS, shared_bytes=shared_bytes
    )


def token_macros(hidden: int, tokens: int, processors: int) -> dict[str, int]:
    """How the pass over tokens is compiled, but for the hidden size and the gate."""
    slices, warps = -(-hidden // 2048), _WARPS["token_gradients"]
    few, some = {1: (8, 4), 2: (4, 2), 3: (2, 2), 4: (2, 2)}[slices]
    parts = few if tokens < 8 * processors else some if tokens < 64 * processors else 2
    return {"WARPS": warps // slices * slices, "PARTS": parts, "AHEAD": 2}


@functools.cache
def _token_kernel(device_index: int, hidden: int, gated: bool, macros: tuple[tuple[str, int], ...]) -> driver.Kernel:
    macros = dict(macros) | {"K": hidden, "GATED": int(gated)}
    return driver.Kernel("token_gradients", macros, device_index, "14Qq2i", threads=macros["WARPS"] * 32)


@functools.cache
def _weight_kernel(device_index: int, hidden: int, gated: bool) -> driver.Kernel:
    macros = WEIGHT_MACROS | {"K": hidden, "GATED": int(gated)}
    warps = macros["WARPS"]
    shared_bytes = warps // 2 * (3 if gated else 2) * _SLICE * 4
    layout = "10Q2qi4x"
    return driver.Kernel(
        "weight_gradients", macros, device_index, layout, threads=warps * 32, shared_bytes=shared_bytes
    )
