"""`choose_backends`: each block's backend and hot neurons, by measuring them on inputs of the kind that it will get."""

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

DENSE, REFERENCE = "dense", "reference"
HOT = "+hot"
_SECONDS, _ROUNDS = 0.02, 3


class Choice(NamedTuple):
    """What a block was given. milliseconds: of its forward on the input measured, by alternative: "dense", a backend's
    name, and that with "+hot" behind it where leaving hot neurons to dense products was an alternative."""

    backend: str
    hot_neurons: int
    mean_nonzeros: float  # per token
    milliseconds: dict[str, float]


@torch.no_grad()
def choose_backends(
    model: nn.Module, *inputs: Any, backends: Sequence[str] | None = None, **named: Any
) -> list[Choice]:
    """Give each SparseFeedForward the backend, and the hot neurons, with which its forward is fastest; in layer order.

    Runs `model(*inputs, **named)` once, without gradients, with the inputs that decide: real text, as many tokens as
    later calls will have. Makes the down weights neuron-major (`make_neuron_major`). Results stay the same up to
    rounding, whatever is chosen; what is fastest changes with the number of tokens and with the text. For inference:
    a training's non-zeros change, and its costs are others.

    backends: sparse ones to try beside dense products; None: all that can run, but for the reference. Raises ValueError
    for a backend that does not exist, a model without blocks, or one that does not run all of them; BackendUnavailable
    for a backend asked for by name that cannot run a block.
    """
    for name in backends or ():
        registry.check_name(name)
    blocks = feed_forward_blocks(make_neuron_major(model))
    choices: dict[nn.Module, Choice] = {}

    def measure(block: SparseFeedForward, arguments: tuple[Tensor, ...]) -> None:
        if block not in choices:
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
    return [choices[block] for block in blocks]


def _choose(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None) -> Choice:
    gate = None if block.gate_proj is None else block.gate_proj.weight
    weights = gate, block.up_proj.weight, block.down_proj.weight
    _, stats = sparse_ffn(x, *weights, backend=DENSE)
    hot = hot_neurons(x, weights[1] if gate is None else gate)
    alternatives: dict[str, tuple[str, Tensor | None]] = {DENSE: (DENSE, None)}
    for name in _that_can(block, x, backends):
        alternatives[name] = name, None
        if len(hot):
            alternatives[name + HOT] = name, hot
    calls = {
        label: lambda name=name, own=own: sparse_ffn(x, *weights, backend=name, stats=block.stats_mode, hot=own)
        for label, (name, own) in alternatives.items()
    }
    milliseconds = _time(calls, x.device)
    block.backend, block.hot = alternatives[min(milliseconds, key=milliseconds.__getitem__)]
    count = 0 if block.hot is None else len(block.hot)
    return Choice(block.backend, count, stats.nonzeros.double().mean().item(), milliseconds)


def _that_can(block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None) -> list[str]:
    """The sparse backends that can run this block on this input; those asked for by name have to."""
    asked = backends is not None
    names = backends if asked else [name for name in registry.available_backends(x.device) if name != REFERENCE]
    dtype = torch.get_autocast_dtype(x.device.type) if under_autocast(x.device.type) else x.dtype
    intermediate, hidden = block.up_proj.weight.shape
    found = []
    for name in names:
        try:
            registry.resolve(
                name, x.device.type, x.device.index, dtype, hidden, intermediate, block.gate_proj is not None, False
            )
        except registry.BackendUnavailable:
            if asked:
                raise
            continue
        if registry.get(name).sparse:
            found.append(name)
    return found


def _time(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Of each call, the median over rounds in which all take turns, in ms."""
    repetitions = {label: _repetitions(call, device) for label, call in calls.items()}
    rounds = [
        {label: _milliseconds(call, repetitions[label], device) for label, call in calls.items()}
        for _ in range(_ROUNDS)
    ]
    return {label: sorted(found[label] for found in rounds)[_ROUNDS // 2] for label in calls}


def _repetitions(call: Callable[[], object], device: torch.device) -> int:
    """As many as fill a round. The first call may compile."""
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
