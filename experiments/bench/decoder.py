"""The alternatives for the forward of a whole decoder, checked against float32.

Shapes: B sequences, S positions, K hidden, N intermediate.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from experiments.bench import fp8
from experiments.bench.feedforward import problem_of, unavailable
from experiments.bench.options import FP8, OWN_DENSE
from experiments.models.llama import (
    FeedForward,
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
from twell import Plan, SparseFeedForward, autotune
from twell.registry import BackendUnavailable
from twell.testing import Problem, relative_error, tolerance
from twell.tuning import Tuning
from twell.tuning.order import neuron_order, order_neurons, restore_order

log = logging.getLogger(__name__)

# The dense forms: the backend of the blocks, and whether the decoder is compiled.
DENSE_FORMS = {
    "dense_transformers": (TRANSFORMERS, False),
    "dense_eager": ("dense", False),
    "dense_compiled": (TRANSFORMERS, True),
    OWN_DENSE: ("dense", True),
    FP8: (FP8, True),
}
CHECKED = 4  # sequences of a batch that are compared with float32


class Decoder:
    """A decoder without its head, on one batch of tokens: `forward(backend)` runs it with that feed-forward backend.

    Args:
        model: a causal language model of transformers with our blocks.
        ids_BS: int64 token ids.
    """

    def __init__(self, model: PreTrainedModel, ids_BS: Tensor):
        self.body: Any = model.base_model
        self.ids, self.blocks = ids_BS, feed_forward_blocks(model)
        self._chosen: list[tuple[Plan | str, Tensor | None]] = []  # the plan of each block, and its neurons' order
        self._now: tuple[str, bool] | None = None  # what `set` was given last
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
            (block.plan, neuron_order(block)) for block in self.blocks if isinstance(block, SparseFeedForward)
        ]
        return choices

    def set(self, backend: str, *, keep_stats: bool = False) -> None:
        """Choose the backend of all blocks, TRANSFORMERS, FP8, or AUTO, after `choose`. Neurons are in the model's own
        order, and with AUTO in the one that was chosen. Does nothing where nothing changes: to set hot neurons waits
        for the device."""
        if (backend, keep_stats) == self._now:
            return
        self._now = backend, keep_stats
        name = "dense" if backend in (TRANSFORMERS, FP8) else backend
        chosen = self._chosen if backend == AUTO else [(name, None)] * len(self.blocks)
        for block, (plan, order) in zip(self.blocks, chosen, strict=True):
            vars(block).pop("fp8", None)
            compute_as_transformers(block, False)  # what reorders neurons refuses a block with a forward in its place
            block.keep_stats = keep_stats
            if isinstance(block, SparseFeedForward):
                now = neuron_order(block)
                if order is None and now is not None:
                    restore_order(block)
                if order is not None and now is None:
                    order_neurons(block, order)
                block.plan = plan
            if backend == FP8:
                vars(block)["fp8"] = fp8.prepare(_without_tokens(block))[1:]
                block.forward = MethodType(_forward_in_fp8, block)  # type: ignore[method-assign]
            else:
                compute_as_transformers(block, backend == TRANSFORMERS)

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
        self.set("dense", keep_stats=True)
        self.body(self.ids, use_cache=False)
        return [nonzeros_of(block).double().mean().item() for block in self.blocks]

    @torch.no_grad()
    def problem(self, layer: int) -> Problem:
        """The feed-forward block of one layer with the input that it gets: x [B S, K]."""
        inputs: list[Tensor] = []
        block = self.blocks[layer]
        with block.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
            self.forward("dense")
        return problem_of(block, inputs[0].flatten(0, 1))


def _without_tokens(block: FeedForward) -> Problem:
    return problem_of(block, block.up_proj.weight.detach()[:0])


def _forward_in_fp8(block: Any, x_BSK: Tensor) -> Tensor:
    block.stats = None
    return fp8.forward(x_BSK.flatten(0, 1), *block.fp8, activation=ACT2FN[block.activation])[0].view_as(x_BSK)


def decoder_alternatives(decoder: Decoder, dense: Sequence[str], backends: Sequence[str]) -> list[Candidate | Absent]:
    """Checked candidates for the forward of the decoder: the hidden states of some sequences are compared with float32.

    Args:
        dense: names of DENSE_FORMS; with dense_compiled, each backend is also measured compiled. FP8 may be off by
            `fp8.TOLERANCE`.

    Raises:
        CheckFailed: when they are off by more than rounding.
    """
    sequences = evenly_spread(len(decoder.ids))
    exact_CSK = decoder.exact(sequences)

    def error(backend: str, compiled: bool) -> float:
        return relative_error(decoder.forward(backend, compiled=compiled)[sequences], exact_CSK)

    rounding = tolerance(error("dense", False), decoder.body.dtype)

    def alternative(
        name: str, plan: str, backend: str, compiled: bool, reason: str = "", allowed: float = rounding
    ) -> Candidate | Absent:
        if reason:
            return Absent(name, plan, reason)
        try:
            measured = check(name, error(backend, compiled), allowed)
        except (BackendUnavailable, CompilationFailed) as failure:
            return Absent(name, plan, in_one_line(failure, REASON_LENGTH))
        return Candidate(name, plan, lambda: decoder.forward(backend, compiled=compiled), measured)

    found = [alternative(name, "dense", *DENSE_FORMS[name]) for name in dense if name != FP8]
    if FP8 in dense:
        misfit = fp8.misfit(_without_tokens(decoder.blocks[0]))
        found.append(alternative(FP8, FP8, *DENSE_FORMS[FP8], misfit, fp8.TOLERANCE))
    for name in backends if decoder.sparse else []:
        if name == AUTO:
            plan = BY_LAYER
            shown, reason = chosen_backends(decoder.choose(), lambda chosen: {chosen.backend})
        else:
            shown, plan, reason = name, plan_of(name, training=False), unavailable(name, decoder.ids.device)
        for compiled in (False, True) if "dense_compiled" in dense else (False,):
            found.append(alternative(named(shown, compiled=compiled), plan, name, compiled, reason))
    return found


def chosen_backends(choices: Tuning, backends_of: Callable[[Plan], Iterable[str]]) -> tuple[str, str]:
    """(the sparse backends that `autotune` chose, why there are none): AUTO, where there was nothing to choose from,
    and dense, where dense products are fastest."""
    if all(len(choice.milliseconds) == 1 for choice in choices):
        return AUTO, "no sparse backend can run these blocks here"
    log.info("each block's forward, in ms:\n%s", choices)
    chosen = {backend for choice in choices for backend in backends_of(choice.plan)}
    return ", ".join(sorted(chosen - {"dense"})) or "dense", ""


def evenly_spread(batch: int) -> list[int]:
    """Indices of the sequences of a batch that are compared: CHECKED of them, the first and the last included."""
    return sorted({round(i * (batch - 1) / (CHECKED - 1)) for i in range(min(CHECKED, batch))})


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
