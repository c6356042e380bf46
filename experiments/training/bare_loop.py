"""A training loop of plain torch, to compare ours with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.models.llama import FeedForward, build_model
from experiments.run.train_config import SparsityConfig, TrainConfig
from experiments.training.optimizer import build_optimizer, l1_coefficient, learning_rate, set_learning_rate


class BareFeedForward(nn.Module):
    """The block as one would write it in torch, with the L1 term and nothing else."""

    def __init__(self, block: FeedForward, config: SparsityConfig) -> None:
        super().__init__()
        self.with_l1, self.l1_reduction = config.l1 > 0, config.l1_reduction
        self.gate_proj, self.up_proj, self.down_proj = block.gate_proj, block.up_proj, block.down_proj
        self.l1: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up_proj(x)) if self.gate_proj is None else F.relu(self.gate_proj(x)) * self.up_proj(x)
        if self.with_l1:
            magnitude = h.abs()
            over_neurons = magnitude.mean if self.l1_reduction == "mean" else magnitude.sum
            self.l1 = over_neurons(-1, dtype=torch.float32).mean()
        return self.down_proj(h)


class BareLoop:
    """A training loop without anything that is not needed to train."""

    def __init__(self, config: TrainConfig, batches: list[list[Tensor]], device: torch.device) -> None:
        self._config, self._batches, self._device = config, batches, device
        self._model = build_model(config.model, seed=config.training.seed, device=device)
        for layer in self._model.model.layers:
            layer.mlp = BareFeedForward(layer.mlp, config.sparsity)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self.losses: list[Tensor] = []

    def step(self, index: int) -> None:
        """The `index`-th optimizer step, from 0."""
        config = self._config
        coefficient = l1_coefficient(config.sparsity, index)
        total = torch.zeros((), device=self._device)
        for tokens in self._batches[index]:
            cross_entropy = self._cross_entropy(tokens)
            loss = cross_entropy
            if coefficient:
                loss = loss + coefficient * torch.stack([layer.mlp.l1 for layer in self._model.model.layers]).mean()
            (loss / len(self._batches[index])).backward()
            total += cross_entropy.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), config.optimizer.max_grad_norm)
        set_learning_rate(self._optimizer, learning_rate(config.optimizer, index, config.training.steps))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(total / len(self._batches[index]))

    def _cross_entropy(self, tokens: Tensor) -> Tensor:
        enabled = self._config.training.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=enabled):
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
