"""Which neurons have an Inf or NaN in a weight that the sparse plan skips where the gate is zero (0 * Inf is NaN).

Where the gate product, the kernel ahead of this one, leaves processors idle, the weights are read beside it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .numbers import is_finite


@triton.jit
def suspects_kernel(
    own,  # (N, K) bf16, contiguous: the weights that make the pattern; read with OWN only, for the backward
    up,  # (N, K) bf16, contiguous; read with GATED only
    down,  # (N, K) bf16, contiguous
    suspect,  # (N) u8
    suspects,  # (PROGRAMS) i32: how many of them each program found
    queues,  # (1 + QUEUES) i32, zeroed here for the kernels that follow, as is
    overflow,  # i64
    N,
    K: tl.constexpr,
    OWN: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,  # K or the next power of 2
    PROGRAMS: tl.constexpr,
    QUEUES: tl.constexpr,
    QUEUES_PADDED: tl.constexpr,  # 1 + QUEUES or the next power of 2
    EARLY: tl.constexpr,  # started before the kernel ahead has ended
):
    program = tl.program_id(0)
    if program == 0:
        index = tl.arange(0, QUEUES_PADDED)
        tl.store(queues + index, 0, mask=index <= QUEUES)
        tl.store(overflow, 0)
    place = tl.arange(0, PADDED)
    found = 0
    for first in range(program * ROWS, N, PROGRAMS * ROWS):
        neuron = first + tl.arange(0, ROWS)
        at = neuron[:, None] * K + place[None, :]
        mask = (neuron < N)[:, None] & (place < K)[None, :]
        finite = is_finite(tl.load(down + at, mask=mask, other=0.0).to(tl.float32))
        if OWN:
            finite &= is_finite(tl.load(own + at, mask=mask, other=0.0).to(tl.float32))
        if GATED:
            finite &= is_finite(tl.load(up + at, mask=mask, other=0.0).to(tl.float32))
        bad = tl.max(tl.where(finite, 0, 1), 1)
        tl.store(suspect + neuron, bad, mask=neuron < N)
        found += tl.sum(bad)
    tl.store(suspects + program, found)
    if EARLY:
        gdc_wait()  # whoever waits for this kernel waits for the one ahead as well
