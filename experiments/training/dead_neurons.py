"""Records which neurons are active in an optimizer step, and reinitialises those that are not.

A neuron is dead if it is active for no token of an optimizer step, in all micro-batches of all processes. Everything
stays on the device; only reading the numbers waits for it.

Shapes: L layers, N neurons, K hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.models.llama import FeedForward, activation_weight
from experiments.run.distributed import Processes
from twell import FFNStats


class Activity:
    """Counts of one optimizer step: `add` after each micro-batch, `share` at the end, `clear` before the next."""

    def __init__(self, layers: int, neurons: int, device: torch.device) -> None:
        self.fired_LN = torch.zeros(layers, neurons, dtype=torch.bool, device=device)
        self._nonzeros_L = torch.zeros(layers, dtype=torch.float64, device=device)
        self._tokens = 0

    def clear(self) -> None:
        self.fired_LN.zero_()
        self._nonzeros_L.zero_()
        self._tokens = 0

    def add(self, stats: Sequence[FFNStats]) -> None:
        """Count one micro-batch, from the statistics of every layer."""
        self.fired_LN |= torch.stack([layer.fired for layer in stats if layer.fired is not None])
        nonzeros_LM = torch.stack([layer.nonzeros.flatten() for layer in stats if layer.nonzeros is not None])
        self._nonzeros_L += nonzeros_LM.sum(1)
        self._tokens += nonzeros_LM.shape[1]

    def share(self, processes: Processes) -> None:
        """Combine the counts of all processes."""
        processes.any(self.fired_LN)
        processes.sum(self._nonzeros_L)
        self._tokens *= processes.count

    def nonzeros(self) -> list[float]:
        """Mean non-zeros per token, per layer. Waits for the device."""
        return (self._nonzeros_L / self._tokens).tolist()

    def dead_fraction(self) -> list[float]:
        """Share of the neurons that were dead, per layer. Waits for the device."""
        return (~self.fired_LN).double().mean(1).tolist()


class Reinitialiser:
    """Mitigation (a) of the paper: after each step, for every dead neuron j of a layer,

        Wg[:, j] <- (1 - strength) Wg[:, j] + strength * Normal(0, std^2)

    on the gate (or on the up projection of a block without a gate). The draws come from a separate generator, the same
    in every process, whose state is saved in checkpoints.
    """

    def __init__(self, blocks: Sequence[FeedForward], *, strength: float, std: float, seed: int) -> None:
        self._weights_NK = [activation_weight(block) for block in blocks]
        self._strength, self._std, self._seed = strength, std, seed
        self.generator = torch.Generator(self._weights_NK[0].device).manual_seed(seed)

    def restore(self, state: Tensor, step: int) -> None:
        """Restore the generator's state from a checkpoint of `step`. Generators of a CPU and a GPU have incompatible
        states, so on another kind of device the draws are new."""
        if state.shape == self.generator.get_state().shape:
            self.generator.set_state(state)
        else:
            self.generator.manual_seed(self._seed + step)

    @torch.no_grad()
    def apply(self, fired_LN: Tensor) -> None:
        """Reinitialise the neurons that are False in `fired_LN` (bool). The weights of all others stay
        bit-identical."""
        for weight_NK, fired_N in zip(self._weights_NK, fired_LN, strict=True):
            draw_NK = torch.empty_like(weight_NK).normal_(0.0, self._std, generator=self.generator)
            moved_NK = torch.lerp(weight_NK, draw_NK, self._strength)
            weight_NK.copy_(torch.where(fired_N[:, None], weight_NK, moved_NK))
