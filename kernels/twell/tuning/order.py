"""Sorts a block's neurons by how often they fire, which does not change the function that it computes.

With the most active neurons in front, hot neurons are a prefix: slices of the weights, which no call has to copy.
Shapes: M tokens, K hidden, N intermediate.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..hot import MULTIPLE, RATE, firing_rates
from ..modules import SparseFeedForward, feed_forward_blocks, weights_of
from .saved import forget_plans

RATES = (RATE / 2, RATE, 2 * RATE)  # firing rates from which on neurons are tried as hot ones
# Firing rates up to which neurons are tried as screened ones: of trained blocks half of the neurons or more, for which
# the bound leaves a few entries a token. The least that firing_rates can tell of 8,192 tokens is a quarter of it.
RARE = 5e-4
KEPT_MULTIPLE = 64  # of the neurons that are kept where silent ones are left out
BlockWeights = tuple[Tensor | None, Tensor, Tensor]  # w_gate, w_up, w_down as `sparse_ffn` takes them


class FiringOrder(NamedTuple):
    """neurons: int64 [N], a permutation: most active first, those that never fired last. prefixes: numbers of neurons
    in front to try as hot ones, ascending, neither 0 nor N. kept: how many, in front, remain where the silent ones are
    left out (`kept_count`). rare: how many, behind all prefixes, have a rate of at most RARE."""

    neurons: Tensor
    prefixes: tuple[int, ...]
    kept: int
    rare: int

    def reordered(self, weights: BlockWeights) -> BlockWeights:
        """Copies of the weights with the neurons in this order, the down weights neuron-major."""
        gate, up, down = weights
        order = self.neurons
        return None if gate is None else gate[order], up[order], down.t()[order].t()


@torch.no_grad()
def firing_order(x: Tensor, w_gate: Tensor, fired: Tensor) -> FiringOrder:
    """The order of a block's neurons on representative inputs, of which the rates are measured as `firing_rates` does.

    x: [..., K]; w_gate: [N, K] (w_up of a non-gated block); fired: bool [N], over all of x, as in `FFNStats`: a neuron
    that the sample of `firing_rates` misses is not silent. Waits for the device.
    """
    rates = firing_rates(x, w_gate)
    order = torch.where(fired, rates, -1).argsort(descending=True, stable=True)
    # Rounded up: a cold neuron among the hot ones costs little, a hot one among the cold a gather for many tokens.
    counts = {-(-int((rates > rate).sum()) // MULTIPLE) * MULTIPLE for rate in RATES}
    prefixes = sorted(count for count in counts if 0 < count < len(rates))
    rare = min(int((rates <= RARE).sum()), len(rates) - max(prefixes, default=0))
    return FiringOrder(order, tuple(prefixes), kept_count(fired, KEPT_MULTIPLE), rare)


def kept_count(fired: Tensor, multiple: int) -> int:
    """How many neurons remain where silent ones are left out: all that fired, bool [N], and as many more as make such a
    multiple (at most N)."""
    return min(len(fired), max(1, -(-int(fired.sum()) // multiple)) * multiple)


@torch.no_grad()
def order_neurons(block: SparseFeedForward, order: Tensor) -> None:
    """Move neuron order[i] to index i in all of the block's weights, in place. The block computes the same function, up
    to rounding, and its state dict remains an ordinary one. `restore_order` undoes it.

    order: int64 [N], a permutation, on the weights' device. The plan's hot and screened neurons are reset. Other data
    that are indexed by neuron, such as `l1_weight` and an optimizer's state, must be reordered by the caller, so order
    a block before you create its optimizer; and weights that another module uses too must not be reordered, which a
    block cannot see. Raises ValueError if `order` is not a permutation, for weights that have gradients, and for
    weights that are not separate, plain parameters.
    """
    weights = [weight for weight in weights_of(block) if weight is not None]
    if any(type(weight) is not nn.Parameter for weight in weights) or len(set(map(id, weights))) < len(weights):
        raise ValueError(
            "the block's weights must be separate, plain parameters, got tied or parametrized ones, or DTensors"
        )
    neurons = len(block.up_proj.weight)
    if not isinstance(order, Tensor) or order.dtype != torch.int64:
        raise ValueError(f"order must be an int64 tensor, got {getattr(order, 'dtype', type(order).__name__)}")
    if order.shape != (neurons,) or not torch.equal(order.sort().values, torch.arange(neurons, device=order.device)):
        raise ValueError(f"order must be a permutation of the {neurons} neurons, got {list(order.shape)} numbers")
    if any(weight.grad is not None for weight in weights):
        raise ValueError("the block's weights have gradients, which go by neurons: set them to None first")
    block.plan = replace(block.plan, hot=0, screened=0)
    with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
        before = neuron_order(block)
        now = order.clone() if before is None else before[order]
    by_neuron = [weight.t() if weight is block.down_proj.weight else weight for weight in weights]
    moved = [weight.index_select(0, order) for weight in by_neuron]  # all before any changes: memory may run out
    for weight, rows in zip(by_neuron, moved, strict=True):
        weight.copy_(rows)  # in place, which increases the weight's version
    block._order = now


@torch.no_grad()
def restore_order(model: nn.Module) -> None:
    """Undo every `order_neurons` on the model's blocks, or on a block itself; their plans then name no neurons.

    Blocks that were not reordered stay unchanged. The order is not part of a state dict: a loaded model has its neurons
    in the order in which they were saved, so load into a reordered block only what was saved in the same order.
    """
    for block in feed_forward_blocks(model):
        if (order := neuron_order(block)) is not None:
            order_neurons(block, order.argsort())
            block._order = None
    forget_plans(model)  # they refer to the other order


def neuron_order(block: SparseFeedForward) -> Tensor | None:
    """The order that `order_neurons` gave the block: int64 [N], in place i the neuron that was at order[i] at first;
    None where the neurons are in their own order."""
    return block._by_neuron("_order", block.up_proj.weight.device)


def can_be_ordered(model: nn.Module, block: SparseFeedForward) -> bool:
    """Whether, as far as can be seen, nothing else depends on the order of the block's neurons: it is not in training
    mode, has no weights of the L1 term, and its weights are plain parameters that no other module of the model uses."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    if block.training or block.l1_weight is not None:
        return False
    weights = [weight for weight in weights_of(block) if weight is not None]
    return all(type(weight) is nn.Parameter and uses[id(weight)] == 1 and weight.grad is None for weight in weights)
