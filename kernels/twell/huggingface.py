"""`sparsify`: replaces a model's MLPs, found by their structure, with our block. Does not import transformers."""

import copy
import functools
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .interface import ACTIVATIONS, RELU, RELU2
from .modules import SparseFeedForward, check_linear, check_no_hooks, feed_forward_blocks
from .names import DENSE
from .plan import Plan, refuse_earlier

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATION = "act_fn"
_WAY_OUT = (
    "A block of plain layers without biases can be put there by hand: "
    "SparseFeedForward.from_linears(gate_proj, up_proj, down_proj), with gate_proj=None for a non-gated one"
)
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
    **earlier: Any,
) -> nn.Module:
    """Replace the MLPs of a Hugging Face model in place; returns the same model.

    An MLP is a module with gate_proj, up_proj, down_proj and act_fn, as in Llama, Qwen, Mistral, Gemma, OLMo and some
    fifty other models (README.md lists those that are tested), or without gate_proj. A trial run checks that it
    computes what the block computes: with small random weights, its own forward must give the block's result. The
    parameters are the same objects and the state dict keeps its keys, so generate, save_pretrained and from_pretrained
    work as before, and what is saved loads into plain transformers. Every module of the model that is such an MLP is
    replaced, of a multimodal model those of its vision tower too; for the text alone, give its language model
    (README.md).

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
    refuse_earlier(earlier)
    if activation not in (None, *ACTIVATIONS):
        wanted = " or ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ValueError(f"activation must be None (keep the model's own) or {wanted}, got {activation!r}")
    if plan is not None:
        plan = Plan.of(plan)
    done = feed_forward_blocks(model)
    mlps = replaceable(model, activation)
    if not mlps and not done:
        raise ValueError(_nothing_to_replace(model))
    if found := {block.activation for block in done} - {activation or RELU, activation or RELU2}:
        raise ValueError(f"the model has blocks with activation {found.pop()!r}, which is fixed; got {activation!r}")
    activations = {name: activation or _activation_of(mlp) or RELU for name, mlp in mlps.items()}
    _configure(model, mlps, activations)
    blocks: dict[nn.Module, SparseFeedForward] = {}  # a module may occur under several names
    for name, mlp in mlps.items():
        if mlp not in blocks:
            blocks[mlp] = SparseFeedForward.from_linears(
                *_linears(mlp), activation=activations[name], plan=plan or DENSE, keep_stats=bool(keep_stats)
            )
        model.set_submodule(name, blocks[mlp])
    for block in done:
        if plan is not None:
            block.plan = plan
        if keep_stats is not None:
            block.keep_stats = keep_stats
    return model


# --- what is replaced -------------------------------------------------------------------------------------------------


def replaceable(model: nn.Module, activation: str | None = None) -> dict[str, nn.Module]:
    """The MLPs that `sparsify` with this activation would replace, by name (a shared module has several names).

    Raises ValueError as `sparsify` does. Empty if there is none.
    """
    mlps = _find(model)
    for name, mlp in mlps.items():
        _check_mlp(name, mlp, activation)
        _probe(name, mlp, activation)
    return mlps


def _find(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that look like an MLP, by name. Raises ValueError for a mixture of experts."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "experts", None), nn.Module):
            raise ValueError(f"{_named(name, module)} is a mixture of experts; sparsify takes dense models only")
        if _is_mlp(module):
            found[name] = module
    if "" in found:
        raise ValueError(f"{type(model).__name__} is an MLP itself; give the model that holds it. {_WAY_OUT}")
    return found


def _is_mlp(module: nn.Module) -> bool:
    parts = (*_LINEARS[1:], _ACTIVATION)
    return not isinstance(module, SparseFeedForward) and all(
        isinstance(getattr(module, part, None), nn.Module) for part in parts
    )


def _activation_of(mlp: Any) -> str | None:
    """The block's name for the MLP's act_fn; None if the block does not support it."""
    if type(mlp.act_fn) is nn.ReLU:
        return RELU
    # transformers' "relu2", recognised by its class name, since this package does not import transformers. The trial
    # run checks it too.
    return RELU2 if type(mlp.act_fn).__name__ == "ReLUSquaredActivation" else None


class _SquaredReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


def _linears(mlp: nn.Module) -> tuple[Any, Any, Any]:
    """(gate_proj or None, up_proj, down_proj)."""
    return getattr(mlp, _LINEARS[0], None), mlp.up_proj, mlp.down_proj


def _named(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _nothing_to_replace(model: nn.Module) -> str:
    wanted = f"{type(model).__name__} has no MLP with gate_proj, up_proj, down_proj and act_fn to replace"
    for name, module in model.named_modules():
        layers = {key: child.weight for key, child in module.named_children() if _is_matrix(child)}
        if 2 <= len(layers) <= 3 and _expands_and_contracts(layers.values()):
            parts = ", ".join(
                f"{key}: {type(child).__name__}{' with a bias' if getattr(child, 'bias', None) is not None else ''}"
                for key, child in module.named_children()
                if key in layers
            )
            return f"{wanted}. {_named(name, module)} has another structure ({parts}). {_WAY_OUT}"
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


def _check_mlp(name: str, mlp: nn.Module, activation: str | None) -> None:
    for path, module in mlp.named_modules(prefix=name):
        check_no_hooks(path, module)
    forwards = [kind for kind in type(mlp).__mro__ if "forward" in vars(kind) and kind is not nn.Module]
    if len(forwards) > 1:
        over = f"{forwards[0].__name__} overrides the forward of {forwards[1].__name__}"
        raise ValueError(f"{name}: {over}, and the sparse block would skip it")
    for part, linear in zip(_LINEARS, _linears(mlp), strict=True):
        if linear is not None:
            check_linear(f"{name}.{part}", linear)
    for part, child in mlp.named_children():
        idle = isinstance(child, nn.Identity) or (isinstance(child, nn.Dropout) and child.p == 0)
        if part not in (*_LINEARS, _ACTIVATION) and not idle:
            raise ValueError(f"{_named(name, mlp)} has {part} ({type(child).__name__}), unlike the sparse block")
    activated: Any = mlp.act_fn
    for owner, module in ((name, mlp), (f"{name}.{_ACTIVATION}", activated)):
        own = [key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if own:
            raise ValueError(f"{_named(owner, module)} has {', '.join(own)}, unlike the sparse block")
    kind = type(activated)
    if activation is None and _activation_of(mlp) is None:
        subclass = ", a subclass of ReLU that may compute something else" if issubclass(kind, nn.ReLU) else ""
        raise ValueError(
            f"{name} has the activation {kind.__name__}{subclass}, and the sparse block needs a ReLU. Replacing it "
            'changes the function that the model computes; to do so (and then to train it), pass activation="relu" or '
            '"relu2"'
        )


@torch.no_grad()
def _probe(name: str, mlp: Any, activation: str | None) -> None:
    """Raises ValueError unless the MLP's own forward gives the block's result. It runs in the MLP's dtype and on its
    device, in a copy with small random weights: the model's own may be on the meta device, large, or 0.

    activation: what to put in place of its own; None: that is kept.
    """
    used = activation or _activation_of(mlp) or RELU
    weight = _linears(mlp)[1].weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    generator = torch.Generator(device).manual_seed(0)
    intermediate, hidden = (min(size, most) for size, most in zip(weight.shape, reversed(_PROBE_SIZES), strict=True))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(weight.dtype)

    twin = copy.copy(mlp)
    twin.__dict__["_modules"] = {**mlp._modules}
    if activation is not None:
        twin._modules[_ACTIVATION] = nn.ReLU() if activation == RELU else _SquaredReLU()
    for part, linear in zip(_LINEARS, _linears(mlp), strict=True):
        if linear is not None:
            n, k = (hidden, intermediate) if part == _LINEARS[-1] else (intermediate, hidden)
            twin._modules[part] = small = nn.Linear(k, n, bias=False, device="meta")
            small.weight = nn.Parameter(normal(n, k) * k**-0.5, requires_grad=False)
    scales = torch.tensor(_PROBE_SCALES[used], device=device, dtype=weight.dtype)
    x = normal(2, len(scales), hidden) * scales[:, None]
    limit = _PROBE_ERROR * torch.finfo(weight.dtype).eps
    with torch.autocast(device.type, enabled=False):
        ours = SparseFeedForward.from_linears(*_linears(twin), activation=used)(x)
        for twin.training in (False, True):
            theirs = _result(name, twin, x)
            error = (theirs.double() - ours.double()).norm(dim=-1) / ours.double().norm(dim=-1)
            if not bool((error <= limit).all()):
                raise ValueError(
                    f"{_named(name, mlp)} does not compute ({used}(gate_proj(x)) * up_proj(x)) down_proj: with random "
                    f"weights and {used} its result is {error.max().item():.2g} off, relative. The sparse block would "
                    f"change what the model computes. {_WAY_OUT}"
                )


def _result(name: str, twin: nn.Module, x: Tensor) -> Tensor:
    try:
        y = twin(x)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ValueError(f"{_named(name, twin)} cannot be called with x alone: {error}") from error
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        got = f"{list(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"{_named(name, twin)} must give a tensor like x, {list(x.shape)} of {x.dtype}, got {got}")
    return y


# --- the configuration ------------------------------------------------------------------------------------------------


def _configure(model: nn.Module, mlps: dict[str, nn.Module], activations: dict[str, str]) -> None:
    """Give each of transformers' models a configuration of its own, which other models built from the same object do
    not share, and set the activations there, so that saved models have them.

    Raises ValueError, and changes nothing, if that is impossible or would affect more than the MLPs.
    """
    # By model of transformers: of each MLP, the module with the configuration that describes it, and its activation.
    roots: dict[str, dict[str, tuple[nn.Module, str]]] = {}
    for name in mlps:
        owners = [owner for owner in _prefixes(name) if _is_configuration(_config_of(model.get_submodule(owner)))]
        models = [owner for owner in owners if hasattr(type(model.get_submodule(owner)), "config_class")]
        if models:  # a plain PyTorch model has no configuration
            wanted = roots.setdefault(models[0], {})
            wanted[name.removeprefix(models[0]).lstrip(".")] = model.get_submodule(owners[-1]), activations[name]
    changes = []
    for path, wanted in roots.items():
        root = model.get_submodule(path)
        copies = _Copies(root)
        _set_activations(root, copies, wanted)
        wrappers = [model.get_submodule(prefix) for prefix in _prefixes(path)[:-1]]
        changes += [change for module in (*wrappers, *root.modules()) for change in copies.of(module)]
    for module, attribute, own in changes:  # only once nothing can be refused any more
        setattr(module, attribute, own)


class _Copies:
    """Copies of all configurations that a model's modules hold. Those that are parts of others, or that several modules
    share, are so in the copies."""

    def __init__(self, root: nn.Module) -> None:
        self._memo: dict[int, Any] = {}  # by id, of the parts too; deepcopy keeps the originals alive in it
        for module in root.modules():
            for value in filter(_is_configuration, vars(module).values()):
                copy.deepcopy(value, self._memo)

    def of(self, module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        """(module, attribute, copy) of each configuration that this module holds."""
        return [
            (module, attribute, self._memo[id(value)])
            for attribute, value in vars(module).items()
            if _is_configuration(value) and id(value) in self._memo
        ]

    def config_of(self, module: nn.Module) -> Any:
        return self._memo[id(_config_of(module))]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


def _is_configuration(value: object) -> bool:
    """Whether this is a configuration of transformers."""
    return getattr(value, "model_type", None) is not None and hasattr(value, "to_dict")


def _set_activations(root: Any, copies: _Copies, wanted: dict[str, tuple[nn.Module, str]]) -> None:
    """Set them in the copies of the configurations."""
    configs = {name: (copies.config_of(owner), activation) for name, (owner, activation) in wanted.items()}
    wrong = [
        (config, activation)
        for name, (config, activation) in configs.items()
        if _activation_of(root.get_submodule(name)) != activation
        or any(value != activation for value in _settings(config).values())
    ]
    if not wrong:
        return
    before = _rebuilt(root, copies)
    for config, activation in wrong:
        for setting in _settings(config):
            setattr(config, setting, activation)
    after = _rebuilt(root, copies)
    _check_rebuilt(root, before, after, {name: activation for name, (_, activation) in configs.items()})


def _settings(config: Any) -> dict[str, str]:
    found = {setting: getattr(config, setting, None) for setting in _SETTINGS}
    return {setting: value for setting, value in found.items() if isinstance(value, str)}


def _rebuilt(root: Any, copies: _Copies) -> nn.Module:
    """The model that the copy of its configuration describes, on the meta device."""
    try:
        with torch.device("meta"):
            return type(root)(copy.deepcopy(copies.config_of(root)))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        raise ValueError(f"{type(root).__name__} cannot be made from its configuration: {error}") from error


def _check_rebuilt(root: nn.Module, before: nn.Module, after: nn.Module, wanted: dict[str, str]) -> None:
    """Raises ValueError unless only the activation of the MLPs differs, and it is now the wanted one."""
    mlps = {name: module for name, module in after.named_modules() if name in wanted}
    not_set = [name for name, mlp in mlps.items() if not _is_mlp(mlp) or _activation_of(mlp) != wanted[name]]
    if not_set or not mlps:
        name = (not_set or list(wanted))[0]
        raise ValueError(
            f"the configuration of {type(root).__name__} has no setting ({', '.join(_SETTINGS)}) that makes the "
            f"activation of {name} {wanted[name]}, so what is saved would compute something else"
        )
    own = {*mlps, *(f"{name}.{_ACTIVATION}" for name in mlps)}
    others = dict(after.named_modules())
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
