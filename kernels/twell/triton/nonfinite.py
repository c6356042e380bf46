"""Which neurons have an Inf or NaN in a weight that the sparse plan skips where the gate is zero (0 * Inf is NaN).

The weights are read beside the last tiles of the gate product, the kernel ahead of this one, where these leave
SMs idle. Programs are many and small, so that they spread over SMs that become free at different times.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .numbers import exponent_is_full


@triton.jit
def nonfinite_kernel(
    own,  # (N, K) bf16, contiguous: the weights that make the pattern; read with OWN only, for the backward
    up,  # (N, K) bf16, contiguous; read with GATED only
    down,  # (N, K) bf16, contiguous
    nonfinite,  # (N) u8
    any_nonfinite,  # (1) i32, zeroed by the kernel ahead: whether there are any
    queue_counters,  # (queue_counters_size) i32, zeroed here for the kernels that follow, as is
    overflow,  # i64
    queue_counters_size,
    N,
    K: tl.constexpr,
    SCAN: tl.constexpr,  # otherwise there are none, and only what follows is zeroed
    OWN: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,  # K / 2 or the next power of 2
    EARLY: tl.constexpr,  # started before the kernel ahead has ended
):
    program = tl.program_id(0)
    found = False
    if SCAN:
        neuron = program * ROWS + tl.arange(0, ROWS)
        pair = tl.arange(0, PADDED)
        at = neuron[:, None] * (K // 2) + pair[None, :]
        mask = (neuron < N)[:, None] & (pair < K // 2)[None, :]
        full = exponent_is_full(_pairs(down, at, mask))
        if OWN:
            full |= exponent_is_full(_pairs(own, at, mask))
        if GATED:
            full |= exponent_is_full(_pairs(up, at, mask))
        bad = tl.max(full.to(tl.int32), 1)
        tl.store(nonfinite + neuron, bad, mask=neuron < N)
        found = tl.max(bad) > 0
    if program == 0:
        tl.store(overflow, 0)
    for first in range(program * 256, queue_counters_size, tl.num_programs(0) * 256):
        index = first + tl.arange(0, 256)
        tl.store(queue_counters + index, 0, mask=index < queue_counters_size)
    # Kernels that wait for this one must wait for the one ahead too. The other programs end and make room for more.
    if EARLY and (found or program == tl.num_programs(0) - 1):
        gdc_wait()
    if SCAN:
        tl.store(any_nonfinite, 1, mask=found)


@triton.jit
def _pairs(weights, at, mask):
    return tl.load(weights.to(tl.pointer_type(tl.uint32)) + at, mask=mask, other=0)
