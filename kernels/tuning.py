"""`autotune`: each block's backend and hot neurons, by measuring them on inputs of the kind that it will get."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import registry
from .checks import under_autocast
from .hot import hot_neurons
from .modules import SparseFeedForward, feed_forward_blocks, make_neuron_major
from .ops import sparse_ffn
from .registry import DENSE, BackendUnavailable

REFERENCE = "reference"
_SECONDS, _ROUNDS = 0.02, 3


class Alternative(NamedTuple):
    """A way to compute a block: a backend, and whether hot neurons are left to dense products."""

    backend: str
    hot: bool = False

    def __str__(self) -> str:
        return f"{self.backend} + hot" if self.hot else self.backend


class Choice(NamedTuple):
    """What a block was given, and the time of its forward by alternative."""

    backend: str
    hot_neurons: int
    mean_nonzeros: float  # per token
    milliseconds: dict[Alternative, float]

    @property
    def alternative(self) -> Alternative:
        return Alternative(self.backend, self.hot_neurons > 0)


class Tuning(tuple[Choice, ...]):
    """The choice of each block, in layer order. Prints as a table; times in ms, "-" where there was no such choice."""

    __slots__ = ()

    def __str__(self) -> str:
        columns = list(dict.fromkeys(found for choice in self for found in choice.milliseconds))
        header = ["layer", "non-zeros", "hot neurons", *map(str, columns), "choice"]
        rows = [
            [
                str(layer),
                f"{choice.mean_nonzeros:.1f}",
                str(choice.hot_neurons),
                *(f"{choice.milliseconds[found]:.3f}" if found in choice.milliseconds else "-" for found in columns),
                str(choice.alternative),
            ]
            for layer, choice in enumerate(self)
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def autotune(model: nn.Module, *inputs: Any, backends: Sequence[str] | None = None, **named: Any) -> Tuning:
    """Give each SparseFeedForward the backend, and the hot neurons, with which its forward is fastest.

    Runs `model(*inputs, **named)` once, without gradients. The inputs decide: real text, as many tokens as later calls
    will have. Makes the down weights neuron-major (`make_neuron_major`). Results stay the same up to rounding, whatever
    is chosen; what is fastest changes with the number of tokens and with the text. For inference: in training the
    non-zeros change, and the costs are others.

    backends: sparse ones to try beside dense products; None: all that can run, except the reference. Raises ValueError
    for a backend that does not exist, a model without blocks, or one that does not run all of them; BackendUnavailable
    for a backend asked for by name that cannot run a block.
    """
    for name in backends or ():
        registry.check_name(name)
        if name == registry.AUTO:
            raise ValueError('backends must be named one by one, got "auto"')
    blocks = feed_forward_blocks(make_neuron_major(model))
    choices: dict[nn.Module, Choice] = {}

    def measure(block: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if block not in choices:
            assert isinstance(block, SparseFeedForward)
            choices[block] = _choose(block, arguments[0], backends)

    hooks = [block.register_forward_pre_hook(measure) for block in blocks]
    try:
        with torch.compiler.set_stance("force_eager"):
            model(*inputs, **named)
    finally:
        for hook in hooks:
            hook.remove()
    if len(choices) < len(blocks):
        raise ValueError(
            f"the model ran {len(choices)} of its {len(blocks)} blocks: give inputs that reach all of them"
        )
    return Tuning(choices[block] for block in blocks)


def _choose(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None) -> Choice:
    gate = None if block.gate_proj is None else block.gate_proj.weight
    weights = gate, block.up_proj.weight, block.down_proj.weight
    _, stats = sparse_ffn(x, *weights, backend=DENSE)
    assert stats.nonzeros is not None
    hot = hot_neurons(x, weights[1] if gate is None else gate)
    alternatives = [Alternative(DENSE)]
    for name in _usable(block, x, backends):
        alternatives += [Alternative(name), Alternative(name, hot=True)] if len(hot) else [Alternative(name)]

    def call(alternative: Alternative) -> Callable[[], object]:
        own = hot if alternative.hot else None
        return lambda: sparse_ffn(x, *weights, backend=alternative.backend, stats=block.stats_mode, hot=own)

    milliseconds = _time({alternative: call(alternative) for alternative in alternatives}, x.device)
    best = min(milliseconds, key=milliseconds.__getitem__)
    block.backend, block.hot = best.backend, hot if best.hot else None
    return Choice(best.backend, len(hot) if best.hot else 0, stats.nonzeros.double().mean().item(), milliseconds)


def _usable(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None) -> list[str]:
    """The sparse backends that can run this block on this input; those asked for by name have to."""
    dtype = torch.get_autocast_dtype(x.device.type) if under_autocast(x.device.type) else x.dtype
    intermediate, hidden = block.up_proj.weight.shape
    names = (
        [name for name in registry.available_backends(x.device) if name != REFERENCE] if backends is None else backends
    )
    found = []
    for name in names:
        reason = registry.why_not(
            name, device=x.device, dtype=dtype, hidden=hidden, intermediate=intermediate, gated=block.gated
        )
        if reason is not None and backends is not None:
            raise BackendUnavailable(f"backend {name!r} cannot run this block: {reason}")
        if reason is None and registry.get(name).sparse:
            found.append(name)
    return found


def _time(calls: dict[Alternative, Callable[[], object]], device: torch.device) -> dict[Alternative, float]:
    """Of each call the median over rounds, in ms; a round runs all of them."""
    repetitions = {name: _repetitions(call, device) for name, call in calls.items()}
    rounds = [
        {name: _milliseconds(call, repetitions[name], device) for name, call in calls.items()} for _ in range(_ROUNDS)
    ]
    return {name: sorted(found[name] for found in rounds)[_ROUNDS // 2] for name in calls}


def _repetitions(call: Callable[[], object], device: torch.device) -> int:
    """How many calls fill a round. The first one may compile."""
    call()
    return max(1, min(1000, int(_SECONDS * 1e3 / max(_milliseconds(call, 2, device), 1e-6))))


def _milliseconds(call: Callable[[], object], repetitions: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(repetitions):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / repetitions
