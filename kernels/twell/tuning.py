"""`autotune`: chooses each block's backend, order of neurons and hot neurons by measuring them on given inputs."""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import registry
from .checks import computed_dtype
from .fewer_tokens import Ranges, measure_fewer_tokens
from .firing_order import firing_order, first_neurons
from .hot import hot_neurons
from .modules import SparseFeedForward, check_whole, feed_forward_blocks, make_neuron_major
from .ops import sparse_ffn
from .ordering import can_be_ordered, order_neurons
from .registry import DENSE, BackendUnavailable
from .saved_tuning import remember
from .silent import Silent, hooked, measure_held_out
from .timing import quick_times, sustained_times

REFERENCE = "reference"
# Of `_contenders`: ms; a factor between times; and sparse calls.
_LONG_CALL, _CLEARLY, _MOST_CONTENDERS = 1.0, 1.6, 3


class Alternative(NamedTuple):
    """A way to compute a block: the backend; its hot neurons (none, given by indices, or a prefix after the neurons
    were sorted by firing rate); and whether silent neurons are left out."""

    backend: str
    hot: bool = False
    ordered: bool = False
    silent_out: bool = False

    def __str__(self) -> str:
        hot = " + ordered" if self.ordered else " + hot" if self.hot else ""
        return f"{self.backend}{hot}{' - silent' if self.silent_out else ''}"


class Choice(NamedTuple):
    """The choice for a block, and the time of its forward by alternative (with its best share of hot neurons)."""

    backend: str
    hot_neurons: int
    mean_nonzeros: float  # per token
    milliseconds: dict[Alternative, float]
    ordered: bool = False  # the hot neurons are in front
    silent_neurons: int = 0  # left out
    fewer_tokens: Ranges = ()  # `SparseFeedForward.backend_up_to`

    @property
    def backends(self) -> frozenset[str]:
        """All backends that the block may use."""
        return frozenset((self.backend, *(name for _, name in self.fewer_tokens)))

    @property
    def alternative(self) -> Alternative:
        hot = self.hot_neurons > 0
        return Alternative(self.backend, hot and not self.ordered, hot and self.ordered, self.silent_neurons > 0)


class Tuning(tuple[Choice, ...]):
    """The choice of each block, in layer order. Prints as a table with times in ms; "-": this alternative did not
    exist.

    silent: the neurons that were left out; None without `drop_silent`.
    """

    silent: Silent | None = None

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
        if any(choice.fewer_tokens for choice in self):
            header.append("fewer tokens")
            for row, choice in zip(rows, self, strict=True):
                row.append(", ".join(f"{name} to {tokens}" for tokens, name in choice.fewer_tokens) or "-")
        if self.silent is not None:
            header.insert(3, "silent neurons")
            for row, choice in zip(rows, self, strict=True):
                row.insert(3, str(choice.silent_neurons))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        lines += [] if self.silent is None else [str(self.silent)]
        return "\n".join(line.rstrip() for line in lines)


@torch.no_grad()
def autotune(
    model: nn.Module,
    *inputs: Any,
    backends: Sequence[str] | None = None,
    drop_silent: bool = False,
    held_out: Any = None,
    **named: Any,
) -> Tuning:
    """Choose the fastest backend and hot neurons for the forward of each SparseFeedForward.

    Runs `model(*inputs, **named)` once, without gradients. The choice depends on the inputs: give real text with as
    many tokens as the largest of later calls will have. Smaller calls, down to a single token, are measured on some of
    these tokens and may get another backend (`SparseFeedForward.backend_up_to`): a sparse one where it is faster than
    dense products both eagerly and in a CUDA graph. Makes the down weights neuron-major
    (`make_neuron_major`). Results stay the same up to rounding. For inference only; `autotune_training` is for
    training. Where dense products are about as fast, calls are timed under a GPU's sustained load, which takes up to
    two seconds a block.

    In eval mode the neurons of a block may be sorted by firing rate, in place. The function stays the same and the
    checkpoint an ordinary one (`restore_order` undoes it). A transformers configuration stores the choices: after
    save_pretrained, from_pretrained and `sparsify`, `restore_tuning` restores them.

    backends: sparse backends to try besides dense products; None: all that can run, except the reference.
    drop_silent: leave out the neurons that fire for none of the tokens of these inputs, where that is faster. This
    changes the model's results wherever one of them would fire. `Tuning.silent` gives a bound on how often that
    happens, and `keep_silent` restores the neurons. held_out: other inputs of the model (a mapping of named inputs, a
    tuple, or a single one) on which their firing and the change of logits and loss are measured.

    Raises ValueError for an unknown backend, for inputs without tokens, for a model without blocks, with sharded ones
    (processes would choose differently) or one that does not run all of them, and for drop_silent with blocks that
    cannot be reordered (in training mode, or with shared weights) or that run twice. After an error, the blocks that it
    had reached have all their neurons, some with new settings; the others are as before.
    Raises BackendUnavailable for a backend that was requested by name but cannot run a block.
    """
    check_names(backends)
    if held_out is not None and not drop_silent:
        raise ValueError("held_out measures what drop_silent leaves out: it needs drop_silent=True")
    check_whole("autotune", feed_forward_blocks(model))
    blocks = feed_forward_blocks(make_neuron_major(model))
    orderable = {block for block in blocks if can_be_ordered(model, block)}
    if drop_silent and len(orderable) < len(blocks):
        raise ValueError(
            f"drop_silent reorders neurons, and {len(blocks) - len(orderable)} of {len(blocks)} blocks are in training "
            "mode, have gradients or share weights with another module: call model.eval() first"
        )
    before = {block: (block.hot, block.hot_prefix, block.silent_suffix, block.backend_up_to) for block in blocks}
    choices: dict[nn.Module, Choice] = {}
    tokens: list[int] = []

    def measure(block: nn.Module, x: Tensor) -> None:
        if block in choices and drop_silent:
            raise ValueError("drop_silent cannot tell which neurons are silent in a block that runs more than once")
        if block not in choices:
            assert isinstance(block, SparseFeedForward)
            tokens.append(checked_tokens(x, "autotune"))
            del before[block]
            choices[block] = _choose(block, x, backends, ordered=block in orderable, drop_silent=drop_silent)

    for block in blocks:
        block.hot, block.silent_suffix, block.hot_prefix, block.backend_up_to = None, 0, 0, ()
    try:
        with hooked(blocks, measure), torch.compiler.set_stance("force_eager"):
            model(*inputs, **named)
        check_all_ran(model, choices)
        found = None if held_out is None else measure_held_out(model, blocks, held_out)
    except BaseException:
        for block in blocks:  # all neurons that this call left out are back: the model computes its function
            block.silent_suffix = 0
            if block in before:
                block.hot, block.hot_prefix, block.silent_suffix, block.backend_up_to = before[block]
        remember(model)
        raise
    tuning = Tuning(choices[block] for block in blocks)
    if drop_silent:
        neurons = sum(block.up_proj.weight.shape[0] for block in blocks)
        tuning.silent = Silent(sum(choice.silent_neurons for choice in tuning), neurons, min(tokens), found)
    remember(model)
    return tuning


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


class _Trial(NamedTuple):
    """One call to time: an alternative with a number of hot neurons."""

    alternative: Alternative
    prefix: int = 0


def _choose(
    block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, *, ordered: bool, drop_silent: bool
) -> Choice:
    gate = None if block.gate_proj is None else block.gate_proj.weight
    weights = gate, block.up_proj.weight, block.down_proj.weight
    pattern, neurons = weights[1] if gate is None else gate, weights[1].shape[0]
    _, stats = sparse_ffn(x, *weights, backend=DENSE, activation=block.activation)
    assert stats.nonzeros is not None
    assert stats.fired is not None
    hot = hot_neurons(x, pattern)
    order = firing_order(x, pattern, stats.fired) if ordered else None
    in_order = weights if order is None else order.reordered(weights)
    prefixes = () if order is None else order.prefixes
    kept = neurons if order is None or not drop_silent else order.kept
    trials = [_Trial(Alternative(DENSE))]
    trials += [_Trial(Alternative(DENSE, silent_out=True))] if kept < neurons else []
    usable = usable_backends(block, x, backends)
    for name in usable:
        trials += [_Trial(Alternative(name)), *([_Trial(Alternative(name, hot=True))] if len(hot) else [])]
        for out in (False, True) if kept < neurons else (False,):
            trials += [_Trial(Alternative(name, silent_out=True))] if out else []
            end = kept if out else neurons
            trials += [_Trial(Alternative(name, ordered=True, silent_out=out), n) for n in prefixes if n < end]

    def call(trial: _Trial) -> Callable[[], object]:
        backend, by_index, by_prefix, out = trial.alternative
        operands = first_neurons(in_order, kept) if out else in_order if by_prefix else weights
        return lambda: sparse_ffn(
            x,
            *operands,
            activation=block.activation,
            backend=backend,
            stats=block.stats_mode,
            hot=hot if by_index else None,
            hot_prefix=trial.prefix,
        )

    times = quick_times({trial: call(trial) for trial in trials}, x.device)
    contenders = _contenders(times) if x.is_cuda else []
    times |= sustained_times({trial: call(trial) for trial in contenders}, x.device)
    best = min(contenders or times, key=times.__getitem__)
    backend, by_index, by_prefix, out = best.alternative
    if order is not None and (by_prefix or out):
        order_neurons(block, order.neurons)
    block.backend, block.hot = backend, hot if by_index else None
    block.hot_prefix, block.silent_suffix = best.prefix, neurons - kept if out else 0
    block.backend_up_to = measure_fewer_tokens(block, x, stats.nonzeros, usable) if usable else ()
    milliseconds: dict[Alternative, float] = {}
    for trial, time_ in times.items():
        milliseconds[trial.alternative] = min(time_, milliseconds.get(trial.alternative, time_))
    hot_count = len(hot) if by_index else best.prefix
    mean = stats.nonzeros.double().mean().item()
    return Choice(
        backend,
        hot_count,
        mean,
        milliseconds,
        by_prefix,
        silent_neurons=block.silent_suffix,
        fewer_tokens=block.backend_up_to,
    )


def _contenders(milliseconds: dict[_Trial, float]) -> list[_Trial]:
    """The calls of which one is the fastest under a GPU's sustained load, where short measurements cannot tell whether
    dense products are: the dense ones and the fastest others. None where that is clear or where calls are short."""
    dense = [trial for trial in milliseconds if trial.alternative.backend == DENSE]
    sparse = sorted(milliseconds.keys() - set(dense), key=milliseconds.__getitem__)[:_MOST_CONTENDERS]
    if not sparse or milliseconds[sparse[0]] < _LONG_CALL:
        return []
    share = milliseconds[sparse[0]] / min(milliseconds[trial] for trial in dense)
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
