"""All of torch's private names that experiments use. `tests/test_torch_internals.py` has a test for each."""

from __future__ import annotations

import torch

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
