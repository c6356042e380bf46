"""The single operations of the sparse plans, each beside its dense counterpart, for the kernel benchmark.

Names are those of `twell.reference`. The inference plan's are taken from every backend of INFERENCE, the others from
the reference alone. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.bench.feedforward import by_neuron, pattern_weight
from experiments.timing.compare import Absent, Candidate, check
from experiments.timing.measure import Call, Consumer
from twell import reference
from twell.interface import Weights
from twell.registry import why_not
from twell.testing import Problem, relative_error, tolerance


class Inference(NamedTuple):
    """The two operations of the inference plan as a backend has them, on problems laid out `by_neuron`.

    `pack` is gate_pack; `down` takes what it returns and gives y [M, K]: gated_down, or down for a non-gated block;
    `to_dense` makes what `pack` returns a matrix [M, >= N]. `consumes`: `down` uses its input up.
    """

    pack: Callable[[Problem], Any]
    down: Callable[[Any, Problem], Tensor]
    to_dense: Callable[[Any], Tensor]
    consumes: bool = False


def _weights(p: Problem) -> Weights:
    return Weights(p.w_gate, p.w_up, p.w_down.t())


def _reference() -> Inference:
    def down(packed: Any, p: Problem) -> Tensor:
        if p.w_gate is None:
            return reference.down(packed, p.w_down.t())[0]
        return reference.gated_down(p.x, packed, p.w_up, p.w_down.t())[0]

    return Inference(
        pack=lambda p: reference.gate_pack(p.x, pattern_weight(p)), down=down, to_dense=lambda packed: packed.to_dense()
    )


def _on_gpu(backend: str) -> Inference:
    inference = importlib.import_module(f"twell.{backend}.inference")
    return Inference(
        pack=lambda p: inference.gate_pack(p.x, _weights(p), stats=False),
        down=lambda packed, p: inference.gated_down(packed, p.x, _weights(p))[0],
        to_dense=lambda packed: dense_of(
            packed.words.view(torch.int32), packed.counts, packed.spilled.view(torch.bfloat16)
        ),
        consumes=True,  # counters in it run down
    )


# The backends that have gate_pack and the pass after it.
INFERENCE: dict[str, Callable[[], Inference]] = {
    "reference": _reference,
    **{name: partial(_on_gpu, name) for name in ("hopper", "triton")},
}
TRAINING = ("reference",)


def dense_of(words: Tensor, counts: Tensor, spilled: Tensor) -> Tensor:
    """The matrix [M, tiles T] in packed words, where full tiles are stored beside the format.

    Args:
        words: int32 [M, tiles, S]: bfloat16 bits << 16 | column; those past the count have no meaning.
        counts: int32 [M, tiles].
        spilled: bfloat16 [M, tiles, T], with a meaning where the count is over S.
    """
    tokens, tiles, slots = words.shape
    columns = tiles * spilled.shape[-1]
    kept = torch.arange(slots, device=words.device) < counts[..., None]
    full = counts > slots
    # Slots without a meaning go to a column of their own, which is cut off.
    target = torch.where(kept & ~full[..., None], words & 0xFFFF, columns).long()
    values = (words >> 16).to(torch.int16).view(torch.bfloat16)
    dense = values.new_zeros(tokens, columns + 1).scatter_(1, target.flatten(1), values.flatten(1))[:, :columns]
    return torch.where(full[..., None], spilled, dense.unflatten(1, (tiles, -1))).flatten(1)


class Step(NamedTuple):
    """One operation with its inputs made.

    `run` is timed; `tensor` makes what it returns a dense tensor; `exact` is that tensor in float64; `dense` is the
    same in plain torch, None where plain torch has no such step (a change of format, which must then be exact).
    """

    run: Call
    tensor: Callable[[Any], Tensor]
    exact: Callable[[], Tensor]
    dense: Callable[[], Tensor] | None = None


def _gate(problem: Problem) -> Tensor:
    return F.relu(F.linear(problem.x, pattern_weight(problem)))


def _gate_pack(ops: Inference, p: Problem) -> Step:
    weight, prepared = pattern_weight(p), by_neuron(p)
    return Step(
        run=lambda: ops.pack(prepared),
        tensor=lambda packed: ops.to_dense(packed)[:, : len(weight)],
        exact=lambda: F.relu(F.linear(p.x.double(), weight.double())),
        dense=lambda: _gate(p),
    )


def _down(ops: Inference, p: Problem) -> Step:
    """The pass after `gate_pack`, on the pattern that this backend packed: gated_down, or down without a gate."""
    prepared, gate_MN = by_neuron(p), _gate(p)
    packed = ops.pack(prepared)
    packed_MN = ops.to_dense(packed)[:, : gate_MN.shape[1]]

    def exact() -> Tensor:
        up_MN = 1.0 if p.w_gate is None else F.linear(p.x.double(), p.w_up.double())
        return F.linear(packed_MN.double() * up_MN, p.w_down.double())

    def dense() -> Tensor:
        return F.linear(gate_MN if p.w_gate is None else gate_MN * F.linear(p.x, p.w_up), p.w_down)

    once = Consumer(lambda: ops.pack(prepared), lambda fresh: ops.down(fresh, prepared))
    run = once if ops.consumes else lambda: ops.down(packed, prepared)
    return Step(run, lambda y_MK: y_MK, exact, dense)


def _twell_to_hybrid(p: Problem) -> Step:
    packed = reference.gate_pack(p.x, pattern_weight(p))
    return Step(
        run=lambda: reference.twell_to_hybrid(packed),
        tensor=lambda hybrid: hybrid.to_dense(),
        exact=lambda: packed.to_dense().double(),
    )


def _hybrid(p: Problem) -> Any:
    return reference.twell_to_hybrid(reference.gate_pack(p.x, pattern_weight(p)))


def _dense_to_hybrid(p: Problem) -> Step:
    pattern = _hybrid(p)
    stored_MN = pattern.entries().mask(pattern.shape)
    return Step(
        run=lambda: reference.dense_to_hybrid(p.x, p.w_up, pattern),
        tensor=lambda hybrid: hybrid.to_dense() * stored_MN,
        exact=lambda: F.linear(p.x.double(), p.w_up.double()) * stored_MN,
        dense=lambda: F.linear(p.x, p.w_up) * stored_MN,
    )


def _hybrid_to_dense(p: Problem) -> Step:
    hybrid, w_down_NK = _hybrid(p), p.w_down.t().contiguous()
    h_MN = hybrid.to_dense()
    return Step(
        run=lambda: reference.hybrid_to_dense(hybrid, w_down_NK),
        tensor=lambda y_MK: y_MK,
        exact=lambda: h_MN.double() @ w_down_NK.double(),
        dense=lambda: h_MN @ w_down_NK,
    )


def _hybrid_transpose(p: Problem) -> Step:
    hybrid = _hybrid(p)
    return Step(
        run=lambda: reference.hybrid_transpose(hybrid),
        tensor=lambda transposed: transposed.to_dense(),
        exact=lambda: hybrid.to_dense().t().double(),
    )


INFERENCE_STEPS: dict[str, Callable[[Inference, Problem], Step]] = {
    "gate_pack": _gate_pack,
    "gated_down": _down,
    "down": _down,
}
TRAINING_STEPS: dict[str, Callable[[Problem], Step]] = {
    "twell_to_hybrid": _twell_to_hybrid,
    "dense_to_hybrid": _dense_to_hybrid,
    "hybrid_to_dense": _hybrid_to_dense,
    "hybrid_transpose": _hybrid_transpose,
}


@torch.no_grad()
def alternatives(name: str, problem: Problem, backends: Sequence[str]) -> list[Candidate | Absent]:
    """Checked candidates for one operation: plain torch where it has the step, and every backend that exposes it.

    Raises:
        CheckFailed: when a result is off by more than rounding, or a change of format is not exact.
    """
    found: list[Candidate | Absent] = []
    inference = name in INFERENCE_STEPS
    plan = "twell" if inference else "hybrid"
    x, (intermediate, hidden), gated = problem.x, problem.w_up.shape, problem.w_gate is not None
    sizes: dict[str, Any] = {"hidden": hidden, "intermediate": intermediate, "gated": gated}
    for backend in backends:
        if backend not in (INFERENCE if inference else TRAINING):
            continue
        if reason := why_not(backend, device=x.device, dtype=x.dtype, **sizes):
            found.append(Absent(backend, plan, reason))
            continue
        step = INFERENCE_STEPS[name](INFERENCE[backend](), problem) if inference else TRAINING_STEPS[name](problem)
        exact = step.exact()
        allowed = plain_error = 0.0  # of a change of format, which must be exact
        if step.dense is not None:
            plain_error = relative_error(step.dense(), exact)
            allowed = tolerance(plain_error, x.dtype)
            if not any(isinstance(other, Candidate) for other in found):
                found.append(Candidate("dense_eager", "dense", step.dense, plain_error))
        error = check(f"{backend} {name}", relative_error(step.tensor(step.run()), exact), allowed)
        found.append(Candidate(backend, plan, step.run, error))
    return found
