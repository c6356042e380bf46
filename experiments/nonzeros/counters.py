"""Counts exactly which neurons fire over a stream of batches, with integers on the device and bounded memory.

Shape suffixes: B sequences, S positions, N neurons (intermediate size), V vocabulary, G group sizes, W windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy
import torch

# The most active tenth of the neurons: what `hot_share` is about.
HOT_FRACTION = 0.1
# Tokens over which a neuron that never fires counts as dead; windows that the text does not fill are left out. The
# paper has one optimizer step, 2^20.
DEAD_WINDOWS = (2**15, 2**17, 2**20)


class DeadCounter:
    """How many neurons fire for none of `window` consecutive tokens, over windows that do not overlap."""

    def __init__(self, window: int, intermediate: int, device: torch.device | str):
        self.window, self.windows = window, 0
        self._tokens = 0  # of the window that is being filled
        self._fired_N = torch.zeros(intermediate, dtype=torch.bool, device=device)
        self._dead = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, active_TN: torch.Tensor) -> None:
        """The next tokens of the text."""
        while len(active_TN):
            part_TN, active_TN = active_TN.tensor_split([self.window - self._tokens])
            self._fired_N |= part_TN.any(0)
            self._tokens += len(part_TN)
            if self._tokens == self.window:
                self._dead += (~self._fired_N).sum()
                self._fired_N.zero_()
                self._tokens, self.windows = 0, self.windows + 1

    def fraction(self) -> float:
        """Mean share of dead neurons over all whole windows, of which there must be one."""
        return int(self._dead) / self.windows / len(self._fired_N)


class LayerActivity:
    """Counters of one layer. `add` batches, then read; every count is exact (int64)."""

    def __init__(
        self, intermediate: int, vocabulary: int, sequence: int, groups: Sequence[int], device: torch.device | str
    ):
        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.tokens = 0
        self.groups = tuple(sorted(groups))
        self.histogram_N1 = zeros(intermediate + 1)
        self.fired_N = zeros(intermediate)
        self.position_S = zeros(sequence)
        self.position_tokens_S = zeros(sequence)
        self.token_V = zeros(vocabulary)
        self.union_G = zeros(len(self.groups))
        self.windows_G = [0] * len(self.groups)
        self.dead = [DeadCounter(window, intermediate, device) for window in DEAD_WINDOWS]

    @torch.no_grad()
    def add(self, active_BSN: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
        """Count one batch.

        Args:
            active_BSN: bool, whether the neuron fired for the token.
            ids_BS: int64, the tokens.

        Returns:
            Non-zeros per token, int64 [B, S].
        """
        batch, sequence, _ = active_BSN.shape
        count_BS = active_BSN.sum(-1)
        self.tokens += batch * sequence
        self.histogram_N1 += torch.bincount(count_BS.flatten(), minlength=len(self.histogram_N1))
        self.fired_N += active_BSN.sum((0, 1))
        self.position_S[:sequence] += count_BS.sum(0)
        self.position_tokens_S[:sequence] += batch
        self.token_V.index_add_(0, ids_BS.flatten(), count_BS.flatten())
        self._add_unions(active_BSN)
        for counter in self.dead:
            counter.add(active_BSN.flatten(0, 1))
        return count_BS

    def _add_unions(self, active_BSN: torch.Tensor) -> None:
        """Neurons active anywhere in a window of consecutive tokens; windows do not cross sequences."""
        union_BWN, width = active_BSN, 1
        for index, group in enumerate(self.groups):
            windows = active_BSN.shape[1] // group
            if not windows:
                return
            # A window of 32 is the union of two windows of 16: build on the smaller one where it divides.
            source_BWN, step = (union_BWN, group // width) if group % width == 0 else (active_BSN, group)
            union_BWN = source_BWN[:, : windows * step].unflatten(1, (windows, step)).any(2)
            width = group
            self.union_G[index] += union_BWN.sum()
            self.windows_G[index] += windows * len(active_BSN)

    def mean(self) -> float:
        """Mean non-zeros per token."""
        return int(self.fired_N.sum()) / self.tokens

    def quantiles(self, shares: Sequence[float]) -> list[int]:
        """Smallest counts that at least the given shares of all tokens do not exceed (exact, from the histogram)."""
        cumulative_N1 = self.histogram_N1.cumsum(0)
        wanted = torch.tensor([math.ceil(share * self.tokens) for share in shares], device=cumulative_N1.device)
        return torch.searchsorted(cumulative_N1, wanted).tolist()

    def maximum(self) -> int:
        return int(self.histogram_N1.nonzero().max())

    def silent_fraction(self) -> float:
        """Share of the neurons that never fired."""
        return float((self.fired_N == 0).double().mean())

    def hot_share(self) -> float | None:
        """Share of all non-zeros that the most active tenth of the neurons carries; None if nothing fired."""
        hot = max(1, round(HOT_FRACTION * len(self.fired_N)))
        total = int(self.fired_N.sum())
        return int(self.fired_N.topk(hot).values.sum()) / total if total else None

    def unions(self) -> dict[int, float]:
        """Group size -> mean number of neurons active anywhere in a group of that many consecutive tokens."""
        means = zip(self.groups, self.union_G.tolist(), self.windows_G, strict=True)
        return {group: union / windows for group, union, windows in means if windows}


class MaskRecorder:
    """Keeps which neurons fire for the first `tokens` tokens, bit-packed on the host (N/8 bytes a token and layer)."""

    def __init__(self, tokens: int):
        self._wanted = tokens
        self._packed: dict[int, list[numpy.ndarray]] = {}
        self._ids: list[numpy.ndarray] = []
        self._positions: list[numpy.ndarray] = []

    def add_tokens(self, ids_BS: torch.Tensor) -> None:
        """Keep the tokens themselves of the part of this batch that is still wanted."""
        room = self._wanted - sum(map(len, self._ids))
        if room > 0:
            batch, sequence = ids_BS.shape
            self._ids.append(ids_BS.flatten()[:room].cpu().numpy())
            self._positions.append(numpy.tile(numpy.arange(sequence), batch)[:room])

    def add(self, layer: int, active_BSN: torch.Tensor) -> None:
        """Keep the part of this batch that is still wanted."""
        room = self._wanted - sum(map(len, self._packed.get(layer, [])))
        if room > 0:
            rows_TN = active_BSN.flatten(0, 1)[:room].cpu().numpy()
            self._packed.setdefault(layer, []).append(numpy.packbits(rows_TN, axis=1))

    def tokens(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Ids of the tokens, and their positions in their sequences: int64 [tokens]; a position of 0 begins one."""
        empty = numpy.zeros(0, dtype=numpy.int64)
        return numpy.concatenate([empty, *self._ids]), numpy.concatenate([empty, *self._positions])

    def masks(self) -> Mapping[int, numpy.ndarray]:
        """Layer -> uint8 [tokens, ceil(N/8)]: `numpy.unpackbits(..., axis=1)[:, :N]` gives the neurons."""
        return {layer: numpy.concatenate(parts) for layer, parts in sorted(self._packed.items())}
