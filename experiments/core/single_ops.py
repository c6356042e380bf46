"""The single operations of the sparse plans, each beside its dense counterpart, for the kernel benchmark.

Names are those of `kernels.reference`; a backend that exposes operations of the same names goes into `MODULES`.
Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.core.compare import Absent, Candidate, check
from kernels import reference
from kernels.testing import Problem, relative_error, tolerance

MODULES: dict[str, ModuleType] = {"reference": reference}


class Step(NamedTuple):
    """One operation with its inputs made.

    `run` is timed; `tensor` makes what it returns a dense tensor; `exact` is that tensor in float64; `dense` is the
    same in plain torch, None where plain torch has no such step (a change of format, which must then be exact).
    """

    plan: str
    run: Callable[[], Any]
    tensor: Callable[[Any], Tensor]
    exact: Callable[[], Tensor]
    dense: Callable[[], Tensor] | None = None


def _activation_weight(problem: Problem) -> Tensor:
    return problem.w_up if problem.w_gate is None else problem.w_gate


def _gate(problem: Problem) -> Tensor:
    return F.relu(F.linear(problem.x, _activation_weight(problem)))


def _gate_pack(ops: ModuleType, p: Problem) -> Step:
    weight = _activation_weight(p)
    return Step(
        plan="twell",
        run=lambda: ops.gate_pack(p.x, weight),
        tensor=lambda packed: packed.to_dense(),
        exact=lambda: F.relu(F.linear(p.x.double(), weight.double())),
        dense=lambda: _gate(p),
    )


def _gated_down(ops: ModuleType, p: Problem) -> Step:
    packed, gate_MN = ops.gate_pack(p.x, p.w_gate), _gate(p)
    return Step(
        plan="twell",
        run=lambda: ops.gated_down(p.x, packed, p.w_up, p.w_down),
        tensor=lambda result: result[0],
        exact=lambda: F.linear(packed.to_dense().double() * F.linear(p.x.double(), p.w_up.double()), p.w_down.double()),
        dense=lambda: F.linear(gate_MN * F.linear(p.x, p.w_up), p.w_down),
    )


def _down(ops: ModuleType, p: Problem) -> Step:
    packed, h_MN = ops.gate_pack(p.x, p.w_up), _gate(p)
    return Step(
        plan="twell",
        run=lambda: ops.down(packed, p.w_down),
        tensor=lambda result: result[0],
        exact=lambda: F.linear(packed.to_dense().double(), p.w_down.double()),
        dense=lambda: F.linear(h_MN, p.w_down),
    )


def _twell_to_hybrid(ops: ModuleType, p: Problem) -> Step:
    packed = ops.gate_pack(p.x, _activation_weight(p))
    return Step(
        plan="hybrid",
        run=lambda: ops.twell_to_hybrid(packed),
        tensor=lambda hybrid: hybrid.to_dense(),
        exact=lambda: packed.to_dense().double(),
    )


def _hybrid(ops: ModuleType, p: Problem) -> Any:
    return ops.twell_to_hybrid(ops.gate_pack(p.x, _activation_weight(p)))


def _dense_to_hybrid(ops: ModuleType, p: Problem) -> Step:
    pattern = _hybrid(ops, p)
    stored_MN = pattern.entries().mask(pattern.shape)
    return Step(
        plan="hybrid",
        run=lambda: ops.dense_to_hybrid(p.x, p.w_up, pattern),
        tensor=lambda hybrid: hybrid.to_dense() * stored_MN,
        exact=lambda: F.linear(p.x.double(), p.w_up.double()) * stored_MN,
        dense=lambda: F.linear(p.x, p.w_up) * stored_MN,
    )


def _hybrid_to_dense(ops: ModuleType, p: Problem) -> Step:
    hybrid, w_down_NK = _hybrid(ops, p), p.w_down.t().contiguous()
    h_MN = hybrid.to_dense()
    return Step(
        plan="hybrid",
        run=lambda: ops.hybrid_to_dense(hybrid, w_down_NK),
        tensor=lambda y_MK: y_MK,
        exact=lambda: h_MN.double() @ w_down_NK.double(),
        dense=lambda: h_MN @ w_down_NK,
    )


def _hybrid_transpose(ops: ModuleType, p: Problem) -> Step:
    hybrid = _hybrid(ops, p)
    return Step(
        plan="hybrid",
        run=lambda: ops.hybrid_transpose(hybrid),
        tensor=lambda transposed: transposed.to_dense(),
        exact=lambda: hybrid.to_dense().t().double(),
    )


BUILDERS: dict[str, Callable[[ModuleType, Problem], Step]] = {
    "gate_pack": _gate_pack,
    "gated_down": _gated_down,
    "down": _down,
    "twell_to_hybrid": _twell_to_hybrid,
    "dense_to_hybrid": _dense_to_hybrid,
    "hybrid_to_dense": _hybrid_to_dense,
    "hybrid_transpose": _hybrid_transpose,
}
# Operations of only one kind of block.
GATED_ONLY, NON_GATED_ONLY = ("gated_down", "dense_to_hybrid"), ("down",)


def exists_for(name: str, *, gated: bool) -> bool:
    """Whether a block of this kind has the operation."""
    return name not in (NON_GATED_ONLY if gated else GATED_ONLY)


@torch.no_grad()
def alternatives(name: str, problem: Problem, backends: Sequence[str]) -> list[Candidate | Absent]:
    """Checked candidates for one operation: plain torch where it has the step, and every backend that exposes it.

    Raises:
        CheckFailed: when a result is off by more than rounding, or a change of format is not exact.
    """
    found: list[Candidate | Absent] = []
    for backend in backends:
        ops = MODULES.get(backend)
        if ops is None or not hasattr(ops, name):
            continue
        step = BUILDERS[name](ops, problem)
        found += _candidates(name, step, backend, problem, with_dense=not found)
    return found


def _candidates(name: str, step: Step, backend: str, problem: Problem, *, with_dense: bool) -> list[Candidate]:
    exact = step.exact()
    plain_error = None if step.dense is None else relative_error(step.dense(), exact)
    allowed = 0.0 if plain_error is None else tolerance(plain_error, problem.x.dtype)
    error = check(f"{backend} {name}", relative_error(step.tensor(step.run()), exact), allowed)
    ours = Candidate(backend, step.plan, torch.no_grad()(step.run), error)
    if step.dense is None or not with_dense:
        return [ours]
    return [Candidate("dense_eager", "dense", torch.no_grad()(step.dense), plain_error), ours]
