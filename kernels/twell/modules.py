"""The feed-forward block as an nn.Module."""

import copy
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from .capacity import CapacityGrowth
from .checks import DTYPES, check_l1_weight, is_sharded
from .interface import RELU, check_activation
from .memory import neuron_major
from .names import DENSE
from .ops import Call, FFNStats, compute
from .plan import CAPACITY, Plan
from .torch_internals import in_backward

logger = logging.getLogger(__name__)
SPARE = 1.25  # factor by which a raised capacity exceeds the need
PARTS = ("gate_proj", "up_proj", "down_proj")
_DOES_MORE = (
    "a layer of a sparse block has hooks (pruning, weight_norm, DeepSpeed's ZeRO-3, and fully_shard of a single layer "
    "add some), a bias or a patched forward, or is another module than a plain torch.nn.Linear (adapters, "
    "quantization), and the block uses its weight alone. Hook or shard whole blocks; torch.nn.utils.parametrize works "
    "on layers"
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
    """The layer's weight. Raises ValueError if the layer has become more than that since `plain_linear`; traces see
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
        if hasattr(linear, "_hf_hook"):
            raise ValueError(
                f"a layer of a sparse block has {_OF_ACCELERATE}, which the block would skip: load it on one device"
            )
        kind = type(linear)
        raise ValueError(_DOES_MORE if _is_plain(linear) else f"{_DOES_MORE}; got a {kind.__module__}.{kind.__name__}")
    weight = parameters.get("weight")
    return linear.weight if weight is None else weight  # of torch.nn.utils.parametrize it is a property


def plain_linear(name: str, linear: nn.Module) -> nn.Linear:
    """The layer; for a subclass of nn.Linear that only casts its weight, as modded-nanogpt's, an nn.Linear of the same
    parameter. Raises ValueError for anything but an unchanged layer without a bias: a block uses its weight alone."""
    weight: Any = getattr(linear, "weight", None)
    if is_sharded(weight):
        raise ValueError(
            f"{name}.weight is sharded (a DTensor): make the blocks first, then call fully_shard. Tensor parallelism "
            "of a block is not supported"
        )
    if type(linear) is not nn.Linear:  # a subclass may keep its weight in another form, or have an adapter
        if isinstance(linear, nn.Linear) and _multiplies_alone(linear):
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            plain.weight = weight
            return plain.train(linear.training)
        raise ValueError(
            f"{name} must be a plain torch.nn.Linear, or give what one gives, got {type(linear).__module__}."
            f"{type(linear).__qualname__}: the sparse block computes with the weight alone, without quantization, "
            "noise or adapters. Adapters elsewhere work: PEFT's target_modules without the MLPs' layers (so not "
            '"all-linear"), or modules_to_save=["mlp"]'
        )
    if type(weight) not in (nn.Parameter, Tensor) or weight.dtype not in DTYPES:
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise ValueError(f"{name}.weight must be a plain floating parameter, not quantized; got a {kind}")
    if linear.bias is not None:
        raise ValueError(f"{name} has a bias; the sparse block has none, so this layer cannot be part of one")
    check_no_hooks(name, linear)
    return linear


def _multiplies_alone(linear: nn.Linear) -> bool:
    """Whether a subclass has nothing but a weight and gives its product with x, with the product's gradients, in
    training and evaluation: tried on a copy with a small random weight."""
    weight, names = linear.weight, {name for name, _ in linear.named_parameters()}
    hooks = any(getattr(linear, kind) for kind in _HOOKS) or "forward" in vars(linear)
    if hooks or names != {"weight"} or [*linear.buffers(), *linear.children()] or type(weight) is not nn.Parameter:
        return False

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device="cpu").to(weight.dtype).requires_grad_()

    def results(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        y = call(x)
        return y, *torch.autograd.grad(y, (x, w), torch.ones_like(y))

    twin = copy.copy(linear)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        w, x = nn.Parameter(normal(*(min(size, 64) for size in weight.shape))), normal(1, 2, min(weight.shape[1], 64))
        twin._parameters = {"weight": w, "bias": None}
        wanted = results(lambda x: F.linear(x, w))
        try:
            return all(
                torch.equal(theirs, ours)
                for mode in (False, True)
                for theirs, ours in zip(results(twin.train(mode)), wanted, strict=True)
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError):
            return False


class SparseFeedForward(nn.Module):
    """y = (relu(gate_proj(x)) * up_proj(x)) down_proj; with gated=False, y = relu(up_proj(x)) down_proj. No biases.
    With activation="relu2", relu is squared (see `sparse_ffn`).

    The submodules have Hugging Face's names and layout, so state dicts are interchangeable. forward(x) takes
    [..., hidden_size] and returns the same shape (see `sparse_ffn` for dtypes, autocast and errors). It uses the
    weights of the submodules without calling them: replacing one by an adapter or a quantized layer raises ValueError,
    and so does a forward if a submodule has got hooks, a bias or a forward of its own. Replacing one by another
    nn.Linear resets the plan's hot neurons, which were chosen for the earlier weights.

    The down weights have the shape of an nn.Linear and are stored neuron by neuron (strides (1, K)), as sparse calls
    read them. They stay so after `to`, load_state_dict and copies; a block around existing layers lays theirs out anew.

    May be set at any time:
    plan: a `Plan` or the name of a backend.
    keep_stats: whether each forward leaves its FFNStats in `.stats`, for `l1_penalty` and for you; else that is None.
        Their l1 carries the autograd graph, so read it before the next forward. They are in no state dict, copy or
        pickle.
    l1_weight: the weight of each neuron in `.stats.l1`, floating [N], see `sparse_ffn`; None: 1 for all.
    """

    _names: tuple[str, ...] = PARTS  # of the layers among the submodules
    _plan: Plan

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool = True,
        activation: str = RELU,
        plan: Plan | str = DENSE,
        keep_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        self._activation = activation
        linear = functools.partial(nn.Linear, bias=False, device=device, dtype=dtype)
        with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
            self.gate_proj = linear(hidden_size, intermediate_size) if gated else None
            self.up_proj = linear(hidden_size, intermediate_size)
            self.down_proj = linear(intermediate_size, hidden_size)
        # No buffers: what empties or averages these, or compares them between processes, knows nothing of neurons.
        self._hot: Tensor | None = None  # the plan's hot neurons where they are given by index
        self._l1_weight: Tensor | None = None
        self._order: Tensor | None = None  # index -> original index, see tuning/order.py
        self.plan = plan
        self.keep_stats = keep_stats
        self.stats: FFNStats | None = None
        self.register_load_state_dict_pre_hook(_lay_out_loaded)
        self._growth = CapacityGrowth()

    @classmethod
    def from_linears(
        cls,
        gate_proj: nn.Linear | None,
        up_proj: nn.Linear,
        down_proj: nn.Linear,
        *,
        names: Sequence[str | None] = PARTS,
        **settings: Any,
    ) -> "SparseFeedForward":
        """The block around existing linear layers, with their parameters. gate_proj=None: a non-gated block.

        names: of the three layers in the state dict, such as (None, "fc1", "fc2") to keep that of an MLP with these.
        settings: those of the class. Raises ValueError for a layer that is more than its weight, or for
        shapes that do not fit together.
        """
        given = {"gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        parts = {name: None if linear is None else plain_linear(name, linear) for name, linear in given.items()}
        intermediate_size, hidden_size = up_proj.weight.shape
        wanted = {"gate_proj": up_proj.weight.shape, "down_proj": (hidden_size, intermediate_size)}
        for name, shape in wanted.items():
            if (linear := parts[name]) is not None and linear.weight.shape != shape:
                got, up = list(linear.weight.shape), list(up_proj.weight.shape)
                raise ValueError(f"{name}.weight must have shape {list(shape)} to fit up_proj.weight {up}, got {got}")
        plan = settings.pop("plan", DENSE)
        block = cls(hidden_size, intermediate_size, gated=gate_proj is not None, device="meta", **settings)
        for name, linear in parts.items():
            setattr(block, name, linear)
        if len(names) != len(PARTS):
            raise ValueError(f"names must be those of gate (or None), up and down, three, got {tuple(names)}")
        used = tuple(part if name is None else name for part, name in zip(PARTS, names, strict=True))
        if len(set(used)) < len(used) or any(hasattr(block, name) for name in set(used) - {*PARTS}):
            raise ValueError(f"names must differ from each other and from a block's attributes, got {tuple(names)}")
        block._names = used
        layers = block._modules
        block._modules = {new: layers[part] for part, new in zip(PARTS, block._names, strict=True) if part in layers}
        block.plan = plan  # now, since a change of layers resets hot neurons
        return block.train(up_proj.training)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self._names[PARTS.index(name)] if name in PARTS else name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in PARTS:
            name = self._names[PARTS.index(name)]
        if name in self._names and isinstance(value, nn.Module):
            value = plain_linear(name, value)
            if "_growth" in vars(self):  # the last attribute that __init__ sets
                self._forget_neurons()
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and getattr(self, "down_proj", None) is value:
            weight = self.down_proj.weight
            if type(weight) is nn.Parameter:  # not sharded or parametrized
                with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
                    weight.data = neuron_major(weight.data)

    def _forget_neurons(self) -> None:
        """Compute every neuron alike again: those of other weights may be in another order, or of another number."""
        plain = replace(self._plan, hot=0, screened=0)
        self._plan, self._hot, self._order = plain, None, None

    @property
    def gated(self) -> bool:
        return self.gate_proj is not None

    @property
    def activation(self) -> str:
        """ "relu" or "relu2"; part of the function that the block computes, and therefore fixed."""
        return self._activation

    @property
    def plan(self) -> Plan:
        """How the block is computed."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan | str) -> None:
        plan, weight = Plan.of(plan), self.up_proj.weight
        plan.check_fits(weight.shape[0])
        self._plan, self._capacity = plan, plan.capacity or CAPACITY
        with torch.inference_mode(False):  # what is made inside inference_mode could not be saved for a backward
            place = "cpu" if weight.is_meta else weight.device
            self._hot = torch.tensor(plan.indices, device=place) if plan.indices else None

    @property
    def current_capacity(self) -> int:
        """The non-zeros per token that the next call with gradients can save: the plan's capacity, or what it has grown
        to."""
        self._grow()
        return self._capacity

    @current_capacity.setter
    def current_capacity(self, capacity: int) -> None:
        self._capacity = capacity

    @property
    def l1_weight(self) -> Tensor | None:
        """The weight of each neuron in `.stats.l1`."""
        return self._l1_weight

    @l1_weight.setter
    def l1_weight(self, weight: Tensor | None) -> None:
        if weight is not None:
            check_l1_weight(weight, self.up_proj.weight)
        self._l1_weight = weight

    def _apply(self, fn: Callable, recurse: bool = True) -> "SparseFeedForward":
        super()._apply(fn, recurse)  # moves the weights, changes their dtype, or makes empty ones
        for name in ("_hot", "_l1_weight", "_order"):
            self._by_neuron(name, self.up_proj.weight.device)
        return self

    def _by_neuron(self, name: str, device: torch.device) -> Tensor | None:
        """One of these tensors, moved to the weights' device. A forward asks too: fully_shard moves weights by their
        data."""
        kept = getattr(self, name)
        if kept is None or kept.device == device or device.type == "meta":  # which has no values
            return kept
        with torch.inference_mode(False):  # what is made inside inference_mode could not be saved for a backward
            kept = kept.to(device)
        if not torch.compiler.is_compiling():  # a compiled program disregards the line before
            setattr(self, name, kept)
        return kept

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "SparseFeedForward does not run in nn.DataParallel, which the Trainer of transformers uses if it sees "
            "several GPUs: start one process for each GPU (torchrun), or make one visible (CUDA_VISIBLE_DEVICES=0)"
        )

    def forward(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if compiling:
            gate_proj, up_proj, down_proj = self.gate_proj, self.up_proj, self.down_proj
        else:  # the same, without the time that nn.Module takes to find them
            parts: dict[str, Any] = self._modules
            gate, up, down = self._names
            gate_proj, up_proj, down_proj = parts.get(gate), parts[up], parts[down]
            self._grow()
        inputs = x, None if gate_proj is None else _weight(gate_proj), _weight(up_proj), _weight(down_proj)
        device = inputs[2].device
        hot, l1_weight = self._by_neuron("_hot", device), self._by_neuron("_l1_weight", device)
        settings = self._plan, self._activation, self.keep_stats, self._capacity, hot, l1_weight, self._growth
        y, stats = compute(inputs, Call(*settings))
        if compiling:
            self.stats = stats
        elif not in_backward():  # what checkpointing repeats would stay in memory until the next forward
            vars(self)["stats"] = stats
        return y

    def hidden(self, x: Tensor) -> Tensor:
        """The activations h [..., N] that the down projection takes, by dense products, whatever the plan: for hooks,
        `block.register_forward_pre_hook(lambda block, inputs: keep(block.hidden(*inputs)))`."""
        active = F.linear(x, pattern_layer(self).weight).relu()
        active = active if self._activation == RELU else active.square()
        return active if self.gate_proj is None else active * F.linear(x, self.up_proj.weight)

    def _grow(self) -> None:
        if (needed := self._growth.due()) and self._plan.capacity is None and needed > self._capacity:
            neurons = self.up_proj.weight.shape[0]
            self._capacity = min(neurons, 2 ** math.ceil(math.log2(SPARE * needed)))
            logger.info("a block had up to %d non-zeros per token: its capacity is %d now", needed, self._capacity)

    def __getstate__(self) -> dict:
        # A tensor inside an autograd graph can be neither copied nor pickled.
        return {**self.__dict__, "stats": None}

    def extra_repr(self) -> str:
        activation = "" if self._activation == RELU else f"activation={self._activation!r}, "
        return f"{activation}plan={str(self._plan)!r}, keep_stats={self.keep_stats}"


def _lay_out_loaded(
    block: SparseFeedForward, state: dict[str, Tensor], prefix: str, how: dict[str, Any], *_: Any
) -> None:
    """Before load_state_dict(assign=True): lay the new down weights out as the present ones are."""
    name, present = f"{prefix}{block._names[2]}.weight", block.down_proj.weight
    loaded = state.get(name) if how.get("assign_to_params_buffers") and type(present) is nn.Parameter else None
    if loaded is not None and loaded.shape == present.shape and present.t().is_contiguous():
        with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
            state[name] = neuron_major(loaded.detach())


def pattern_layer(block: SparseFeedForward) -> nn.Linear:
    """The layer whose products decide which neurons fire."""
    return block.up_proj if block.gate_proj is None else block.gate_proj


def weights_of(block: SparseFeedForward) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights of its gate, up and down layers, as `sparse_ffn` takes them."""
    gate = None if block.gate_proj is None else block.gate_proj.weight
    return gate, block.up_proj.weight, block.down_proj.weight


def feed_forward_blocks(model: nn.Module) -> list[SparseFeedForward]:
    """The blocks that the model runs, in layer order (the order of registration): of the copies that PEFT's
    `modules_to_save` makes, the active one. Raises TypeError for what is no module, and ValueError for a block whose
    forward was replaced."""
    return list(named_blocks(model))


def named_blocks(model: nn.Module) -> dict[SparseFeedForward, str]:
    """`feed_forward_blocks`, with their names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}: load it first")
    idle = {copy for module in model.modules() for copy in _idle_copies(module)}
    modules = model.named_modules(memo=idle)  # which skips these
    blocks = {module: name for name, module in modules if isinstance(module, SparseFeedForward)}
    for block, name in blocks.items():
        if hasattr(block, "_hf_hook"):
            raise ValueError(f"{name or 'the block'} has {_OF_ACCELERATE}, which it would skip: load it on one device")
        if "forward" in vars(block):
            raise ValueError(
                f"{name or 'the block'} has a forward that something put in place of the block's, so its activation, "
                "plan and statistics have no effect. TrainingArguments(use_liger_kernel=True) does so; with "
                'liger_kernel_config={"swiglu": False} it leaves the blocks alone'
            )
    return blocks


def _idle_copies(module: nn.Module) -> list[nn.Module]:
    """The modules that PEFT's wrapper for `modules_to_save` holds beside the one that it calls."""
    copies: Any = module._modules.get("modules_to_save")
    if copies is None or "original_module" not in module._modules:
        return []
    wrapper: Any = module
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    runs = copies[active[0]] if active and all(name in copies for name in active) else wrapper.original_module
    return [copy for copy in (wrapper.original_module, *copies.values()) if copy is not runs]


def check_whole(program: str, model: nn.Module, blocks: Sequence[SparseFeedForward]) -> None:
    """Raises ValueError if weights of the blocks are sharded or replicated, before a program that changes blocks for
    inference."""
    sharded = any(is_sharded(parameter) for block in blocks for parameter in block.parameters())
    if sharded or any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{program} takes no {'sharded weights (DTensors)' if sharded else 'DistributedDataParallel'}: run it "
            "before that, in one process, since several would choose differently, save the model, and load it and call "
            "load_plans in each"
        )


def l1_penalty(model: nn.Module) -> Tensor:
    """The L1 term of the latest forward, before its coefficient: the mean over the model's blocks of `FFNStats.l1`.

    A differentiable scalar, on the device of the last block; add `coefficient * l1_penalty(model)` to the loss of each
    forward, before the next one. Of a block that runs several times in one, the last time counts. The scale does not
    depend on the numbers of layers, tokens or processes: under data parallelism, the mean over processes is the term of
    the whole batch. Padding tokens count like any others. Raises ValueError for a model without blocks, for blocks
    without statistics, and for a trained block's term without a gradient while gradients are enabled.
    """
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward; `sparsify` puts them there")
    terms = {block: block.stats.l1 for block in blocks if block.stats is not None}
    if len(terms) < len(blocks):
        raise ValueError(
            f"{len(blocks) - len(terms)} of {len(blocks)} blocks have no statistics: set keep_stats "
            "(sparsify(model, keep_stats=True)) and run the model before"
        )
    trained = [term for block, term in terms.items() if pattern_layer(block).weight.requires_grad]
    if torch.is_grad_enabled() and (without := sum(not term.requires_grad for term in trained)):
        raise ValueError(
            f"the L1 term of {without} of {len(trained)} trained blocks has no gradient: the latest forward ran under "
            "torch.no_grad, or under activation checkpointing with use_reentrant=True; use use_reentrant=False"
        )
    device = terms[blocks[-1]].device
    return torch.stack([term.to(device) for term in terms.values()]).mean()
