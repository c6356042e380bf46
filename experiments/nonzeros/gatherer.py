"""Counts what every feed-forward block of a model does."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from experiments.models.llama import FeedForward, SiluFeedForward, activation_weight, feed_forward_blocks, nonzeros_of
from experiments.nonzeros.counters import LayerActivity, MaskRecorder
from experiments.run.errors import RunError

# The hooks and the block compute the same gate; where a backend sums in another order, a value next to zero may fall
# on the other side.
COUNT_TOLERANCE = 1e-3


class Gatherer:
    """Counts what every feed-forward block of a model does, through hooks that change no result."""

    def __init__(self, model: nn.Module, vocabulary: int, sequence: int, groups: list[int], mask_tokens: int):
        self.blocks = feed_forward_blocks(model)
        self.masks = MaskRecorder(mask_tokens)
        self.token_count_V = torch.zeros(vocabulary, dtype=torch.int64)
        device = self.blocks[0].up_proj.weight.device
        sizes = (vocabulary, sequence, groups, device)
        self.layers = [LayerActivity(block.up_proj.out_features, *sizes) for block in self.blocks]
        self._differing = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, model: PreTrainedModel, ids_BS: Tensor) -> None:
        """Run the model's decoder on one batch of tokens (on its device) and count."""
        self.masks.add_tokens(ids_BS)
        self.token_count_V += torch.bincount(ids_BS.flatten(), minlength=len(self.token_count_V)).cpu()

        def count(index: int, block: FeedForward, arguments: tuple[Tensor, ...], _: Tensor) -> None:
            active_BSN = block_activity(block, arguments[0])
            count_BS = self.layers[index].add(active_BSN, ids_BS)
            self.masks.add(index, active_BSN)
            self._differing.add_((count_BS - nonzeros_of(block)).abs().sum())

        with contextlib.ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.enter_context(block.register_forward_hook(functools.partial(count, index)))
            model.base_model(ids_BS, use_cache=False)

    def check(self) -> float:
        """Sum of |difference| between these counts and `FFNStats.nonzeros` of the same forwards, over all non-zeros.

        Raises:
            RunError: if it is more than values next to zero explain.
        """
        total = sum(int(layer.fired_N.sum()) for layer in self.layers)
        error = int(self._differing) / max(total, 1)
        if error > COUNT_TOLERANCE:
            raise RunError(f"the counts differ from the blocks' own statistics by {error:.2%} of {total} non-zeros")
        return error


def block_activity(block: FeedForward, x_BSK: Tensor) -> Tensor:
    """Which neurons of a feed-forward block fire for x: bool [B, S, N]; gate (or up, if non-gated) not zero after its
    activation."""
    activation = F.silu if isinstance(block, SiluFeedForward) else F.relu
    return activation(F.linear(x_BSK, activation_weight(block))) != 0
