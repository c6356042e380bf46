"""`sparsify`: our block in place of the MLPs of a Hugging Face model. Needs no import of transformers."""

from typing import Any

from torch import nn

from .interface import ACTIVATIONS, RELU, RELU2
from .modules import SparseFeedForward
from .ops import check_stats
from .registry import check_name

SUPPORTED = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
_PARTS = ("gate_proj", "up_proj", "down_proj")


def sparsify(
    model: nn.Module, *, backend: str = "dense", activation: str | None = None, stats: str = "none"
) -> nn.Module:
    """Replace the MLPs of a Llama, Qwen2, Qwen3 or Mistral model in place; returns the same model.

    The parameters are the same objects and the state dict keeps its keys, so generate, save_pretrained and
    from_pretrained work as before, and what is saved loads into plain transformers. The model's activation must be a
    ReLU or its square (config.hidden_act="relu" or "relu2"). activation= one of these replaces another one, and sets
    config.hidden_act. This changes the function that the model computes, so it needs training afterwards.

    backend, stats: as in `sparse_ffn`, for every block; on a model that is already sparsified, only these are set.
    Raises ValueError for a model, an MLP or an activation that cannot be replaced, or a setting that does not exist;
    the model is then unchanged. An MLP with a hook cannot, since the block uses its weights and not its layers.
    """
    if activation not in (None, *ACTIVATIONS):
        wanted = " or ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ValueError(f"activation must be None (keep the model's own) or {wanted}, got {activation!r}")
    check_name(backend)
    check_stats(stats)
    _check_model(model)
    mlps = {name: module for name, module in model.named_modules() if _is_mlp(module)}
    done = [module for module in model.modules() if isinstance(module, SparseFeedForward)]
    if not mlps and not done:
        raise ValueError(f"{type(model).__name__} has no MLP with gate_proj, up_proj, down_proj and act_fn to replace")
    for name, mlp in mlps.items():
        _check_mlp(name, mlp, activation)
    if found := {block.activation for block in done} - {activation or RELU, activation or RELU2}:
        raise ValueError(f"the model has blocks with activation {found.pop()!r}, which is fixed; got {activation!r}")
    new = {
        name: SparseFeedForward.from_linears(
            *(getattr(mlp, part) for part in _PARTS),
            activation=activation or _activation_of(mlp),
            backend=backend,
            stats=stats,
        )
        for name, mlp in mlps.items()
    }
    for block in done:
        block.backend, block.stats_mode = backend, stats
    for name, block in new.items():
        model.set_submodule(name, block)
    if new:
        config: Any = model.config
        config.hidden_act = next(iter(new.values())).activation
    return model


def _check_model(model: nn.Module) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in SUPPORTED:
        got = f"{type(model).__name__} (model type {kind!r})"
        raise ValueError(f"sparsify supports the Hugging Face models {', '.join(SUPPORTED.values())}; got {got}")


def _is_mlp(module: nn.Module) -> bool:
    return not isinstance(module, SparseFeedForward) and all(
        isinstance(getattr(module, part, None), nn.Module) for part in (*_PARTS, "act_fn")
    )


def _activation_of(mlp: nn.Module) -> str | None:
    """What the MLP's act_fn is here; None if it is nothing that the block computes."""
    if isinstance(mlp.act_fn, nn.ReLU):
        return RELU
    # transformers' "relu2", known by its name: this package does not import transformers.
    return RELU2 if type(mlp.act_fn).__name__ == "ReLUSquaredActivation" else None


def _check_mlp(name: str, mlp: nn.Module, activation: str | None) -> None:
    for part in _PARTS:
        linear = getattr(mlp, part)
        # A subclass may keep its weight in another form (quantised, sharded, with an adapter).
        if type(linear) is not nn.Linear:
            raise ValueError(f"{name}.{part} must be a torch.nn.Linear, got {type(linear).__name__}")
        if linear.bias is not None:
            raise ValueError(f"{name}.{part} has a bias; the sparse block has none, so this model cannot be replaced")
    for path, module in mlp.named_modules(prefix=name):
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            raise ValueError(f"{path} has forward hooks, which the sparse block would skip; remove them first")
    if activation is None and _activation_of(mlp) is None:
        raise ValueError(
            f"{name} has the activation {type(mlp.act_fn).__name__}, and the sparse block needs a ReLU. Replacing it "
            'changes the function that the model computes; to do so (and then to train it), pass activation="relu"'
        )
