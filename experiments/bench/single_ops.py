"""The single operations of the inference plan, each beside its dense counterpart, for the kernel benchmark.

Names are those of `twell.reference`. Shapes: M tokens, K hidden, N intermediate.
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
    same in plain torch.
    """

    run: Call
    tensor: Callable[[Any], Tensor]
    exact: Callable[[], Tensor]
    dense: Callable[[], Tensor]


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


STEPS: dict[str, Callable[[Inference, Problem], Step]] = {"gate_pack": _gate_pack, "gated_down": _down, "down": _down}


@torch.no_grad()
def alternatives(name: str, problem: Problem, backends: Sequence[str]) -> list[Candidate | Absent]:
    """Checked candidates for one operation: plain torch, and every backend that exposes it.

    Raises:
        CheckFailed: when a result is off by more than rounding.
    """
    found: list[Candidate | Absent] = []
    x, (intermediate, hidden), gated = problem.x, problem.w_up.shape, problem.w_gate is not None
    sizes: dict[str, Any] = {"hidden": hidden, "intermediate": intermediate, "gated": gated}
    for backend in (backend for backend in backends if backend in INFERENCE):
        if reason := why_not(backend, device=x.device, dtype=x.dtype, **sizes):
            found.append(Absent(backend, "twell", reason))
            continue
        step = STEPS[name](INFERENCE[backend](), problem)
        exact = step.exact()
        plain_error = relative_error(step.dense(), exact)
        if not any(isinstance(other, Candidate) for other in found):
            found.append(Candidate("dense_eager", "dense", step.dense, plain_error))
        allowed = tolerance(plain_error, x.dtype)
        error = check(f"{backend} {name}", relative_error(step.tensor(step.run()), exact), allowed)
        found.append(Candidate(backend, "twell", step.run, error))
    return found
