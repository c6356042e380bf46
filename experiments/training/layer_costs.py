"""Measures the time of a feed-forward block in training on this device, dense and sparse, as a function of its
non-zeros.

Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from experiments.timing.measure import Call, time_alternatives
from experiments.timing.power import Unavailable
from twell import Plan, available_backends, sparse_ffn
from twell.registry import why_not
from twell.testing import Problem, make_problem

DENSE = "dense"
# The reference defines results and is never the fastest.
NEVER_FASTER = (DENSE, "reference")
# Mean non-zeros over N of the synthetic problems: 8, 32 and 88 of 5632.
DENSITIES = (1 / 704, 1 / 176, 1 / 64)
# For each alternative: one dense, and one sparse for each density.
SECONDS, SETTLE_SECONDS, ROUNDS = 0.15, 0.05, 2


@dataclass(frozen=True)
class Setting:
    """Everything that determines the costs: the sparse backend, the device's name, the dtype's ("bfloat16"), M of one
    micro-batch, K, N, the gate, whether dense blocks are compiled, and the share of the tokens in the sparse blocks'
    dense backup."""

    backend: str
    device: str
    dtype: str
    tokens: int
    hidden: int
    intermediate: int
    gated: bool
    compiled: bool
    backup: float | None = None


@dataclass(frozen=True)
class Costs:
    """Forward and backward of one block, in ms. Dense: `dense_ms`, for any number of non-zeros. Sparse: `fixed_ms`,
    plus `per_nonzero_ms` for each mean non-zero per token."""

    dense_ms: float
    fixed_ms: float
    per_nonzero_ms: float

    def sparse_ms(self, nonzeros: float) -> float:
        """Predicted time of the sparse block."""
        return self.fixed_ms + self.per_nonzero_ms * nonzeros

    @property
    def break_even(self) -> float:
        """Mean non-zeros per token below which the sparse block is faster: 0 if it never is, infinite if always."""
        gain = self.dense_ms - self.fixed_ms
        if gain <= 0:
            return 0.0
        return gain / self.per_nonzero_ms if self.per_nonzero_ms > 0 else math.inf


def sparse_backend(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, gated: bool
) -> tuple[str | None, str]:
    """The sparse backend that can train such blocks here, the first in the registry's order; None with the reasons."""
    reasons = []
    for name in available_backends(device):
        if name in NEVER_FASTER:
            continue
        reason = why_not(
            name, device=device, dtype=dtype, hidden=hidden, intermediate=intermediate, gated=gated, training=True
        )
        if reason is None:
            return name, ""
        reasons.append(f"{name}: {reason}")
    return None, "; ".join(reasons)


def measure_costs(setting: Setting, device: torch.device) -> Costs:
    """Time forward and backward, with statistics and the gradient of L1, on problems of `twell.testing`.

    Takes about a second and, if `compiled`, the time that torch.compile needs for one block. Does not touch the global
    random generators. Its memory is freed afterwards and does not count in CUDA's peak.
    """
    dtype = getattr(torch, setting.dtype)
    shape = (setting.tokens, setting.hidden, setting.intermediate)
    problems = [
        make_problem(*shape, share * setting.intermediate, gated=setting.gated, dtype=dtype, device=device)
        for share in DENSITIES
    ]
    nonzeros = [_mean_nonzeros(problem) for problem in problems]
    pairs = list(zip(problems, nonzeros, strict=True))
    calls = {
        f"sparse {n}": _forward_backward(problem, setting.backend, count, backup=setting.backup)
        for n, (problem, count) in enumerate(pairs)
    }
    calls[DENSE] = _forward_backward(problems[-1], DENSE, nonzeros[-1], compiled=setting.compiled)
    meter = Unavailable("not needed here")
    timings = time_alternatives(calls, device, meter, seconds=SECONDS, rounds=ROUNDS, settle_seconds=SETTLE_SECONDS)
    found = {name: timing.time().known for name, timing in timings.items()}
    del problems, pairs, calls
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return fit(found.pop(DENSE), nonzeros, list(found.values()))


def fit(dense_ms: float, nonzeros: Sequence[float], sparse_ms: Sequence[float]) -> Costs:
    """Costs from a least-squares line through the sparse block's times; a constant if noise makes the slope
    negative."""
    per_nonzero_ms, fixed_ms = numpy.polyfit(nonzeros, sparse_ms, 1)
    if per_nonzero_ms < 0:
        return Costs(dense_ms, float(numpy.mean(sparse_ms)), 0.0)
    return Costs(dense_ms, float(fixed_ms), float(per_nonzero_ms))


def _mean_nonzeros(problem: Problem) -> float:
    with torch.no_grad():
        _, stats = sparse_ffn(*problem, plan=DENSE, return_stats=True)
    return stats.nonzeros.double().mean().item()


def _forward_backward(
    problem: Problem, backend: str, nonzeros: float, *, compiled: bool = False, backup: float | None = None
) -> Call:
    """Forward and backward of the block with this backend, with capacity for these mean non-zeros."""
    leaves = Problem._make(t if t is None else t.detach().requires_grad_() for t in problem)
    inputs = [t for t in leaves if t is not None]
    dy_MK, dl1 = problem.x, torch.tensor(1e-5, device=problem.x.device)
    plan = Plan(backend, capacity=min(len(problem.w_up), math.ceil(2 * nonzeros) + 1), backup=backup or 0.0)

    def block(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor]:
        y_MK, stats = sparse_ffn(x, w_gate, w_up, w_down, plan=plan, return_stats=True)
        return y_MK, stats.l1

    if compiled:
        block = torch.compile(block, dynamic=False)

    def forward_backward() -> None:
        y_MK, l1 = block(*leaves)
        torch.autograd.grad([y_MK, l1], inputs, [dy_MK, dl1.to(l1.dtype)])

    return forward_backward
