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

from ..formats import TwELL
from ..kept import Kept
from ..memory import in_rows
from . import driver

MAX_HIDDEN, HIDDEN_STEP, MAX_INTERMEDIATE = 8192, 64, 65536
_ROWS, _CLUSTER, _PACKERS, _MULTIPLIERS, _WARPS = 128, 2, 3, 8, 12
LAUNCHES = 8192  # of each kernel that are kept prepared, about a kilobyte each


class Tiling(NamedTuple):
    """How `gate_pack` cuts the intermediate size."""

    tile: int
    slots: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring of operands, the finished tile, the barriers, and room to align."""
        return self.stages * (_ROWS + self.tile) * 128 + _ROWS * self.tile * 2 + 8 * (2 * self.stages + 4) + 1024


WIDE = Tiling(tile=256, slots=32, stages=3)
# Twice the CTAs, for inputs so small that wide tiles leave most of the GPU idle.
NARROW = Tiling(tile=128, slots=16, stages=6)


class Layout(NamedTuple):
    """Where the parts of a packed gate stand in its block of memory, as offsets in 32-bit words."""

    tokens: int
    intermediate: int
    tiling: Tiling
    tiles: int
    suspect_counts: int
    words: int
    spilled: int
    counts: int
    link: int
    next_chunk: int
    suspects: int
    suspect: int
    size: int


_OVERFLOW_WORDS = 4  # the counter's 8 bytes, and what keeps the words after it aligned for 16-byte accesses


def _layout(tokens: int, intermediate: int, tiling: Tiling, suspect_counts: int) -> Layout:
    tiles = -(-intermediate // tiling.tile)
    cells = tokens * tiles
    sizes = (
        *(_OVERFLOW_WORDS, cells * tiling.slots, cells * tiling.tile // 2, cells, tokens, 1),
        *(suspect_counts, -(-intermediate // 4)),
    )
    return Layout(tokens, intermediate, tiling, tiles, suspect_counts, *itertools.accumulate(sizes))


class PackedGate:
    """relu(x w^T) [M, N] in TwELL, with the tiles that did not fit beside it; all in one block of memory.

    words: int32 [M, tiles, S]: bfloat16 bits << 16 | column; slots past the count are not written.
    counts: int32 [M, tiles]. spilled: bfloat16 [M, tiles, T], written only for tiles whose count is over S. It is
    allocated in full, so that no input can exceed it and where a value goes never depends on timing.
    overflow: int64 scalar, the number of overflowing tiles, counted by `gated_down`; a tensor of its own, since it may
    outlive the block, or None where nobody asked for it.
    The rest is for `gated_down`: link, int32 [M]; one word; the neurons with weights that are not finite, and numbers
    that add up to how many these are. The views are made when asked for: a call needs addresses only.
    """

    __slots__ = ("_block", "address", "layout", "overflow", "overflow_at")

    def __init__(self, layout: Layout, device: torch.device, *, count_overflow: bool) -> None:
        self.layout = layout
        self._block = torch.empty(layout.size, dtype=torch.int32, device=device)
        self.address = self._block.data_ptr()
        self.overflow = torch.empty((), dtype=torch.int64, device=device) if count_overflow else None
        self.overflow_at = self.address if self.overflow is None else self.overflow.data_ptr()

    def _part(self, start: int, end: int) -> Tensor:
        return self._block[start:end]

    @property
    def words(self) -> Tensor:
        at = self.layout
        return self._part(at.words, at.spilled).view(at.tokens, at.tiles, at.tiling.slots)

    @property
    def spilled(self) -> Tensor:
        at = self.layout
        return self._part(at.spilled, at.counts).view(torch.bfloat16).view(at.tokens, at.tiles, at.tiling.tile)

    @property
    def counts(self) -> Tensor:
        at = self.layout
        return self._part(at.counts, at.link).view(at.tokens, at.tiles)

    def to_twell(self) -> TwELL:
        """The same matrix as the format's class, for tests and inspection. Raises ValueError if a tile overflowed."""
        tiling, counts = self.layout.tiling, self.counts
        if overflow := int((counts > tiling.slots).sum()):
            raise ValueError(f"{overflow} tiles have more than {tiling.slots} non-zeros and are stored elsewhere")
        lanes = self.words.view(torch.uint16).view(*self.words.shape, 2)
        return TwELL(lanes, counts, self.layout.intermediate, tiling.tile, torch.bfloat16)


def gate_pack(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    tiling: Tiling | None = None,
    *,
    count_overflow: bool = True,
    training: bool = False,
) -> PackedGate:
    """relu(x w_gate^T) in TwELL; with w_gate None, relu(x w_up^T).

    x: bfloat16 [M, K], M >= 1, K a multiple of 64; w_gate, w_up: bfloat16 [N, K], N at most 65,536; w_down: bfloat16
    [K, N], neuron-major in memory (`memory.neuron_major`), and w_up beside a gate contiguous: they are only looked
    through for Inf and NaN. training: the gate's own weights, contiguous too, are looked through for the backward.
    """
    (tokens, hidden), intermediate, device = x.shape, w_up.shape[0], x.device
    kernel, layout, grid = _gate_plan(tokens, intermediate, device.index, tiling)
    x, w = in_rows(x), in_rows(w_up if w_gate is None else w_gate)
    packed = PackedGate(layout, device, count_overflow=count_overflow)
    own = w.data_ptr()
    look_through = (own if training else 0, 0 if w_gate is None else w_up.data_ptr(), w_down.data_ptr())
    addresses = (x.data_ptr(), own, look_through, packed.address, packed.overflow_at)
    _gate_launch((kernel, layout, grid, driver.stream(device.index), hidden, x.stride(0), w.stride(0), addresses))()
    return packed


# The arguments come as one tuple: that is what the cache hashes fastest.
@functools.lru_cache(maxsize=LAUNCHES)
def _gate_launch(arguments: tuple) -> driver.Launch:
    """A launch for these addresses, strides (in elements) and sizes; kept, since a model repeats its calls."""
    kernel, layout, grid, stream, hidden, x_stride, w_stride, addresses = arguments
    x, w, look_through, block, overflow = addresses
    tokens, intermediate = layout.tokens, layout.intermediate
    return kernel.prepare(
        grid,
        stream,
        driver.tensor_map(x, tokens, hidden, x_stride * 2, _ROWS),
        driver.tensor_map(w, intermediate, hidden, w_stride * 2, layout.tiling.tile // _CLUSTER),
        block + 4 * layout.words,
        block + 4 * layout.counts,
        block + 4 * layout.spilled,
        overflow,
        block + 4 * layout.next_chunk,
        *look_through,
        block + 4 * layout.suspect,
        block + 4 * layout.suspects,
        tokens,
        intermediate,
        hidden,
    )


@functools.lru_cache(maxsize=4096)
def _gate_plan(
    tokens: int, intermediate: int, device_index: int, tiling: Tiling | None
) -> tuple[driver.Kernel, Layout, int]:
    """(kernel, layout of the result, CTAs: one a processor, in whole clusters)."""
    grid = processors(device_index) // _CLUSTER * _CLUSTER
    tiling = tiling or tiling_for(tokens, intermediate, processors(device_index))
    tiles = -(-tokens // (_ROWS * _CLUSTER)) * -(-intermediate // tiling.tile)
    # Warps that look through the weights: all packers, and those that would multiply but have no tile.
    suspect_counts = grid * _PACKERS + max(grid - tiles * _CLUSTER, 0) * _MULTIPLIERS
    return _gate_pack_kernel(device_index, tiling), _layout(tokens, intermediate, tiling, suspect_counts), grid


def gated_down(
    packed: PackedGate,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    stats: bool = False,
    keep: Kept | None = None,
    parts: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """y = (g * (x w_up^T)) w_down^T for the packed g; with w_gate None, y = g w_down^T (g came from w_up).

    To be called once for each packed g, with the weights it was made with: w_up bfloat16 [N, K], contiguous; w_down
    bfloat16 [K, N], neuron-major in memory. Returns (y [M, K], statistics): (nonzeros int32 [M], sum over neurons of
    |h| float32 [M], fired bool [N]), or None without `stats`. keep: filled with what the backward needs.
    """
    (tokens, hidden), device, layout = x.shape, x.device, packed.layout
    gated, save = w_gate is not None, keep is not None
    kernel, grid, chunk = _down_plan(tokens, hidden, device.index, layout.tiling, parts, gated, stats, save)
    x = in_rows(x)
    y = torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
    counts, counts_at = None, _NOWHERE
    if stats:
        nonzeros, l1 = (x.new_empty(tokens, dtype=dtype) for dtype in (torch.int32, torch.float32))
        counts = (nonzeros, l1, x.new_zeros(layout.intermediate, dtype=torch.bool))
        counts_at = tuple(t.data_ptr() for t in counts)
    addresses = (x.data_ptr(), w_up.data_ptr(), w_down.data_ptr(), packed.address, packed.overflow_at, y.data_ptr())
    kept_at = _NOT_KEPT if keep is None else keep.addresses()
    stream = driver.stream(device.index)
    _down_launch((kernel, layout, grid, chunk, stream, x.stride(0), addresses, counts_at, kept_at))()
    return y, counts


_NOWHERE, _NOT_KEPT = (0, 0, 0), (0, 0, 0, 0, 0)


class Repeated:
    """`gate_pack` and `gated_down` without statistics, for operands that lie where the given ones did: everything is
    decided, so that a call costs two allocations and two launches. Called with x [..., K], returns y.

    x: bfloat16 [M, K], contiguous; weights as for `gate_pack` and `gated_down`. None of the tensors is kept.
    """

    __slots__ = ("_down", "_gate", "_index", "_size")

    def __init__(self, x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> None:
        (tokens, hidden), intermediate, self._index = x.shape, w_up.shape[0], x.device.index
        kernel, layout, grid = _gate_plan(tokens, intermediate, self._index, None)
        gated, at = w_gate is not None, (x.data_ptr(), w_up.data_ptr(), w_down.data_ptr())
        own, up = (w_gate.data_ptr(), at[1]) if gated else (at[1], 0)
        self._gate = (kernel, layout, grid, hidden), (at[0], own, (0, up, at[2]))
        self._down = _down_plan(tokens, hidden, self._index, layout.tiling, None, gated, False, False), layout, at
        self._size = layout.size

    def __call__(self, x: Tensor) -> Tensor:
        block = torch.empty(self._size, dtype=torch.int32, device=x.device)
        y = torch.empty_like(x)
        gate, down = _launches(self, driver.stream(self._index), block.data_ptr(), y.data_ptr())
        gate()
        down()
        return y

    def prepare(self, stream: int, block: int, y: int) -> tuple[driver.Launch, driver.Launch]:
        """Both launches, for these addresses of the workspace and of y."""
        (kernel, layout, grid, hidden), gate_at = self._gate
        gate = _gate_launch((kernel, layout, grid, stream, hidden, hidden, hidden, (*gate_at, block, block)))
        (kernel, grid, chunk), layout, down_at = self._down
        addresses = (*down_at, block, block, y)
        return gate, _down_launch((kernel, layout, grid, chunk, stream, hidden, addresses, _NOWHERE, _NOT_KEPT))


@functools.lru_cache(maxsize=LAUNCHES)
def _launches(repeated: Repeated, stream: int, block: int, y: int) -> tuple[driver.Launch, driver.Launch]:
    return repeated.prepare(stream, block, y)


@functools.lru_cache(maxsize=LAUNCHES)
def _down_launch(arguments: tuple) -> driver.Launch:
    """As `_gate_launch`."""
    kernel, layout, grid, chunk, stream, x_stride, addresses, counts, (words, u, rows, state, capacity) = arguments
    x, w_up, w_down, block, overflow, y = addresses
    return kernel.prepare(
        grid,
        stream,
        x,
        w_up,
        w_down,
        block + 4 * layout.words,
        block + 4 * layout.counts,
        block + 4 * layout.spilled,
        y,
        overflow,
        *counts,
        block + 4 * layout.link,
        block + 4 * layout.next_chunk,
        block + 4 * layout.suspect,
        block + 4 * layout.suspects,
        words,
        u,
        rows,
        state,
        state + 8,
        x_stride * 2,
        layout.tokens,
        layout.intermediate,
        chunk,
        layout.suspect_counts,
        capacity,
    )


@functools.lru_cache(maxsize=4096)
def _down_plan(
    tokens: int, hidden: int, device_index: int, tiling: Tiling, parts: int | None, gated: bool, stats: bool, save: bool
) -> tuple[driver.Kernel, int, int]:
    """(kernel, CTAs, tokens that a CTA takes at a time)."""
    count = processors(device_index)
    parts = parts or parts_for(tokens, hidden, count)
    kernel = _gated_down_kernel(device_index, hidden, tiling, parts, gated, stats, save)
    return kernel, min(count, tokens), chunk_for(tokens, parts, count)


def tiling_for(tokens: int, intermediate: int, processors: int) -> Tiling:
    """Wide tiles, unless narrow ones still find an idle processor each."""
    narrow_tiles = -(-tokens // (_ROWS * _CLUSTER)) * _CLUSTER * -(-intermediate // NARROW.tile)
    return NARROW if narrow_tiles <= processors else WIDE


def parts_for(tokens: int, hidden: int, processors: int) -> int:
    """Into how many parts `gated_down` cuts a token's non-zeros: more where there are few tokens for each processor."""
    if tokens >= 64 * processors:
        return 1
    slices = -(-hidden // 2048)
    parts = {1: (12, 6, 4, 3), 2: (6, 3, 3, 3), 3: (4, 4, 4, 4), 4: (3, 3, 3, 3)}[slices]
    return parts[sum(tokens > each * processors for each in (2, 4, 16))]


def chunk_for(tokens: int, parts: int, processors: int) -> int:
    """How many neighbouring tokens a CTA takes at a time: many share weight rows in L1, few balance the load."""
    if parts == 1:
        return 32
    return 4 if tokens >= 64 * processors else 1


@functools.cache
def processors(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def _gate_pack_kernel(device_index: int, tiling: Tiling) -> driver.Kernel:
    macros = {"TILE": tiling.tile, "SLOTS": tiling.slots, "STAGES": tiling.stages, "SMEM_BYTES": tiling.shared_bytes}
    layout, shared_bytes = "128s128s10Q3i36x", tiling.shared_bytes
    return driver.Kernel(
        "gate_pack", macros, device_index, layout, threads=384, shared_bytes=shared_bytes, cluster=_CLUSTER
    )


@functools.cache
def _gated_down_kernel(
    device_index: int, hidden: int, tiling: Tiling, parts: int, gated: bool, stats: bool, save: bool
) -> driver.Kernel:
    macros = {"K": hidden, "TILE": tiling.tile, "SLOTS": tiling.slots, "PARTS": parts}
    macros |= {"GATED": int(gated), "STATS": int(stats), "SAVE": int(save), "WARPS": _WARPS}
    return driver.Kernel("gated_down", macros, device_index, "20Qq4iI4x", threads=_WARPS * 32, early=True)
