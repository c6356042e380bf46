"""Training with transformers' Trainer: the L1 term and its schedule, statistics in the log, and autotuning."""

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from .checks import in_process_group
from .hot import firing_rates
from .modules import feed_forward_blocks, l1_penalty, pattern_layer
from .tuning import autotune, hooked

EXEMPT_EVERY = 25  # steps between two choices of exempt neurons
KEPT = 0.6  # weight of the earlier firing rates in each update of their moving average: about 0.98 for each step


@dataclass(frozen=True)
class L1Schedule:
    """The coefficient of the L1 term: 0 for `off` steps, then linear growth over `ramp` steps, then constant.

    exempt: the share of each block's neurons, those that fire most often, that pay none (`l1_weight` of the block).
    """

    coefficient: float
    off: int = 0
    ramp: int = 0
    exempt: float = 0.0

    def __post_init__(self) -> None:
        if not all(isinstance(value, int | float) and value >= 0 for value in astuple(self)) or self.exempt >= 1:
            raise ValueError(f"an L1 schedule needs numbers of at least 0, and exempt below 1, got {self}")

    def at(self, step: int) -> float:
        """The coefficient of a step, counted from 0."""
        if step < self.off:
            return 0.0
        return self.coefficient * min(1.0, (step - self.off + 1) / max(1, self.ramp))


class SparseTraining:
    """For a Trainer or a class derived from it (`class MyTrainer(SparseTraining, SFTTrainer)`): adds the L1 term to the
    loss in training, and logs `nonzeros`, mean non-zeros per token and block, and `l1`, the term without coefficient.

    l1: an `L1Schedule`, or a constant coefficient. The model needs blocks with keep_stats=True.
    """

    def __init__(self: Any, *arguments: Any, l1: L1Schedule | float = 0.0, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.l1 = l1 if isinstance(l1, L1Schedule) else L1Schedule(l1)
        self._rates: dict[nn.Module, Tensor] = {}
        self._exempted_in = -1

    def compute_loss(
        self: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        step = self.state.global_step
        period = step // EXEMPT_EVERY  # a resumed training begins within one
        if model.training and self.l1.exempt and period != self._exempted_in:
            self._exempted_in = period
            exempt_hottest(model, inputs, self.l1.exempt, self._rates)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        if model.training and (coefficient := self.l1.at(step)):
            penalty = coefficient * l1_penalty(model)
            # The Trainer's rule: losses that are already scaled to all accumulated batches are summed, others averaged.
            scaled = getattr(self, "loss_is_scaled_for_ga", None)  # transformers 5.17 has none
            if scaled is None:
                scaled = self.compute_loss_func or (self.model_accepts_loss_kwargs and num_items_in_batch is not None)
            if scaled:
                penalty = penalty / self.current_gradient_accumulation_steps
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Gives state from before `sparsify` the layout of the parameters, which fused optimizers need."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        states = getattr(self.optimizer, "state", {})  # some of DeepSpeed's have none
        for parameter in self.model.parameters():
            state = states.get(parameter, {})
            for name, value in state.items():
                same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
                if same_shape and value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)

    def log(self: Any, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        stats = [block.stats for block in feed_forward_blocks(self.model) if block.stats is not None]
        if stats:
            means = torch.stack([torch.stack((s.nonzeros.float().mean(), s.l1.detach())) for s in stats]).mean(0)
            logs |= dict(zip(("nonzeros", "l1"), means.tolist(), strict=True))
        super().log(logs, *arguments, **named)  # type: ignore[misc]


class SparseTrainer(SparseTraining, Trainer):
    """transformers' Trainer with `SparseTraining`."""


@torch.no_grad()
def exempt_hottest(model: nn.Module, inputs: dict[str, Any], share: float, rates: dict[nn.Module, Tensor]) -> None:
    """Run the model, add the firing rates of its blocks to their moving averages, and let the share of each block's
    neurons with the highest rates pay no L1 term from now on."""
    blocks = feed_forward_blocks(model)

    def measure(block: Any, x: Tensor) -> None:
        now = firing_rates(x, pattern_layer(block).weight)
        if in_process_group():  # all processes exempt the same neurons
            torch.distributed.all_reduce(now)
        rates[block] = torch.lerp(now, rates[block], KEPT) if block in rates else now
        hottest = rates[block].topk(round(share * len(now))).indices
        block.l1_weight = torch.ones_like(now).index_fill(0, hottest, 0.0)

    with hooked(blocks, measure), torch.compiler.set_stance("force_eager"):
        model(**inputs)


class AutotuneCallback(TrainerCallback):
    """Calls `autotune` on the latest inputs of the model every so many steps, not before the first of them; also at the
    second step after a resume from later ones. settings: those of `autotune`."""

    def __init__(self, every: int = 500, **settings: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.every, self.settings = every, settings
        self._inputs: tuple[tuple, dict[str, Any]] | None = None
        self._tuned_in = 0
        self._handle: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        feed_forward_blocks(model)  # raises for blocks whose forward was replaced, as Liger does

        def keep(_: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
            self._inputs = arguments, named

        self._handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        period = state.global_step // self.every
        if self._inputs is not None and period != self._tuned_in:
            self._tuned_in = period
            arguments, named = self._inputs
            autotune(model.train(), *arguments, **named, **self.settings)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._handle.remove()
        self._inputs, self._tuned_in = None, 0
