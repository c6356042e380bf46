"""The fastest plan for a block's forward and backward, the same in all processes."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..capacity import capacity_for
from ..checks import in_process_group
from ..hot import best_split, firing_rates
from ..modules import SparseFeedForward, pattern_layer
from ..ops import Call, Inputs, compute
from ..plan import CAPACITY, Plan
from ..registry import DENSE
from .common import Choice, Decision, checked_tokens, fastest_by_form, usable_backends
from .timing import Halves, both_halves, queued_times, quick_times

# Another form than the present one must be so much faster: it costs a compilation of a compiled model.
MARGIN = 0.95
# Where hot neurons save a larger share of the non-zeros, a sparse backend without them is not timed.
MOST_SAVED = 0.5

T = TypeVar("T")
Group = Any  # torch.distributed.ProcessGroup, whose import takes a second
logger = logging.getLogger(__name__)


def compiled_blocks(
    model: nn.Module, blocks: Sequence[SparseFeedForward], compiled: bool | None
) -> set[SparseFeedForward]:
    """The blocks that run compiled. None: those in a module whose `compile()` was called, or that torch.compile
    returned (it holds `_orig_mod`)."""
    inside: set[nn.Module] = set(blocks if compiled else ())
    if compiled is None:
        for module in model.modules():
            if module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module):
                inside.update(module.modules())
    run_compiled = {block for block in blocks if block in inside}
    if run_compiled:
        logger.info("dense products of %d of %d blocks are timed compiled", len(run_compiled), len(blocks))
    return run_compiled


def choose(
    block: SparseFeedForward,
    x: Tensor,
    backends: Sequence[str] | None,
    processes: "Processes",
    *,
    hot: bool,
    compiled: bool,
) -> Decision:
    """What is fastest on x [..., K], forward and backward. hot: whether to try hot neurons."""
    pattern, plan = pattern_layer(block).weight, block.plan

    def rates() -> Tensor:
        checked_tokens(x, "autotune")
        return firing_rates(x, pattern).cpu()

    rates_N = torch.stack(processes.all_of(rates)).mean(0)
    nonzeros = rates_N.sum().item()
    tokens = x.shape[:-1].numel()
    backend, split = plan.backend_for(tokens), best_split(rates_N)
    hot_sets = [neurons for neurons in (plan.indices, tuple(split.neurons.tolist())) if neurons] if hot else []
    saved = split.saved if hot else 0.0

    def plan_of(name: str, neurons: Sequence[int] = ()) -> Plan:
        return Plan(name, tuple(neurons), capacity=plan.capacity, backup=plan.backup)

    present = plan_of(backend, plan.indices if hot and backend != DENSE else ())

    def capacity(tried: Plan) -> int:
        return plan.capacity or capacity_for(nonzeros - rates_N[list(tried.indices)].sum().item(), len(rates_N))

    def times() -> dict[Plan, float]:
        usable = usable_backends(block, x, backends, training=True)
        names = list(usable if backends is not None else usable[:1])
        names += [plan.backend] if plan.backend in set(usable) - set(names) else []
        plans = []
        for name in names:
            alone = plan_of(name)
            plans += [alone] if saved <= MOST_SAVED * nonzeros or alone == present else []
            plans += [plan_of(name, neurons) for neurons in hot_sets]
        calls = {tried: forward_backward(block, x, tried, capacity(tried)) for tried in dict.fromkeys(plans)}
        # One capacity for all: it has no effect, but a compiled block guards on it.
        dense = functools.partial(forward_backward, block, x, Plan(DENSE), CAPACITY)
        call = _compiled_if_possible(dense) if compiled and calls else dense()
        calls = {plan_of(DENSE): call, **calls}
        if compiled:
            return queued_times(calls, functools.partial(both_halves, call), x.device)
        return quick_times({tried: functools.partial(both_halves, each) for tried, each in calls.items()}, x.device)

    everywhere = processes.all_of(times)
    common = [tried for tried in everywhere[0] if all(tried in others for others in everywhere)]
    milliseconds = {tried: sum(others[tried] for others in everywhere) / len(everywhere) for tried in common}
    best = min(milliseconds, key=milliseconds.__getitem__)
    if milliseconds[best] >= MARGIN * milliseconds.get(present, math.inf):
        best = present
    fewer = tuple((most, name) for most, name in plan.up_to if most < tokens)
    chosen = Plan(best.backend, best.hot, fewer, plan.capacity, plan.backup)
    times_ms = fastest_by_form(milliseconds) | fastest_by_form({best: milliseconds[best]})
    return Decision(Choice(chosen, nonzeros, times_ms), capacity=capacity(best))


def forward_backward(
    block: SparseFeedForward, x: Tensor, plan: Plan, capacity: int, *, compiled: bool = False
) -> Halves:
    """The block's forward, and its backward with the gradients that its training needs, of its statistics too."""

    def leaf(part: nn.Linear) -> Tensor:
        trained = any(parameter.requires_grad for parameter in part.parameters())  # not one if it is parametrized
        return part.weight.detach().requires_grad_(trained)

    x = x.detach().requires_grad_()
    gate = None if block.gate_proj is None else leaf(block.gate_proj)
    inputs = x, gate, leaf(block.up_proj), leaf(block.down_proj)
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    dy = x.detach()
    hot = torch.tensor(plan.indices, device=x.device) if plan.indices else None
    given = Call(plan, block.activation, block.keep_stats, capacity, hot)
    forward = _compiled_output_and_l1 if compiled else _output_and_l1

    def call() -> Callable[[], object]:
        with torch.enable_grad():
            y, l1 = forward(inputs, given)
        outputs, gradients = [y], [dy.to(y.dtype)]
        if l1 is not None:
            outputs, gradients = [*outputs, l1], [*gradients, torch.ones_like(l1)]
        return functools.partial(torch.autograd.grad, outputs, needed, gradients)

    return call


def _compiled_if_possible(made: Callable[..., Halves]) -> Halves:
    """`made(compiled=True)`, or `made()` where that cannot be compiled."""
    call = made(compiled=True)
    try:
        both_halves(call)
    except torch._dynamo.exc.TorchDynamoException as error:
        logger.warning("dense products are timed as they are, since torch.compile fails for a block alone: %s", error)
        return made()
    return call


def _output_and_l1(inputs: Inputs, given: Call) -> tuple[Tensor, Tensor | None]:
    y, stats = compute(inputs, given)
    return y, None if stats is None else stats.l1


def _compiled_output_and_l1(inputs: Inputs, given: Call) -> tuple[Tensor, Tensor | None]:
    with torch.compiler.set_stance("default"):  # the model's own forward runs eagerly meanwhile
        return _compile()(inputs, given)


@functools.cache
def _compile() -> Callable[..., tuple[Tensor, Tensor | None]]:
    return torch.compile(_output_and_l1, dynamic=False)


class Processes:
    """The processes that tune together; if torch.distributed is not initialized, this one alone."""

    def __init__(self, group: Group) -> None:
        self._many, self._group = in_process_group(), group
        self._known = False  # whether all know that one of them failed

    def all_of(self, call: Callable[[], T]) -> list[T]:
        """What `call()` returns in each process. If it raises in one, all raise: where one fails between two of these
        calls, inside of another, the others learn it at their next one."""
        if not self._many:
            return [call()]
        result: tuple[T | None, str] = None, ""
        error: Exception | None = None
        try:
            result = call(), ""
        except Exception as raised:  # the others wait for this process
            if self._known:
                raise
            error, result = raised, (None, f"{type(raised).__name__}: {raised}")
        results: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(results, result, group=self._group)
        self._known = any(failure for _, failure in results)
        if error is not None:
            raise error
        for rank, (_, failure) in enumerate(results):
            if failure:
                raise RuntimeError(f"autotune failed in process {rank}: {failure}")
        return [value for value, _ in results]
