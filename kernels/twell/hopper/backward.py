"""The backward through sparse activations on Hopper, from what `inference.gated_down` saved of the forward.

Three steps: the saved entries are ordered by neuron; one pass over tokens makes dx, and du, dg and h of every entry;
one pass over neurons makes the weights' gradients. All deterministic. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Gradients, Needs, Weights
from ..memory import in_rows
from . import driver, inference
from .params import TokenGradientsParams, TransposeParams, WeightGradientsParams

_BLOCK, _RANGE, _COUNTERS, _TRANSPOSE_THREADS = 64, 8192, 8, 512
_WARPS = {"token_gradients": 8, "weight_gradients": 12}
_SLICE = 256
# Neurons with more than FREQUENT records are taken by a whole CTA.
TRANSPOSE_MACROS = {"RANGE": _RANGE, "FREQUENT": 256}
WEIGHT_MACROS = {
    "WARPS": _WARPS["weight_gradients"],
    "SLICE": _SLICE,
    "AHEAD": 8,
    "FREQUENT": TRANSPOSE_MACROS["FREQUENT"],
}


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
    (tokens, hidden), intermediate, device = x.shape, weights.up.shape[0], x.device.index
    stream, gated, sm_count = driver.stream(device), weights.gate is not None, inference.sm_count(device)
    at = driver.address
    x, dy = in_rows(x), in_rows(dy)
    gradients = Gradients.empty(x, weights, needs)
    scratch = _Scratch.empty(x, intermediate, len(saved.words), needs.weights)
    if needs.weights:
        _transpose(scratch, saved, tokens, intermediate, stream)
    scalar = None if dl1 is None else dl1.to(torch.float32)
    macros = token_macros(hidden, tokens, sm_count)
    switches = {"GATED": int(gated), "SQUARED": int(squared), "WEIGHTED": int(weights.l1 is not None)}
    token_parameters = TokenGradientsParams(
        dy=dy.data_ptr(),
        gate=at(weights.gate),
        up=weights.up.data_ptr(),
        down=weights.down.data_ptr(),
        dx=at(gradients.x),
        saved_words=saved.words.data_ptr(),
        saved_u=saved.u.data_ptr(),
        saved_rows=saved.rows.data_ptr(),
        record_index=scratch.record_index,
        records=scratch.records,
        dl1=at(scalar),
        l1_weight=at(weights.l1),
        link=scratch.link,
        next_chunk=scratch.counters + 4 * 4,
        nonfinite=scratch.counters + 4 * 5,
        dy_stride=dy.stride(0) * 2,
        M=tokens,
        chunk=inference.chunk_for(tokens, macros["PARTS"], sm_count),
    )
    kernel = _token_kernel(device, hidden, tuple({**macros, **switches}.items()))
    kernel.prepare(min(sm_count, tokens), stream, token_parameters)()
    if needs.weights:
        weight_parameters = WeightGradientsParams(
            x=x.data_ptr(),
            dy=dy.data_ptr(),
            records=scratch.records,
            ends=scratch.ends,
            frequent=scratch.frequent,
            counters=scratch.counters,
            nonfinite=saved.nonfinite_at,
            dup=at(gradients.up),
            dgate=at(gradients.gate),
            ddown=at(gradients.down),
            x_stride=x.stride(0) * 2,
            dy_stride=dy.stride(0) * 2,
            N=intermediate,
        )
        _weight_kernel(device, hidden, gated).prepare(sm_count, stream, weight_parameters)()
    return gradients


class _Scratch(NamedTuple):
    """Memory of one backward, in one allocation; addresses by the names of the kernels' parameters, 0 for what is not
    needed."""

    block: Tensor
    link: int
    counters: int
    counts: int
    before: int
    ends: int
    frequent: int
    record_index: int
    records: int

    @classmethod
    def empty(cls, x: Tensor, intermediate: int, entries: int, needs_weights: bool) -> "_Scratch":
        ends = _ends(x.shape[0], intermediate, entries)
        if not needs_weights:
            block = x.new_zeros(ends[2], dtype=torch.uint8)
            start = block.data_ptr()
            return cls(block, start, start + ends[1], *(0,) * 6)
        block = x.new_empty(ends[-1], dtype=torch.uint8)  # `transpose` sets the counters to zero
        start = block.data_ptr()
        return cls(block, *(start + end for end in ends[:-1]))


@functools.lru_cache(maxsize=4096)
def _ends(tokens: int, intermediate: int, entries: int) -> tuple[int, ...]:
    """Where each part of _Scratch begins, which is where the one before it ends, and the end of the last, in bytes."""
    counts = -(-tokens // _BLOCK) * intermediate
    sizes = (
        tokens * 4,
        _COUNTERS * 4,
        counts,
        counts * 4,
        intermediate * 4,
        intermediate * 4,
        entries * 4,
        entries * 16,
    )
    return tuple(itertools.accumulate((-(-size // 16) * 16 for size in sizes), initial=0))


def _transpose(scratch: _Scratch, saved: SavedCSR, tokens: int, intermediate: int, stream: int) -> None:
    """The index of each saved entry among the records, which are ordered by neuron, then by token."""
    by_block, by_neuron = -(-tokens // _BLOCK), -(-intermediate // _TRANSPOSE_THREADS)
    parameters = TransposeParams(
        saved_words=saved.words.data_ptr(),
        saved_rows=saved.rows.data_ptr(),
        counts=scratch.counts,
        before=scratch.before,
        ends=scratch.ends,
        record_index=scratch.record_index,
        frequent=scratch.frequent,
        counters=scratch.counters,
        M=tokens,
        N=intermediate,
    )
    for step, grid in enumerate((by_block, by_neuron, by_block)):
        _transpose_kernel(saved.words.device.index, step).prepare(grid, stream, parameters)()


@functools.cache
def _transpose_kernel(device_index: int, step: int) -> driver.Kernel:
    macros = TRANSPOSE_MACROS | {"STEP": step}
    shared_bytes = 0 if step == 1 else 2 * 4 * _RANGE
    return driver.Kernel("transpose", macros, device_index, threads=_TRANSPOSE_THREADS, shared_bytes=shared_bytes)


def token_macros(hidden: int, tokens: int, sm_count: int) -> dict[str, int]:
    """The macros of the pass over tokens, except the hidden size and the switches."""
    slices, warps = -(-hidden // 2048), _WARPS["token_gradients"]
    few, some = {1: (8, 4), 2: (4, 2), 3: (2, 2), 4: (2, 2)}[slices]
    parts = few if tokens < 8 * sm_count else some if tokens < 64 * sm_count else 2
    return {"WARPS": warps // slices * slices, "PARTS": parts, "AHEAD": 2}


@functools.cache
def _token_kernel(device_index: int, hidden: int, macros: tuple[tuple[str, int], ...]) -> driver.Kernel:
    known = {"K": hidden, **dict(macros)}
    return driver.Kernel("token_gradients", known, device_index, threads=known["WARPS"] * 32)


@functools.cache
def _weight_kernel(device_index: int, hidden: int, gated: bool) -> driver.Kernel:
    macros = WEIGHT_MACROS | {"K": hidden, "GATED": int(gated)}
    warps = macros["WARPS"]
    shared_bytes = warps // 2 * (3 if gated else 2) * _SLICE * 4
    return driver.Kernel("weight_gradients", macros, device_index, threads=warps * 32, shared_bytes=shared_bytes)
