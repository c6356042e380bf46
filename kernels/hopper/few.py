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
from . import driver
from .params import FewDownParams, FewGateParams

MAX_TOKENS = 16
_MAX_EARLY = 4  # tokens: with more, `few_down` slows down the end of `few_gate` if it starts before that
_WARPS, _TILE, _COLUMNS, _LIST = 8, 16, 16, 2048
_SHARED_BYTES = 232448  # what a CTA can have


def _bucket(tokens: int) -> int:
    """The kernels are compiled for at most so many tokens."""
    return 8 if tokens <= 8 else MAX_TOKENS


def gate_shared_bytes(tokens: int, hidden: int) -> tuple[int, int]:
    """Dynamic shared memory of `few_gate` (weights on their way, later the warps' sums), and static."""
    most, steps = _bucket(tokens), -(-hidden // (64 * _WARPS))
    return max(steps * 4 * _WARPS * 32 * 16, _WARPS * most * (_TILE + 1) * 4), most * (_TILE + 2) * 4 + 16


def takes(tokens: int, hidden: int) -> bool:
    """Whether these kernels are made for a block of this hidden size and so many tokens."""
    return 0 < tokens <= MAX_TOKENS and sum(gate_shared_bytes(tokens, hidden)) <= _SHARED_BYTES


def forward(x: Tensor, weights: Weights, *, squared: bool, scan: bool) -> Tensor:
    """y [M, K] for x [M, K] that these kernels take; weights: [N, K], contiguous. squared: the activation is relu(z)^2.
    scan: look for Inf and NaN in the weights, whose products with zeros of the activation are NaN."""
    x = in_rows(x)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    return PreparedFew(x, weights, squared=squared, scan=scan).fill(y)


class PreparedFew(driver.PreparedPair):
    """`few_gate` and `few_down` for operands with the addresses of the given ones, as for `forward`."""

    __slots__ = ("_addresses", "_plan")

    def __init__(self, x: Tensor, weights: Weights, *, squared: bool, scan: bool) -> None:
        (tokens, hidden), intermediate, index = x.shape, weights.up.shape[0], x.device.index
        self._plan = _plan(index, tokens, hidden, intermediate, weights.gate is not None, squared, scan)
        self._addresses = (*(t.data_ptr() for t in (x, weights.pattern, weights.up, weights.down)), x.stride(0))
        super().__init__(index, self._plan.h_at + tokens * intermediate * 2)

    def _key(self) -> Hashable:
        return self._plan, self._addresses  # `forward` makes a new object for each call

    def _launches(self, stream: int, workspace: int, y: int) -> tuple[driver.Launch, driver.Launch]:
        plan, (x, gate, up, down, x_stride) = self._plan, self._addresses
        h, tokens, intermediate = workspace + plan.h_at, plan.tokens, plan.intermediate
        gate_parameters = FewGateParams(
            x=x,
            gate=gate,
            up=up,
            down=down,
            h=h,
            active=workspace,
            x_stride=x_stride * 2,
            gate_stride=plan.hidden * 2,
            M=tokens,
            N=intermediate,
        )
        down_parameters = FewDownParams(h=h, down=down, active=workspace, y=y, M=tokens, N=intermediate)
        return (
            plan.gate.prepare(-(-intermediate // _TILE), stream, gate_parameters),
            plan.down.prepare(plan.hidden // _COLUMNS, stream, down_parameters),
        )


class _Plan(NamedTuple):
    """What does not depend on addresses. h_at: where h begins in the workspace, behind the bits of active neurons."""

    tokens: int
    hidden: int
    intermediate: int
    h_at: int
    gate: driver.Kernel
    down: driver.Kernel


@functools.lru_cache(maxsize=4096)
def _plan(
    device_index: int, tokens: int, hidden: int, intermediate: int, gated: bool, squared: bool, scan: bool
) -> _Plan:
    early, most = tokens <= _MAX_EARLY, _bucket(tokens)
    shared = gate_shared_bytes(tokens, hidden)[0]
    active_bytes = tokens * -(-intermediate // 32) * 4
    return _Plan(
        *(tokens, hidden, intermediate, -(-active_bytes // 16) * 16),
        _gate_kernel(device_index, tuple(gate_macros(hidden, most, gated, squared, scan, early).items()), shared),
        _down_kernel(device_index, hidden, most, early),
    )


@functools.cache
def _gate_kernel(device_index: int, macros: tuple[tuple[str, int], ...], shared_bytes: int) -> driver.Kernel:
    return driver.Kernel("few_gate", dict(macros), device_index, threads=_WARPS * 32, shared_bytes=shared_bytes)


def gate_macros(hidden: int, most: int, gated: bool, squared: bool, scan: bool, early: bool) -> dict[str, int]:
    """The macros of few_gate.cu for at most so many tokens."""
    macros = {"K": hidden, "TOKENS": most, "WARPS": _WARPS, "GATED": int(gated), "SQUARED": int(squared)}
    return macros | {"SCAN": int(scan), "EARLY": int(early)}


@functools.cache
def _down_kernel(device_index: int, hidden: int, most: int, early: bool) -> driver.Kernel:
    macros, shared_bytes = down_macros(hidden, most), most * _LIST * 2
    return driver.Kernel("few_down", macros, device_index, threads=most * 32, shared_bytes=shared_bytes, early=early)


def down_macros(hidden: int, most: int) -> dict[str, int]:
    """The macros of few_down.cu for at most so many tokens."""
    return {"K": hidden, "TOKENS": most, "LIST": _LIST}
