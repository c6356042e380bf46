"""The alternatives for one feed-forward block: plain dense torch in three forms, and the backends of `kernels`, also
with hot neurons by index, with neurons sorted by firing rate, and sorted without the silent ones.

Each is checked against float64 on the same problem that it is timed on. Without its silent neurons a block computes
another function, with the same results on the tokens on which they were silent. These are the problem's own tokens: the
check holds for them, and says nothing about others. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.bench import fp8
from experiments.bench.options import DENSE_FORMS, FP8
from experiments.run.torch_internals import RECOMPILE_LIMIT, CompilationFailed, raise_recompile_limit
from experiments.run.values import in_one_line
from experiments.timing.compare import REASON_LENGTH, Absent, Candidate, check
from experiments.timing.measure import Measurement, Repeated, held_memory
from experiments.timing.plans import WITH_HOT, WITH_LIVE, Name, plan_of
from twell import Plan, available_backends, sparse_ffn
from twell.hot import hot_neurons
from twell.memory import neuron_major
from twell.ops import Call, compute
from twell.plan import CAPACITY
from twell.registry import BackendUnavailable, why_not
from twell.testing import Problem, evaluate, evaluate_exactly, plain_ffn, relative_error, tolerance
from twell.tuning.forward import measured
from twell.tuning.order import FiringOrder, firing_order
from twell.tuning.timing import quick_times

if TYPE_CHECKING:
    from experiments.models.llama import FeedForward

log = logging.getLogger(__name__)

COUNT_TOKENS = 8192
DENSE_LIVE = "dense" + WITH_LIVE  # a control: what of the speed is due to leaving silent neurons out alone

# (x, w_gate, w_up, w_down) -> (y, l1)
Function = Callable[..., tuple[Tensor, Tensor | None]]


class Form(NamedTuple):
    """A way to compute the block.

    `run` takes the operands that `prepare` makes once (weights in another layout, say), and is what is timed. It
    returns (y, l1), l1 being None unless `has_l1`: then its gradient is part of the backward.
    """

    backend: str
    plan: str
    run: Function
    has_l1: bool = False
    prepare: Callable[[Problem], tuple[Tensor | None, ...]] = tuple
    backup: float | None = None
    # Columns of a row, known after `prepare`: how many neurons are hot, silent and screened, where it applies.
    counts: Callable[[], dict[str, Any]] = dict
    tolerance: float | None = None  # relative error allowed; None: that of rounding

    def __call__(self, *operands: Any) -> tuple[Tensor, Tensor | None]:
        """(y, l1) of a problem as it is, prepared anew."""
        return self.run(*self.prepare(Problem(*operands)))


def chosen(backends: Sequence[str], device: torch.device) -> list[str]:
    """The backends named, or all that exist but the dense one, whether they can run on `device` or not."""
    return list(backends) or [name for name in available_backends(device) if name != "dense"]


def unavailable(name: str, device: torch.device) -> str:
    """Why the backend of this name cannot run on this device; empty if it can."""
    return why_not(Name.of(name).backend, device=device) or ""


def alternatives(
    problem: Problem,
    dense: Sequence[str],
    backends: Sequence[str],
    *,
    blocks: int = 0,
    l1: float = 0.0,
    others: Sequence[Form] = (),
) -> list[Candidate | Absent]:
    """Checked candidates for a block's forward, or for its forward and backward.

    Args:
        dense: which of DENSE_FORMS and FP8; dense_fused is left out of a non-gated problem, which has nothing to fuse,
            FP8 of training.
        backends: names of `kernels` backends, with statistics in training and without in inference. Those with neurons
            sorted by firing rate are for a forward only and left out of training. dense+live is the fastest of the
            forms of `dense` on the neurons that fire.
        blocks: of a training: so many run forward, and then backward to the input and all weights; the time is that of
            one. 0: the forward without a graph.
        l1: coefficient of the L1 term in the backends' backward. The dense forms have none, as a dense model has none.
        others: further forms.

    Raises:
        CheckFailed: when a result or a gradient is off by more than rounding.
        ValueError: for an unknown dense form or backend.
    """
    dy_MK = None
    if blocks:
        generator = torch.Generator(problem.x.device).manual_seed(0)
        dy_MK = torch.randn(problem.x.shape, generator=generator, device=problem.x.device).to(problem.x.dtype)
    checker = Checker(problem, dy_MK)
    found = [*forms(problem, dense, backends, training=blocks > 0), *others]
    return [
        form if isinstance(form, Absent) else _candidate(form, problem, dy_MK, l1, checker, blocks) for form in found
    ]


def forms(problem: Problem, dense: Sequence[str], backends: Sequence[str], *, training: bool) -> list[Form | Absent]:
    """The forms of these names, not yet checked: see `alternatives`.

    Raises:
        ValueError: for an unknown dense form or backend.
    """
    exact = [name for name in dense if name != FP8]
    found: list[Form | Absent] = [
        _dense_form(name, problem, training=training)
        for name in exact
        if name != "dense_fused" or problem.w_gate is not None
    ]
    if FP8 in dense and not training:
        if reason := fp8.misfit(problem):
            found.append(Absent(FP8, FP8, reason))
        else:
            _prepare_to_compile(FP8, problem)
            found.append(Form(FP8, FP8, fp8.compiled, prepare=fp8.prepare, tolerance=fp8.TOLERANCE))
    if training and (in_order := [name for name in backends if Name.of(name).in_order]):
        log.info("%s: for a forward only, left out of training", ", ".join(in_order))
        backends = [name for name in backends if name not in in_order]
    device = problem.x.device
    for name in backends:
        if name == DENSE_LIVE:
            call, plan = _DenseLiveCall(exact), plan_of(DENSE_LIVE, training=False)
            found.append(Form("dense", plan, call, prepare=call.prepare, counts=call.counts))
        else:
            found.append(_backend_form(name, device, training=training, stats=training))
    return found


def with_and_without_stats(problem: Problem, backend: str) -> list[Candidate | Absent]:
    """Checked candidates for the forward of the form of this name: with statistics, under its backend's name, and
    without, as `without_stats` names it.

    Raises:
        CheckFailed: when y or the L1 statistic is off by more than rounding.
    """
    if backend == DENSE_LIVE:
        return [
            Absent("dense", plan_of(backend, training=False), "dense products without silent neurons count nothing")
        ]
    checker, device = Checker(problem, None), problem.x.device
    bare = _backend_form(backend, device, stats=False, name=without_stats(backend))
    found = [_backend_form(backend, device, stats=True), bare]
    return [form if isinstance(form, Absent) else _candidate(form, problem, None, 0.0, checker) for form in found]


def without_stats(name: str) -> str:
    """What the backend of a form is called in rows of a forward without statistics, beside one with them."""
    return f"{Name.of(name).backend}_without_stats"


def mean_nonzeros(problem: Problem) -> float:
    """Mean non-zero activations per token, counted in the problem's dtype."""
    weight = pattern_weight(problem)
    counts = [(F.linear(part, weight) > 0).sum() for part in problem.x.split(COUNT_TOKENS)]
    return int(torch.stack(counts).sum()) / len(problem.x)


def _dense_form(name: str, problem: Problem, *, training: bool) -> Form:
    match name:
        case "dense_eager":
            return Form(name, "dense", _eager)
        case "dense_compiled":
            _prepare_to_compile("training" if training else "inference", problem)
            return Form(name, "dense", _compiled_eager)
        case "dense_twell":
            return Form(name, "dense", _Call(Name.of("dense"), stats=False))
        case "dense_fused":
            return Form(name, "dense", _fused, prepare=_fuse)
    raise ValueError(f"dense forms are {', '.join(DENSE_FORMS)}, got {name!r}")


@functools.cache
def _say_left_out(backend: str, reason: str) -> None:
    """Once, and not for every pattern or layer: the rows have the reason too."""
    log.warning("%s cannot run here and is left out: %s", backend, reason)


def _backend_form(
    backend: str, device: torch.device, *, stats: bool, training: bool = False, name: str = ""
) -> Form | Absent:
    """A backend's forward. The layout of the down weights, the hot neurons and the neurons' order are prepared once, as
    a user would do after loading a model."""
    asked, plan = Name.of(backend), plan_of(backend, training=training)
    name, backup = name or asked.backend, asked.share
    if reason := unavailable(backend, device):
        _say_left_out(backend, reason)
        return Absent(name, plan, reason, backup)
    if asked.backup and not training:
        return Absent(name, plan, "only training has a dense backup", backup)
    call = (_OrderedCall if asked.in_order else _Call)(asked, stats)
    if plan == "dense":
        return Form(name, plan, call, stats)
    return Form(name, plan, call, stats, call.prepare, backup, call.counts)


def problem_of(block: FeedForward, x_MK: Tensor) -> Problem:
    """What a block computes for this input, with its weights in x's dtype."""
    gate = None if block.gate_proj is None else block.gate_proj.weight.detach().to(x_MK.dtype)
    up, down = (linear.weight.detach().to(x_MK.dtype) for linear in (block.up_proj, block.down_proj))
    return Problem(x_MK, gate, up, down)


def by_neuron(problem: Problem) -> Problem:
    """The problem with w_down as the sparse backends read it: neuron by neuron in memory, same shape and values."""
    return problem._replace(w_down=neuron_major(problem.w_down))


class _Call:
    """The forward of the form of this name as (x, w_gate, w_up, w_down) -> (y, l1)."""

    def __init__(self, asked: Name, stats: bool) -> None:
        self._asked = asked
        self._call = Call(Plan(asked.backend, backup=asked.share or 0.0), stats=stats)

    def prepare(self, problem: Problem) -> Problem:
        """What is done once before many calls."""
        capacity = max(CAPACITY, math.ceil(1.25 * mean_nonzeros(problem)))  # as the training loop grows it
        self._call = self._call._replace(capacity=capacity)
        if self._asked.neurons == WITH_HOT:
            hot = hot_neurons(problem.x, pattern_weight(problem))
            # As a block has them: in the plan, and on the device.
            self._call = self._call._replace(plan=replace(self._call.plan, hot=tuple(hot.tolist())), hot=hot)
        return by_neuron(problem)

    def counts(self) -> dict[str, Any]:
        """How many neurons `prepare` left to dense products, where hot neurons were requested."""
        return {"hot": self._call.plan.hot_count} if self._asked.neurons else {}

    def __call__(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor | None]:
        y_MK, stats = compute((x, w_gate, w_up, w_down), self._call)
        return y_MK, None if stats is None else stats.l1


class _OrderedCall(_Call):
    """The same with neurons sorted by firing rate, hot ones in front; WITH_LIVE: those that are silent on the problem's
    tokens left out. Chosen on the first problem: of the plans that `autotune` tries, the one that is fastest there."""

    _order: FiringOrder | None = None
    _silent: int | None = None

    @torch.no_grad()
    def prepare(self, problem: Problem) -> Problem:
        if self._order is not None:
            return self._ordered(problem, self._order)
        self._order = _firing_order(problem)
        ordered = self._ordered(problem, self._order)
        plan, silent = self._call.plan, len(problem.w_up) - len(ordered.w_up)
        tried = [replace(plan, hot=count) for count in (0, *self._order.prefixes) if count < len(ordered.w_up)]
        rare = 0 if problem.w_gate is None or self._call.stats else self._order.rare - silent
        _, fastest = measured(
            tried, lambda plan: partial(compute, ordered, self._call._replace(plan=plan)), ordered.x, rare
        )
        self._call = self._call._replace(plan=fastest)
        if self._asked.neurons == WITH_LIVE:
            self._silent = silent
        return ordered

    def _ordered(self, problem: Problem, order: FiringOrder) -> Problem:
        """The problem with its neurons in this order, or with the first of them alone."""
        w_gate, w_up, w_down = order.reordered(problem[1:])
        kept = order.kept if self._asked.neurons == WITH_LIVE else len(w_up)
        return Problem(problem.x, None if w_gate is None else w_gate[:kept], w_up[:kept], w_down[:, :kept])

    def counts(self) -> dict[str, Any]:
        plan = self._call.plan
        return {"hot": plan.hot_count, "silent": self._silent, "screened": plan.screened}


def _firing_order(problem: Problem) -> FiringOrder:
    _, stats = sparse_ffn(*problem, plan="dense", return_stats=True)
    return firing_order(problem.x, pattern_weight(problem), stats.fired)


class _DenseLiveCall:
    """The fastest of the dense forms of these names (of all, where none is named) on a block without the neurons that
    are silent on the problem's tokens. Both are chosen on the first problem."""

    def __init__(self, dense: Sequence[str]) -> None:
        self._names = tuple(dense) or DENSE_FORMS
        self._order: FiringOrder | None = None
        self._form: Form | None = None

    @torch.no_grad()
    def prepare(self, problem: Problem) -> tuple[Tensor | None, ...]:
        self._order = self._order or _firing_order(problem)
        kept = self._order.neurons[: self._order.kept].sort().values  # as they were, and w_down as the forms read it
        x, w_gate, w_up, w_down = problem
        live = Problem(x, None if w_gate is None else w_gate[kept], w_up[kept], w_down[:, kept])
        self._form = self._form or self._fastest(live)
        return self._form.prepare(live)

    def _fastest(self, live: Problem) -> Form:
        """The fastest dense form that runs on this device."""
        found = [form for form in forms(live, self._names, [], training=False) if isinstance(form, Form)]
        times: dict[str, float] = {}
        failure: Exception | None = None
        for form in found:
            try:
                times |= quick_times({form.backend: partial(form.run, *form.prepare(live))}, live.x.device)
            except (CompilationFailed, torch.OutOfMemoryError) as error:
                failure = error
        if failure is not None and not times:
            raise failure
        return min((form for form in found if form.backend in times), key=lambda form: times[form.backend])

    def counts(self) -> dict[str, Any]:
        assert self._order is not None  # `prepare` has chosen it
        return {"silent": len(self._order.neurons) - self._order.kept}

    def __call__(self, *operands: Tensor | None) -> tuple[Tensor, None]:
        assert self._form is not None  # `prepare` has chosen it
        return self._form.run(*operands)[0], None


def pattern_weight(problem: Problem) -> Tensor:
    """The weights [N, K] whose product with x decides which neurons fire."""
    return problem.w_up if problem.w_gate is None else problem.w_gate


def _candidate(
    form: Form, problem: Problem, dy_MK: Tensor | None, l1: float, checker: Checker, blocks: int = 1
) -> Candidate | Absent:
    l1 = l1 if form.has_l1 else 0.0
    try:
        error = checker.error(form, l1)
    except (BackendUnavailable, CompilationFailed, torch.OutOfMemoryError) as failure:
        return Absent(form.backend, form.plan, in_one_line(failure, REASON_LENGTH), form.backup)
    operands = form.prepare(problem)
    call: Callable[[], object] = partial(form.run, *operands)
    inputs, held = [t for t in operands if t is not None], None
    if dy_MK is not None:
        call, inputs, held = _forward_backward(form.run, operands, dy_MK, l1, blocks)
    return Candidate(form.backend, form.plan, call, error, held, inputs=inputs, backup=form.backup, **form.counts())


def _forward_backward(
    run: Function, operands: Sequence[Tensor | None], dy_MK: Tensor, l1: float, blocks: int
) -> tuple[Callable[[], object], list[Tensor], Callable[[], Measurement]]:
    """(what is timed, the tensors that it reads, how to measure what it holds for the backward)."""
    stack = [[t if t is None else t.detach().requires_grad_() for t in operands] for _ in range(blocks)]
    inputs = [t for leaves in stack for t in leaves if t is not None]
    dl1 = torch.full((), l1, device=dy_MK.device)

    def forward_backward() -> None:
        outputs, gradients = [], []
        for leaves in stack:
            y_MK, penalty = run(*leaves)
            outputs.append(y_MK)
            gradients.append(dy_MK)
            if l1:
                assert penalty is not None  # the form has it
                outputs.append(penalty)
                gradients.append(dl1.to(penalty))
        torch.autograd.grad(outputs, inputs, gradients)

    def held() -> Measurement:
        return held_memory(lambda: run(*stack[0])[0], inputs)

    call = forward_backward if blocks == 1 else Repeated(forward_backward, blocks)
    return call, [*inputs, dy_MK], held


class Checker:
    """Compares forms with float64, computing what they are compared with once."""

    def __init__(self, problem: Problem, dy_MK: Tensor | None):
        self._problem, self._dy_MK = problem, dy_MK
        self._known: dict[float, tuple[dict[str, Tensor], dict[str, float]]] = {}

    def wanted(self, l1: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Exact results by name, and the error allowed to each."""
        if l1 not in self._known:
            exact = evaluate_exactly(self._problem, self._dy_MK, l1)
            plain = evaluate(plain_ffn, self._problem, self._dy_MK, l1)
            errors = {name: relative_error(plain[name], exact[name]) for name in exact}
            allowed = {name: tolerance(error, self._problem.x.dtype) for name, error in errors.items()}
            self._known[l1] = exact, allowed
        return self._known[l1]

    def error(self, form: Form, l1: float) -> float:
        """Largest relative error of the form's results. Raises CheckFailed when one is more than allowed."""
        exact, allowed = self.wanted(l1)

        def with_l1(*operands: Tensor | None) -> tuple[Tensor, Tensor]:
            y_MK, penalty = form(*operands)
            return y_MK, y_MK.new_zeros(()) if penalty is None else penalty

        ours = evaluate(with_l1, self._problem, self._dy_MK, l1)
        names = [name for name in exact if name != "l1" or form.has_l1]
        return max(
            check(f"{form.backend} {name}", relative_error(ours[name], exact[name]), form.tolerance or allowed[name])
            for name in names
        )


def _eager(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> tuple[Tensor, None]:
    up_MN = F.linear(x_MK, w_up_NK)
    h_MN = F.relu(up_MN) if w_gate_NK is None else F.relu(F.linear(x_MK, w_gate_NK)) * up_MN
    y_MK = F.linear(h_MN, w_down_KN)
    return y_MK, None


_compiled_kinds: set[tuple[object, ...]] = set()


def _prepare_to_compile(name: str, problem: Problem) -> None:
    """Keep the function of this name, which torch compiles once for all problems of one kind (layers of a model, or
    non-zeros of one size), within torch's limit: beyond that it would run uncompiled."""
    kind = (name, *(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in problem))
    if kind not in _compiled_kinds:
        if len(_compiled_kinds) >= RECOMPILE_LIMIT // 4:
            torch.compiler.reset()
            _compiled_kinds.clear()
        raise_recompile_limit()
        _compiled_kinds.add(kind)


_compiled_eager = torch.compile(_eager, dynamic=False)


def _fuse(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    assert problem.w_gate is not None  # a block without a gate has nothing to fuse
    return problem.x, torch.cat([problem.w_gate, problem.w_up]), problem.w_down


def _fused(x_MK: Tensor, w_gate_up_2NK: Tensor, w_down_KN: Tensor) -> tuple[Tensor, None]:
    gate_MN, up_MN = F.linear(x_MK, w_gate_up_2NK).chunk(2, dim=-1)
    y_MK = F.linear(F.relu(gate_MN) * up_MN, w_down_KN)
    return y_MK, None
