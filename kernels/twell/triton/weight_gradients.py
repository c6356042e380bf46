"""The neurons' side of the backward: dup = du^T x, dgate = dg^T x, ddown = h^T dy, with sums in float32.

A program takes one neuron and SLICE columns: for each of the neuron's records it reads that part of one row of x and
one of dy, AHEAD records at a time. All programs of one slice run before those of the next, so that the slices of x and
dy at work stay in L2.
"""

import triton
import triton.language as tl

from .numbers import to_bits


@triton.jit
def weight_gradients_kernel(
    x,  # (M, K) bf16
    dy,  # (M, K) bf16
    records,  # (E, 4) i32: token and the bits of du, dg, h, by neuron, then by token
    by_neuron,  # ByNeuron, whose `order` is that in which neurons are taken
    state,  # (3) i32: the last not zero: NaN or Inf may be missing from the records
    gradients,  # Gradients: (N, K) bf16, or None
    x_stride,
    dy_stride,
    N,
    K: tl.constexpr,
    SLICE: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    FOR_UP: tl.constexpr = gradients.up is not None
    FOR_GATE: tl.constexpr = gradients.gate is not None
    FOR_DOWN: tl.constexpr = gradients.down is not None
    program = tl.program_id(0)
    neuron = tl.load(by_neuron.order + program % N)
    column = (program // N) * SLICE + tl.arange(0, SLICE)[None, :]
    first, total = tl.load(by_neuron.firsts + neuron), tl.load(by_neuron.totals + neuron)
    last = tl.maximum(first + total - 1, 0)
    up_sums = tl.zeros((1, SLICE), dtype=tl.float32)
    gate_sums = tl.zeros((1, SLICE), dtype=tl.float32)
    down_sums = tl.zeros((1, SLICE), dtype=tl.float32)
    index = first + tl.arange(0, AHEAD)[:, None]
    token = tl.load(records + tl.minimum(index, last).to(tl.int64) * 4)
    factors = records.to(tl.pointer_type(tl.float32))
    for _ in range(0, total, AHEAD):
        # Records past the end repeat the last one with factors of zero. The tokens are known one step ahead.
        here = index <= last
        at = factors + tl.minimum(index, last).to(tl.int64) * 4
        row = token.to(tl.int64)
        index += AHEAD
        token = tl.load(records + tl.minimum(index, last).to(tl.int64) * 4)
        if FOR_UP or FOR_GATE:
            x_rows = _rows(x, row * x_stride, column, K, SLICE)
            if FOR_UP:
                up_sums += tl.sum(tl.load(at + 1, mask=here, other=0.0) * x_rows, 0, keep_dims=True)
            if FOR_GATE:
                gate_sums += tl.sum(tl.load(at + 2, mask=here, other=0.0) * x_rows, 0, keep_dims=True)
        if FOR_DOWN:
            dy_rows = _rows(dy, row * dy_stride, column, K, SLICE)
            down_sums += tl.sum(tl.load(at + 3, mask=here, other=0.0) * dy_rows, 0, keep_dims=True)
    poison = tl.where(tl.load(state + 2) != 0, float("nan"), 0.0)
    if FOR_UP:
        _store(gradients.up, up_sums, poison, neuron, column, K, INTERPRET)
    if FOR_GATE:
        _store(gradients.gate, gate_sums, poison, neuron, column, K, INTERPRET)
    if FOR_DOWN:
        _store(gradients.down, down_sums, poison, neuron, column, K, INTERPRET)


@triton.jit
def _rows(matrix, offsets, column, K: tl.constexpr, SLICE: tl.constexpr):
    if K % SLICE == 0:
        return tl.load(matrix + offsets + column).to(tl.float32)
    return tl.load(matrix + offsets + column, mask=column < K, other=0.0).to(tl.float32)


@triton.jit
def _store(matrix, sums, poison, neuron, column, K: tl.constexpr, INTERPRET: tl.constexpr):
    bits = to_bits(sums + poison, INTERPRET)
    tl.store(matrix + neuron.to(tl.int64) * K + column, bits.to(tl.bfloat16, bitcast=True), mask=column < K)
