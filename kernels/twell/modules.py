"""The feed-forward block as an nn.Module."""

import functools
import logging
import math
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .capacity import CapacityGrowth, is_capturing
from .checks import DTYPES, in_process_group, is_fixed, is_sharded
from .finiteness import Version
from .interface import RELU, check_activation
from .memory import neuron_major
from .ops import (
    CAPACITY,
    FFNStats,
    call,
    check_backup,
    check_capacity,
    check_distinct,
    check_flag,
    check_hot,
    check_l1_weight,
    check_prefix,
    check_stats,
)
from .registry import AUTO, DENSE, check_name
from .torch_internals import in_backward

logger = logging.getLogger(__name__)
SPARE = 1.25  # factor by which a raised capacity exceeds the need
_PARTS = ("gate_proj", "up_proj", "down_proj")
_DOES_MORE = (
    "a layer of a sparse block has hooks (pruning, weight_norm, and fully_shard of a single layer add some), a bias or "
    "a patched forward, or is another module than a plain torch.nn.Linear (adapters, quantization), and the block uses "
    "its weight alone. Hook or shard whole blocks; torch.nn.utils.parametrize works on layers"
)
_OF_ACCELERATE = "hooks of accelerate (device_map over several devices, or offloading)"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_no_hooks(name: str, module: nn.Module) -> None:
    """Raises ValueError for a module with hooks or with a forward of its own: a block does not call its layers."""
    if hasattr(module, "_hf_hook"):
        raise ValueError(f"{name} has {_OF_ACCELERATE}, which the sparse block would skip: load it on one device")
    if any(getattr(module, kind) for kind in _HOOKS):
        raise ValueError(f"{name} has hooks, which the sparse block would skip; remove them first")
    if "forward" in vars(module):
        raise ValueError(f"{name} has a patched forward, which the sparse block would skip; remove it first")


def _is_plain(linear: nn.Module) -> bool:
    """Whether it is an nn.Linear itself, or one that torch.nn.utils.parametrize has given a class of its own."""
    kind = type(linear)
    return kind is nn.Linear or (kind.__mro__[1] is nn.Linear and parametrize.is_parametrized(linear))


def _weight(linear: nn.Linear) -> Tensor:
    """The layer's weight. Raises ValueError if the layer has become more than that since `check_linear`; traces see
    its class and forward hooks only. Written out, as small calls on a GPU are bound by the host, and nn.Module's
    attributes are slow."""
    if torch.compiler.is_compiling():
        if linear._forward_pre_hooks or linear._forward_hooks or not _is_plain(linear):
            raise ValueError(_DOES_MORE)
        return linear.weight
    own = vars(linear)
    parameters = own["_parameters"]
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or parameters.get("bias") is not None
        or (type(linear) is not nn.Linear and not _is_plain(linear))
    ):
        raise ValueError(_what_it_does(linear))
    weight = parameters.get("weight")
    return linear.weight if weight is None else weight  # of torch.nn.utils.parametrize it is a property


def _what_it_does(linear: nn.Module) -> str:
    if hasattr(linear, "_hf_hook"):
        return f"a layer of a sparse block has {_OF_ACCELERATE}, which the block would skip: load it on one device"
    return _DOES_MORE if _is_plain(linear) else f"{_DOES_MORE}; got a {type(linear).__module__}.{type(linear).__name__}"


def check_linear(name: str, linear: nn.Module) -> None:
    """Raises ValueError for anything but an unchanged nn.Linear without a bias: a block uses its weight alone."""
    if type(linear) is not nn.Linear:  # a subclass may keep its weight in another form, or have an adapter
        raise ValueError(
            f"{name} must be a plain torch.nn.Linear, got {type(linear).__module__}.{type(linear).__qualname__}: the "
            "sparse block computes with the weight alone, without quantization or adapters"
        )
    weight = linear.weight
    if is_sharded(weight):
        raise ValueError(
            f"{name}.weight is sharded (a DTensor): make the blocks first, then call fully_shard. Tensor parallelism "
            "of a block is not supported"
        )
    if type(weight) not in (nn.Parameter, Tensor) or weight.dtype not in DTYPES:
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise ValueError(f"{name}.weight must be a plain floating parameter, not quantized; got a {kind}")
    if linear.bias is not None:
        raise ValueError(f"{name} has a bias; the sparse block has none, so this layer cannot be part of one")
    check_no_hooks(name, linear)


def checked_ranges(ranges: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """`SparseFeedForward.backend_up_to` as tuples. Raises ValueError if it is no such thing."""
    try:
        found = tuple((tokens, name) for tokens, name in ranges)
    except (TypeError, ValueError):
        raise ValueError(f"backend_up_to must hold pairs (tokens, backend), got {reprlib.repr(ranges)}") from None
    counts = [tokens for tokens, _ in found]
    if any(type(tokens) is not int or tokens < 1 for tokens in counts) or counts != sorted(set(counts)):
        raise ValueError(f"backend_up_to must hold ascending numbers of tokens, at least 1, got {reprlib.repr(counts)}")
    for _, name in found:
        check_name(name)
        if name == AUTO:
            raise ValueError('the backends of backend_up_to must be named one by one, got "auto"')
    return found


class SparseFeedForward(nn.Module):
    """y = (relu(gate_proj(x)) * up_proj(x)) down_proj; with gated=False, y = relu(up_proj(x)) down_proj. No biases.
    With activation="relu2", relu is squared (see `sparse_ffn`).

    The submodules have Hugging Face's names and layout, so state dicts are interchangeable. forward(x) takes
    [..., hidden_size] and returns the same shape (see `sparse_ffn` for dtypes, autocast and errors). It uses the
    weights of the submodules without calling them: replacing one by an adapter or a quantized layer raises ValueError,
    and so does a forward if a submodule has got hooks, a bias or a forward of its own. Replacing one by another
    nn.Linear resets `hot`, `hot_prefix` and `silent_suffix`, which were chosen for the earlier weights.

    `.stats` is the FFNStats of the latest forward, None before the first. Its l1 carries the autograd graph, so read
    it before the next forward. It is the module's only state: not in the state dict, nor in copies and pickles.
    `.backend`, `.backend_up_to`, `.stats_mode` ("full" or "none"), `.capacity`, `.capacity_grows`, `.hot`, `.backup`,
    `.finite_weights` and `.l1_weight` may be set at any time; an invalid value raises ValueError, and a tensor of the
    wrong dtype TypeError.

    If the non-zeros of a call exceed `.capacity`, dense products compute its gradients, which remain exact. The module
    then raises `.capacity` for its next call, unless `.capacity_grows` is False or torch.compile has compiled it.
    """

    _capacity_grows = True
    _hot: Tensor | None
    _order: Tensor | None
    _l1_weight: Tensor | None
    _backend_up_to: tuple[tuple[int, str], ...]

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
        finite_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} must be a whole number, got {size!r}")
        self._activation = activation
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
            self.gate_proj = linear(hidden_size, intermediate_size) if gated else None
            self.up_proj = linear(hidden_size, intermediate_size)
            self.down_proj = linear(intermediate_size, hidden_size)
        self.backend = backend
        self.stats_mode = stats
        self.capacity = capacity
        self.backup = backup
        self.finite_weights = finite_weights
        self.register_buffer("_hot", None, persistent=False)
        self.register_buffer("_l1_weight", None, persistent=False)
        self.register_buffer("_order", None, persistent=False)  # index -> original index, see ordering.py
        self._hot_prefix = self._silent_suffix = 0
        self._silent_of: Version | None = None
        self.stats: FFNStats | None = None
        self._growth = CapacityGrowth()

    @classmethod
    def from_linears(
        cls, gate_proj: nn.Linear | None, up_proj: nn.Linear, down_proj: nn.Linear, **settings: Any
    ) -> "SparseFeedForward":
        """The block around existing linear layers: the same parameters, no copies. gate_proj=None: a non-gated block.

        settings: those of the class. Raises ValueError for a layer that is not a plain nn.Linear without a bias, or for
        shapes that do not fit together.
        """
        parts = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        for name, linear in parts.items():
            if linear is not None:
                check_linear(name, linear)
        intermediate_size, hidden_size = up_proj.weight.shape
        wanted = {"gate_proj": up_proj.weight.shape, "down_proj": (hidden_size, intermediate_size)}
        for name, shape in wanted.items():
            if (linear := parts[name]) is not None and linear.weight.shape != shape:
                got, up = list(linear.weight.shape), list(up_proj.weight.shape)
                raise ValueError(f"{name}.weight must have shape {list(shape)} to fit up_proj.weight {up}, got {got}")
        block = cls(hidden_size, intermediate_size, gated=gate_proj is not None, device="meta", **settings)
        block.gate_proj, block.up_proj, block.down_proj = gate_proj, up_proj, down_proj
        return block.train(up_proj.training)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PARTS and isinstance(value, nn.Module):
            check_linear(name, value)
            if "_growth" in vars(self):  # the last attribute that __init__ sets
                self._forget_neurons(f"{name} is replaced")
        super().__setattr__(name, value)

    def _forget_neurons(self, why: str) -> None:
        """Compute every neuron alike again: those of other weights may be in another order, or of another number."""
        self._restore_silent(why)
        self._hot_prefix, self._hot, self._order = 0, None, None

    def _reset_inference(self, tokens: int, why: str) -> None:
        """Reset what `autotune` chose for inference, but for calls of fewer tokens; not by setters, which read weights
        that may be sharded."""
        self._restore_silent(why)
        self._hot_prefix = 0
        self._backend_up_to = tuple((most, name) for most, name in self._backend_up_to if most < tokens)

    def _pattern_version(self) -> Version | None:
        """Of the weight that makes neurons fire; None where a change cannot be told: of weights that are computed anew
        in each call, of inference tensors, and in a process group, for the sake of FSDP."""
        weight = pattern_layer(self).weight
        plain = type(weight) is nn.Parameter and not (weight.is_inference() or weight.is_meta)
        return Version(weight) if plain and not in_process_group() else None

    def _silent_are_known(self) -> bool:
        """Whether the neurons that are left out are, as far as can be told, those of the weights as they are."""
        known = self._silent_of
        return known is None or in_process_group() or known.is_of(pattern_layer(self).weight)

    def _restore_silent(self, why: str) -> None:
        if self._silent_suffix:
            logger.warning("%s: %d neurons that were left out are restored", why, self._silent_suffix)
        self._silent_suffix, self._silent_of = 0, None

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
        self._backend, self._backend_up_to = name, ()

    @property
    def backend_up_to(self) -> tuple[tuple[int, str], ...]:
        """(tokens, backend) in ascending order: the backends of calls with at most so many tokens, where it is not
        `backend`. Setting `backend` empties it.

        Programs that torch.export made for any number of tokens use `backend` alone; torch.compile makes one for each
        range. Captured and compiled calls are dense in place of a sparse backend unless `finite_weights` is set: with
        few tokens, looking for Inf and NaN in all weights takes as long as dense products.
        """
        return self._backend_up_to

    @backend_up_to.setter
    def backend_up_to(self, ranges: Sequence[tuple[int, str]]) -> None:
        self._backend_up_to = checked_ranges(ranges)

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
    def capacity_grows(self) -> bool:
        """Whether the module raises `capacity` by itself, for its next call, after a call with more non-zeros."""
        return self._capacity_grows

    @capacity_grows.setter
    def capacity_grows(self, grows: bool) -> None:
        check_flag("capacity_grows", grows)
        self._capacity_grows = grows

    @property
    def finite_weights(self) -> bool:
        """Whether the caller guarantees that the weights are and stay finite, see `sparse_ffn`."""
        return self._finite_weights

    @finite_weights.setter
    def finite_weights(self, guaranteed: bool) -> None:
        check_flag("finite_weights", guaranteed)
        self._finite_weights = guaranteed

    @property
    def backup(self) -> float | None:
        """Share of a training call's tokens that are computed densely, see `sparse_ffn`; None: the backend's plan."""
        return self._backup

    @backup.setter
    def backup(self, share: float | None) -> None:
        check_backup(share)
        self._backup = share

    @property
    def l1_weight(self) -> Tensor | None:
        """The weight of each neuron in `.stats.l1`, floating [N], see `sparse_ffn`; None: 1 for all."""
        return self._l1_weight

    @l1_weight.setter
    def l1_weight(self, weight: Tensor | None) -> None:
        if weight is not None:
            check_l1_weight(weight, self.up_proj.weight)
        self._l1_weight = weight

    @property
    def hot(self) -> Tensor | None:
        """The neurons that sparse backends leave to dense products, see `sparse_ffn`; None: none."""
        return self._hot

    @hot.setter
    def hot(self, neurons: Tensor | None) -> None:
        if neurons is not None:
            check_hot(neurons, self.up_proj.weight.device)
            check_distinct(neurons, self.up_proj.weight.shape[0])
            if self._silent_suffix:
                raise ValueError("a block that leaves neurons out takes its hot neurons by hot_prefix")
            self._hot_prefix = 0
            if neurons.is_inference():  # it could not be saved for a backward
                with torch.inference_mode(False):
                    neurons = neurons.clone()
        self._hot = neurons

    @property
    def hot_prefix(self) -> int:
        """The number of leading neurons that sparse backends leave to dense products, see `sparse_ffn`. Setting it
        resets `hot` to None."""
        return self._hot_prefix

    @hot_prefix.setter
    def hot_prefix(self, count: int) -> None:
        check_prefix("hot_prefix", count, self.up_proj.weight.shape[0] - self._silent_suffix)
        self._hot_prefix, self._hot = count, self._hot if count == 0 else None

    @property
    def silent_suffix(self) -> int:
        """The number of trailing neurons that are left out as if they never fired. If they would fire, the result
        changes. 0 restores them, as does loading a state dict, and the first call after another change of the weights
        that make them fire: but not in a compiled program, or in a process group."""
        return self._silent_suffix

    @silent_suffix.setter
    def silent_suffix(self, count: int) -> None:
        neurons = self.up_proj.weight.shape[0]
        check_prefix("silent_suffix", count, neurons - max(self._hot_prefix, 1))
        if count and self._hot is not None:
            raise ValueError("a block whose hot neurons are given by indices cannot leave a suffix out: use hot_prefix")
        self._silent_suffix = count
        self._silent_of = self._pattern_version() if count else None

    def _apply(self, fn: Callable, recurse: bool = True) -> "SparseFeedForward":
        if not self._silent_are_known():
            self._restore_silent("the weights have changed")
        indices = {name: self._buffers[name] for name in ("_hot", "_order")}
        self._buffers.update(dict.fromkeys(indices))
        try:
            super()._apply(fn, recurse)  # moves the weights, changes their dtype, or makes empty ones
        finally:  # the indices keep their values, whatever becomes of the weights
            device = self.up_proj.weight.device
            for name, index in indices.items():
                self._buffers[name] = index if index is None or device.type == "meta" else index.to(device)
        self._silent_of = self._pattern_version() if self._silent_suffix else None
        return self

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "SparseFeedForward does not run in nn.DataParallel, which the Trainer of transformers uses if it sees "
            "several GPUs: start one process for each GPU (torchrun), or make one visible (CUDA_VISIBLE_DEVICES=0)"
        )

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        # The loaded neurons may be in another order, and other neurons would be left out.
        self._restore_silent("a state dict is loaded")
        super()._load_from_state_dict(*arguments, **named)

    def forward(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if compiling:
            gate_proj, up_proj, down_proj, hot = self.gate_proj, self.up_proj, self.down_proj, self._hot
        else:  # the same, without the time that nn.Module takes to find them
            parts: dict[str, Any] = self._modules
            gate_proj, up_proj, down_proj = parts.get("gate_proj"), parts["up_proj"], parts["down_proj"]
            hot = self._buffers["_hot"]
            self._grow()
            if self._silent_suffix and not self._silent_are_known():
                self._restore_silent("the weights have changed")
        gate, up, down = None if gate_proj is None else _weight(gate_proj), _weight(up_proj), _weight(down_proj)
        if silent := self._silent_suffix:
            kept = up.shape[0] - silent
            gate, up, down = None if gate is None else gate[:kept], up[:kept], down[:, :kept]
        y, stats = call(
            *(x, gate, up, down),
            activation=self._activation,
            backend=self._backend_of(x) if self._backend_up_to else self._backend,
            stats=self._stats_mode,
            capacity=self._capacity,
            hot=hot,
            hot_prefix=self._hot_prefix,
            backup=self._backup,
            finite_weights=self._finite_weights,
            growth=self._growth,
            l1_weight=self._l1_weight,
        )
        if silent and stats.fired is not None:
            # Not by _replace, whose result torch 2.11 cannot return from a compiled program.
            fired = torch.cat((stats.fired, stats.fired.new_zeros(silent)))
            stats = FFNStats(stats.nonzeros, stats.l1, fired, stats.overflow, stats.backend)
        if compiling:
            self.stats = stats
        elif not in_backward():  # what checkpointing repeats would stay in memory until the next forward
            vars(self)["stats"] = stats
        return y

    def _backend_of(self, x: Tensor) -> str:
        tokens = math.prod(x.shape[:-1])
        if is_fixed(tokens):
            for most, name in self._backend_up_to:
                if tokens <= most:
                    scans = not self._finite_weights and (torch.compiler.is_compiling() or is_capturing(x))
                    return DENSE if scans else name
        return self._backend

    def _grow(self) -> None:
        if (needed := self._growth.due()) and self.capacity_grows and needed > self._capacity:
            neurons = self.up_proj.weight.shape[0]
            self.capacity = min(neurons, 2 ** math.ceil(math.log2(SPARE * needed)))
            logger.info("a block had up to %d non-zeros per token: its capacity is %d now", needed, self.capacity)

    def __getstate__(self) -> dict:
        # A tensor inside an autograd graph, and a weak reference, can be neither copied nor pickled.
        if not self._silent_are_known():
            self._restore_silent("the weights have changed")
        return {**self.__dict__, "stats": None, "_silent_of": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._silent_of = self._pattern_version() if self._silent_suffix else None

    def extra_repr(self) -> str:
        activation = "" if self._activation == RELU else f"activation={self._activation!r}, "
        return f"{activation}backend={self.backend!r}, stats={self.stats_mode!r}"


def pattern_layer(block: SparseFeedForward) -> nn.Linear:
    """The layer whose products decide which neurons fire."""
    return block.up_proj if block.gate_proj is None else block.gate_proj


def feed_forward_blocks(model: nn.Module) -> list[SparseFeedForward]:
    """The model's blocks in layer order (the order of registration)."""
    return [module for module in model.modules() if isinstance(module, SparseFeedForward)]


def check_whole(program: str, blocks: Sequence[SparseFeedForward]) -> None:
    """Raises ValueError if weights of the blocks are sharded, before a program that changes blocks for inference."""
    if any(is_sharded(parameter) for block in blocks for parameter in block.parameters()):
        raise ValueError(
            f"{program} takes no sharded weights (DTensors). Before fully_shard, run autotune in one process, since "
            "several would choose differently, save the model, and load it and call restore_tuning in each. Both make "
            "the down weights neuron-major, and fully_shard takes contiguous ones only, so undo that for each block: "
            "block.down_proj.weight.data = block.down_proj.weight.data.contiguous()"
        )


def l1_penalty(model: nn.Module) -> Tensor:
    """The L1 term of the latest forward, before its coefficient: the mean over the model's blocks of `FFNStats.l1`.

    A differentiable scalar, on the device of the last block; add `coefficient * l1_penalty(model)` to the loss of each
    forward, before the next one. Its scale does not depend on the numbers of layers, tokens or processes: under data
    parallelism, the mean over processes is the term of the whole batch. Padding tokens count like any others. Raises
    ValueError for a model without blocks, for blocks without statistics, and for a term without a gradient while
    gradients are enabled.
    """
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward; `sparsify` puts them there")
    terms = {block: block.stats.l1 for block in blocks if block.stats is not None and block.stats.l1 is not None}
    if len(terms) < len(blocks):
        raise ValueError(
            f"{len(blocks) - len(terms)} of {len(blocks)} blocks have no statistics: set stats_mode to 'full' "
            "(sparsify(model, stats='full')) and run the model before"
        )
    trained = [term for block, term in terms.items() if pattern_layer(block).weight.requires_grad]
    if torch.is_grad_enabled() and (without := sum(not term.requires_grad for term in trained)):
        raise ValueError(
            f"the L1 term of {without} of {len(trained)} trained blocks has no gradient: the latest forward ran under "
            "torch.no_grad, or under activation checkpointing with use_reentrant=True; use use_reentrant=False"
        )
    device = terms[blocks[-1]].device
    return torch.stack([term.to(device) for term in terms.values()]).mean()


@torch.no_grad()
def make_neuron_major(model: nn.Module) -> nn.Module:
    """Make the down weights of the model's SparseFeedForward blocks neuron-major in place; returns the model.

    Parameters, shapes, values and the state dict stay the same; gradients get the new layout too. Call it once, after
    loading and before wrapping the model (in DDP, for example): load_state_dict preserves the layout. In a running
    training, the state of torch's fused optimizers follows at their next step, and no other depends on the layout.

    What takes contiguous parameters only refuses these: FSDP2 (`fully_shard`), torch.nn.utils.parameters_to_vector,
    torch.optim.LBFGS, and safetensors' save_file (not save_pretrained, which makes them contiguous). The way back, for
    each of the blocks: `block.down_proj.weight.data = block.down_proj.weight.data.contiguous()`. Raises ValueError for
    a model without blocks, or with sharded ones, which keep their layout: their sparse calls copy the down weights.
    """
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to prepare; `sparsify` puts them there")
    if any(is_sharded(block.down_proj.weight) for block in blocks):
        raise ValueError(
            "the down weights are sharded (DTensors), and sharded weights keep their layout: nothing needs to be done, "
            "sparse calls copy the down weights"
        )
    with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
        for block in blocks:
            block.down_proj.weight.data = neuron_major(block.down_proj.weight.data)
    return model
