"""AdamW as in table 2 of the paper, and the schedules of the learning rate and the L1 coefficient.

Steps are counted from 0 here: step 0 is the first update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from experiments.run.errors import CheckpointError
from experiments.run.train_config import OptimizerConfig, SparsityConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW. Weight decay applies to matrices (including the embedding), not to norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of a step: linear growth over the warm-up, then half a cosine down to a fraction of the
    peak."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def l1_coefficient(config: SparsityConfig, step: int) -> float:
    """The coefficient of a step: 0 for `l1_off_steps`, then linear growth over `l1_ramp_steps`, then constant (the
    paper's mitigation b)."""
    if step < config.l1_off_steps:
        return 0.0
    ramp = (step - config.l1_off_steps + 1) / config.l1_ramp_steps if config.l1_ramp_steps else 1.0
    return config.l1 * min(1.0, ramp)


# AdamW's state of each parameter: two moments of its shape, and the number of updates.
MOMENTS, STEPS = ("exp_avg", "exp_avg_sq"), "step"


# --- the optimizer's state as named tensors ---------------------------------------------------------------------------


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names in the order of the optimizer's own numbering."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as {"<parameter>/exp_avg": ..., "<parameter>/exp_avg_sq": ..., "<parameter>/step": ...}."""
    names = _parameter_names(model, optimizer)
    state = optimizer.state_dict()["state"]
    return {f"{names[index]}/{key}": tensor for index, entry in state.items() for key, tensor in entry.items()}


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. Raises `CheckpointError` if they belong to another model or optimizer."""
    names, parameters = _parameter_names(model, optimizer), dict(model.named_parameters())
    # Fused AdamW would read beyond the end of moments that are smaller than their parameter.
    wanted = {f"{name}/{key}": (p.shape, p.dtype) for name, p in parameters.items() for key in MOMENTS}
    wanted |= {f"{name}/{STEPS}": (torch.Size(()), torch.float32) for name in parameters}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if different := sorted({name for name, _ in wanted.items() ^ found.items()}):
        raise CheckpointError(f"the optimizer's state is of another model: {', '.join(different[:5])} differ")
    state: dict[int, dict[str, Tensor]] = {}
    for number, name in enumerate(names):
        # Fused AdamW reads a parameter and its moments as flat memory, so they must have one layout.
        like = torch.empty_like(parameters[name], device="cpu")
        state[number] = {key: torch.empty_like(like).copy_(tensors[f"{name}/{key}"]) for key in MOMENTS}
        state[number][STEPS] = tensors[f"{name}/{STEPS}"]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
