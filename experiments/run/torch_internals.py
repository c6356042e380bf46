"""All of torch's private names that experiments use. `tests/test_torch_internals.py` has a test for each."""

from __future__ import annotations

import torch
from torch import Tensor

RECOMPILE_LIMIT = 64
# torch.compile's backend (the C++ or Triton compiler, say) failed.
CompilationFailed = torch._dynamo.exc.BackendCompilerFailed


def raise_recompile_limit() -> None:
    """Allow RECOMPILE_LIMIT compilations of one function.

    By default torch gives up after the eighth and runs the function uncompiled. Here many compilations are expected:
    for dense and sparse layers, with and without statistics, and for each micro-batch that a benchmark tries.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)


def do_not_split_graphs_for_ddp() -> None:
    """Keep DDP from cutting each compiled graph at its buckets of gradients.

    Layers are compiled one by one, so the cuts would lie within layers; between layers, communication overlaps anyway.
    """
    torch._dynamo.config.optimize_ddp = False


def fp8_product(rows: Tensor, scales: Tensor, weights: Tensor, weight_scales: Tensor) -> Tensor:
    """(rows * scales) (weights * weight_scales)^T in bfloat16 [M, N], of FP8 rows [M, K] and weights [N, K]; scales are
    float32, one for each row of either: [M, 1] and [N, 1]."""
    return torch._scaled_mm(
        *(rows, weights.t()), scale_a=scales, scale_b=weight_scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
