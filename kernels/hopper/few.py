"""The block for few tokens on Hopper, where reading the weights is all that takes time: `few_gate`, then `few_down`.

All of the gate is read, and of the up and down weights only the rows of neurons that some token activates: for one
token with 29 of 5,632 neurons a third of the bytes that dense products read. With more tokens most rows of the down
weights are read anyway, and the product with them is cuBLAS's.

Shapes: M tokens, K hidden, N intermediate. Everything is bfloat16 with float32 accumulation.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..interface import Weights
from ..launch_cache import LAUNCHES
from ..memory import in_rows
from . import driver
from .params import FewDownParams, FewGateParams

MAX_TOKENS = 64
_MAX_GATHERED = 16  # tokens: with more, y is a plain product with all of the down weights
_MAX_EARLY = 4  # tokens: with more, `few_down` on the processors before `few_gate` has ended slows it down
_WARPS, _COLUMNS, _LIST = 8, 16, 2048
_MOST_PAIRS = 16  # non-zeros of a CTA whose u a warp each computes; with more, tensor cores compute all of the tile
_SHARED_BYTES = 232448  # what a CTA can have


class GateConfig(NamedTuple):
    """How `few_gate` is compiled. tokens: at most so many; groups: of 16 neurons that a CTA has."""

    tokens: int
    groups: int

    def shared_bytes(self, hidden: int) -> tuple[int, int]:
        """Dynamic shared memory (weights on their way, later the warps' sums), and static."""
        steps, tile = -(-hidden // (64 * _WARPS)), 16 * self.groups
        copies, sums = steps * self.groups * 4 * _WARPS * 32 * 16, _WARPS * self.tokens * (tile + 1) * 4
        return max(copies, sums), self.tokens * (tile + 2) * 4 + 16


@functools.cache
def gate_config(tokens: int, hidden: int) -> GateConfig | None:
    """The configuration for so many tokens, None where there is none."""
    bucket = next((most for most in (8, 16, 32, 64) if tokens <= most), None)
    if bucket is None:
        return None
    # Twice the neurons halve what is read of x, which counts from some twenty tokens on.
    wanted = [GateConfig(bucket, groups) for groups in ((1,) if bucket <= 16 else (2, 1))]
    return next((config for config in wanted if sum(config.shared_bytes(hidden)) <= _SHARED_BYTES), None)


def takes(tokens: int, hidden: int) -> bool:
    """Whether these kernels are made for a block of this hidden size and so many tokens."""
    return 0 < tokens <= MAX_TOKENS and gate_config(tokens, hidden) is not None


def forward(x: Tensor, weights: Weights, *, squared: bool, scan: bool) -> Tensor:
    """y [M, K] for x [M, K], 1 <= M <= MAX_TOKENS; weights: [N, K], contiguous. squared: the activation is relu(z)^2.
    scan: look for Inf and NaN in the weights, whose products with zeros of the activation are NaN."""
    x = in_rows(x)
    run = Few(x, weights, squared=squared, scan=scan)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    return run.compute(y, weights.down)


def prepared(x: Tensor, weights: Weights, *, squared: bool, scan: bool) -> "Few | None":
    """For repeated calls with operands at these addresses, all of them contiguous; None where a call needs more than
    launches."""
    return Few(x, weights, squared=squared, scan=scan) if len(x) <= _MAX_GATHERED else None


class Few:
    """The launches for operands at the addresses of the given ones; holds no tensor. x: rows of K, as `in_rows` makes
    them."""

    __slots__ = ("_addresses", "_index", "_plan", "_size")

    def __init__(self, x: Tensor, weights: Weights, *, squared: bool, scan: bool) -> None:
        (tokens, hidden), intermediate = x.shape, weights.up.shape[0]
        gated = weights.gate is not None
        self._index = x.device.index
        self._plan = _plan(self._index, tokens, hidden, intermediate, gated, squared, scan)
        at = (t.data_ptr() for t in (x, weights.pattern, weights.up, weights.down))
        self._addresses = (*at, x.stride(0))
        # The words of `active`, then h from a multiple of 16 bytes on.
        self._size = self._plan.h_at + tokens * intermediate * 2

    def compute(self, y: Tensor, down: Tensor | None) -> Tensor:
        """Fills y [M, K] and returns it. down: [N, K]; not used where `few_down` computes y."""
        plan = self._plan
        block = torch.empty(self._size, dtype=torch.uint8, device=y.device)
        key = plan, self._addresses, driver.stream(self._index), block.data_ptr(), y.data_ptr()
        if (launches := LAUNCHES.get(key)) is None:
            launches = self._launches(*key[2:])
            LAUNCHES.put(key, launches)
        for launch in launches:
            launch()
        if plan.down is None:
            assert down is not None
            h = block[plan.h_at :].view(torch.bfloat16).view(plan.tokens, plan.intermediate)
            torch.mm(h, down, out=y)
        return y

    def __call__(self, x: Tensor) -> Tensor:
        """For repeated calls with an x at the same address, of any shape with as many elements."""
        return self.compute(torch.empty_like(x), None)

    def _launches(self, stream: int, block: int, y: int) -> tuple[driver.Launch, ...]:
        plan, (x, gate, up, down, x_stride) = self._plan, self._addresses
        gate_parameters = FewGateParams(
            x=x,
            gate=gate,
            up=up,
            down=down,
            h=block + plan.h_at,
            active=block,
            x_stride=x_stride * 2,
            gate_stride=plan.hidden * 2,
            M=plan.tokens,
            N=plan.intermediate,
        )
        first = plan.gate.prepare(plan.gate_grid, stream, gate_parameters)
        if plan.down is None:
            return (first,)
        down_parameters = FewDownParams(
            h=block + plan.h_at, down=down, active=block, y=y, M=plan.tokens, N=plan.intermediate
        )
        return first, plan.down.prepare(plan.hidden // _COLUMNS, stream, down_parameters)


class _Plan(NamedTuple):
    """What does not depend on addresses."""

    tokens: int
    hidden: int
    intermediate: int
    h_at: int
    gate: driver.Kernel
    gate_grid: int
    down: driver.Kernel | None


@functools.lru_cache(maxsize=4096)
def _plan(
    device_index: int, tokens: int, hidden: int, intermediate: int, gated: bool, squared: bool, scan: bool
) -> _Plan:
    config = gate_config(tokens, hidden)
    assert config is not None  # `takes` says so
    early = tokens <= _MAX_EARLY
    active_bytes = tokens * -(-intermediate // 32) * 4
    return _Plan(
        *(tokens, hidden, intermediate, -(-active_bytes // 16) * 16),
        _gate_kernel(device_index, hidden, config, gated, squared, scan, early),
        -(-intermediate // (16 * config.groups)),
        _down_kernel(device_index, hidden, config.tokens, early) if tokens <= _MAX_GATHERED else None,
    )


@functools.cache
def _gate_kernel(
    device_index: int, hidden: int, config: GateConfig, gated: bool, squared: bool, scan: bool, early: bool
) -> driver.Kernel:
    macros = gate_macros(hidden, config, gated, squared, scan, early)
    shared = config.shared_bytes(hidden)[0]
    return driver.Kernel("few_gate", macros, device_index, threads=_WARPS * 32, shared_bytes=shared)


def gate_macros(hidden: int, config: GateConfig, gated: bool, squared: bool, scan: bool, early: bool) -> dict[str, int]:
    """The macros of few_gate.cu."""
    macros = {"K": hidden, "TOKENS": config.tokens, "GROUPS": config.groups, "WARPS": _WARPS, "MOST_PAIRS": _MOST_PAIRS}
    return macros | {"GATED": int(gated), "SQUARED": int(squared), "SCAN": int(scan), "EARLY": int(early)}


@functools.cache
def _down_kernel(device_index: int, hidden: int, tokens: int, early: bool) -> driver.Kernel:
    macros = down_macros(hidden, tokens)
    return driver.Kernel(
        "few_down", macros, device_index, threads=tokens * 32, shared_bytes=tokens * _LIST * 2, early=early
    )


def down_macros(hidden: int, tokens: int) -> dict[str, int]:
    """The macros of few_down.cu."""
    return {"K": hidden, "TOKENS": tokens, "LIST": _LIST}
