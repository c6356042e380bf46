"""Which feed-forward blocks of a training run dense and which sparse, and how much room the sparse ones have.

`sparsity.backend=auto` starts with dense blocks, since a young model is not sparse. At each logged step every layer's
mean non-zeros, which are known then anyway, are held against costs that were measured on this device before the first
step: a layer changes to the sparse backend, or back, when that is faster by a margin (hysteresis).

Of a sparse layer, the busiest neurons are left to dense products where that saves time (`kernels.hot`): what it saves
counts as fewer non-zeros. Firing rates drift, so the choice is looked at anew at logged steps, and changed when another
one is clearly better.

A sparse block has room for the non-zeros of one call; its outputs never depend on it, its gradients are of no use when
it was too little. So a step whose non-zeros exceeded it anywhere is repeated with more: the loss is that of unlimited
room. The room is a power of two, so that memory is of few sizes, and at least `HEADROOM` times the mean, since
micro-batches differ. With a dense backup (`sparsity.backup`) only the other tokens' non-zeros take room; those of hot
neurons, which take none either, are counted all the same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.run.distributed import Processes
from experiments.run.environment import device_name
from experiments.run.train_config import SparsityConfig, TrainConfig
from experiments.training.layer_costs import DENSE, Costs, Setting, measure_costs, sparse_backend
from kernels.hot import HotSplit, best_split, saved_by
from kernels.ops import CAPACITY

HEADROOM, LEAST_ROOM = 2, 64
RATE_TOKENS = 4096  # in each process, at a logged step
# Mean non-zeros below which no choice of hot neurons saves anything, so that rates are not measured.
WORTH_RATES = 25
# Another choice of hot neurons must save so many times as much, and so many non-zeros more: each is a new shape.
BETTER, BETTER_BY = 1.25, 1.0
_NO_SPLIT = HotSplit(torch.empty(0, dtype=torch.int64), 0.0)
log = logging.getLogger(__name__)


def room_for(nonzeros: float, intermediate: int) -> int:
    """The capacity of a block with this mean of non-zeros per token: a power of two, or all of its neurons."""
    return min(intermediate, max(LEAST_ROOM, 2 ** math.ceil(math.log2(max(1.0, HEADROOM * nonzeros)))))


def build_plan(config: TrainConfig, blocks: Sequence[nn.Module], group: Processes, micro_batch: int) -> LayerPlan:
    """The plan of a run whose micro-batches are of `micro_batch` sequences. All processes switch, or none does."""
    setting = None
    if config.sparsity.backend == "auto" and config.model.activation == "relu":
        setting = _setting(config, group.device, micro_batch * config.training.sequence_length)
        backends = {other and other.backend for other in group.gather(setting)}
        if len(backends) > 1:
            found = ", ".join(sorted(map(str, backends)))
            log.info("sparsity.backend=auto: every layer stays dense (not all processes have the same: %s)", found)
            setting = None
    return LayerPlan(blocks, config.sparsity, group, setting)


def _setting(config: TrainConfig, device: torch.device, tokens: int) -> Setting | None:
    """What costs are to be measured in; None (logged, with the reason) if no sparse backend can train here."""
    model, precision = config.model, config.training.precision
    sizes = (model.hidden_size, model.intermediate_size, model.gated)
    backend, reason = sparse_backend(device, getattr(torch, precision), *sizes)
    if backend is None:
        log.info("sparsity.backend=auto: every layer stays dense (%s)", reason)
        return None
    how = {"compiled": config.execution.compile, "backup": config.sparsity.backup}
    return Setting(backend, device_name(device), precision, tokens, *sizes, **how)


class LayerPlan:
    """Sets the backends and capacities of a model's blocks.

    Every process of a run has one, and all of them take the same decisions: they share the costs, the mean and the
    most non-zeros. `setting`: for switching, what costs are measured in; without it, all blocks stay what
    `config.backend` says ("auto": dense).
    """

    def __init__(
        self, blocks: Sequence[nn.Module], config: SparsityConfig, group: Processes, setting: Setting | None = None
    ) -> None:
        self._blocks, self._config, self._group, self._setting = blocks, config, group, setting
        self.costs: Costs | None = None
        self.repeated_steps = 0
        self._prepared = False
        for layer, block in enumerate(blocks):
            if config.backend not in ("auto", DENSE):
                # Nothing has been measured yet: room for everything.
                self._make_sparse(layer, config.backend, _neurons(block))

    def prepare(self) -> None:
        """Measure the costs, once in a process, unless a checkpoint brought them. The first process's count."""
        if self._setting is None or self._prepared:
            return
        self._prepared = True
        if self._group.agree(self.costs is None):
            self.costs = self._group.gather(measure_costs(self._setting, self._group.device))[0]
            log.info(
                "a block's forward and backward: dense %.3f ms, %s %.3f ms and %.4f ms for each mean non-zero; "
                "the break-even is at %.1f",
                *(self.costs.dense_ms, self._setting.backend, self.costs.fixed_ms, self.costs.per_nonzero_ms),
                self.costs.break_even,
            )

    @property
    def sparse(self) -> bool:
        """Whether any layer is."""
        return any(block.backend != DENSE for block in self._blocks)

    @property
    def backends(self) -> list[str]:
        """By layer."""
        return [block.backend for block in self._blocks]

    @property
    def capacities(self) -> list[int]:
        """By layer, in non-zeros per token; 0 for a dense one."""
        return [0 if block.backend == DENSE else block.capacity for block in self._blocks]

    @property
    def hot_neurons(self) -> list[int]:
        """By layer, how many are left to dense products."""
        return [0 if block.backend == DENSE or block.hot is None else len(block.hot) for block in self._blocks]

    def needs_rates(self, nonzeros: Sequence[float]) -> bool:
        """Whether `decide` should be given firing rates: some layer with these non-zeros could have hot neurons."""
        possible = self._config.hot_neurons and (self.costs is not None or self.sparse)
        return possible and max(nonzeros) >= WORTH_RATES

    def decide(self, step: int, nonzeros: Sequence[float], rates: Sequence[Tensor] | None = None) -> None:
        """Switch layers, and fit their room, for these mean non-zeros per token in `step`.

        rates: by layer, how often each neuron fires, [N], the same in all processes; None: not known.
        """
        for layer, count in enumerate(nonzeros):
            # On the CPU: running sums on a GPU may differ in the last bit, and with them the processes' decisions.
            rates_N = None if rates is None else _that_add_up_to(count, rates[layer].cpu())
            split = _NO_SPLIT if rates_N is None else best_split(rates_N)
            if self.costs is not None:
                self._choose(step, layer, count, count - split.saved)
            if self._blocks[layer].backend != DENSE:
                self._fit_room(layer, count)
                if rates_N is not None:
                    self._choose_hot(step, layer, split, rates_N)

    def make_room(self, step: int, most_nonzeros: Sequence[int], tokens: int) -> bool:
        """Whether `step` must be repeated: some layer had more non-zeros than room in a call. It has room for them now.

        most_nonzeros: that took room, in any one call of the step, by layer, in any process; a call has `tokens`
        tokens.
        """
        short = []
        for layer, (block, count) in enumerate(zip(self._blocks, most_nonzeros, strict=True)):
            if block.backend == DENSE or count <= block.capacity * tokens:
                continue
            before, block.capacity = block.capacity, room_for(math.ceil(count / tokens), _neurons(block))
            short.append(f"layer {layer} had {count / tokens:.1f} and room for {before}, now for {block.capacity}")
        if short:
            self.repeated_steps += 1
            log.info("step %d is repeated, for its non-zeros per token: %s", step, "; ".join(short))
        return bool(short)

    def _choose(self, step: int, layer: int, count: float, to_pay: float) -> None:
        """For the mean non-zeros, and those that a sparse block pays for where hot neurons are split off."""
        block, costs = self._blocks[layer], self.costs
        was_sparse = block.backend != DENSE
        share = self._config.to_dense_above if was_sparse else self._config.to_sparse_below
        sparse = to_pay < share * costs.break_even
        if sparse == was_sparse:
            return
        if sparse:
            self._make_sparse(layer, self._setting.backend, room_for(count, _neurons(block)))
        else:
            # A capacity that dense blocks share: torch.compile looks at it all the same.
            block.backend, block.capacity, block.hot, block.backup = DENSE, CAPACITY, None, None
        log.info(
            "step %d: layer %d runs %s from now on: %.1f non-zeros, predicted %.3f ms dense and %.3f ms sparse",
            *(step, layer, block.backend, count, costs.dense_ms, costs.sparse_ms(to_pay)),
        )

    def _choose_hot(self, step: int, layer: int, split: HotSplit, rates_N: Tensor) -> None:
        block = self._blocks[layer]
        now = 0.0 if block.hot is None else saved_by(rates_N, block.hot.cpu())
        if now >= 0 and split.saved < max(BETTER * now, now + BETTER_BY):
            return
        block.hot = split.neurons.to(block.up_proj.weight.device) if len(split.neurons) else None
        log.info(
            "step %d: layer %d leaves %d hot neurons to dense products, worth %.1f non-zeros",
            *(step, layer, len(split.neurons), split.saved),
        )

    def _make_sparse(self, layer: int, backend: str, room: int) -> None:
        block = self._blocks[layer]
        block.backend, block.capacity, block.backup = backend, self._config.capacity or room, self._config.backup

    def _fit_room(self, layer: int, count: float) -> None:
        """More room at once, less only where a quarter is enough; a configured capacity only ever grows."""
        block = self._blocks[layer]
        room = room_for(count, _neurons(block))
        if self._config.capacity is None and (room > block.capacity or 4 * room <= block.capacity):
            block.capacity = room

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON values."""
        return {
            "backends": self.backends,
            "capacities": self.capacities,
            "capacity": self._config.capacity,
            "hot_neurons": [
                block.hot.tolist() if n else [] for block, n in zip(self._blocks, self.hot_neurons, strict=True)
            ],
            "repeated_steps": self.repeated_steps,
            "setting": self._setting and dataclasses.asdict(self._setting),
            "costs": self.costs and dataclasses.asdict(self.costs),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with the layers as they were, if the options and the machine still allow it; with the costs, if the
        setting is the same. Another configured capacity than before takes the place of theirs."""
        self.repeated_steps = state["repeated_steps"]
        if self._setting is not None and state["costs"] and Setting(**state["setting"]) == self._setting:
            self.costs = Costs(**state["costs"])
        chosen = self._config.capacity if self._config.capacity != state.get("capacity") else None
        layers = zip(self._blocks, state["backends"], state["capacities"], state["hot_neurons"], strict=True)
        for block, backend, capacity, hot in layers:
            possible = block.backend if self._setting is None else self._setting.backend
            if backend == possible != DENSE:
                block.backend, block.capacity, block.backup = backend, chosen or capacity, self._config.backup
                if hot and self._config.hot_neurons:
                    block.hot = torch.tensor(hot, device=block.up_proj.weight.device)


def _that_add_up_to(nonzeros: float, rates_N: Tensor) -> Tensor:
    """The rates of all of a step's tokens, from those of the few that were measured."""
    return (rates_N * (nonzeros / rates_N.sum().clamp(min=1e-9))).clamp_(max=1.0)


def _neurons(block: nn.Module) -> int:
    return block.up_proj.weight.shape[0]
