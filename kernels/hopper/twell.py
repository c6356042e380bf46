"""The paper's inference plan on Hopper: `gate_pack`, then `gated_down` (section 3 of the paper).

Shapes: M tokens, K hidden, N intermediate, T columns a tile, S slots a tile. Everything is bfloat16 with float32
accumulation, on torch's current stream; nothing synchronises, and all memory comes from torch's allocator. The callers
(`backends.hopper`) have checked dtypes and sizes, and made the tensors' device the current one.
"""

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import TwELL
from . import driver

MAX_HIDDEN, HIDDEN_STEP, MAX_INTERMEDIATE = 8192, 64, 65536
_ROWS, _CLUSTER, _WARPS = 128, 2, 12


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


@dataclass(frozen=True)
class PackedGate:
    """relu(x w^T) [M, N] in TwELL, with the tiles that did not fit beside it.

    words: int32 [M, tiles, S]: bfloat16 bits << 16 | column; slots past the count are not written.
    counts: int32 [M, tiles]. spilled: bfloat16 [M, tiles, T], written only for tiles whose count is over S. It is
    allocated in full, so that no input can exceed it and where a value goes never depends on timing.
    overflow: int64 scalar, next_chunk: int32 [1], link: int32 [M]: zeroed by `gate_pack`, used by `gated_down`.
    """

    words: Tensor
    counts: Tensor
    spilled: Tensor
    overflow: Tensor
    next_chunk: Tensor
    link: Tensor
    intermediate: int
    tiling: Tiling

    def to_twell(self) -> TwELL:
        """The same matrix as the format's class, for tests and inspection. Raises ValueError if a tile overflowed."""
        if overflow := int((self.counts > self.tiling.slots).sum()):
            raise ValueError(f"{overflow} tiles have more than {self.tiling.slots} non-zeros and are stored elsewhere")
        lanes = self.words.view(torch.uint16).view(*self.words.shape, 2)
        return TwELL(lanes, self.counts, self.intermediate, self.tiling.tile, torch.bfloat16)


def gate_pack(x: Tensor, w: Tensor, tiling: Tiling | None = None) -> PackedGate:
    """relu(x w^T) in TwELL. x: bfloat16 [M, K], M >= 1, K a multiple of 64; w: bfloat16 [N, K], N at most 65,536."""
    (tokens, hidden), intermediate, device = x.shape, w.shape[0], x.device.index
    tiling = tiling or tiling_for(tokens, intermediate, processors(device))
    x, w = _for_tma(x), _for_tma(w)
    packed = _allocate(x, intermediate, tiling)
    parameters = struct.pack(
        "128s128s5Q3i",
        _map(x, _ROWS),
        _map(w, tiling.tile // _CLUSTER),
        packed.words.data_ptr(),
        packed.counts.data_ptr(),
        packed.spilled.data_ptr(),
        packed.overflow.data_ptr(),
        packed.next_chunk.data_ptr(),
        tokens,
        intermediate,
        hidden,
    )
    clusters = min(processors(device) // _CLUSTER, -(-tokens // (_ROWS * _CLUSTER)) * packed.counts.shape[1])
    _gate_pack_kernel(device, tiling).launch(clusters * _CLUSTER, driver.stream(device), parameters)
    return packed


def gated_down(
    packed: PackedGate,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    stats: bool = False,
    parts: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """y = (g * (x w_up^T)) w_down^T for the packed g; with w_gate None, y = g w_down^T (g came from w_up).

    To be called once for each packed g. Weights in nn.Linear layout; w_down [K, N] is read by columns: one whose memory
    is already transposed (`w.t().contiguous().t()`) is used as it is, any other is copied. Returns (y [M, K],
    statistics): (nonzeros int32 [M], sum over neurons of |h| float32 [M], fired bool [N]), or None without `stats`.
    """
    (tokens, hidden), device = x.shape, x.device.index
    x, w_up, down_NK = _for_tma(x), w_up.contiguous(), w_down.t().contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    counts = None
    if stats:
        nonzeros, l1 = (x.new_empty(tokens, dtype=dtype) for dtype in (torch.int32, torch.float32))
        counts = (nonzeros, l1, x.new_zeros(packed.intermediate, dtype=torch.bool))
    parts = parts or parts_for(tokens, hidden, processors(device))
    parameters = struct.pack(
        "13Qq3i",
        x.data_ptr(),
        w_up.data_ptr(),
        down_NK.data_ptr(),
        packed.words.data_ptr(),
        packed.counts.data_ptr(),
        packed.spilled.data_ptr(),
        y.data_ptr(),
        packed.overflow.data_ptr(),
        *((0, 0, 0) if counts is None else (t.data_ptr() for t in counts)),
        packed.link.data_ptr(),
        packed.next_chunk.data_ptr(),
        x.stride(0) * 2,
        tokens,
        packed.intermediate,
        _chunk(tokens, parts, processors(device)),
    )
    kernel = _gated_down_kernel(device, hidden, packed.tiling, parts, w_gate is not None, stats)
    kernel.launch(min(processors(device), tokens), driver.stream(device), parameters)
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


@functools.cache
def _gate_pack_kernel(device_index: int, tiling: Tiling) -> driver.Kernel:
    macros = {"TILE": tiling.tile, "SLOTS": tiling.slots, "STAGES": tiling.stages, "SMEM_BYTES": tiling.shared_bytes}
    return driver.Kernel(
        "gate_pack", macros, device_index, threads=384, shared_bytes=tiling.shared_bytes, cluster=_CLUSTER, size=320
    )


@functools.cache
def _gated_down_kernel(
    device_index: int, hidden: int, tiling: Tiling, parts: int, gated: bool, stats: bool
) -> driver.Kernel:
    macros = {"K": hidden, "TILE": tiling.tile, "SLOTS": tiling.slots, "PARTS": parts}
    macros |= {"GATED": int(gated), "STATS": int(stats)}
    return driver.Kernel("gated_down", macros, device_index, threads=_WARPS * 32, size=128)


def _allocate(x: Tensor, intermediate: int, tiling: Tiling) -> PackedGate:
    """One block of memory for everything but the counter, which may outlive the call."""
    tokens, tiles = x.shape[0], -(-intermediate // tiling.tile)
    cells = tokens * tiles
    words, counts = cells * tiling.slots, cells
    spilled = cells * tiling.tile // 2
    block = x.new_empty(words + spilled + counts + tokens + 1, dtype=torch.int32)
    words_, spilled_, counts_, link, next_chunk = block.split_with_sizes((words, spilled, counts, tokens, 1))
    return PackedGate(
        words_.view(tokens, tiles, tiling.slots),
        counts_.view(tokens, tiles),
        spilled_.view(torch.bfloat16).view(tokens, tiles, tiling.tile),
        x.new_empty((), dtype=torch.int64),
        next_chunk,
        link,
        intermediate,
        tiling,
    )


def _for_tma(matrix: Tensor) -> Tensor:
    """Itself where rows are contiguous and 16-byte aligned, else a copy."""
    row_stride, stride = matrix.stride()
    if stride == 1 and row_stride % 8 == 0 and row_stride >= matrix.shape[1] and matrix.data_ptr() % 16 == 0:
        return matrix
    return matrix.contiguous() if not matrix.is_contiguous() else matrix.clone()


def _map(matrix: Tensor, box_rows: int) -> bytes:
    rows, columns = matrix.shape
    return driver.tensor_map(matrix.data_ptr(), rows, columns, matrix.stride(0) * 2, box_rows)
