"""The function and the module with the fields of a plan as keywords, as tests vary them; and a problem to try."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from twell import FFNStats, Plan, SparseFeedForward, sparse_ffn
from twell.testing import Problem, make_problem

OF_PLANS = ("backend", "hot", "up_to", "capacity", "backup", "screened")
OF_BLOCKS = ("activation", "keep_stats", "device", "dtype")


def plan_with(**fields: Any) -> Plan:
    """The plan with these fields; hot neurons may be a tensor of indices."""
    hot = fields.get("hot", 0)
    return Plan(**{**fields, "hot": tuple(hot.tolist()) if isinstance(hot, Tensor) else hot})


def run_ffn(*operands: Tensor | None, stats: bool = True, **named: Any) -> tuple[Tensor, FFNStats | None]:
    """(y, statistics if they are asked for). named: arguments of `sparse_ffn`, and fields of the plan, whose backend is
    "auto" unless it is among them."""
    plan = {name: named.pop(name) for name in OF_PLANS if name in named}
    found = sparse_ffn(*operands, plan=plan_with(**{"backend": "auto", **plan}), return_stats=stats, **named)
    return found if stats else (found, None)


def make_block(hidden: int, intermediate: int, gated: bool = True, **settings: Any) -> SparseFeedForward:
    """The block, which keeps its statistics unless it is told not to. settings: its own, and fields of its plan."""
    of_block = {name: settings.pop(name) for name in OF_BLOCKS if name in settings}
    return SparseFeedForward(
        hidden, intermediate, gated=gated, plan=plan_with(**settings), **{"keep_stats": True, **of_block}
    )


def change(block: SparseFeedForward, **fields: Any) -> None:
    """Change these fields of the block's plan."""
    given = plan_with(**fields)
    block.plan = replace(block.plan, **{name: getattr(given, name) for name in fields})


def y_and_l1(*operands: Tensor | None, **named: Any) -> tuple[Tensor, Tensor]:
    """(y, L1 term) of `run_ffn`, as `twell.testing.check` compares them."""
    y, stats = run_ffn(*operands, **named)
    return y, stats.l1


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.name())
        return function(*arguments, **(keywords or {}))


def make(gated: bool = True, dtype: torch.dtype = torch.float64) -> Problem:
    """30 tokens of a small block."""
    return make_problem(30, 16, 40, 8, gated=gated, dtype=dtype)


def upstream(problem: Problem) -> Tensor:
    """A gradient of y."""
    generator = torch.Generator(problem.x.device).manual_seed(1)
    return torch.randn(problem.x.shape, device=problem.x.device, generator=generator).to(problem.x.dtype)


def leaves(problem: Problem) -> Problem:
    """The same problem, whose gradients are wanted."""
    return problem.each(lambda tensor: tensor.detach().clone().requires_grad_())


def firing_block(rates: Tensor, hidden: int = 16) -> SparseFeedForward:
    """A gated block whose neurons fire at these rates [N] on `rising_tokens`."""
    torch.manual_seed(0)
    block = SparseFeedForward(hidden, len(rates))
    with torch.no_grad():
        block.gate_proj.weight.zero_()
        block.gate_proj.weight[:, 0], block.gate_proj.weight[:, 1] = 1, rates - 1
    return block


def rising_tokens(hidden: int = 16) -> Tensor:
    """[1000, K]: the first column rises from 0 to 1, the second is 1."""
    x = torch.zeros(1000, hidden)
    x[:, 0], x[:, 1] = torch.arange(1000) / 1000, 1
    return x


def exact_pattern(counts: list[int], hidden: int, tile: int, tiles: int, device: str = "cpu") -> Problem:
    """A gated problem in bfloat16 whose token i has exactly counts[i] non-zeros in each of these tiles."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    intermediate = tile * tiles
    x, gate = normal(len(counts), hidden), torch.zeros(intermediate, hidden, device=device, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = torch.tensor(counts, dtype=torch.bfloat16), 1
    order = torch.stack([torch.randperm(tile, device=device, generator=generator) for _ in range(tiles)])
    gate[:, 0], gate[:, 1] = 1, -order.flatten().bfloat16()  # active where count > order
    return Problem(x, gate, normal(intermediate, hidden) / 8, normal(hidden, intermediate) / 8)
