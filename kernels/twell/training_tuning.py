"""`autotune_training`: chooses each block's backend and hot neurons in training, by measuring forward and backward."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .capacity import capacity_for
from .checks import in_process_group
from .hot import best_split, firing_rates
from .modules import SparseFeedForward, feed_forward_blocks, pattern_layer
from .ops import Call, Inputs, compute
from .plan import CAPACITY, Plan
from .registry import DENSE, is_sparse
from .saved_plans import forget_plans
from .timing import Halves, both_halves, queued_times, quick_times
from .tuning import Choice, Form, Tuning, check_all_ran, check_names, checked_tokens, hooked, usable_backends

# Another form than the present one must be so much faster: it costs a compilation of a compiled model.
_MARGIN = 0.95
# Where hot neurons save a larger share of the non-zeros, a sparse backend without them is not timed.
_MOST_SAVED = 0.5

T = TypeVar("T")
Group = Any  # torch.distributed.ProcessGroup, whose import takes a second
logger = logging.getLogger(__name__)


class _Trial(NamedTuple):
    """What is timed: a backend, without hot neurons, with those of these inputs, or with those that the block has."""

    backend: str
    hot: bool = False
    hot_as_now: bool = False


class _Decision(NamedTuple):
    choice: Choice
    capacity: int


@torch.no_grad()
def autotune_training(
    model: nn.Module,
    *inputs: Any,
    backends: Sequence[str] | None = None,
    compiled: bool | None = None,
    group: Group = None,
    **named: Any,
) -> Tuning:
    """Choose the fastest plan for forward and backward of each SparseFeedForward, and set it.

    Call it between two steps of a training, now and then: at first dense products are faster, later each block is
    sparse as soon as that saves time on this device. Results and gradients stay the same up to rounding, whatever is
    chosen. What `autotune` chose for inference is reset, but for calls of fewer tokens. Runs `model(*inputs, **named)`
    once, without gradients: give a micro-batch of the training. On the way, each block's forward and backward are timed
    alone on its own input, for some 0.1 to 0.2 s each: dense products, and a sparse backend without hot neurons, with
    those of these inputs by index, and with the present ones. The present plan stays unless another is at least 5%
    faster. Weights, gradients and random generators stay as they are; buffers that the model's forward updates do not.
    If it raises, no block has changed.

    Of blocks that run compiled, dense products are timed as torch.compile with its default options runs them, since it
    makes them faster; that compiles one block for each shape of inputs or weights. The time in which the host issues a
    form's kernels does not count there, since the host of a compiled model is ahead of the GPU, unless the model or the
    micro-batch is small. That needs memory for a form and for dense products at once. A block that changes makes
    torch.compile compile the compiled module that holds it anew. Beyond torch._dynamo.config.recompile_limit (8 by
    default) it gives up: raise it.

    backends: sparse backends to try besides dense products; None: the first one that can train the block here.
    compiled: whether the blocks run compiled; None: those do that are inside of a module whose `compile()` was called,
        or of what `torch.compile(module)` returned, if it is in `model`. Where a compiled function calls the model, it
        cannot be seen: say True.
    group: where torch.distributed is initialized, the processes whose blocks are alike; None: all. They must all call
        this. They choose alike, by the means of their firing rates and times, and if one of them raises, all do
        (under FSDP: if it raises in a block, since other processes wait for its weights elsewhere).

    Raises ValueError for an unknown backend, for inputs without tokens, and for a model without blocks or one that does
    not run all of them. Raises BackendUnavailable for a backend that was requested by name but cannot train a block,
    and RuntimeError for what failed in another process.
    """
    check_names(backends)
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to tune; `sparsify` puts them there")
    found: dict[nn.Module, _Decision] = {}
    processes = _Processes(group)
    at_rest = {block: block.up_proj.weight.device for block in blocks}
    known = _inside_compiled(model) if compiled is None else blocks if compiled else []
    run_compiled = set(blocks).intersection(known)
    if run_compiled:
        logger.info("dense products of %d of %d blocks are timed compiled", len(run_compiled), len(blocks))

    def measure(block: nn.Module, x: Tensor) -> None:
        if block not in found:
            assert isinstance(block, SparseFeedForward)
            offloaded = x.device != at_rest[block]
            found[block] = _decide(block, x, backends, processes, offloaded=offloaded, compiled=block in run_compiled)

    def run() -> None:
        model(*inputs, **named)
        check_all_ran(model, found)

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), hooked(blocks, measure), torch.compiler.set_stance("force_eager"):
        processes.all_of(run)
    for layer, block in enumerate(blocks):
        _apply(layer, block, found[block])
    forget_plans(model)  # what was chosen for inference is reset
    return Tuning(found[block].choice for block in blocks)


def _inside_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules in one whose `compile()` was called, or that torch.compile returned (it holds `_orig_mod`)."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module):
            found.update(module.modules())
    return found


def _decide(
    block: SparseFeedForward,
    x: Tensor,
    backends: Sequence[str] | None,
    processes: "_Processes",
    *,
    offloaded: bool,
    compiled: bool,
) -> _Decision:
    pattern = pattern_layer(block).weight

    def rates() -> Tensor:
        checked_tokens(x, "autotune_training")
        return firing_rates(x, pattern).cpu()

    rates_N = torch.stack(processes.all_of(rates)).mean(0)
    nonzeros, neurons = rates_N.sum().item(), len(rates_N)
    tokens, plan = x.shape[:-1].numel(), block.plan
    suggested = best_split(rates_N)
    # Where the weights are elsewhere between two steps, so are the block's buffers, and hot neurons are one.
    hot_sets = {} if offloaded else _hot_sets(plan, suggested.neurons)
    saved = 0.0 if offloaded else suggested.saved

    def capacity(hot: tuple[int, ...]) -> int:
        return plan.capacity or capacity_for(nonzeros - rates_N[list(hot)].sum().item(), neurons)

    backend = plan.backend_for(tokens)
    with_hot = bool(plan.indices) and backend != DENSE
    present = _Trial(backend, with_hot, with_hot)

    def hot_of(trial: _Trial) -> tuple[int, ...]:
        return hot_sets[trial.hot_as_now] if trial.hot else ()

    def times() -> dict[_Trial, float]:
        usable = usable_backends(block, x, backends, training=True)
        names = list(usable if backends is not None else usable[:1])
        names += [plan.backend] if plan.backend in set(usable) - set(names) else []
        trials = []
        for name in names:
            alone = _Trial(name)
            trials += [alone] if saved <= _MOST_SAVED * nonzeros or alone == present else []
            trials += [_Trial(name, True, as_now) for as_now in hot_sets]
        calls: dict[_Trial, Halves] = {}
        for trial in trials:
            own = Plan(trial.backend, hot_of(trial), capacity=capacity(hot_of(trial)), backup=plan.backup)
            calls[trial] = _forward_backward(block, x, own)
        # One capacity for all: it has no effect, but a compiled block guards on it.
        dense = functools.partial(_forward_backward, block, x, Plan(DENSE))
        call = _compiled_if_possible(dense) if compiled and calls else dense()
        calls = {_Trial(DENSE): call, **calls}
        if compiled:
            return queued_times(calls, functools.partial(both_halves, call), x.device)
        return quick_times({trial: functools.partial(both_halves, each) for trial, each in calls.items()}, x.device)

    everywhere = processes.all_of(times)
    common = [each for each in everywhere[0] if all(each in own for own in everywhere)]
    milliseconds = {each: sum(own[each] for own in everywhere) / len(everywhere) for each in common}
    best = min(milliseconds, key=milliseconds.__getitem__)
    if milliseconds[best] >= _MARGIN * milliseconds.get(present, math.inf):
        best = present
    by_form: dict[Form, float] = {}
    for trial, time_ in milliseconds.items():
        form = Form(trial.backend, trial.hot)
        by_form[form] = min(time_, by_form.get(form, math.inf))
    fewer = tuple((most, name) for most, name in plan.up_to if most < tokens)
    chosen = Plan(best.backend, hot_of(best), fewer, plan.capacity, plan.backup)
    times_ms = by_form | {Form.of(chosen): milliseconds[best]}
    return _Decision(Choice(chosen, nonzeros, times_ms), capacity(hot_of(best)))


def _hot_sets(plan: Plan, suggested: Tensor) -> dict[bool, tuple[int, ...]]:
    """The hot neurons to try: the plan's (True), and those suggested if they are others."""
    by_index = {True: plan.indices} if plan.indices else {}
    neurons = tuple(suggested.tolist())
    return by_index | ({False: neurons} if neurons and neurons not in by_index.values() else {})


def _apply(layer: int, block: SparseFeedForward, decision: _Decision) -> None:
    plan, before, present = decision.choice.plan, block.plan, block._capacity
    if plan.backend != before.backend:
        logger.info(
            "layer %d runs %s instead of %s from now on, at %.1f non-zeros per token",
            *(layer, plan, before.backend, decision.choice.mean_nonzeros),
        )
    if plan != before:
        block.plan = plan
    if plan.capacity is None and is_sparse(plan.backend):
        # Raised at once, but lowered only if a quarter is enough: what is saved gets other sizes.
        enough = present / 4 < decision.capacity <= present
        block._capacity = present if enough else decision.capacity
    elif plan.capacity is None:
        block._capacity = CAPACITY  # the same for all dense blocks, because torch.compile guards on it even for them


def _forward_backward(block: SparseFeedForward, x: Tensor, plan: Plan, *, compiled: bool = False) -> Halves:
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
    given = Call(plan, block.activation, block.keep_stats, plan.capacity or CAPACITY, hot)
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


class _Processes:
    """The processes that tune together; if torch.distributed is not initialized, this one alone."""

    def __init__(self, group: Group) -> None:
        self._many, self._group = in_process_group(), group
        self._told = False  # whether all know that one of them failed

    def all_of(self, call: Callable[[], T]) -> list[T]:
        """What `call()` returns in each process. If it raises in one, all raise: where one fails between two of these
        calls, inside of another, the others learn it at their next one."""
        if not self._many:
            return [call()]
        own: tuple[T | None, str] = None, ""
        error: Exception | None = None
        try:
            own = call(), ""
        except Exception as raised:  # the others wait for this process
            if self._told:
                raise
            error, own = raised, (None, f"{type(raised).__name__}: {raised}")
        found: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(found, own, group=self._group)
        self._told = any(told for _, told in found)
        if error is not None:
            raise error
        for rank, (_, told) in enumerate(found):
            if told:
                raise RuntimeError(f"autotune_training failed in process {rank}: {told}")
        return [result for result, _ in found]
