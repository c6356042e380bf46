"""The function and the module with the fields of a plan as keywords, as tests vary them."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from twell import FFNStats, Plan, SparseFeedForward, sparse_ffn

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
        hidden, intermediate, gated, plan=plan_with(**settings), **{"keep_stats": True, **of_block}
    )


def change(block: SparseFeedForward, **fields: Any) -> None:
    """Change these fields of the block's plan."""
    given = plan_with(**fields)
    block.plan = replace(block.plan, **{name: getattr(given, name) for name in fields})
