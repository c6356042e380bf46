"""`sparsify`: replaces a model's MLPs, found by their structure, with our block. Does not import transformers."""

import copy
import functools
import logging
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .interface import ACTIVATIONS, RELU, RELU2
from .modules import PARTS, SparseFeedForward, check_no_hooks, feed_forward_blocks, plain_linear
from .names import DENSE
from .plan import Plan

logger = logging.getLogger(__name__)
_WAY_OUT = (
    "A block of plain layers without biases can be put there by hand: "
    "SparseFeedForward.from_linears(gate_proj, up_proj, down_proj), with gate_proj=None for a non-gated one"
)
_CUT = "It is one matrix for gate and up: cut it (kernels/README.md)"
RELEASED = "llama_sparse_relu"  # the model type of the paper's released checkpoints
OTHER_ENGINES = (
    "transformers computes what is saved; other engines expect the usual activation of this model type: llama.cpp "
    "computes that one, without a word, and vLLM refuses another"
)
_BIASES = "The block has no biases, so models with biases in their MLPs cannot use it"
# The settings of transformers' configurations that name the activation of the MLPs.
_SETTINGS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")
_PROBE_SIZES = (24, 40)  # at most: hidden, intermediate
# The scales of the test tokens: a clamp, or a bias, shows at one of them. Nothing exceeds float16.
_PROBE_SCALES = {RELU: (0.1, 1.0, 30.0), RELU2: (0.1, 1.0, 5.0)}
_PROBE_ERROR = 4  # in units of the dtype's rounding error; the products are the same


def sparsify(
    model: nn.Module,
    activation: str | None = None,
    *,
    plan: Plan | str | None = None,
    keep_stats: bool | None = None,
) -> nn.Module:
    """Replace the MLPs of a Hugging Face model in place; returns the same model.

    An MLP is a module with gate_proj, up_proj, down_proj and act_fn, as in Llama, Qwen, Mistral, Gemma, OLMo and some
    fifty other models (README.md lists those that are tested), or without gate_proj. A model without such modules has
    its MLPs found by what they compute: two or three linear layers around a ReLU or its square. A trial run checks
    each: with small random weights, its own forward must give the block's result. The parameters are the same objects
    and the state dict keeps its keys, so generate, save_pretrained and from_pretrained work as before, and what is
    saved loads into plain transformers. Every module of the model that is such an MLP is replaced, of a multimodal
    model those of its vision tower too; for the text alone, give its language model (README.md).

    The MLPs' activation must be a ReLU or its square. activation="relu" or "relu2" replaces another one, in the model's
    configuration too. This changes the function that the model computes, so it needs training afterwards.

    The model gets a copy of its configuration (`model.config`): other models that were built from the same object, or a
    larger model that holds this one, keep theirs as it is.

    plan, keep_stats: as of `SparseFeedForward`, for every block. None: "dense" and False in new blocks; those that the
    model already has keep theirs.

    Raises ValueError, and leaves the model unchanged, for an unknown setting and for anything that the block would
    compute differently or skip: biases, quantized or sharded layers, adapters, hooks, patched forwards, extra
    computations in a forward, other activations, mixtures of experts, MLPs of another structure, and a configuration
    that cannot set the activation of the MLPs alone.
    """
    if activation not in (None, *ACTIVATIONS):
        wanted = " or ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ValueError(f"activation must be None (keep the model's own) or {wanted}, got {activation!r}")
    if plan is not None:
        plan = Plan.of(plan)
    done = feed_forward_blocks(model)
    mlps = replaceable(model, activation)
    if not mlps and not done:
        raise ValueError(_nothing_to_replace(model))
    if fixed := {block.activation for block in done} - {activation or RELU, activation or RELU2}:
        raise ValueError(f"the model has blocks with activation {fixed.pop()!r}, which is fixed; got {activation!r}")
    _configure(model, mlps)
    blocks: dict[nn.Module, SparseFeedForward] = {}  # a module may occur under several names
    for name, mlp in mlps.items():
        if mlp.module not in blocks:
            blocks[mlp.module] = SparseFeedForward.from_linears(
                *mlp.linears,
                names=mlp.names,
                activation=mlp.activation,
                plan=plan or DENSE,
                keep_stats=bool(keep_stats),
            )
        model.set_submodule(name, blocks[mlp.module])
    for block in done:
        if plan is not None:
            block.plan = plan
        if keep_stats is not None:
            block.keep_stats = keep_stats
    return model


# --- what is replaced -------------------------------------------------------------------------------------------------


class Mlp(NamedTuple):
    """An MLP, and how its block is made. names: of its gate (None without one), up and down layer; act: of the module
    that activates, None where its forward calls a function."""

    module: Any
    names: tuple[str | None, str, str]
    act: str | None
    activation: str = ""  # that of the block; "" while unknown

    @property
    def linears(self) -> tuple[Any, Any, Any]:
        gate, up, down = (name and getattr(self.module, name) for name in self.names)
        return gate, up, down


def replaceable(model: nn.Module, activation: str | None = None) -> dict[str, Mlp]:
    """The MLPs that `sparsify` with this activation would replace, by name (a shared module has several names).

    Those with Hugging Face's names; where there are none, nor blocks, modules that compute what a block computes, with
    whatever names. Raises ValueError as `sparsify` does. Empty if there is none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        config = _config_of(module)
        # Ordinary classes keep settings that they do not know, such as the released ones'.
        settings = vars(config) if _is_configuration(config) else {}
        if getattr(config, "model_type", None) == RELEASED or any(key.startswith("sparsity_") for key in settings):
            raise ValueError(
                f"{_named(name, module)} is of a checkpoint that the paper's authors released: its gate is a ReLU "
                "whatever hidden_act says, and its weights may have another layout: use twell.from_released(path)"
            )
        if isinstance(getattr(module, "experts", None), nn.Module):
            raise ValueError(f"{_named(name, module)} is a mixture of experts; sparsify takes dense models only")
    named = {name: mlp for name, module in modules.items() if (mlp := _by_name(module)) is not None}
    mlps = {name: _checked(name, mlp, activation) for name, mlp in named.items()}
    if not mlps and not any(isinstance(module, SparseFeedForward) for module in modules.values()):
        mlps = _by_result(modules, activation)
    if "" in mlps:
        raise ValueError(f"{type(model).__name__} is an MLP itself; give the model that holds it. {_WAY_OUT}")
    return mlps


def _by_name(module: Any) -> Mlp | None:
    parts = [getattr(module, part, None) for part in (*PARTS[1:], "act_fn")]
    if isinstance(module, SparseFeedForward) or not all(isinstance(part, nn.Module) for part in parts):
        return None
    gate = PARTS[0] if getattr(module, PARTS[0], None) is not None else None
    return Mlp(module, (gate, *PARTS[1:]), "act_fn")


def _by_result(modules: dict[str, nn.Module], activation: str | None) -> dict[str, Mlp]:
    """Modules that have the layers of an MLP and compute what a block computes. Raises ValueError for one that does
    not if no other does, or another of its class."""
    mlps: dict[str, Mlp] = {}
    refused: dict[type, ValueError] = {}
    for name, module in modules.items():
        errors = []
        for mlp in _by_shape(module):
            try:
                mlps[name] = _checked(name, mlp, activation)
                break
            except ValueError as error:
                errors.append(error)
        else:
            if errors:
                refused.setdefault(type(module), errors[0])
    classes = {type(mlp.module) for mlp in mlps.values()}
    for kind, reason in refused.items():
        if not mlps or kind in classes:
            raise reason
    return mlps


def _by_shape(module: nn.Module) -> list[Mlp]:
    """What it may be: an MLP of two or three linear layers and at most one activation. Of two layers with the same
    shape, either may be the gate."""
    children = dict(module.named_children())
    layers = {name: child.weight.shape for name, child in children.items() if isinstance(child, nn.Linear)}
    others = [name for name, child in children.items() if name not in layers and not _is_idle(child)]
    if len(others) > 1 or any(True for name in others for _ in children[name].parameters()):
        return []
    up = [name for name, shape in layers.items() if len(shape) == 2 and shape[0] > shape[1]]
    down = [name for name in layers if name not in up]
    if len(down) != 1 or len(up) not in (1, 2) or any(layers[name] != layers[down[0]][::-1] for name in up):
        return []
    act = others[0] if others else None
    pairs = [(None, up[0])] if len(up) == 1 else [tuple(up), tuple(reversed(up))]
    return [Mlp(module, (gate, inner, down[0]), act) for gate, inner in pairs]


def _is_idle(module: nn.Module) -> bool:
    return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)


class _SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _nothing_to_replace(model: nn.Module) -> str:
    wanted = f"{type(model).__name__} has no MLP to replace: two or three linear layers around a ReLU or its square"
    for name, module in model.named_modules():
        layers = {key: child for key, child in module.named_children() if _is_matrix(child)}
        if 2 <= len(layers) <= 3 and _expands_and_contracts(layer.weight for layer in layers.values()):
            biases = {
                key: "" if getattr(layer, "bias", None) is None else " with a bias" for key, layer in layers.items()
            }
            children = layers | {key: child for key, child in module.named_children() if not _is_idle(child)}
            parts = ", ".join(f"{key}: {type(child).__name__}{biases.get(key, '')}" for key, child in children.items())
            *inner, down = (layer.weight.shape for layer in layers.values())
            in_one = any(shape[0] == 2 * down[1] for shape in inner)
            advice = _BIASES if any(biases.values()) else _CUT if in_one else _WAY_OUT
            return f"{wanted}. {_named(name, module)} has another structure ({parts}). {advice}"
    return f"{wanted}. {_WAY_OUT}"


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _expands_and_contracts(weights: Iterable[Tensor]) -> bool:
    """Whether one of the first weights may come before the last: [K, N] or [2N, K] (gate and up in one), and [N, K]."""
    *first, last = (tuple(weight.shape) for weight in weights)
    wide, narrow = max(last), min(last)
    return wide > narrow and any(sorted(shape) in ([narrow, wide], [narrow, 2 * wide]) for shape in first)


# --- whether it can be replaced ---------------------------------------------------------------------------------------


def _checked(name: str, mlp: Mlp, activation: str | None) -> Mlp:
    """The MLP with the activation of its block. Raises ValueError for what the block would not compute."""
    _check_parts(name, mlp)
    if activation is not None:
        if (error := _probe(name, mlp, activation, replaced=True)) is not None:
            raise error
        return mlp._replace(activation=activation)
    if (used := _activation_of(name, mlp)) is not None:
        return mlp._replace(activation=used)
    kind = type(getattr(mlp.module, mlp.act)) if mlp.act else nn.Module
    with_relu = _probe(name, mlp, RELU, replaced=True)
    if with_relu is not None or mlp.act is None:
        raise with_relu or AssertionError
    subclass = ", a subclass of ReLU that computes something else" if issubclass(kind, nn.ReLU) else ""
    raise ValueError(
        f"{name} has the activation {kind.__name__}{subclass}, and the sparse block needs a ReLU. Replacing it "
        'changes the function that the model computes; to do so (and then to train it), pass activation="relu" or '
        '"relu2"'
    )


def _activation_of(name: str, mlp: Mlp) -> str | None:
    """The activation with which a block computes what the MLP computes; None: with neither."""
    return next((used for used in ACTIVATIONS if _probe(name, mlp, used, replaced=False) is None), None)


def _check_parts(name: str, mlp: Mlp) -> None:
    for path, module in mlp.module.named_modules(prefix=name):
        check_no_hooks(path, module)
    forwards = [kind for kind in type(mlp.module).__mro__ if "forward" in vars(kind) and kind is not nn.Module]
    if len(forwards) > 1:
        over = f"{forwards[0].__name__} overrides the forward of {forwards[1].__name__}"
        raise ValueError(f"{name}: {over}, and the sparse block would skip it")
    for part, linear in zip(mlp.names, mlp.linears, strict=True):
        if linear is not None:
            plain_linear(f"{name}.{part}", linear)
    for part, child in mlp.module.named_children():
        if part not in (*mlp.names, mlp.act) and not _is_idle(child):
            raise ValueError(f"{_named(name, mlp.module)} has {part} ({type(child).__name__}), unlike the sparse block")
    for owner in (name, *([f"{name}.{mlp.act}"] if mlp.act else [])):
        module = mlp.module if owner == name else getattr(mlp.module, mlp.act or "")
        values = [key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if values:
            raise ValueError(f"{_named(owner, module)} has {', '.join(values)}, unlike the sparse block")


@torch.no_grad()
def _probe(name: str, mlp: Mlp, used: str, *, replaced: bool) -> ValueError | None:
    """None if the MLP's own forward gives the result of a block with this activation, else what is wrong. It runs in
    the MLP's dtype and on its device, in a copy with small random weights: the model's own may be on the meta device,
    large, or 0. replaced: with this activation in place of its own module."""
    weight = mlp.linears[1].weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    generator = torch.Generator(device).manual_seed(0)
    intermediate, hidden = (min(size, most) for size, most in zip(weight.shape, reversed(_PROBE_SIZES), strict=True))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(weight.dtype)

    twin = copy.copy(mlp.module)
    twin.__dict__["_modules"] = {**mlp.module._modules}
    if replaced and mlp.act is not None:
        twin._modules[mlp.act] = nn.ReLU() if used == RELU else _SquaredReLU()
    for part in filter(None, mlp.names):
        n, k = (hidden, intermediate) if part == mlp.names[-1] else (intermediate, hidden)
        twin._modules[part] = small = nn.Linear(k, n, bias=False, device="meta")
        small.weight = nn.Parameter(normal(n, k) * k**-0.5, requires_grad=False)
    scales = torch.tensor(_PROBE_SCALES[used], device=device, dtype=weight.dtype)
    x = normal(2, len(scales), hidden) * scales[:, None]
    limit = _PROBE_ERROR * torch.finfo(weight.dtype).eps
    with torch.autocast(device.type, enabled=False):
        ours = SparseFeedForward.from_linears(*mlp._replace(module=twin).linears, names=mlp.names, activation=used)(x)
        for twin.training in (False, True):
            theirs = _result(name, twin, x)
            if isinstance(theirs, ValueError):
                return theirs
            error = (theirs.double() - ours.double()).norm(dim=-1) / ours.double().norm(dim=-1)
            if not bool((error <= limit).all()):
                gate, up, down = mlp.names
                inner = f"{used}({up}(x))" if gate is None else f"({used}({gate}(x)) * {up}(x))"
                return ValueError(
                    f"{_named(name, mlp.module)} does not compute {inner} {down}: with random weights and {used} its "
                    f"result is {error.max().item():.2g} off, relative. The sparse block would change what the model "
                    f"computes. {_WAY_OUT}"
                )
    return None


def _result(name: str, twin: nn.Module, x: Tensor) -> Tensor | ValueError:
    try:
        y = twin(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        return ValueError(f"{_named(name, twin)} cannot be called with x alone: {error}")
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        got = f"{list(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        return ValueError(f"{_named(name, twin)} must give a tensor like x, {list(x.shape)} of {x.dtype}, got {got}")
    return y


# --- the configuration ------------------------------------------------------------------------------------------------


# Of all configurations that a model's modules hold, by the original's id: a memo of deepcopy, which keeps the originals
# alive. Those that are parts of others, or that several modules share, are so in the copies.
Copies = dict[int, Any]


def _configure(model: nn.Module, mlps: dict[str, Mlp]) -> None:
    """Give each of transformers' models a configuration of its own, which other models built from the same object do
    not share, and set the activations there, so that saved models have them.

    Raises ValueError, and changes nothing, if that is impossible or would affect more than the MLPs.
    """
    # By model of transformers: of each MLP, the module with the configuration that describes it.
    roots: dict[str, dict[str, tuple[nn.Module, Mlp]]] = {}
    for name, mlp in mlps.items():
        owners = [owner for owner in prefixes(name) if _is_configuration(_config_of(model.get_submodule(owner)))]
        models = [owner for owner in owners if hasattr(type(model.get_submodule(owner)), "config_class")]
        if models:  # a plain PyTorch model has no configuration
            wanted = roots.setdefault(models[0], {})
            wanted[name.removeprefix(models[0]).lstrip(".")] = model.get_submodule(owners[-1]), mlp
    changes = []
    for path, wanted in roots.items():
        root = model.get_submodule(path)
        copies: Copies = {}
        for module in root.modules():
            for value in filter(_is_configuration, vars(module).values()):
                copy.deepcopy(value, copies)
        _set_activations(root, copies, wanted)
        wrappers = [model.get_submodule(prefix) for prefix in prefixes(path)[:-1]]
        changes += [
            (module, attribute, copies[id(value)])
            for module in (*wrappers, *root.modules())
            for attribute, value in vars(module).items()
            if _is_configuration(value) and id(value) in copies
        ]
    for module, attribute, own in changes:  # only once nothing can be refused any more
        setattr(module, attribute, own)


def prefixes(name: str) -> list[str]:
    """The names of the modules that hold the one of this name, from the model's own, "", to itself."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


def _is_configuration(value: object) -> bool:
    """Whether this is a configuration of transformers."""
    return getattr(value, "model_type", None) is not None and hasattr(value, "to_dict")


def _set_activations(root: Any, copies: Copies, wanted: dict[str, tuple[nn.Module, Mlp]]) -> None:
    """Set them in the copies of the configurations."""
    configs = {name: copies[id(_config_of(owner))] for name, (owner, _) in wanted.items()}
    wrong = [
        (configs[name], mlp.activation)
        for name, (_, mlp) in wanted.items()
        if {mlp.activation, *_settings(configs[name]).values()} != {_activation_of(name, mlp)}
    ]
    if not wrong:
        return
    logger.warning("%s: the activation in the configuration changes. %s", type(root).__name__, OTHER_ENGINES)
    own = copies[id(_config_of(root))]
    before = rebuilt(root, own)
    for config, activation in wrong:
        for setting in _settings(config):
            setattr(config, setting, activation)
    _check_rebuilt(root, before, rebuilt(root, own), {name: mlp for name, (_, mlp) in wanted.items()})
    own.activation_note = OTHER_ENGINES  # what save_pretrained writes says it too


def _settings(config: Any) -> dict[str, str]:
    found = {setting: getattr(config, setting, None) for setting in _SETTINGS}
    return {setting: value for setting, value in found.items() if isinstance(value, str)}


def rebuilt(root: Any, config: Any, what: str = "configuration") -> nn.Module:
    """The model that this configuration describes, on the meta device. Raises ValueError if there is none."""
    try:
        with torch.device("meta"):
            return type(root)(copy.deepcopy(config))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ValueError(f"{type(root).__name__} cannot be made from its {what}: {error}") from error


def _check_rebuilt(root: nn.Module, before: nn.Module, after: nn.Module, wanted: dict[str, Mlp]) -> None:
    """Raises ValueError unless only the activation of the MLPs differs, and it is now the wanted one."""
    others = dict(after.named_modules())
    for name, mlp in wanted.items():
        module = others.get(name)
        if type(module) is not type(mlp.module) or _activation_of(name, mlp._replace(module=module)) != mlp.activation:
            raise ValueError(
                f"the configuration of {type(root).__name__} has no setting ({', '.join(_SETTINGS)}) that makes the "
                f"activation of {name} {mlp.activation}, so what is saved would compute something else"
            )
    own = {*wanted, *(f"{name}.{mlp.act}" for name, mlp in wanted.items())}
    for name, module in before.named_modules():
        if name not in own and _traits(module) != _traits(others[name]):
            raise ValueError(
                f"in the configuration of {type(root).__name__} the activation of the MLPs is also that of "
                f"{_named(name, module)}: if that one changes, what is saved computes something else. {_WAY_OUT}; "
                "that leaves the configuration alone"
            )


def _traits(module: nn.Module) -> tuple[type, dict[str, object]]:
    """The properties of an activation that a name in the configuration can determine: class, names and functions."""
    found: dict[str, object] = {}
    for key, value in vars(module).items():
        if isinstance(value, functools.partial):
            found[key] = (value.func, value.args, value.keywords)
        elif isinstance(value, str | types.FunctionType | types.BuiltinFunctionType):
            found[key] = value
    return type(module), found
