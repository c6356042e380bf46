"""The paper's inference plan on Hopper: `gate_pack`, then `gated_down` (section 3 of the paper).

Shapes: M tokens, K hidden, N intermediate, T columns a tile, S slots a tile. Everything is bfloat16 with float32
accumulation, on torch's current stream; nothing synchronises, and all memory comes from torch's allocator. The callers
(`backends.hopper`) have checked dtypes and sizes, and made the tensors' device the current one.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import TwELL
from . import driver

MAX_HIDDEN, HIDDEN_STEP, MAX_INTERMEDIATE = 8192, 64, 65536
_ROWS, _CLUSTER, _PACKERS, _WARPS = 128, 2, 3, 12


@dataclass(frozen=True)
class Tiling:
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


class PackedGate:
    """relu(x w^T) [M, N] in TwELL, with the tiles that did not fit beside it; all in one block of memory.

    words: int32 [M, tiles, S]: bfloat16 bits << 16 | column; slots past the count are not written.
    counts: int32 [M, tiles]. spilled: bfloat16 [M, tiles, T], written only for tiles whose count is over S. It is
    allocated in full, so that no input can exceed it and where a value goes never depends on timing.
    The rest is for `gated_down`: link, int32 [M]; one word; the neurons with weights that are not finite, and numbers
    that add up to how many these are. It counts the overflowing tiles in `overflow`, an int64 scalar of its own since
    that may outlive the block. The views are made when asked for: a call needs addresses only.
    """

    def __init__(self, x: Tensor, intermediate: int, tiling: Tiling) -> None:
        self.tokens, self.tiles = x.shape[0], -(-intermediate // tiling.tile)
        self.intermediate, self.tiling = intermediate, tiling
        cells = self.tokens * self.tiles
        words, spilled = cells * tiling.slots, cells * tiling.tile // 2
        self.suspect_counts = _grid(x.device.index) * _PACKERS
        self._sizes = (words, spilled, cells, self.tokens, 1, self.suspect_counts, -(-intermediate // 4))
        self._block = x.new_empty(sum(self._sizes), dtype=torch.int32)
        self.overflow = x.new_empty((), dtype=torch.int64)
        self.words_at = self._block.data_ptr()
        self.spilled_at = self.words_at + 4 * words
        self.counts_at = self.spilled_at + 4 * spilled
        self.link_at = self.counts_at + 4 * cells
        self.next_chunk_at = self.link_at + 4 * self.tokens
        self.suspects_at = self.next_chunk_at + 4
        self.suspect_at = self.suspects_at + 4 * self.suspect_counts

    def _part(self, index: int) -> Tensor:
        return self._block.split_with_sizes(self._sizes)[index]

    @property
    def words(self) -> Tensor:
        return self._part(0).view(self.tokens, self.tiles, self.tiling.slots)

    @property
    def spilled(self) -> Tensor:
        return self._part(1).view(torch.bfloat16).view(self.tokens, self.tiles, self.tiling.tile)

    @property
    def counts(self) -> Tensor:
        return self._part(2).view(self.tokens, self.tiles)

    def to_twell(self) -> TwELL:
        """The same matrix as the format's class, for tests and inspection. Raises ValueError if a tile overflowed."""
        if overflow := int((self.counts > self.tiling.slots).sum()):
            raise ValueError(f"{overflow} tiles have more than {self.tiling.slots} non-zeros and are stored elsewhere")
        lanes = self.words.view(torch.uint16).view(*self.words.shape, 2)
        return TwELL(lanes, self.counts, self.intermediate, self.tiling.tile, torch.bfloat16)


def gate_pack(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, down_NK: Tensor, tiling: Tiling | None = None
) -> PackedGate:
    """relu(x w_gate^T) in TwELL; with w_gate None, relu(x w_up^T). x: bfloat16 [M, K], M >= 1, K a multiple of 64;
    weights: bfloat16 [N, K], N at most 65,536; down_NK, and w_up beside a gate, contiguous: they are only looked
    through for Inf and NaN."""
    (tokens, hidden), intermediate, device = x.shape, w_up.shape[0], x.device.index
    tiling = tiling or tiling_for(tokens, intermediate, processors(device))
    x, w = _for_tma(x), _for_tma(w_up if w_gate is None else w_gate)
    packed = PackedGate(x, intermediate, tiling)
    _gate_pack_kernel(device, tiling).launch(
        _grid(device),
        driver.stream(device),
        _map(x, _ROWS),
        _map(w, tiling.tile // _CLUSTER),
        packed.words_at,
        packed.counts_at,
        packed.spilled_at,
        packed.overflow.data_ptr(),
        packed.next_chunk_at,
        0 if w_gate is None else w_up.data_ptr(),
        down_NK.data_ptr(),
        packed.suspect_at,
        packed.suspects_at,
        tokens,
        intermediate,
        hidden,
    )
    return packed


def gated_down(
    packed: PackedGate,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    down_NK: Tensor,
    *,
    stats: bool = False,
    parts: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """y = (g * (x w_up^T)) down_NK for the packed g; with w_gate None, y = g down_NK (g came from w_up).

    To be called once for each packed g, with the weights it was made with: bfloat16 [N, K], contiguous. Returns (y
    [M, K], statistics): (nonzeros int32 [M], sum over neurons of |h| float32 [M], fired bool [N]), or None without
    `stats`.
    """
    (tokens, hidden), device = x.shape, x.device.index
    x = _for_tma(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    counts = None
    if stats:
        nonzeros, l1 = (x.new_empty(tokens, dtype=dtype) for dtype in (torch.int32, torch.float32))
        counts = (nonzeros, l1, x.new_zeros(packed.intermediate, dtype=torch.bool))
    parts = parts or parts_for(tokens, hidden, processors(device))
    _gated_down_kernel(device, hidden, packed.tiling, parts, w_gate is not None, stats).launch(
        min(processors(device), tokens),
        driver.stream(device),
        x.data_ptr(),
        w_up.data_ptr(),
        down_NK.data_ptr(),
        packed.words_at,
        packed.counts_at,
        packed.spilled_at,
        y.data_ptr(),
        packed.overflow.data_ptr(),
        *((0, 0, 0) if counts is None else (t.data_ptr() for t in counts)),
        packed.link_at,
        packed.next_chunk_at,
        packed.suspect_at,
        packed.suspects_at,
        x.stride(0) * 2,
        tokens,
        packed.intermediate,
        _chunk(tokens, parts, processors(device)),
        packed.suspect_counts,
    )
    return y, counts


def tiling_for(tokens: int, intermediate: int, processors: int) -> Tiling:
    """Wide tiles, unless narrow ones still find an idle processor each."""
    narrow_tiles = -(-tokens // (_ROWS * _CLUSTER)) * _CLUSTER * -(-intermediate // NARROW.tile)
    return NARROW if narrow_tiles <= processors else WIDE


def parts_for(tokens: int, hidden: int, processors: int) -> int:
    """Into how many parts `gated_down` cuts a token's non-zeros: more where there are few tokens for each processor."""
    slices = -(-hidden // 2048)
    few, some = {1: (12, 4), 2: (6, 3), 3: (4, 4), 4: (3, 3)}[slices]
    if tokens < 8 * processors:
        return few
    return some if tokens < 64 * processors else 1


def _chunk(tokens: int, parts: int, processors: int) -> int:
    """How many neighbouring tokens a CTA takes at a time: many share weight rows in L1, few balance the load."""
    if parts == 1:
        return 32
    return 4 if tokens >= 64 * processors else 1


@functools.cache
def processors(device_index: int) -> int:
    """Streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def _grid(device_index: int) -> int:
    """CTAs of `gate_pack`: one a processor, in whole clusters."""
    return processors(device_index) // _CLUSTER * _CLUSTER


@functools.cache
def _gate_pack_kernel(device_index: int, tiling: Tiling) -> driver.Kernel:
    macros = {"TILE": tiling.tile, "SLOTS": tiling.slots, "STAGES": tiling.stages, "SMEM_BYTES": tiling.shared_bytes}
    layout, shared_bytes = "128s128s9Q3i44x", tiling.shared_bytes
    return driver.Kernel(
        "gate_pack", macros, device_index, layout, threads=384, shared_bytes=shared_bytes, cluster=_CLUSTER
    )


@functools.cache
def _gated_down_kernel(
    device_index: int, hidden: int, tiling: Tiling, parts: int, gated: bool, stats: bool
) -> driver.Kernel:
    macros = {"K": hidden, "TILE": tiling.tile, "SLOTS": tiling.slots, "PARTS": parts}
    macros |= {"GATED": int(gated), "STATS": int(stats)}
    return driver.Kernel("gated_down", macros, device_index, "15Qq4i", threads=_WARPS * 32)


def _for_tma(matrix: Tensor) -> Tensor:
    """Itself where rows are contiguous and 16-byte aligned, else a copy."""
    row_stride, stride = matrix.stride()
    if stride == 1 and row_stride % 8 == 0 and row_stride >= matrix.shape[1] and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.contiguous() if not matrix.is_contiguous() else matrix.clone()


def _map(matrix: Tensor, box_rows: int) -> bytes:
    rows, columns = matrix.shape
    return driver.tensor_map(matrix.data_ptr(), rows, columns, matrix.stride(0) * 2, box_rows)
