"""What tuning for inference and for training share: the result, the inputs of blocks, and the backends that can run."""

import functools
import logging
import os
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import registry
from ..checks import computed_dtype
from ..interface import Request
from ..modules import SparseFeedForward, named_blocks
from ..plan import Plan

logger = logging.getLogger(__name__)
REFERENCE = "reference"


class Form(NamedTuple):
    """A kind of plan: the backend, and whether it has hot neurons by index, or in front of sorted ones, and
    screened ones behind."""

    backend: str
    hot: bool = False
    in_front: bool = False
    screened: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Form":
        """Form of a plan."""
        return cls(plan.backend, bool(plan.indices), bool(plan.leading), bool(plan.screened))

    def __str__(self) -> str:
        hot = ", hot in front" if self.in_front else ", hot" if self.hot else ""
        return self.backend + hot + (", screened" if self.screened else "")


class Choice(NamedTuple):
    """The plan chosen for a block, and what was measured: the time of each form, with its best share of hot neurons."""

    plan: Plan
    mean_nonzeros: float  # per token
    milliseconds: dict[Form, float]


class Decision(NamedTuple):
    """A choice, and what else a block is given: the order of its neurons (inference), its capacity (training)."""

    choice: Choice
    order: Tensor | None = None
    capacity: int | None = None


class Tuning(tuple[Choice, ...]):
    """The choice of each block, in layer order. Prints as a table; "-": this form did not exist."""

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
        table = [["layer", "non-zeros", *(f"{form} (ms)" for form in columns)], *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        plans = ["plan", *(str(choice.plan) for choice in self)]
        return "\n".join(f"{line}  {plan}" for line, plan in zip(lines, plans, strict=True))


def fastest_by_form(milliseconds: dict[Plan, float]) -> dict[Form, float]:
    """The time of the fastest plan of each form."""
    fastest: dict[Form, float] = {}
    for plan, time in milliseconds.items():
        fastest[Form.of(plan)] = min(time, fastest.get(Form.of(plan), time))
    return fastest


@contextmanager
def hooked(blocks: Sequence[SparseFeedForward], hook: Callable[[SparseFeedForward, Tensor], None]) -> Iterator[None]:
    """Calls `hook` with the block and its input x, given by position or by name, before each forward of these
    blocks."""

    def with_input(block: Any, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        hook(block, arguments[0] if arguments else named["x"])

    handles = [block.register_forward_pre_hook(with_input, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_inputs(program: Callable, model: nn.Module, inputs: Sequence[Any], named: Iterable[str]) -> None:
    """Raises TypeError for a mapping of inputs that the model's forward takes by name, and for a named input that no
    forward in the model names, and that is nearly a setting of the program: what takes **kwargs would take it
    silently."""
    for batch in inputs:
        if isinstance(batch, Mapping) and batch and batch.keys() <= signature(model.forward).parameters.keys():
            raise TypeError(f"{program.__name__} got inputs in a {type(batch).__name__}: unpack it, with ** before it")
    settings = [name for name, kind in signature(program).parameters.items() if kind.kind is kind.KEYWORD_ONLY]
    for name in named:
        meant = get_close_matches(name, settings, 1, cutoff=0.8)
        if meant and not any(name in signature(module.forward).parameters for module in model.modules()):
            raise TypeError(f"{program.__name__} has no setting {name!r}; did you mean {meant[0]!r}?")


def check_names(backends: Sequence[str] | None) -> None:
    """Raises ValueError for a backend that does not exist, for "auto", and for a name alone."""
    if isinstance(backends, str):
        raise ValueError(f"backends must be a sequence of names, got {backends!r}")
    for name in backends or ():
        registry.check_name(name)
        if name == registry.AUTO:
            raise ValueError('backends must be named one by one, got "auto"')


def check_all_ran(model: nn.Module, ran: Container[nn.Module], needed: Container[nn.Module] | None = None) -> None:
    """Raises ValueError if the model did not run all of its blocks, or all that are needed."""
    blocks = {block: name for block, name in named_blocks(model).items() if needed is None or block in needed}
    if idle := [name for block, name in blocks.items() if block not in ran]:
        raise ValueError(
            f"the model ran {len(blocks) - len(idle)} of its {len(blocks)} blocks, and {idle[0]} is the first that it "
            "did not: give inputs that reach all of them (of a multimodal model, images too, or sparsify its language "
            "model alone)"
        )


def checked_tokens(x: Tensor, program: str) -> int:
    """The number of tokens of a block's input. Raises ValueError for none, and for NaN or Inf, which make every neuron
    fire."""
    if not (tokens := x.shape[:-1].numel()):
        raise ValueError(f"{program} needs inputs with at least one token")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{program} needs inputs that are finite in each block, and one of them got NaN or Inf")
    return tokens


def misfit(name: str, block: SparseFeedForward, like: Tensor, *, training: bool = False) -> str | None:
    """`registry.why_not` for this block, on the device and in the dtype of products with this tensor."""
    intermediate, hidden = block.up_proj.weight.shape
    return registry.why_not(
        name,
        device=like.device,
        dtype=computed_dtype(like),
        hidden=hidden,
        intermediate=intermediate,
        gated=block.gated,
        training=training,
        activation=block.activation,
    )


def usable_backends(
    block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, *, training: bool = False
) -> list[str]:
    """The sparse backends that can run this block on this input; those requested by name must be able to, else this
    raises BackendUnavailable."""
    names = (
        [name for name in registry.available_backends(x.device) if name != REFERENCE] if backends is None else backends
    )
    usable, misfits = [], {}
    for name in names:
        reason = misfit(name, block, x, training=training)
        if reason is not None and backends is not None:
            raise registry.BackendUnavailable(f"backend {name!r} cannot run this block: {reason}")
        if reason is None and registry.get(name).sparse:
            usable.append(name)
        elif reason is not None and registry.why_not(name, device=x.device) is None:
            misfits[name] = reason
    if misfits and not usable:
        _warn_once(f"blocks stay dense: {'; '.join(f'{name}: {reason}' for name, reason in misfits.items())}")
    return usable


def load_kernels(calls: Iterable[tuple[SparseFeedForward, str, bool]]) -> None:
    """Compile and load, side by side, the kernels of calls without gradients: (block, backend, whether it screens)."""
    loads: dict[Hashable, Callable[[], object]] = {}
    for block, name, screens in calls:
        if (kernels := registry.get(name).kernels) is not None:
            weight = block.up_proj.weight
            intermediate, hidden = weight.shape
            kind = weight.device, computed_dtype(weight), hidden, intermediate, block.gated
            loads |= kernels(Request(*kind, False, block.activation), block.gated and screens)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as threads:
        for load in [threads.submit(call) for call in loads.values()]:
            load.result()


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
