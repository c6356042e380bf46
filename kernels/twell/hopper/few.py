"""The block for few tokens on Hopper, where reading the weights is all that takes time: `few_gate`, then `few_down`.

All of the gate is read, and of the up and down weights only the rows of neurons that some token activates: for one
token with 29 of 5,632 neurons a third of the bytes that dense products read.

Shapes: M tokens, K hidden, N intermediate. Everything is bfloat16 with float32 accumulation.
"""

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..interface import Weights
from ..memory import in_rows
from . import driver, inference
from .params import FewDownParams, FewGateParams

MAX_TOKENS = 16
_MAX_EARLY = 2  # tokens: with more, `few_down` slows down the end of `few_gate` if it starts before that
_WARPS, _TILE, _COLUMNS = 8, 16, 16
_DOWN_WARPS, _LIST = MAX_TOKENS, 2048  # a warp for each token
_MOST_ROWS, _MOST_SLOTS = 96, 3
_MOST_X = 160  # registers of a thread for its share of x
_SHARED_BYTES = 232448  # what a CTA can have


def _bucket(tokens: int) -> int:
    """The kernels are compiled for at most so many tokens."""
    return 8 if tokens <= 8 else MAX_TOKENS


def kind(tokens: int) -> tuple[int, bool]:
    """What of the number of tokens the kernels are compiled for."""
    return _bucket(tokens), tokens <= _MAX_EARLY


def _steps(hidden: int) -> int:
    """Parts of 64 columns that a warp of `few_gate` has at most."""
    return -(-hidden // (64 * _WARPS))


def slots(tokens: int, hidden: int, rows: int = _MOST_ROWS) -> int:
    """Tiles of weights that are on their way to a CTA of `few_gate` at once; 0: not even one fits."""
    most, tiles = _bucket(tokens), -(-rows // _TILE)
    static = tiles * (_TILE * (most * 4 + 6) + most * 2 + 8) + 64
    free = _SHARED_BYTES - static - _sums_bytes(most)
    return min(_MOST_SLOTS, free // (_steps(hidden) * 4 * _WARPS * 32 * 16))


def _sums_bytes(most: int) -> int:
    return 2 * _WARPS * most * (_TILE + 1) * 4


def takes(tokens: int, hidden: int) -> bool:
    """Whether these kernels are made for a block of this hidden size and so many tokens."""
    if not 0 < tokens <= MAX_TOKENS:
        return False
    return _steps(hidden) * _bucket(tokens) <= _MOST_X and slots(tokens, hidden) > 0


def forward(x: Tensor, weights: Weights, *, squared: bool) -> Tensor:
    """y [M, K] for x [M, K] that these kernels take. weights: [N, K], contiguous; squared: of relu(z)^2."""
    x = in_rows(x)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    return PreparedFew(x, weights, squared=squared).fill(y)


class PreparedFew(driver.PreparedPair):
    """`few_gate` and `few_down` for operands with the addresses of the given ones, as for `forward`."""

    __slots__ = ("_addresses", "_plan")

    def __init__(self, x: Tensor, weights: Weights, *, squared: bool) -> None:
        (tokens, hidden), intermediate, index = x.shape, weights.up.shape[0], x.device.index
        self._plan = plan(index, tokens, hidden, intermediate, weights.gate is not None, squared)
        self._addresses = (*(t.data_ptr() for t in (x, weights.pattern, weights.up, weights.down)), x.stride(0))
        super().__init__(index, self._plan.size)

    def _key(self) -> Hashable:
        return self._plan, self._addresses  # `forward` makes a new object for each call

    def _launches(self, stream: int, workspace: int, y: int) -> tuple[driver.Launch, driver.Launch]:
        plan, (x, gate, up, down, x_stride) = self._plan, self._addresses
        found, tokens = workspace + plan.found_at, plan.tokens
        gate_parameters = FewGateParams(
            x=x,
            gate=gate,
            up=up,
            down=down,
            found=found,
            counts=workspace,
            x_stride=x_stride * 2,
            gate_stride=plan.hidden * 2,
            M=tokens,
            N=plan.intermediate,
        )
        down_parameters = FewDownParams(found=found, counts=workspace, down=down, y=y, M=tokens, blocks=plan.blocks)
        return (
            plan.gate.prepare(plan.blocks, stream, gate_parameters),
            plan.down.prepare(plan.hidden // _COLUMNS, stream, down_parameters),
        )


class _Plan(NamedTuple):
    """What does not depend on addresses. blocks: of `few_gate`. found_at: where its non-zeros begin in the workspace,
    behind their counts; size: of the workspace in bytes."""

    tokens: int
    hidden: int
    intermediate: int
    blocks: int
    found_at: int
    size: int
    gate: driver.Kernel
    down: driver.Kernel


@functools.lru_cache(maxsize=4096)
def plan(device_index: int, tokens: int, hidden: int, intermediate: int, gated: bool, squared: bool) -> _Plan:
    most, early = kind(tokens)
    # Neurons of a CTA of `few_gate`: one CTA for each processor, unless it would have too many.
    rows = min(-(-intermediate // inference.sm_count(device_index)), _MOST_ROWS)
    blocks = -(-intermediate // rows)
    found_at = -(-tokens * blocks * 4 // 16) * 16
    macros = gate_macros(hidden, rows, most, gated, squared, early)
    return _Plan(
        *(tokens, hidden, intermediate, blocks, found_at, found_at + tokens * blocks * macros["PAIRS"] * 8),
        _gate_kernel(device_index, tuple(macros.items())),
        _down_kernel(device_index, tuple(down_macros(hidden, rows, blocks).items()), early),
    )


@functools.cache
def _gate_kernel(device_index: int, macros: tuple[tuple[str, int], ...]) -> driver.Kernel:
    known = dict(macros)
    shared_bytes = known["SLOTS"] * _steps(known["K"]) * 4 * _WARPS * 32 * 16 + _sums_bytes(known["TOKENS"])
    return driver.Kernel("few_gate", known, device_index, threads=_WARPS * 32, shared_bytes=shared_bytes)


def gate_macros(hidden: int, rows: int, most: int, gated: bool, squared: bool, early: bool) -> dict[str, int]:
    """The macros of few_gate.cu for so many rows of weights in a CTA and at most so many tokens."""
    macros = {"K": hidden, "ROWS": rows, "PAIRS": -(-rows // 2), "TOKENS": most, "WARPS": _WARPS}
    macros |= {"SLOTS": slots(most, hidden, rows), "GATED": int(gated), "SQUARED": int(squared)}
    return macros | {"EARLY": int(early)}


@functools.cache
def _down_kernel(device_index: int, macros: tuple[tuple[str, int], ...], early: bool) -> driver.Kernel:
    known = dict(macros)
    shared_bytes = _DOWN_WARPS * max(_LIST, 64 * known["PAIRS"]) * 4
    return driver.Kernel(
        "few_down", known, device_index, threads=_DOWN_WARPS * 32, shared_bytes=shared_bytes, early=early
    )


def down_macros(hidden: int, rows: int, blocks: int) -> dict[str, int]:
    """The macros of few_down.cu for what few_gate.cu leaves: so many blocks with so many neurons."""
    return {"K": hidden, "PAIRS": -(-rows // 2), "GROUPS": -(-blocks // 32), "WARPS": _DOWN_WARPS, "LIST": _LIST}
