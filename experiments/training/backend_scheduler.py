"""Chooses during training which feed-forward blocks run dense or sparse, and with what capacity.

`execution.sparse.backend=auto` starts with dense blocks, since a model is not sparse early in training. At each logged
step, the mean non-zeros of every layer are compared with costs that were measured on this device before the first step:
a layer switches to the sparse backend, or back, when that is faster by a margin (hysteresis).

The most active (hot) neurons of a sparse layer are computed by dense products where that saves time (`twell.hot`);
the saving counts as fewer non-zeros. Firing rates drift, so the selection is reviewed at logged steps, and replaced
when the layer's predicted time falls by 5% (where a backend was named, so that no costs are known: when another
selection saves a quarter more non-zeros).

A sparse block has a capacity: the non-zeros per token that it can save in one call. Its outputs do not depend on it,
but the gradients of a call that exceeds it cannot be used. Such a step is therefore retried with a larger capacity, so
the loss is the same as with unlimited capacity (`twell.capacity` says how large it is). With a dense backup
(`execution.sparse.backup`), only the non-zeros of the other tokens need capacity. The non-zeros of hot neurons need
none either, but are counted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments.models.llama import FeedForward
from experiments.run.distributed import Processes
from experiments.run.environment import device_name
from experiments.run.train_config import SparseConfig, TrainConfig
from experiments.training.layer_costs import DENSE, Costs, Setting, measure_costs, sparse_backend
from twell import Plan
from twell.capacity import capacity_for
from twell.hot import HotSplit, best_split, clearly_better, saved_by

AUTO = "execution.sparse.backend=auto"  # in messages
RATE_TOKENS = 4096  # in each process, at a logged step
# Below this mean of non-zeros no selection of hot neurons saves time, so rates need not be measured.
LEAST_NONZEROS_FOR_HOT = 25
# Other hot neurons must bring the predicted time of the layer below this share of what it is with the present ones.
_WORTH_IT = 0.95
_NO_SPLIT = HotSplit(torch.empty(0, dtype=torch.int64), 0.0)
log = logging.getLogger(__name__)


def build_scheduler(
    config: TrainConfig, blocks: Sequence[FeedForward], group: Processes, micro_batch: int
) -> BackendScheduler:
    """The scheduler of a run whose micro-batches have `micro_batch` sequences. All processes switch layers, or none
    does."""
    setting = None
    if config.execution.sparse.backend == "auto" and config.model.activation != "silu":
        setting = _setting(config, group.device, micro_batch * config.training.sequence_length)
        backends = {other and other.backend for other in group.all_gather(setting)}
        if len(backends) > 1:
            found = ", ".join(sorted(map(str, backends)))
            log.info("%s: every layer stays dense (not all processes have the same: %s)", AUTO, found)
            setting = None
    return BackendScheduler(blocks, config.execution.sparse, group, setting)


def _setting(config: TrainConfig, device: torch.device, tokens: int) -> Setting | None:
    """The setting in which costs are measured; None (logged with the reason) if no sparse backend can train here."""
    model, precision = config.model, config.training.precision
    sizes = (model.hidden_size, model.intermediate_size, model.gated)
    backend, reason = sparse_backend(device, getattr(torch, precision), *sizes)
    if backend is None:
        log.info("%s: every layer stays dense (%s)", AUTO, reason)
        return None
    compiled, backup = config.execution.compile, config.execution.sparse.backup
    return Setting(backend, device_name(device), precision, tokens, *sizes, compiled, backup)


class BackendScheduler:
    """Sets the backends and capacities of a model's blocks.

    Every process of a run has one. They all make the same decisions, since they share the costs and the counts of
    non-zeros. Costs are measured in `setting`; without it, all blocks keep `config.backend` ("auto": dense).
    """

    def __init__(
        self, blocks: Sequence[FeedForward], config: SparseConfig, group: Processes, setting: Setting | None = None
    ) -> None:
        self._blocks, self._config, self._group, self._setting = blocks, config, group, setting
        self.costs: Costs | None = None
        self.retried_steps = 0
        self._prepared = False
        for layer, block in enumerate(blocks):
            if config.backend not in ("auto", DENSE):
                # Nothing has been measured yet, so reserve capacity for everything.
                self._make_sparse(layer, config.backend, _neurons(block))

    def prepare(self) -> None:
        """Measure the costs once, unless a checkpoint provided them. All processes use those of the first."""
        if self._setting is None or self._prepared:
            return
        self._prepared = True
        if self._group.agree(self.costs is None):
            self.costs = self._group.all_gather(measure_costs(self._setting, self._group.device))[0]
            log.info(
                "a block's forward and backward: dense %.3f ms, %s %.3f ms and %.4f ms for each mean non-zero; "
                "the break-even is at %.1f",
                *(self.costs.dense_ms, self._setting.backend, self.costs.fixed_ms, self.costs.per_nonzero_ms),
                self.costs.break_even,
            )

    @property
    def sparse(self) -> bool:
        """Whether any layer is sparse."""
        return any(block.plan.backend != DENSE for block in self._blocks)

    @property
    def backends(self) -> list[str]:
        """The backend of each layer."""
        return [block.plan.backend for block in self._blocks]

    @property
    def capacities(self) -> list[int]:
        """The capacity of each layer in non-zeros per token; 0 for a dense one."""
        return [block.plan.capacity or 0 for block in self._blocks]

    @property
    def hot_neurons(self) -> list[int]:
        """The number of hot neurons of each layer, computed by dense products."""
        return [block.plan.hot_count for block in self._blocks]

    def needs_firing_rates(self, nonzeros: Sequence[float]) -> bool:
        """Whether `update` needs firing rates: some layer with these non-zeros could have hot neurons."""
        possible = self._config.hot_neurons and (self.costs is not None or self.sparse)
        return possible and max(nonzeros) >= LEAST_NONZEROS_FOR_HOT

    def update(self, step: int, nonzeros: Sequence[float], rates: Sequence[Tensor] | None = None) -> None:
        """Switch layers and adapt their capacities to these mean non-zeros per token in `step`.

        rates: for each layer, the firing rates [N], the same in all processes; None: unknown.
        """
        for layer, count in enumerate(nonzeros):
            # On the CPU: running sums on a GPU may differ in the last bit, and then the processes' decisions might
            # differ.
            rates_N = None if rates is None else _scaled_to(count, rates[layer].cpu())
            split = _NO_SPLIT if rates_N is None else best_split(rates_N)
            if self.costs is not None and self._setting is not None:
                self._switch(step, layer, count, count - split.saved, self.costs, self._setting.backend)
            if self._blocks[layer].plan.backend != DENSE:
                self._fit_capacity(layer, count)
                if rates_N is not None:
                    self._update_hot_neurons(step, layer, count, split, rates_N)

    def grow_capacities(self, step: int, most_nonzeros: Sequence[int], tokens: int) -> bool:
        """Raise the capacity of layers that exceeded it in a call of `step`. Returns whether there were any, in which
        case the step must be retried.

        most_nonzeros: for each layer, the maximum over calls and processes of the non-zeros that need capacity; a call
        has `tokens` tokens.
        """
        exceeded = []
        for layer, (block, count) in enumerate(zip(self._blocks, most_nonzeros, strict=True)):
            before = block.plan.capacity
            if before is None or count <= before * tokens:  # None: of a dense layer
                continue
            capacity = capacity_for(math.ceil(count / tokens), _neurons(block))
            block.plan = replace(block.plan, capacity=capacity)
            exceeded.append(f"layer {layer} had {count / tokens:.1f}, capacity {before}, now {capacity}")
        if exceeded:
            self.retried_steps += 1
            log.info("step %d is retried, its non-zeros per token exceeded a capacity: %s", step, "; ".join(exceeded))
        return bool(exceeded)

    def _switch(self, step: int, layer: int, count: float, paid: float, costs: Costs, backend: str) -> None:
        """Switch the layer if that is faster. `count`: its mean non-zeros; `paid`: those that the best hot neurons
        leave to the sparse kernels (the present ones may leave some more)."""
        block = self._blocks[layer]
        was_sparse = block.plan.backend != DENSE
        share = self._config.to_dense_above if was_sparse else self._config.to_sparse_below
        sparse = paid < share * costs.break_even
        if sparse == was_sparse:
            return
        if sparse:
            self._make_sparse(layer, backend, capacity_for(count, _neurons(block)))
        else:
            block.plan = DENSE
        log.info(
            "step %d: layer %d runs %s from now on: %.1f non-zeros, predicted %.3f ms dense and %.3f ms sparse",
            *(step, layer, block.plan.backend, count, costs.dense_ms, costs.sparse_ms(paid)),
        )

    def _update_hot_neurons(self, step: int, layer: int, count: float, split: HotSplit, rates_N: Tensor) -> None:
        block = self._blocks[layer]
        now = saved_by(rates_N, block.plan.indices) if block.plan.indices else 0.0
        if not self._is_worth_it(count, split.saved, now):
            return
        block.plan = replace(block.plan, hot=tuple(split.neurons.tolist()))
        log.info(
            "step %d: layer %d leaves %d hot neurons to dense products, worth %.1f non-zeros",
            *(step, layer, len(split.neurons), split.saved),
        )

    def _is_worth_it(self, count: float, saved: float, present: float) -> bool:
        """Whether hot neurons that save `saved` of the layer's non-zeros should replace those that save `present`: by
        the predicted times, where they are known. Where hot neurons save most, a small part of that is a large part of
        what is left."""
        if self.costs is None:
            return clearly_better(saved, present)
        best, now = (self.costs.sparse_ms(max(0.0, count - one)) for one in (saved, present))
        return best < _WORTH_IT * now

    def _make_sparse(self, layer: int, backend: str, capacity: int) -> None:
        self._blocks[layer].plan = Plan(backend, (), (), self._config.capacity or capacity, self._config.backup or 0.0)

    def _fit_capacity(self, layer: int, count: float) -> None:
        """Raise the capacity at once, but lower it only if a quarter is enough; a configured one never shrinks."""
        block = self._blocks[layer]
        needed, present = capacity_for(count, _neurons(block)), block.plan.capacity
        if self._config.capacity is None and present is not None and (needed > present or 4 * needed <= present):
            block.plan = replace(block.plan, capacity=needed)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        return {
            "backends": self.backends,
            "capacities": self.capacities,
            "capacity": self._config.capacity,
            "hot_neurons": [list(block.plan.indices) for block in self._blocks],
            "retried_steps": self.retried_steps,
            "setting": self._setting and dataclasses.asdict(self._setting),
            "costs": self.costs and dataclasses.asdict(self.costs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the layers if options and machine still allow it, and the costs if the setting is the same. A
        configured capacity that has changed replaces the saved ones."""
        self.retried_steps = state["retried_steps"]
        if self._setting is not None and state["costs"] and Setting(**state["setting"]) == self._setting:
            self.costs = Costs(**state["costs"])
        chosen = self._config.capacity if self._config.capacity != state.get("capacity") else None
        layers = zip(self._blocks, state["backends"], state["capacities"], state["hot_neurons"], strict=True)
        for block, backend, capacity, hot in layers:
            possible = block.plan.backend if self._setting is None else self._setting.backend
            if backend == possible != DENSE:
                kept = tuple(hot) if self._config.hot_neurons else ()
                block.plan = Plan(backend, kept, (), chosen or capacity, self._config.backup or 0.0)


def _scaled_to(nonzeros: float, rates_N: Tensor) -> Tensor:
    """The rates rescaled so that they add up to these mean non-zeros: rates are measured on a few of a step's
    tokens."""
    return (rates_N * (nonzeros / rates_N.sum().clamp(min=1e-9))).clamp_(max=1.0)


def _neurons(block: FeedForward) -> int:
    return block.up_proj.weight.shape[0]
