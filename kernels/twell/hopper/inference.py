"""The paper's inference plan on Hopper: `gate_pack`, then `gated_down` (section 3 of the paper).

Shapes: M tokens, K hidden, N intermediate, T columns a tile, S slots a tile. Everything is bfloat16 with float32
accumulation, on torch's current stream; nothing synchronises, and all memory comes from torch's allocator. The callers
(`backends.hopper`) have checked dtypes and sizes, and made the tensors' device the current one.
"""

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ..gpu.saved_csr import SavedCSR
from ..interface import Cold, Weights
from ..launch_cache import LAUNCHES
from ..memory import in_rows
from . import driver
from .params import GatedDownParams, GatePackParams
from .screen import Rows, Screen, quantised

ROWS, CLUSTER = 128, 2  # as in product.cuh: of a tile, and CTAs
_WARPS = 12


class Tiling(NamedTuple):
    """How `gate_pack` cuts the intermediate size."""

    tile: int
    slots: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring of operands, the finished tile, the barriers, and room to align."""
        return self.stages * (ROWS + self.tile) * 128 + ROWS * self.tile * 2 + 8 * (2 * self.stages + 4) + 1024


WIDE = Tiling(tile=256, slots=32, stages=3)
# Twice the CTAs, for inputs so small that wide tiles leave most of the GPU idle.
NARROW = Tiling(tile=128, slots=16, stages=6)


class Switches(NamedTuple):
    """What `gated_down` is compiled for: its macros, in capitals. weighted: neurons have weights in the L1 term;
    screened: some entries of the packed gate are only marked."""

    gated: bool
    squared: bool
    stats: bool = False
    save: bool = False
    weighted: bool = False
    screened: bool = False

    def macros(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in self._asdict().items()}


class Layout(NamedTuple):
    """The parts of a packed gate: offsets in its block of memory, in 32-bit words."""

    tokens: int
    intermediate: int
    tiling: Tiling
    tiles: int
    words: int
    spilled: int
    counts: int
    link: int
    next_chunk: int
    size: int


_OVERFLOW_WORDS = 4  # the counter's 8 bytes, and what keeps the words after it aligned for 16-byte accesses


def _layout(tokens: int, intermediate: int, tiling: Tiling) -> Layout:
    tiles = -(-intermediate // tiling.tile)
    cells = tokens * tiles
    sizes = (_OVERFLOW_WORDS, cells * tiling.slots, cells * tiling.tile // 2, cells, tokens, 1)
    return Layout(tokens, intermediate, tiling, tiles, *itertools.accumulate(sizes))


class PackedGate:
    """relu(x w^T) [M, N] in TwELL, with the tiles that did not fit beside it; all in one block of memory.

    words: int32 [M, tiles, S]: bfloat16 bits << 16 | column; slots past the count are not written.
    counts: int32 [M, tiles]. spilled: bfloat16 [M, tiles, T], written only for tiles whose count is over S. It is
    allocated in full, so that no input can exceed it and where a value goes never depends on timing.
    overflow: int64 scalar, the number of overflowing tiles, counted by `gated_down`; a tensor of its own, since it may
    outlive the block, or None if it was not asked for.
    neurons: uint16 [N], which neurons these are, if not all of the block's.
    screened: whether entries that are -0 are still to be computed.
    The rest is for `gated_down`: link, int32 [M], and one word. Views are created on demand: a call needs only
    addresses.
    """

    __slots__ = ("_block", "_neurons", "address", "layout", "neurons_at", "overflow", "overflow_at", "screened")

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        count_overflow: bool,
        neurons: Tensor | None = None,
        screened: bool = False,
    ) -> None:
        self.layout, self.screened = layout, screened
        self._neurons, self.neurons_at = neurons, driver.address(neurons)
        self._block = torch.empty(layout.size, dtype=torch.int32, device=device)
        self.address = self._block.data_ptr()
        self.overflow = torch.empty((), dtype=torch.int64, device=device) if count_overflow else None
        self.overflow_at = self.address if self.overflow is None else self.overflow.data_ptr()

    @property
    def words(self) -> Tensor:
        at = self.layout
        return self._block[at.words : at.spilled].view(at.tokens, at.tiles, at.tiling.slots)

    @property
    def spilled(self) -> Tensor:
        at = self.layout
        return self._block[at.spilled : at.counts].view(torch.bfloat16).view(at.tokens, at.tiles, at.tiling.tile)

    @property
    def counts(self) -> Tensor:
        at = self.layout
        return self._block[at.counts : at.link].view(at.tokens, at.tiles)


def gate_pack(
    x: Tensor,
    weights: Weights,
    tiling: Tiling | None = None,
    *,
    stats: bool = True,
    cold: Cold | None = None,
    screen: Screen | None = None,
) -> PackedGate:
    """`gate_pack` of `adapter.Kernels`. cold: the neurons to compute, if not all; screen: those that are only marked
    where they may fire."""
    (tokens, hidden), device = x.shape, x.device
    x, w = in_rows(x), in_rows(weights.pattern if cold is None else cold.rows)
    tiling = tiling if screen is None else WIDE
    kernel, layout, grid = _gate_plan(tokens, w.shape[0], device.index, tiling)
    packed = PackedGate(
        layout,
        device,
        count_overflow=stats,
        neurons=None if cold is None else cold.neurons,
        screened=screen is not None,
    )
    stream, result = driver.stream(device.index), (packed.neurons_at, packed.address, packed.overflow_at)
    count = layout.intermediate if screen is None else screen.first
    if count:
        addresses = (x.data_ptr(), w.data_ptr(), 0, 0, *result)
        _gate_launch((kernel, layout, grid, stream, 0, count, hidden, x.stride(0), w.stride(0), addresses))()
    if screen is not None:
        launch_screened(packed, quantised(x, screen.factors), screen)
    return packed


def launch_screened(packed: PackedGate, x: Rows, screen: Screen) -> None:
    """Mark the neurons of `screen` in the packed gate."""
    index, layout, w, half = x.values.device.index, packed.layout, screen.weights, x.values.shape[1] // 2
    addresses = (*(t.data_ptr() for t in (x.values, w.values, x.norms, w.norms)), packed.neurons_at, packed.address)
    kernel, grid = gate_pack_kernel(index, layout.tiling, True), product_grid(index)
    neurons = screen.first, layout.intermediate - screen.first
    arguments = kernel, layout, grid, driver.stream(index), *neurons, half, half, half, (*addresses, packed.overflow_at)
    _gate_launch(arguments)()


# The arguments come as one tuple, which is the launch's key in the cache.
@LAUNCHES.kept
def _gate_launch(arguments: tuple) -> driver.Launch:
    """The launch for these addresses, strides (in 16 bits, like the hidden size) and sizes, for `count` neurons from
    `first` on, a multiple of the tile."""
    kernel, layout, grid, stream, first, count, hidden, x_stride, w_stride, addresses = arguments
    x, w, x_norms, w_norms, neurons, block, overflow = addresses
    tokens = layout.tokens
    parameters = GatePackParams(
        map_x=driver.tensor_map(x, tokens, hidden, x_stride * 2, ROWS),
        map_w=driver.tensor_map(w, count, hidden, w_stride * 2, layout.tiling.tile // CLUSTER),
        words=block + 4 * layout.words,
        counts=block + 4 * layout.counts,
        spilled=block + 4 * layout.spilled,
        overflow=overflow,
        next_chunk=block + 4 * layout.next_chunk,
        neurons=neurons,
        x_norms=x_norms,
        w_norms=w_norms,
        M=tokens,
        N=count,
        K=hidden,
        tiles=layout.tiles,
        first_tile=first // layout.tiling.tile,
    )
    return kernel.prepare(grid, stream, parameters)


@functools.lru_cache(maxsize=4096)
def _gate_plan(
    tokens: int, intermediate: int, device_index: int, tiling: Tiling | None
) -> tuple[driver.Kernel, Layout, int]:
    """(kernel, layout of the result, CTAs)."""
    tiling = tiling or tiling_for(tokens, intermediate, sm_count(device_index))
    return (
        gate_pack_kernel(device_index, tiling, False),
        _layout(tokens, intermediate, tiling),
        product_grid(device_index),
    )


def gated_down(
    packed: PackedGate,
    x: Tensor,
    weights: Weights,
    *,
    stats: bool = False,
    save: SavedCSR | None = None,
    squared: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """`gated_down` of `adapter.Kernels`."""
    (tokens, hidden), device, layout = x.shape, x.device, packed.layout
    kind = weights.gate is not None, squared, stats, save is not None, weights.l1 is not None, packed.screened
    switches = Switches(*kind)
    plan = _down_plan(tokens, hidden, device.index, layout.tiling, switches)
    x = in_rows(x)
    y = x.new_empty(x.shape) if out is None else out
    counts, counts_at = None, _NOWHERE
    if stats:
        nonzeros, l1 = (x.new_empty(tokens, dtype=dtype) for dtype in (torch.int32, torch.float32))
        counts = (nonzeros, l1, x.new_zeros(weights.up.shape[0], dtype=torch.bool))
        counts_at = (nonzeros.data_ptr(), l1.data_ptr(), driver.address(weights.l1), counts[2].data_ptr())
    operands = (x.data_ptr(), weights.up.data_ptr(), weights.down.data_ptr(), driver.address(weights.gate))
    addresses = (*operands, packed.neurons_at, packed.address, packed.overflow_at, y.data_ptr())
    saved_at = _NOT_SAVED if save is None else save.addresses()
    _down_launch((*plan, layout, driver.stream(device.index), x.stride(0), addresses, counts_at, saved_at))()
    return y, counts


_NOWHERE, _NOT_SAVED = (0, 0, 0, 0), (0, 0, 0, 0, 0, 0)


@LAUNCHES.kept
def _down_launch(arguments: tuple) -> driver.Launch:
    """Prepared launch of `gated_down`, kept like that of `_gate_launch`."""
    kernel, grid, chunk, layout, stream, x_stride, addresses, counts, saved = arguments
    x, up, down, gate, neurons, block, overflow, y = addresses
    nonzeros, l1, l1_weight, fired = counts
    saved_words, saved_u, saved_rows, saved_count, nonfinite, capacity = saved
    parameters = GatedDownParams(
        x=x,
        up=up,
        down=down,
        gate=gate,
        words=block + 4 * layout.words,
        counts=block + 4 * layout.counts,
        spilled=block + 4 * layout.spilled,
        y=y,
        overflow=overflow,
        nonzeros=nonzeros,
        l1=l1,
        l1_weight=l1_weight,
        fired=fired,
        link=block + 4 * layout.link,
        next_chunk=block + 4 * layout.next_chunk,
        neurons=neurons,
        saved_words=saved_words,
        saved_u=saved_u,
        saved_rows=saved_rows,
        saved_count=saved_count,
        nonfinite=nonfinite,
        x_stride=x_stride * 2,
        M=layout.tokens,
        N=layout.intermediate,
        chunk=chunk,
        capacity=capacity,
    )
    return kernel.prepare(grid, stream, parameters)


class PreparedForward(driver.PreparedPair):
    """`gate_pack` and `gated_down` without statistics, for operands with the addresses of the given ones.

    x: bfloat16 [M, K], contiguous; weights as for `gate_pack` and `gated_down`.
    """

    __slots__ = ("_down", "_gate")

    def __init__(self, x: Tensor, weights: Weights, *, squared: bool) -> None:
        (tokens, hidden), intermediate, index = x.shape, weights.up.shape[0], x.device.index
        kernel, layout, grid = _gate_plan(tokens, intermediate, index, None)
        super().__init__(index, 4 * layout.size)
        at = x.data_ptr(), weights.up.data_ptr(), weights.down.data_ptr(), driver.address(weights.gate)
        self._gate = (kernel, layout, grid, hidden), (at[0], weights.pattern.data_ptr())
        plan = _down_plan(tokens, hidden, index, layout.tiling, Switches(weights.gate is not None, squared))
        self._down = plan, layout, at

    def _launches(self, stream: int, workspace: int, y: int) -> tuple[driver.Launch, driver.Launch]:
        (kernel, layout, grid, hidden), gate_at = self._gate
        sizes = 0, layout.intermediate, hidden, hidden, hidden
        gate = _gate_launch((kernel, layout, grid, stream, *sizes, (*gate_at, 0, 0, 0, workspace, workspace)))
        plan, layout, down_at = self._down
        addresses = (*down_at, 0, workspace, workspace, y)
        return gate, _down_launch((*plan, layout, stream, hidden, addresses, _NOWHERE, _NOT_SAVED))


@functools.lru_cache(maxsize=4096)
def _down_plan(
    tokens: int, hidden: int, device_index: int, tiling: Tiling, switches: Switches
) -> tuple[driver.Kernel, int, int]:
    """(kernel, CTAs, tokens that a CTA takes at a time)."""
    count = sm_count(device_index)
    parts = parts_for(tokens, hidden, count)
    kernel = gated_down_kernel(device_index, hidden, tiling, parts, switches)
    return kernel, min(count, tokens), chunk_for(tokens, parts, count)


def tiling_for(tokens: int, intermediate: int, sm_count: int) -> Tiling:
    """Wide tiles, unless every narrow one has an idle SM."""
    narrow_tiles = -(-tokens // (ROWS * CLUSTER)) * CLUSTER * -(-intermediate // NARROW.tile)
    return NARROW if narrow_tiles <= sm_count else WIDE


def parts_for(tokens: int, hidden: int, sm_count: int) -> int:
    """How many parts `gated_down` cuts a token's non-zeros into: more if there are few tokens an SM."""
    if tokens >= 64 * sm_count:
        return 1
    slices = -(-hidden // 2048)
    parts = {1: (12, 6, 4, 3), 2: (6, 3, 3, 3), 3: (4, 4, 4, 4), 4: (3, 3, 3, 3)}[slices]
    return parts[sum(tokens > each * sm_count for each in (2, 4, 16))]


def chunk_for(tokens: int, parts: int, sm_count: int) -> int:
    """How many neighbouring tokens a CTA takes at a time: many share weight rows in L1, few balance the load."""
    if parts == 1:
        return 32
    return 4 if tokens >= 64 * sm_count else 1


@functools.cache
def sm_count(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def product_grid(device_index: int) -> int:
    """CTAs of a kernel with the loop of product.cuh: one an SM, in whole clusters."""
    return sm_count(device_index) // CLUSTER * CLUSTER


def gate_pack_macros(tiling: Tiling, screen: bool) -> dict[str, int]:
    """How `gate_pack` is compiled. screen: in int8."""
    sizes = {"TILE": tiling.tile, "SLOTS": tiling.slots, "STAGES": tiling.stages, "SMEM_BYTES": tiling.shared_bytes}
    return {**sizes, "SCREEN": int(screen)}


@functools.cache
def gate_pack_kernel(device_index: int, tiling: Tiling, screen: bool) -> driver.Kernel:
    macros = gate_pack_macros(tiling, screen)
    return driver.Kernel(
        "gate_pack", macros, device_index, threads=384, shared_bytes=tiling.shared_bytes, cluster=CLUSTER
    )


@functools.cache
def gated_down_kernel(device_index: int, hidden: int, tiling: Tiling, parts: int, switches: Switches) -> driver.Kernel:
    macros = {"K": hidden, "TILE": tiling.tile, "SLOTS": tiling.slots, "PARTS": parts, "WARPS": _WARPS}
    macros |= switches.macros()
    return driver.Kernel("gated_down", macros, device_index, threads=_WARPS * 32, early=True)
