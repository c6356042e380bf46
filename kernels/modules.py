"""The feed-forward block as an nn.Module."""

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from .capacity import CapacityGrowth
from .interface import RELU
from .memory import neuron_major
from .ops import (
    CAPACITY,
    FFNStats,
    call,
    check_activation,
    check_backup,
    check_capacity,
    check_hot,
    check_prefix,
    check_stats,
)
from .registry import check_name

logger = logging.getLogger(__name__)
SPARE = 1.25  # room that a raised capacity has beyond what was needed


class SparseFeedForward(nn.Module):
    """y = (relu(gate_proj(x)) * up_proj(x)) down_proj; with gated=False, y = relu(up_proj(x)) down_proj. No biases.
    With activation="relu2", relu is squared (see `sparse_ffn`).

    The submodules have Hugging Face's names and layout, so state dicts are interchangeable. forward(x) takes
    [..., hidden_size] and returns the same shape (see `sparse_ffn` for dtypes, autocast and errors).

    `.stats` is the FFNStats of the latest forward, None before the first. Its l1 carries the autograd graph, so read
    it before the next forward. It is the module's only state: not in the state dict, nor in copies and pickles.
    `.backend`, `.stats_mode` ("full" or "none"), `.capacity`, `.hot` and `.backup` may be set at any time; ValueError
    for what cannot be.

    A call whose non-zeros exceed `.capacity` has exact gradients too, by dense products. The module then raises
    `.capacity` for its next call, unless `.capacity_grows` is False or the module is compiled by torch.compile.
    """

    capacity_grows = True
    _order: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        gated: bool = True,
        *,
        activation: str = RELU,
        backend: str = "dense",
        stats: str = "full",
        capacity: int = CAPACITY,
        backup: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        self._activation = activation
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        self.gate_proj = linear(hidden_size, intermediate_size) if gated else None
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)
        self.backend = backend
        self.stats_mode = stats
        self.capacity = capacity
        self.backup = backup
        self.register_buffer("_hot", None, persistent=False)
        self.register_buffer("_order", None, persistent=False)  # place -> original place, see ordering.py
        self._hot_prefix = self._silent_suffix = 0
        self.stats: FFNStats | None = None
        self._growth = CapacityGrowth()

    @classmethod
    def from_linears(
        cls, gate_proj: nn.Linear | None, up_proj: nn.Linear, down_proj: nn.Linear, **settings: Any
    ) -> "SparseFeedForward":
        """The block around existing linear layers: the same parameters, no copies."""
        intermediate_size, hidden_size = up_proj.weight.shape
        block = cls(hidden_size, intermediate_size, gated=gate_proj is not None, device="meta", **settings)
        block.gate_proj, block.up_proj, block.down_proj = gate_proj, up_proj, down_proj
        return block.train(up_proj.training)

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    @property
    def activation(self) -> str:
        """ "relu" or "relu2"; part of the function that the block computes, and therefore fixed."""
        return self._activation

    @property
    def backend(self) -> str:
        return self._backend

    @backend.setter
    def backend(self, name: str) -> None:
        check_name(name)
        self._backend = name

    @property
    def stats_mode(self) -> str:
        return self._stats_mode

    @stats_mode.setter
    def stats_mode(self, mode: str) -> None:
        check_stats(mode)
        self._stats_mode = mode

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, nonzeros: int) -> None:
        check_capacity(nonzeros)
        self._capacity = nonzeros

    @property
    def backup(self) -> float | None:
        """Share of a training call's tokens that are computed densely, see `sparse_ffn`; None: the backend's plan."""
        return self._backup

    @backup.setter
    def backup(self, share: float | None) -> None:
        check_backup(share)
        self._backup = share

    @property
    def hot(self) -> Tensor | None:
        """The neurons that sparse backends leave to dense products, see `sparse_ffn`; None: none."""
        return self._hot

    @hot.setter
    def hot(self, neurons: Tensor | None) -> None:
        if neurons is not None:
            check_hot(neurons, self.up_proj.weight.device)
            count = self.up_proj.weight.shape[0]
            distinct = neurons.unique()
            if len(distinct) != len(neurons) or ((distinct < 0) | (distinct >= count)).any():
                raise ValueError(f"hot must hold distinct neurons from 0 to {count - 1}")
            if self._silent_suffix:
                raise ValueError("a block that leaves neurons out takes its hot neurons by hot_prefix")
            self._hot_prefix = 0
        self._hot = neurons

    @property
    def hot_prefix(self) -> int:
        """How many neurons, from the first on, sparse backends leave to dense products, see `sparse_ffn`. Setting it
        takes `hot` back."""
        return self._hot_prefix

    @hot_prefix.setter
    def hot_prefix(self, count: int) -> None:
        check_prefix("hot_prefix", count, self.up_proj.weight.shape[0] - self._silent_suffix)
        self._hot_prefix, self._hot = count, self._hot if count == 0 else None

    @property
    def silent_suffix(self) -> int:
        """How many neurons, at the end, are left out as if they never fired. The block computes another function where
        they do. 0 brings them back, as does loading a state dict."""
        return self._silent_suffix

    @silent_suffix.setter
    def silent_suffix(self, count: int) -> None:
        neurons = self.up_proj.weight.shape[0]
        check_prefix("silent_suffix", count, neurons - max(self._hot_prefix, 1))
        if count and self._hot is not None:
            raise ValueError("a block whose hot neurons are given by indices cannot leave a suffix out: use hot_prefix")
        self._silent_suffix = count

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        # What is loaded may have its neurons in another order, so that others would be left out.
        if self._silent_suffix:
            logger.warning("a state dict is loaded: %d neurons that were left out are back", self._silent_suffix)
        self._silent_suffix = 0
        super()._load_from_state_dict(*arguments, **named)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj.weight if self.gate_proj is not None else None
        up, down = self.up_proj.weight, self.down_proj.weight
        if silent := self._silent_suffix:
            kept = up.shape[0] - silent
            gate, up, down = None if gate is None else gate[:kept], up[:kept], down[:, :kept]
        if not torch.compiler.is_compiling():
            self._grow()
        y, stats = call(
            *(x, gate, up, down),
            activation=self._activation,
            backend=self.backend,
            stats=self.stats_mode,
            capacity=self.capacity,
            hot=self._hot,
            hot_prefix=self._hot_prefix,
            backup=self._backup,
            growth=self._growth,
        )
        if silent and stats.fired is not None:
            stats = stats._replace(fired=torch.cat((stats.fired, stats.fired.new_zeros(silent))))
        self.stats = stats
        return y

    def _grow(self) -> None:
        needed, neurons = self._growth.due(), self.up_proj.weight.shape[0]
        if self.capacity_grows and needed > self.capacity:
            self.capacity = min(neurons, 2 ** math.ceil(math.log2(SPARE * needed)))
            logger.info("a block had up to %d non-zeros per token: its capacity is %d now", needed, self.capacity)

    def __getstate__(self) -> dict:
        # A tensor inside an autograd graph can be neither copied nor pickled.
        return {**self.__dict__, "stats": None}

    def extra_repr(self) -> str:
        activation = "" if self._activation == RELU else f"activation={self._activation!r}, "
        return f"{activation}backend={self.backend!r}, stats={self.stats_mode!r}"


def feed_forward_blocks(model: nn.Module) -> list[SparseFeedForward]:
    """The model's blocks in layer order (the order of registration)."""
    return [module for module in model.modules() if isinstance(module, SparseFeedForward)]


@torch.no_grad()
def make_neuron_major(model: nn.Module) -> nn.Module:
    """Make the down weights of the model's SparseFeedForward blocks neuron-major in place; returns the model.

    Parameters, shapes, values and the state dict stay the same; gradients get the new layout too. Call it once, after
    loading and before wrapping the model (in DDP, for example): load_state_dict preserves the layout. safetensors
    writes contiguous tensors only; save_pretrained takes care of that. Raises ValueError for a model without blocks.
    """
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to prepare; `sparsify` puts them there")
    for block in blocks:
        block.down_proj.weight.data = neuron_major(block.down_proj.weight.data)
    return model
