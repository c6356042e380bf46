"""The plans of a training's feed-forward blocks, and when they are chosen.

With `execution.sparse.backend=auto` every block is dense at first, since a model is not sparse early in training. At
logged steps `twell.autotune` measures, on a micro-batch of the training, dense blocks whose non-zeros have become few,
and sparse ones whose non-zeros have become many. With a named backend every block has it from the start. The neurons
that a sparse block leaves to dense products (`twell.hot`) follow their firing rates, without a measurement.

What a plan changes is time and memory. Gradients are exact at any capacity: those of a call that exceeds it come from
dense products, and where no capacity is configured, the block raises it for its next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.models.llama import FeedForward
from experiments.run.distributed import Processes
from experiments.run.train_config import SparseConfig, TrainConfig
from experiments.training.loss import LossModel
from twell import Plan, SparseFeedForward, autotune, available_backends
from twell.capacity import capacity_for, fitted
from twell.hot import best_split
from twell.registry import why_not

AUTO, DENSE = "auto", "dense"
# The reference defines results and is never the fastest.
NEVER_FASTER = (DENSE, "reference")
# Share of the neurons above which no sparse form is measured. On an H200, forward and backward of a block with 5,632
# neurons are no faster sparse than dense with 325 non-zeros (1/17), and are with 291.
MOST_NONZEROS = 1 / 16
# A dense block is measured again once it has so many times fewer non-zeros than when it was last measured, a sparse one
# once it has so many times more: to measure takes as long as some 50 of its calls, and the first time, in a compiled
# model, as long as a compilation.
MOVED = 2.0
# The hot neurons and the capacity of a sparse block follow once its non-zeros have changed by so much.
FITS = 1.1

log = logging.getLogger(__name__)


def sparse_backend(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, gated: bool
) -> tuple[str | None, str]:
    """The sparse backend that can train such blocks here, the first in the registry's order; None with the reasons."""
    reasons = []
    for name in available_backends(device):
        if name in NEVER_FASTER:
            continue
        reason = why_not(
            name, device=device, dtype=dtype, hidden=hidden, intermediate=intermediate, gated=gated, training=True
        )
        if reason is None:
            return name, ""
        reasons.append(f"{name}: {reason}")
    return None, "; ".join(reasons)


def build_plans(config: TrainConfig, blocks: Sequence[FeedForward], group: Processes) -> BlockPlans:
    """The plans of a run. All processes have the same sparse backend, or all blocks stay dense."""
    model, sparse = config.model, config.execution.sparse
    backend: str | None = DENSE if model.activation == "silu" else sparse.backend
    if backend == AUTO:
        sizes = (model.hidden_size, model.intermediate_size, model.gated)
        backend, reason = sparse_backend(group.device, getattr(torch, config.training.precision), *sizes)
        backends = set(group.all_gather(backend))
        if len(backends) > 1:
            backend, reason = None, "not all processes have the same: " + ", ".join(sorted(map(str, backends)))
        if backend is None:
            log.info("execution.sparse.backend=auto: every layer stays dense (%s)", reason)
    return BlockPlans(blocks, sparse, backend or DENSE, compiled=config.execution.compile)


class BlockPlans:
    """Sets the plans of a model's blocks. Every process of a run has one, and all choose alike.

    backend: the sparse one that blocks may get or, if the configuration names one, have; "dense": none.
    """

    def __init__(self, blocks: Sequence[FeedForward], config: SparseConfig, backend: str, *, compiled: bool) -> None:
        self._blocks, self._config, self._backend, self._compiled = blocks, config, backend, compiled
        self._auto = config.backend == AUTO
        # Mean non-zeros when last measured, and when hot neurons and capacity were last chosen.
        self._measured: list[float | None] = [None] * len(blocks)
        self._fitted: list[float | None] = [None] * len(blocks)
        for block in self._sparse_blocks():
            plan = Plan(DENSE if self._auto else backend, capacity=config.capacity, backup=config.backup or 0.0)
            block.plan = plan

    def _sparse_blocks(self) -> list[SparseFeedForward]:
        """The blocks, if they may be sparse."""
        may_be = self._backend != DENSE
        return [block for block in self._blocks if may_be and isinstance(block, SparseFeedForward)]

    @property
    def backends(self) -> list[str]:
        return [block.plan.backend for block in self._blocks]

    @property
    def capacities(self) -> list[int]:
        """The capacity of each layer in non-zeros per token, in this process; 0 for a dense one."""
        return [
            block.current_capacity if isinstance(block, SparseFeedForward) and block.plan.backend != DENSE else 0
            for block in self._blocks
        ]

    @property
    def hot_neurons(self) -> list[int]:
        """The number of hot neurons of each layer, computed by dense products."""
        return [block.plan.hot_count for block in self._blocks]

    def due(self, nonzeros: Sequence[float]) -> list[int]:
        """The layers to measure at these mean non-zeros."""
        layers = []
        for layer, block in enumerate(self._sparse_blocks() if self._auto else []):
            now, before = max(nonzeros[layer], 1.0), self._measured[layer]
            if block.plan.backend != DENSE:
                layers += [layer] if now >= MOVED * (before or 1.0) else []
            elif now <= MOST_NONZEROS * block.up_proj.out_features and (before is None or now <= before / MOVED):
                layers.append(layer)
        return layers

    def choose(
        self, nonzeros: Sequence[float], loss_model: LossModel, tokens: Tensor, rates: Callable[[], list[Tensor]]
    ) -> None:
        """Choose the plans of the layers that are due, and fit those of other sparse ones. tokens: a micro-batch, as
        `loss_model` takes it; rates: the firing rates of each layer, the same in all processes."""
        due, blocks = self.due(nonzeros), self._sparse_blocks()
        now = [max(mean, 1.0) for mean in nonzeros]

        def fits(layer: int) -> bool:
            before = self._fitted[layer]
            return before is not None and before / FITS < now[layer] < before * FITS

        sparse = [layer for layer, block in enumerate(blocks) if block.plan.backend != DENSE and layer not in due]
        if follow := [layer for layer in sparse if not fits(layer)]:
            rates_LN = rates() if self._config.hot_neurons else None
            for layer in follow:
                self._fit(blocks[layer], nonzeros[layer], None if rates_LN is None else rates_LN[layer])
        if due:
            chosen = [blocks[layer] for layer in due]
            autotune(loss_model, tokens, blocks=chosen, hot=self._config.hot_neurons, compiled=self._compiled)
        for layer in due:
            self._measured[layer] = now[layer]
        for layer in (*due, *follow):
            self._fitted[layer] = now[layer]

    def _fit(self, block: SparseFeedForward, nonzeros: float, rates_N: Tensor | None) -> None:
        present = block.current_capacity
        if rates_N is not None:
            # On the CPU: running sums on a GPU may differ in the last bit, and then the processes' choices might, too.
            block.plan = replace(block.plan, hot=tuple(best_split(rates_N.cpu()).neurons.tolist()), screened=0)
            nonzeros -= rates_N[list(block.plan.indices)].sum().item()
        if block.plan.capacity is None:
            block.current_capacity = fitted(present, capacity_for(nonzeros, block.up_proj.out_features))

    def state(self, capacities: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values. capacities: `capacities` of each process."""
        plans = [block.plan.as_dict() for block in self._blocks]
        return {
            "plans": plans,
            "capacities": [list(of_process) for of_process in capacities],
            "measured": self._measured,
            "fitted": self._fitted,
        }

    def restore(self, state: dict[str, Any], rank: int) -> None:
        """Restore what options and machine still allow: another backend, capacity or backup in the configuration
        replaces the saved one."""
        plans = [Plan.of(plan) for plan in state["plans"]]
        capacities = state["capacities"][rank] if rank < len(state["capacities"]) else None
        for layer, block in enumerate(self._sparse_blocks()):
            saved = plans[layer]
            if saved.backend not in (self._backend, DENSE) or (saved.backend == DENSE and not self._auto):
                continue
            hot = saved.indices if self._config.hot_neurons else ()
            block.plan = replace(block.plan, backend=saved.backend, hot=hot)
            self._measured[layer], self._fitted[layer] = state["measured"][layer], state["fitted"][layer]
            if capacities is not None and block.plan.capacity is None and saved.capacity is None and capacities[layer]:
                block.current_capacity = capacities[layer]
