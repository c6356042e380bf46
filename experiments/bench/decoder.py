"""The alternatives for the forward of a whole decoder, checked against float32.

Shapes: B sequences, S positions, K hidden, N intermediate.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.bench.feedforward import unavailable
from experiments.models.llama import (
    ReluFeedForward,
    SiluFeedForward,
    compute_as_transformers,
    feed_forward_blocks,
    nonzeros_of,
)
from experiments.run.torch_internals import CompilationFailed, raise_recompile_limit
from experiments.run.values import in_one_line
from experiments.timing.compare import REASON_LENGTH, Absent, Candidate, check
from experiments.timing.plans import AUTO, BY_LAYER, TRANSFORMERS, named, plan_of
from twell import BackendUnavailable, SparseFeedForward, Tuning, autotune, neuron_major, order_neurons, restore_order
from twell.ordering import neuron_order
from twell.testing import Problem, relative_error, tolerance

log = logging.getLogger(__name__)

# The dense forms: the backend of the blocks, and whether the decoder is compiled.
DENSE_FORMS = {
    "dense_transformers": (TRANSFORMERS, False),
    "dense_eager": ("dense", False),
    "dense_compiled": ("dense", True),
}


class _Setting(NamedTuple):
    """Setting of one block: backend, hot neurons by index or in front, and the order of its neurons."""

    backend: str
    hot: Tensor | None = None
    hot_prefix: int = 0
    order: Tensor | None = None


class Decoder:
    """A decoder without its head, on one batch of tokens: `forward(backend)` runs it with that feed-forward backend.

    Args:
        model: a causal language model of transformers with our blocks.
        ids_BS: int64 token ids.
    """

    def __init__(self, model: PreTrainedModel, ids_BS: Tensor):
        self.body: Any = model.base_model
        self.ids, self.blocks = ids_BS, feed_forward_blocks(model)
        self._chosen: list[_Setting] = []
        self._now: tuple[str, str] | None = None  # what `set` was given last
        for block in self.blocks:
            if isinstance(block, ReluFeedForward):
                block.in_graph = True  # a compiled decoder is one graph, its sparse blocks operators of it

    @cached_property
    def _compiled(self) -> Callable:
        torch.compiler.reset()  # torch counts compilations over all models (see experiments.bench.feedforward)
        raise_recompile_limit()  # each backend is one
        return torch.compile(self.body, dynamic=False)

    @property
    def sparse(self) -> bool:
        """Whether the blocks have a choice of backends: SiLU blocks are always dense."""
        return not isinstance(self.blocks[0], SiluFeedForward)

    def choose(self) -> Tuning:
        """Find what AUTO means: for each block the backend, the hot neurons and the neurons' order that are fastest on
        its own input."""
        self.set("dense")
        choices, self._now = autotune(self.body, self.ids, use_cache=False), None
        self._chosen = [
            _Setting(block.backend, block.hot, block.hot_prefix, neuron_order(block))
            for block in self.blocks
            if isinstance(block, SparseFeedForward)
        ]
        return choices

    def set(self, backend: str, stats: str = "none") -> None:
        """Choose the backend of all blocks, TRANSFORMERS, or AUTO, after `choose`. The down weights are laid out in
        memory as sparse backends read them; for dense products as loaded: what torch.compile made for one layout takes
        no other. Neurons are in the model's own order, and with AUTO in the one that was chosen. Does nothing where
        nothing changes: to set hot neurons waits for the device."""
        if (backend, stats) == self._now:
            return
        self._now = backend, stats
        plain = backend == TRANSFORMERS
        name = "dense" if plain else backend
        chosen = self._chosen if backend == AUTO else [_Setting(name)] * len(self.blocks)
        for block, (own, hot, prefix, order) in zip(self.blocks, chosen, strict=True):
            compute_as_transformers(block, plain)
            block.stats_mode = stats
            self._put_in_order(block, order)
            weight = block.down_proj.weight
            weight.data = weight.data.contiguous() if name == "dense" else neuron_major(weight.data)
            if self.sparse:
                block.backend, block.hot, block.hot_prefix = own, hot, prefix

    def _put_in_order(self, block: Any, order: Tensor | None) -> None:
        now = neuron_order(block) if self.sparse else None
        if order is None and now is not None:
            restore_order(block)
        if order is not None and now is None:
            order_neurons(block, order)

    @torch.no_grad()
    def forward(self, backend: str, *, compiled: bool = False) -> Tensor:
        """Hidden states [B, S, K]."""
        self.set(backend)
        body = self._compiled if compiled else self.body
        return body(self.ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def exact(self, sequences: Sequence[int]) -> Tensor:
        """Hidden states of some sequences with dense products, in float32, or in float64 where the model is in float32:
        [len(sequences), S, K]."""
        self.set("dense")
        body = exact_copy(self.body)
        with no_tf32():
            return torch.cat([body(self.ids[i : i + 1], use_cache=False).last_hidden_state for i in sequences])

    @torch.no_grad()
    def nonzeros(self) -> list[float]:
        """Mean non-zeros per token, of each layer."""
        self.set("dense", stats="full")
        self.body(self.ids, use_cache=False)
        return [nonzeros_of(block).double().mean().item() for block in self.blocks]

    @torch.no_grad()
    def problem(self, layer: int) -> Problem:
        """The feed-forward block of one layer with the input that it gets: x [B S, K]."""
        inputs: list[Tensor] = []
        block = self.blocks[layer]
        hook = block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        try:
            self.forward("dense")
        finally:
            hook.remove()
        gate = None if block.gate_proj is None else block.gate_proj.weight.detach()
        return Problem(inputs[0].flatten(0, 1), gate, block.up_proj.weight.detach(), block.down_proj.weight.detach())


def decoder_alternatives(
    decoder: Decoder, dense: Sequence[str], backends: Sequence[str], check_sequences: int
) -> list[Candidate | Absent]:
    """Checked candidates for the forward of the decoder.

    Args:
        dense: names of DENSE_FORMS; with dense_compiled, each backend is also measured compiled.
        check_sequences: sequences of the batch, evenly spread, whose hidden states are compared with float32.

    Raises:
        CheckFailed: when they are off by more than rounding.
    """
    sequences = evenly_spread(len(decoder.ids), check_sequences)
    exact_CSK = decoder.exact(sequences)

    def error(backend: str, *, compiled: bool = False) -> float:
        return relative_error(decoder.forward(backend, compiled=compiled)[sequences], exact_CSK)

    allowed = tolerance(error("dense"), decoder.body.dtype)
    found = [
        _alternative(decoder, name, "dense", DENSE_FORMS[name][0], error, allowed, compiled=DENSE_FORMS[name][1])
        for name in dense
    ]
    forms = (False, True) if "dense_compiled" in dense else (False,)
    for name in backends if decoder.sparse else []:
        make = _chosen_alternatives if name == AUTO else _backend_alternatives
        found += make(decoder, name, error, allowed, forms)
    return found


def evenly_spread(batch: int, count: int) -> list[int]:
    """Indices of `count` sequences of the batch, the first and the last among them."""
    return sorted({round(i * (batch - 1) / max(count - 1, 1)) for i in range(min(count, batch))})


Error = Callable[..., float]  # of a backend, compiled or not


def _alternative(
    decoder: Decoder, name: str, plan: str, backend: str, error: Error, allowed: float, *, compiled: bool
) -> Candidate | Absent:
    try:
        measured = check(name, error(backend, compiled=compiled), allowed)
    except (BackendUnavailable, CompilationFailed) as failure:
        return Absent(name, plan, in_one_line(failure, REASON_LENGTH))
    return Candidate(name, plan, lambda: decoder.forward(backend, compiled=compiled), measured)


def _backend_alternatives(
    decoder: Decoder, name: str, error: Error, allowed: float, forms: Sequence[bool]
) -> list[Candidate | Absent]:
    plan = plan_of(name, training=False)
    if reason := unavailable(name, decoder.ids.device):
        return [Absent(named(name, compiled=compiled), plan, reason) for compiled in forms]
    return [
        _alternative(decoder, named(name, compiled=compiled), plan, name, error, allowed, compiled=compiled)
        for compiled in forms
    ]


def _chosen_alternatives(
    decoder: Decoder, name: str, error: Error, allowed: float, forms: Sequence[bool]
) -> list[Candidate | Absent]:
    choices = decoder.choose()
    if all(len(choice.milliseconds) == 1 for choice in choices):
        reason = "no sparse backend can run these blocks here"
        return [Absent(named(name, compiled=compiled), BY_LAYER, reason) for compiled in forms]
    log.info("each block's forward, in ms:\n%s", choices)
    resolved = ", ".join(sorted({choice.backend for choice in choices} - {"dense"})) or "dense"
    return [
        _alternative(decoder, named(resolved, compiled=compiled), BY_LAYER, name, error, allowed, compiled=compiled)
        for compiled in forms
    ]


def exact_copy(model: PreTrainedModel) -> Any:
    """A copy to compare with, in float32; of a model in float32, in float64. Nothing of it is compiled."""
    model = copy.deepcopy(model)
    for module in model.modules():
        vars(module).pop("forward", None)  # what compile_layers left
    return model.double() if model.dtype == torch.float32 else model.float()


@contextlib.contextmanager
def no_tf32() -> Iterator[None]:
    """float32 products at full precision inside this block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
