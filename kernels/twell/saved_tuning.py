"""Saves the choices of `autotune` as plain values in a transformers model's configuration, and restores them."""

import hashlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import registry
from .checks import computed_dtype
from .modules import (
    SparseFeedForward,
    check_whole,
    checked_ranges,
    feed_forward_blocks,
    make_neuron_major,
    pattern_layer,
)
from .ordering import CONFIG_KEY, unwrapped
from .registry import BackendUnavailable


def tuning_settings(model: nn.Module) -> list[dict[str, Any]]:
    """The choice of each block, in layer order, as plain values for JSON. `autotune` stores it in the configuration of
    a transformers model; for other models, save it yourself."""
    return [_settings(block) for block in feed_forward_blocks(model)]


def _settings(block: SparseFeedForward) -> dict[str, Any]:
    return {
        "backend": block.backend,
        "backend_up_to": [list(pair) for pair in block.backend_up_to],
        "hot": None if block.hot is None else block.hot.tolist(),
        "hot_prefix": block.hot_prefix,
        "silent_suffix": block.silent_suffix,
        "silent_sha256": _fingerprint(block, block.silent_suffix) if block.silent_suffix else None,
    }


def restore_tuning(model: nn.Module, settings: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Restore the choices of `autotune` on a model that was saved and loaded, on the device where it will run.

    settings: from `tuning_settings`; None: those in the model's configuration. Makes the down weights neuron-major.
    Raises ValueError if there are no settings, if they are malformed or for other blocks, if they would leave out other
    neurons than those found to be silent, and for weights that are sharded or not loaded (on the meta device);
    BackendUnavailable for a backend that cannot run here. The model is then unchanged.
    """
    settings = getattr(getattr(unwrapped(model), "config", None), CONFIG_KEY, None) if settings is None else settings
    blocks = feed_forward_blocks(model)
    if settings is None:
        raise ValueError(f"the configuration of {type(model).__name__} holds no tuning: run autotune on it")
    if len(settings) != len(blocks):
        raise ValueError(f"the tuning is for {len(settings)} blocks, and {type(model).__name__} has {len(blocks)}")
    check_whole("restore_tuning", blocks)
    for layer, (block, own) in enumerate(zip(blocks, settings, strict=True)):
        _check_restorable(layer, block, own)
    make_neuron_major(model)
    for block, own in zip(blocks, settings, strict=True):
        block.hot, block.silent_suffix, block.hot_prefix = None, 0, 0
        hot = own["hot"]
        block.backend, block.backend_up_to = own["backend"], own["backend_up_to"]
        block.hot = None if hot is None else torch.tensor(hot, dtype=torch.int64, device=block.up_proj.weight.device)
        block.hot_prefix, block.silent_suffix = own["hot_prefix"], own["silent_suffix"]


def _check_restorable(layer: int, block: SparseFeedForward, own: Mapping[str, Any]) -> None:
    weight = block.up_proj.weight
    intermediate, hidden = weight.shape
    if weight.is_meta:
        raise ValueError(f"the weights of layer {layer} are on the meta device: load them before restore_tuning")
    _check_form(layer, own)
    for name in dict.fromkeys((own["backend"], *(name for _, name in checked_ranges(own["backend_up_to"])))):
        reason = registry.why_not(
            name,
            device=weight.device,
            dtype=computed_dtype(weight),
            hidden=hidden,
            intermediate=intermediate,
            gated=block.gated,
            activation=block.activation,
        )
        if reason is not None:
            raise BackendUnavailable(f"backend {name!r}, chosen for layer {layer}, cannot run here: {reason}")
    hot, silent = own["hot"] or [], own["silent_suffix"]
    if len(set(hot)) < len(hot):
        raise ValueError(f"the tuning of layer {layer} names a hot neuron twice")
    if hot and silent:
        raise ValueError(
            f"the tuning of layer {layer} has hot neurons by index and leaves neurons out: it cannot do both"
        )
    fits = min(own["hot_prefix"], silent) >= 0 and max(own["hot_prefix"], bool(silent)) + silent <= intermediate
    if not fits or any(not 0 <= n < intermediate for n in hot):
        raise ValueError(f"the tuning of layer {layer} is for another number of neurons than {intermediate}")
    if silent and _fingerprint(block, silent) != own["silent_sha256"]:
        raise ValueError(
            f"layer {layer} has other weights than those whose {silent} silent neurons were left out: run autotune"
        )


def _check_form(layer: int, own: Any) -> None:
    """Raises ValueError, naming the field, unless these may come from `_settings`."""
    if not isinstance(own, Mapping):
        raise ValueError(f"the tuning of layer {layer} must be a mapping, got {reprlib.repr(own)}")
    if missing := _FORM.keys() - own.keys():
        raise ValueError(f"the tuning of layer {layer} has no {', '.join(sorted(missing))}")
    for field, (wanted, is_so) in _FORM.items():
        if not is_so(own[field]):
            raise ValueError(f"{field} of the tuning of layer {layer} must be {wanted}, got {reprlib.repr(own[field])}")
    try:
        registry.check_name(own["backend"])
        checked_ranges(own["backend_up_to"])
    except ValueError as error:
        raise ValueError(f"the tuning of layer {layer} cannot be restored: {error}") from error


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


# Of each field of `_settings`: what it must be, in words and as a test.
_FORM: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "backend": ("the name of a backend", lambda value: isinstance(value, str)),
    "backend_up_to": ("a list of pairs (tokens, backend)", _is_list),
    "hot": ("None or a list of neurons", lambda value: value is None or (_is_list(value) and all(map(_is_int, value)))),
    "hot_prefix": ("a whole number of neurons", _is_int),
    "silent_suffix": ("a whole number of neurons", _is_int),
    "silent_sha256": ("None or a digest", lambda value: value is None or isinstance(value, str)),
}


def _fingerprint(block: SparseFeedForward, silent: int) -> str:
    """A digest of the weights that make the last neurons fire, the same for every dtype from bfloat16 up."""
    rows = pattern_layer(block).weight[-silent:].detach().to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()


def remember(model: nn.Module) -> None:
    """Store the blocks' current settings in the configuration of a transformers model (no effect on others), also of
    one inside a wrapper that calls it `module`, such as DistributedDataParallel."""
    config = getattr(unwrapped(model), "config", None)
    if hasattr(config, "to_dict"):
        setattr(config, CONFIG_KEY, tuning_settings(model))


def keep_silent(model: nn.Module) -> None:
    """Restore all neurons that were left out as silent, so that the model computes its original function again."""
    for block in feed_forward_blocks(model):
        block.silent_suffix = 0
    if hasattr(getattr(unwrapped(model), "config", None), CONFIG_KEY):
        remember(model)
