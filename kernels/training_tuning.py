"""`autotune_training`: chooses each block's backend and hot neurons in training, by measuring forward and backward."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .capacity import capacity_for
from .checks import in_process_group
from .hot import best_split, clearly_better, firing_rates, saved_by
from .modules import SparseFeedForward, feed_forward_blocks, pattern_layer
from .ops import CAPACITY, sparse_ffn
from .ordering import forget_tuning
from .registry import DENSE, is_sparse
from .silent import hooked
from .timing import quick_times
from .tuning import Alternative, Choice, Tuning, check_all_ran, check_names, checked_tokens, usable_backends

# Another alternative than the present one must be so much faster. It costs a compilation of a compiled model, and
# torch.compile makes dense products about 4% faster than they are measured here.
_MARGIN = 0.95
# Where hot neurons save a larger share of the non-zeros, a sparse backend without them is not timed.
_MOST_SAVED = 0.5

T = TypeVar("T")
Group = Any  # torch.distributed.ProcessGroup, whose import takes a second
logger = logging.getLogger(__name__)


class _Decision(NamedTuple):
    chosen: Alternative
    hot: Tensor
    capacity: int
    choice: Choice
    tokens: int


@torch.no_grad()
def autotune_training(
    model: nn.Module, *inputs: Any, backends: Sequence[str] | None = None, group: Group = None, **named: Any
) -> Tuning:
    """Choose the fastest backend, hot neurons and capacity for forward and backward of each SparseFeedForward.

    Call it between two steps of a training, now and then: at first dense products are faster, later each block is
    sparse as soon as that saves time on this device. Results and gradients stay the same up to rounding, whatever is
    chosen; only neurons that `autotune` left out as silent come back, with a warning. What else `autotune` chose for
    inference is reset, but for calls of fewer tokens. Runs `model(*inputs, **named)` once, without gradients: give a
    micro-batch of the training. On the way, each block's forward and backward are timed alone on its own input, for
    0.1 s or six calls each: dense products, and a sparse backend without and with hot neurons by index. The present
    choice stays unless another is at least 5% faster. Weights, gradients and random generators stay as they are;
    buffers that the model's forward updates do not. If it raises, no block has changed.

    A block that changes makes torch.compile compile the compiled module that holds it anew. Beyond
    torch._dynamo.config.recompile_limit (8 by default) it gives up: raise it.

    backends: sparse backends to try besides dense products; None: the first one that can train the block here.
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

    def measure(block: nn.Module, x: Tensor) -> None:
        if block not in found:
            assert isinstance(block, SparseFeedForward)
            found[block] = _decide(block, x, backends, processes, offloaded=x.device != at_rest[block])

    def run() -> None:
        model(*inputs, **named)
        check_all_ran(model, found)

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), hooked(blocks, measure), torch.compiler.set_stance("force_eager"):
        processes.all_of(run)
    for layer, block in enumerate(blocks):
        _apply(layer, block, found[block])
    forget_tuning(model)  # what was chosen for inference is reset
    return Tuning(found[block].choice for block in blocks)


def _decide(
    block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, processes: "_Processes", *, offloaded: bool
) -> _Decision:
    pattern = pattern_layer(block).weight

    def rates() -> Tensor:
        checked_tokens(x, "autotune_training")
        return firing_rates(x, pattern).cpu()

    rates_N = torch.stack(processes.all_of(rates)).mean(0)
    nonzeros, neurons = rates_N.sum().item(), len(rates_N)
    # Where the weights are elsewhere between two steps, so are the block's buffers, and hot neurons are one.
    hot = torch.empty(0, dtype=torch.int64) if offloaded else _hot(block, rates_N)
    saved = saved_by(rates_N, hot) if len(hot) else 0.0
    capacities = {
        by_index: block.capacity if not block.capacity_grows else capacity_for(cold, neurons)
        for by_index, cold in ((False, nonzeros), (True, nonzeros - rates_N[hot].sum().item()))
    }
    hot = hot.to(x.device)

    def times() -> dict[Alternative, float]:
        usable = usable_backends(block, x, backends, training=True)
        names = list(usable if backends is not None else usable[:1])
        names += [block.backend] if block.backend in set(usable) - set(names) else []
        few = [False] if saved <= _MOST_SAVED * nonzeros else []
        tried = [Alternative(name, by_index) for name in names for by_index in (few + ([True] if len(hot) else []))]
        return quick_times(
            {
                each: _forward_backward(block, x, each, hot if each.hot else None, capacities[each.hot])
                for each in (Alternative(DENSE), *tried)
            },
            x.device,
        )

    everywhere = processes.all_of(times)
    common = [each for each in everywhere[0] if all(each in own for own in everywhere)]
    milliseconds = {each: sum(own[each] for own in everywhere) / len(everywhere) for each in common}
    backend = block._backend_of(x)
    present = Alternative(backend, block.hot is not None and backend != DENSE)
    best = min(milliseconds, key=milliseconds.__getitem__)
    if milliseconds[best] >= _MARGIN * milliseconds.get(present, math.inf):
        best = present
    choice = Choice(best.backend, len(hot) if best.hot else 0, nonzeros, milliseconds)
    return _Decision(best, hot, capacities[best.hot], choice, x.shape[:-1].numel())


def _hot(block: SparseFeedForward, rates_N: Tensor) -> Tensor:
    """The neurons to compute by dense products, int64 [H]: the present ones unless others are clearly better."""
    best = best_split(rates_N)
    if block.hot is None:
        return best.neurons
    present = block.hot.cpu()
    return best.neurons if clearly_better(best.saved, saved_by(rates_N, present)) else present


def _apply(layer: int, block: SparseFeedForward, decision: _Decision) -> None:
    chosen, hot, capacity, choice, tokens = decision
    block._reset_inference(tokens, "autotune_training")
    if chosen.backend != block.backend:
        logger.info(
            "layer %d runs %s instead of %s from now on, at %.1f non-zeros per token",
            *(layer, chosen, block.backend, choice.mean_nonzeros),
        )
        block.backend = chosen.backend
    if not chosen.hot:
        block.hot = None
    elif block.hot is None or not torch.equal(block.hot, hot):
        block.hot = hot
    if not is_sparse(chosen.backend):
        # The same for all dense blocks, because torch.compile guards on it even for them.
        block.capacity = CAPACITY if block.capacity_grows else block.capacity
    elif not block.capacity / 4 < capacity <= block.capacity:
        # Raised at once, but lowered only if a quarter is enough: what is saved gets other sizes.
        block.capacity = capacity


def _forward_backward(
    block: SparseFeedForward, x: Tensor, alternative: Alternative, hot: Tensor | None, capacity: int
) -> Callable[[], object]:
    """Forward and backward of the block, with the gradients that its training needs, of its statistics too."""

    def leaf(part: nn.Linear) -> Tensor:
        trained = any(parameter.requires_grad for parameter in part.parameters())  # not one if it is parametrized
        return part.weight.detach().requires_grad_(trained)

    x = x.detach().requires_grad_()
    gate = None if block.gate_proj is None else leaf(block.gate_proj)
    up, down = leaf(block.up_proj), leaf(block.down_proj)
    wanted = [tensor for tensor in (x, gate, up, down) if tensor is not None and tensor.requires_grad]
    dy = x.detach()

    def call() -> None:
        with torch.enable_grad():
            y, stats = sparse_ffn(
                *(x, gate, up, down),
                activation=block.activation,
                backend=alternative.backend,
                stats=block.stats_mode,
                capacity=capacity,
                hot=hot,
                backup=block.backup if is_sparse(alternative.backend) else None,
            )
            outputs, gradients = [y], [dy.to(y.dtype)]
            if stats.l1 is not None:
                outputs, gradients = [*outputs, stats.l1], [*gradients, torch.ones_like(stats.l1)]
            torch.autograd.grad(outputs, wanted, gradients)

    return call


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
