"""The loss and the gradients of a training step, shared by `train` and the benchmark of training.

Shapes: B sequences, S positions, K hidden, V vocabulary.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from experiments.models.llama import FeedForward, activation_weight, compile_layers, feed_forward_blocks
from twell import hot


class LossModel(nn.Module):
    """The model with its loss: tokens int64 [B, S + 1] -> (cross-entropy, L1 term), float32 scalars.

    Cross-entropy is in nats, the mean over tokens. The L1 term is the mean over layers of `FFNStats.l1` (mean over
    tokens of the sum over neurons of |h|), before its coefficient. It is 0, without a gradient, while the blocks keep
    no statistics.
    """

    def __init__(self, model: LlamaForCausalLM, *, precision: str = "bfloat16") -> None:
        super().__init__()
        self.model = model
        self._autocast = precision == "bfloat16"
        self._cross_entropy_of = self._cross_entropy

    def compile_parts(self) -> None:
        """Compile each layer and the loss with torch.compile. Call this before `recompute_activations`.

        Layers are compiled separately because they are alike: all of them share the compiled code of one, and when a
        layer changes its backend, only that layer is compiled again.
        """
        compile_layers(self.model)
        self._cross_entropy_of = torch.compile(self._cross_entropy, dynamic=False)

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        inputs_BS, targets_BS = tokens_BS[:, :-1], tokens_BS[:, 1:]
        with torch.autocast(tokens_BS.device.type, torch.bfloat16, enabled=self._autocast):
            hidden_BSK = self.model.model(input_ids=inputs_BS, use_cache=False).last_hidden_state
        cross_entropy = self._cross_entropy_of(hidden_BSK, targets_BS)
        terms = [block.stats.l1 for block in feed_forward_blocks(self.model) if block.stats is not None]
        if not terms:
            return cross_entropy, torch.zeros_like(cross_entropy)
        return cross_entropy, torch.stack(terms).mean()

    def _cross_entropy(self, hidden_BSK: Tensor, targets_BS: Tensor) -> Tensor:
        with torch.autocast(hidden_BSK.device.type, torch.bfloat16, enabled=self._autocast):
            logits_BSV = self.model.lm_head(hidden_BSK)
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten())


@torch.no_grad()
def firing_rates(loss_model: LossModel, tokens_BS: Tensor) -> list[Tensor]:
    """For each layer, the share of these tokens for which each neuron fires: float32 [N].

    Runs the model uncompiled, since compiled code does not call the hooks that capture the blocks' inputs.
    """
    blocks, found = feed_forward_blocks(loss_model.model), []

    def note(block: FeedForward, arguments: tuple[Tensor, ...]) -> None:
        found.append(hot.firing_rates(arguments[0], activation_weight(block)))

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(note))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        loss_model(tokens_BS)
    return found


def total_loss(cross_entropy: Tensor, l1: Tensor, coefficient: float) -> Tensor:
    """The loss to differentiate. With a coefficient of 0, the L1 term is not part of the backward pass."""
    return cross_entropy + coefficient * l1 if coefficient else cross_entropy
