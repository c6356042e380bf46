"""The backends of a tuned block for calls with fewer tokens than it was tuned on.

What is fastest depends on the number of tokens: an H200 computes a block of 16 tokens faster from the rows of the
weights that they need, one of 100 tokens with dense products, and one of some thousand tokens from the non-zeros.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .modules import SparseFeedForward
from .registry import DENSE
from .timing import cold_costs

# Numbers of tokens that are measured, below those of the inputs.
COUNTS = (1, 4, 16, 64, 128, 1024, 2048, 4096, 8192, 32768)

Ranges = tuple[tuple[int, str], ...]


def measure_fewer_tokens(block: SparseFeedForward, x: Tensor, nonzeros: Tensor, backends: Sequence[str]) -> Ranges:
    """`Plan.up_to` for a block whose plan fits all of x otherwise.

    x: [..., K], the block's inputs; nonzeros: [...], of each token; backends: the sparse ones to try beside dense
    products. Every count of COUNTS is measured on tokens from the whole range of non-zeros. A sparse backend must be
    faster than dense products both eagerly and in a CUDA graph.
    """
    x_MK, plan = x.reshape(-1, x.shape[-1]), block.plan
    tokens = x_MK.shape[0]
    best = {}
    try:
        for count in (count for count in COUNTS if count < tokens):
            best[count] = _fastest(block, x_MK[evenly_by_nonzeros(nonzeros, count)], backends)
    finally:
        block.plan = plan
    return ranges({**best, tokens: plan.backend})


def evenly_by_nonzeros(nonzeros: Tensor, count: int) -> Tensor:
    """Indices, int64 [count], of tokens from the whole range of non-zeros: of `count` equal parts of the tokens in
    ascending order of their non-zeros, the middle one of each. nonzeros: [...], of at least so many tokens."""
    order = nonzeros.flatten().argsort(stable=True)
    return order[(torch.arange(count, device=order.device) * 2 + 1) * len(order) // (2 * count)]


def _fastest(block: SparseFeedForward, x: Tensor, backends: Sequence[str]) -> str:
    def with_backend(name: str) -> Callable[[], object]:
        plan = replace(block.plan, backend=name)

        def run() -> None:
            block.plan = plan
            block.forward(x)  # no hooks: those of `autotune` called this

        return run

    costs = cold_costs({name: with_backend(name) for name in (DENSE, *backends)}, x.device)
    faster = [name for name in backends if costs[name].beats(costs[DENSE])]
    return min(faster, key=lambda name: costs[name].device, default=DENSE)


def ranges(best: dict[int, str]) -> Ranges:
    """Ranges that agree with the fastest backend at some counts, ascending; those beyond the last have its backend.

    Between two counts with different backends the calls are dense if one of the two is, else they have that of the
    larger count.
    """
    found = []
    for (count, name), (larger, beyond) in itertools.pairwise(best.items()):
        if name != beyond:
            found.append((larger - 1 if name == DENSE else count, name))
    return tuple(found)
