"""`autotune`: chooses each block's plan by measuring some on given inputs."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import registry
from .checks import computed_dtype
from .fewer_tokens import measure_fewer_tokens
from .firing_order import firing_order
from .hot import hot_neurons
from .modules import SparseFeedForward, check_whole, feed_forward_blocks
from .ops import Call, compute, sparse_ffn
from .ordering import can_be_ordered, order_neurons
from .plan import Plan
from .registry import DENSE, BackendUnavailable
from .saved_plans import save_plans
from .timing import quick_times, sustained_times

REFERENCE = "reference"
# Of `_contenders`: ms; a factor between times; and sparse calls.
_LONG_CALL, _CLEARLY, _MOST_CONTENDERS = 1.0, 1.6, 3


class Form(NamedTuple):
    """A kind of plan: the backend, and whether it has hot neurons by index, or in front of sorted ones."""

    backend: str
    hot: bool = False
    in_front: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Form":
        """That of a plan."""
        return cls(plan.backend, bool(plan.indices), bool(plan.leading))

    def __str__(self) -> str:
        return self.backend + (", hot in front" if self.in_front else ", hot" if self.hot else "")


class Choice(NamedTuple):
    """The plan chosen for a block, and what was measured: the time of each form, with its best share of hot neurons."""

    plan: Plan
    mean_nonzeros: float  # per token
    milliseconds: dict[Form, float]


class Tuning(tuple[Choice, ...]):
    """The choice of each block, in layer order. Prints as a table with times in ms; "-": this form did not exist."""

    def __str__(self) -> str:
        columns = list(dict.fromkeys(form for choice in self for form in choice.milliseconds))
        rows = [
            [
                str(layer),
                f"{choice.mean_nonzeros:.1f}",
                *(f"{choice.milliseconds[form]:.3f}" if form in choice.milliseconds else "-" for form in columns),
            ]
            for layer, choice in enumerate(self)
        ]
        table = [["layer", "non-zeros", *map(str, columns)], *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        plans = ["plan", *(str(choice.plan) for choice in self)]
        return "\n".join(f"{line}  {plan}" for line, plan in zip(lines, plans, strict=True))


@contextmanager
def hooked(blocks: Sequence[nn.Module], hook: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Calls `hook` with the block and its input x, given by position or by name, before each forward of these
    blocks."""

    def with_input(block: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        hook(block, arguments[0] if arguments else named["x"])

    handles = [block.register_forward_pre_hook(with_input, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def autotune(model: nn.Module, *inputs: Any, backends: Sequence[str] | None = None, **named: Any) -> Tuning:
    """Choose the fastest plan for the forward of each SparseFeedForward, and set it.

    Runs `model(*inputs, **named)` once, without gradients. The choice depends on the inputs: give real text with as
    many tokens as the largest of later calls will have. Smaller calls, down to a single token, are measured on some of
    these tokens and may get another backend (`Plan.up_to`): a sparse one where it is faster than dense products both
    eagerly and in a CUDA graph. Results stay the same up to rounding. For inference only; `autotune_training` is for
    training. Where dense products are about as fast, calls are timed under a GPU's sustained load, which takes up to
    two seconds a block.

    In eval mode the neurons of a block may be sorted by firing rate, in place: the function stays the same, and the
    checkpoint an ordinary one (`twell.ordering.restore_order` undoes it). A transformers configuration stores the
    plans: after save_pretrained, from_pretrained and `sparsify`, `load_plans` restores them.

    backends: sparse backends to try besides dense products; None: all that can run, except the reference.

    Raises ValueError for an unknown backend, for inputs without tokens, and for a model without blocks, with sharded
    ones (processes would choose differently) or one that does not run all of them. After an error, the blocks that it
    had reached have their new plans; the others are as before. Raises BackendUnavailable for a backend that was
    requested by name but cannot run a block.
    """
    check_names(backends)
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to tune; `sparsify` puts them there")
    check_whole("autotune", blocks)
    orderable = {block for block in blocks if can_be_ordered(model, block)}
    before = {block: block.plan for block in blocks}
    choices: dict[nn.Module, Choice] = {}

    def measure(block: nn.Module, x: Tensor) -> None:
        if block not in choices:
            assert isinstance(block, SparseFeedForward)
            checked_tokens(x, "autotune")
            del before[block]
            choices[block] = _choose(block, x, backends, ordered=block in orderable)

    for block in blocks:
        block.plan = replace(block.plan, hot=0, up_to=())
    try:
        with hooked(blocks, measure), torch.compiler.set_stance("force_eager"):
            model(*inputs, **named)
        check_all_ran(model, choices)
    finally:
        for block, plan in before.items():
            block.plan = plan
        save_plans(model)
    return Tuning(choices[block] for block in blocks)


def check_names(backends: Sequence[str] | None) -> None:
    """Raises ValueError for a backend that does not exist, and for "auto"."""
    for name in backends or ():
        registry.check_name(name)
        if name == registry.AUTO:
            raise ValueError('backends must be named one by one, got "auto"')


def check_all_ran(model: nn.Module, ran: Container[nn.Module]) -> None:
    """Raises ValueError if the model did not run all of its blocks."""
    blocks = {module: name for name, module in model.named_modules() if isinstance(module, SparseFeedForward)}
    if idle := [name for block, name in blocks.items() if block not in ran]:
        raise ValueError(
            f"the model ran {len(blocks) - len(idle)} of its {len(blocks)} blocks, and {idle[0]} is the first that it "
            "did not: give inputs that reach all of them (of a multimodal model, images too, or sparsify its language "
            "model alone)"
        )


def checked_tokens(x: Tensor, program: str) -> int:
    """The number of tokens of a block's input. Raises ValueError for none."""
    if not (tokens := x.shape[:-1].numel()):
        raise ValueError(f"{program} needs inputs with at least one token")
    return tokens


def _choose(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, *, ordered: bool) -> Choice:
    gate = None if block.gate_proj is None else block.gate_proj.weight
    weights = gate, block.up_proj.weight, block.down_proj.weight
    pattern, neurons = weights[1] if gate is None else gate, weights[1].shape[0]
    _, stats = sparse_ffn(x, *weights, block.activation, DENSE, return_stats=True)
    hot = tuple(hot_neurons(x, pattern).tolist())
    order = firing_order(x, pattern, stats.fired) if ordered else None
    in_order = weights if order is None else order.reordered(weights)
    plans = [Plan(DENSE)]
    usable = usable_backends(block, x, backends)
    for name in usable:
        plans += [Plan(name), *([Plan(name, hot)] if hot else [])]
        plans += [Plan(name, count) for count in (() if order is None else order.prefixes) if count < neurons]

    def call(plan: Plan) -> Callable[[], object]:
        if plan.indices:
            indices = torch.tensor(plan.indices, device=x.device)  # as a block keeps them
            given = Call(plan, block.activation, block.keep_stats, hot=indices)
            return lambda: compute((x, *weights), given)
        operands = in_order if plan.leading else weights
        return lambda: sparse_ffn(x, *operands, block.activation, plan, return_stats=block.keep_stats)

    times = quick_times({plan: call(plan) for plan in plans}, x.device)
    contenders = _contenders(times) if x.is_cuda else []
    times |= sustained_times({plan: call(plan) for plan in contenders}, x.device)
    best = min(contenders or times, key=times.__getitem__)
    if order is not None and best.leading:
        order_neurons(block, order.neurons)
    block.plan = replace(block.plan, backend=best.backend, hot=best.hot, up_to=())
    if usable:
        block.plan = replace(block.plan, up_to=measure_fewer_tokens(block, x, stats.nonzeros, usable))
    milliseconds: dict[Form, float] = {}
    for plan, time_ in times.items():
        milliseconds[Form.of(plan)] = min(time_, milliseconds.get(Form.of(plan), time_))
    return Choice(block.plan, stats.nonzeros.double().mean().item(), milliseconds)


def _contenders(milliseconds: dict[Plan, float]) -> list[Plan]:
    """The calls of which one is the fastest under a GPU's sustained load, where short measurements cannot tell whether
    dense products are: the dense ones and the fastest others. None where that is clear or where calls are short."""
    dense = [plan for plan in milliseconds if plan.backend == DENSE]
    sparse = sorted(milliseconds.keys() - set(dense), key=milliseconds.__getitem__)[:_MOST_CONTENDERS]
    if not sparse or milliseconds[sparse[0]] < _LONG_CALL:
        return []
    share = milliseconds[sparse[0]] / min(milliseconds[plan] for plan in dense)
    return [*dense, *sparse] if 1 / _CLEARLY < share < _CLEARLY else []


def usable_backends(
    block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, *, training: bool = False
) -> list[str]:
    """The sparse backends that can run this block on this input; those requested by name must be able to, else this
    raises BackendUnavailable."""
    intermediate, hidden = block.up_proj.weight.shape
    names = (
        [name for name in registry.available_backends(x.device) if name != REFERENCE] if backends is None else backends
    )
    found = []
    for name in names:
        reason = registry.why_not(
            name,
            device=x.device,
            dtype=computed_dtype(x),
            hidden=hidden,
            intermediate=intermediate,
            gated=block.gated,
            training=training,
            activation=block.activation,
        )
        if reason is not None and backends is not None:
            raise BackendUnavailable(f"backend {name!r} cannot run this block: {reason}")
        if reason is None and registry.get(name).sparse:
            found.append(name)
    return found
