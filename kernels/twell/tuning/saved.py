"""The plans of a model's blocks as JSON values, in its configuration too if it is one of transformers."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..modules import SparseFeedForward, feed_forward_blocks
from ..names import AUTO
from ..plan import Plan
from ..registry import BackendUnavailable
from .common import load_kernels, misfit

CONFIG_KEY = "twell_plans"  # of a transformers configuration


def save_plans(model: nn.Module) -> list[dict[str, Any]]:
    """The plan of each block, in layer order, as JSON values. They are stored in the configuration of a transformers
    model too, also of one inside a wrapper that calls it `module`, such as DistributedDataParallel."""
    plans = [block.plan.as_dict() for block in feed_forward_blocks(model)]
    config = getattr(unwrapped(model), "config", None)
    if hasattr(config, "to_dict"):
        setattr(config, CONFIG_KEY, plans)
    return plans


def load_plans(model: nn.Module, plans: Sequence[Mapping[str, Any]] | None = None) -> None:
    """Give each block its plan, on a model that was saved and loaded, on the device where it will run.

    plans: from `save_plans`; None: those in the model's configuration. Raises ValueError if there are no plans, if they
    are malformed or for other blocks, and for weights that are not loaded (on the meta device); BackendUnavailable for
    a backend that cannot run here. The model is then unchanged.

    Of a model in eval mode, kernels that are compiled for its shapes are compiled and loaded now, side by side, so that
    no later call waits for that. This takes no GPU time, and a second where no cache has them.
    """
    plans = getattr(getattr(unwrapped(model), "config", None), CONFIG_KEY, None) if plans is None else plans
    blocks, name = feed_forward_blocks(model), type(model).__name__
    if not blocks:
        raise ValueError(f"{name} has no SparseFeedForward to give plans; `sparsify` puts them there")
    if plans is None:
        raise ValueError(
            f"{name} has no configuration that holds plans: run autotune in eval mode, or give those of save_plans"
        )
    if not isinstance(plans, Sequence) or isinstance(plans, str):
        raise ValueError(f"plans must be a list as of save_plans (of a text: json.loads), got {reprlib.repr(plans)}")
    if len(plans) != len(blocks):
        raise ValueError(f"there are plans for {len(plans)} blocks, and {name} has {len(blocks)}")
    checked = [_checked(layer, block, plan) for layer, (block, plan) in enumerate(zip(blocks, plans, strict=True))]
    pairs = list(zip(blocks, checked, strict=True))
    load_kernels(
        (block, name, plan.screened > 0)
        for block, plan in pairs
        for name in plan.backends
        if not block.training and name != AUTO
    )
    for block, plan in pairs:
        block.plan = plan


def _checked(layer: int, block: SparseFeedForward, values: Any) -> Plan:
    weight = block.up_proj.weight
    if weight.is_meta:
        raise ValueError(f"the weights of layer {layer} are on the meta device: load them before load_plans")
    try:
        plan = Plan.of(values)
        plan.check_fits(weight.shape[0])
    except (TypeError, ValueError) as error:
        raise ValueError(f"the plan of layer {layer} cannot be used: {error}") from error
    for name in plan.backends:
        if (reason := misfit(name, block, weight)) is not None:
            raise BackendUnavailable(f"backend {name!r}, planned for layer {layer}, cannot run here: {reason}")
    return plan


def forget_plans(model: nn.Module) -> None:
    """Delete the plans in the configuration of a transformers model (no effect on others)."""
    if hasattr(config := getattr(unwrapped(model), "config", None), CONFIG_KEY):
        delattr(config, CONFIG_KEY)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that call it `module`, as DistributedDataParallel does."""
    while not hasattr(model, "config") and isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
