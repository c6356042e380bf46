"""The paper's inference plan in Triton: `gate_pack`, then `gated_down` (section 3 of the paper). As in
`hopper/inference.py`, callers have checked dtypes and sizes, and made the tensors' device the current one.

Shapes: M tokens, K hidden, N intermediate, T columns a tile, S slots a tile.
"""

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..gpu.saved_csr import SavedCSR
from ..interface import Weights
from ..memory import in_rows
from .gate_pack import GatePack, gate_pack_kernel
from .gated_down import GatedDown, Statistics, gated_down_kernel, reserve_kernel
from .launch import Launch, Prepared

# Read when the kernels are imported, as Triton does: they run in the interpreter, on CPU tensors, or on a GPU.
INTERPRET = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class GateConfig:
    """How `gate_pack` runs: an output tile of `rows` x `tile`, made in steps of `step` along K."""

    tile: int
    slots: int
    rows: int
    step: int
    warps: int
    stages: int
    descriptors: bool  # operands come through TMA
    persistent: bool  # one program a processor, which loads the next tile's operands while it packs
    speed: float = 1.0  # of a processor, relative to the best of its table


@dataclass(frozen=True)
class TokenConfig:
    """How a pass over tokens runs (see `tokens.py`); each entry is read by `across` warps."""

    across: int
    chunk: int  # neighbouring tokens that a processor takes at a time; 0: a program takes a part of one token
    programs: int = 0  # a processor, where chunk is not 0
    parts: int = 1  # of a token, at most, where chunk is 0
    share: int = 1  # entries up to which a token is in one part


_GATE_HOPPER = (
    GateConfig(tile=256, slots=32, rows=128, step=64, warps=8, stages=3, descriptors=True, persistent=True),
    GateConfig(128, 16, rows=128, step=64, warps=8, stages=6, descriptors=True, persistent=False, speed=0.88),
    GateConfig(128, 16, rows=64, step=64, warps=4, stages=5, descriptors=True, persistent=False, speed=0.6),
    GateConfig(64, 16, rows=64, step=64, warps=4, stages=5, descriptors=True, persistent=False, speed=0.55),
)
_GATE_BLACKWELL = (
    GateConfig(tile=128, slots=16, rows=128, step=64, warps=8, stages=4, descriptors=True, persistent=False),
    GateConfig(64, 16, rows=128, step=64, warps=4, stages=4, descriptors=True, persistent=False, speed=0.8),
)
# These fit into the 99 KB of shared memory of the smaller GPUs.
_GATE_OTHER = (
    GateConfig(tile=128, slots=16, rows=128, step=64, warps=8, stages=4, descriptors=False, persistent=False),
    GateConfig(128, 16, rows=64, step=64, warps=4, stages=4, descriptors=False, persistent=False, speed=0.8),
)
_GATE = {9: _GATE_HOPPER, 10: _GATE_BLACKWELL}


def gate_config(capability: tuple[int, int], tokens: int, intermediate: int, sm_count: int) -> GateConfig:
    """The configuration of `gate_pack` for a device of this compute capability: the one whose tiles finish
    first, if a processor computes one at a time."""

    def time(config: GateConfig) -> float:
        tiles = -(-tokens // config.rows) * -(-intermediate // config.tile)
        return -(-tiles // sm_count) * config.rows * config.tile / config.speed

    return min(_GATE.get(capability[0], _GATE_OTHER), key=time)


def token_config(tokens: int, hidden: int, sm_count: int, *, backward: bool = False) -> TokenConfig:
    """The configuration of a pass over tokens. If there are few for each processor, long ones are cut into parts.

    backward: with three weight rows an entry instead of two, which take more registers than one warp has to spare.
    """
    across = {1: 1, 2: 2, 3: 4, 4: 4}[-(-hidden // 2048)]
    many = 64 * sm_count
    if tokens < many:
        parts = min(max(triton.next_power_of_2(many // tokens + 1) // 2, 2), 8)
        return TokenConfig(across, chunk=0, parts=parts, share=128 // parts)
    if backward and hidden >= 512:
        across = max(across, 2)
    return TokenConfig(across, chunk=16, programs=max((16 if backward else 12) // across, 2))


@dataclass(frozen=True)
class PackedGate:
    """relu(x w^T) [M, N] in TwELL, with the tiles that did not fit beside it.

    words, counts, spilled: as in `GatePack`; slots past the count are not written, and `spilled` is allocated in full,
    so that no input can exceed it and where a value goes never depends on timing. The rest is for `gated_down`, zeroed
    here: its queue counters, and `overflow`, in which it counts the overflowing tiles with statistics, and in training
    the rows that were not saved.
    """

    words: Tensor
    counts: Tensor
    spilled: Tensor
    overflow: Tensor
    queue_counters: Tensor
    intermediate: int
    config: GateConfig

    @classmethod
    def empty(cls, x: Tensor, intermediate: int, config: GateConfig) -> "PackedGate":
        tokens, tiles = x.shape[0], -(-intermediate // config.tile)
        return cls(
            words=x.new_empty(tokens, tiles, config.slots, dtype=torch.uint32),
            counts=x.new_empty(tokens, tiles, dtype=torch.int32),
            spilled=x.new_empty(tokens, tiles, config.tile // 2, dtype=torch.uint32),
            overflow=x.new_empty((), dtype=torch.int64),
            queue_counters=x.new_empty(max(1 + device(x.device).sm_count, tokens), dtype=torch.int32),
            intermediate=intermediate,
            config=config,
        )


def gate_pack(
    x: Tensor,
    weights: Weights,
    config: GateConfig | None = None,
    *,
    stats: bool = True,
) -> PackedGate:
    """`gate_pack` of `adapter.Kernels`; `stats` makes no difference: there is always room for the overflow's count."""
    intermediate, here = weights.up.shape[0], device(x.device)
    config = config or gate_config(here.capability, len(x), intermediate, here.sm_count)
    x, w = in_rows(x), in_rows(weights.pattern)
    packed = PackedGate.empty(x, intermediate, config)
    _gate_launch(packed, x, w)()
    return packed


def _gate_launch(packed: PackedGate, x: Tensor, w: Tensor) -> Launch:
    """The launch that fills `packed` with relu(x w^T), x and w in rows, and zeroes the counters of `gated_down`."""
    (tokens, hidden), intermediate, config, here = x.shape, packed.intermediate, packed.config, device(x.device)
    tiles = -(-tokens // config.rows) * -(-intermediate // config.tile)
    x_rows, w_rows = x, w
    if config.descriptors:
        x_rows = TensorDescriptor.from_tensor(x, [config.rows, config.step])
        w_rows = TensorDescriptor.from_tensor(w, [config.tile, config.step])
    outputs = packed.words, packed.counts, packed.spilled, packed.queue_counters, packed.overflow
    return Launch(
        gate_pack_kernel,
        (min(tiles, here.sm_count) if config.persistent else tiles,),
        (x_rows, w_rows, GatePack(*outputs, x_stride=x.stride(0), w_stride=w.stride(0), M=tokens, N=intermediate)),
        {
            "HOW": config,
            "K": hidden,
            "FULL": intermediate % config.tile == 0,
            "QUEUES": here.sm_count,
            "INTERPRET": INTERPRET,
            "num_warps": config.warps,
            "num_stages": config.stages,
        },
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
    (tokens, hidden), here = x.shape, device(x.device)
    config = token_config(tokens, hidden, here.sm_count)
    x = in_rows(x)
    y = x.new_empty(x.shape) if out is None else out
    counts = None
    if stats:
        fired = x.new_zeros(packed.intermediate, dtype=torch.bool)
        counts = Statistics(x.new_empty(tokens, dtype=torch.int32), x.new_empty(tokens, dtype=torch.float32), fired)
    if save is not None:
        tiles = packed.counts.shape[1]
        padded = triton.next_power_of_2(tiles)
        rows = max(1, min(64, 2048 // padded))
        reserve_kernel[(-(-tokens // rows),)](
            packed.counts,
            save.rows,
            save.state[:2].view(torch.int64),
            packed.overflow,
            save.room,
            tokens,
            TILES=tiles,
            TILES_PADDED=padded,
            ROWS=rows,
            num_warps=4,
        )
    _down_launch(packed, x, weights, y, config, squared, counts, save)()
    return y, counts


def _down_launch(
    packed: PackedGate,
    x: Tensor,
    weights: Weights,
    y: Tensor,
    config: TokenConfig,
    squared: bool,
    counts: Statistics | None = None,
    save: SavedCSR | None = None,
) -> Launch:
    """The launch that fills y and, if they are asked for, the statistics `counts` and the saved entries. x in rows."""
    (tokens, hidden), here = x.shape, device(x.device)
    partial, partial_l1 = partial_sums(x, config, stats=counts is not None)
    operands = GatedDown(
        x,
        weights,
        packed.words,
        packed.counts,
        packed.spilled,
        y,
        packed.overflow,
        packed.queue_counters,
        partial,
        partial_l1,
        stats=None if counts is None else counts._replace(fired=counts.fired.view(torch.uint8)),
        saved=None if save is None else save._replace(words=save.words.view(torch.uint32)),
        x_stride=x.stride(0),
        M=tokens,
        N=packed.intermediate,
    )
    return Launch(
        gated_down_kernel,
        (programs_for(config, tokens, here.sm_count),),
        (operands,),
        {
            "HOW": config,
            "K": hidden,
            "TILE": packed.config.tile,
            "SLOTS": packed.config.slots,
            "SQUARED": squared,
            "QUEUES": here.sm_count,
            "INTERPRET": INTERPRET,
            "num_warps": config.across,
            "num_stages": 1,
        },
    )


def prepared(x: Tensor, weights: Weights, squared: bool) -> Prepared:
    """`gate_pack` and `gated_down` without statistics, for repeated calls with operands at these addresses, all of them
    contiguous."""
    (tokens, hidden), intermediate, here = x.shape, weights.up.shape[0], device(x.device)
    packed = PackedGate.empty(x, intermediate, gate_config(here.capability, tokens, intermediate, here.sm_count))
    y, config = torch.empty_like(x), token_config(tokens, hidden, here.sm_count)
    launches = [_gate_launch(packed, x, weights.pattern), _down_launch(packed, x, weights, y, config, squared)]
    return Prepared(launches, [t for t in (x, *weights) if t is not None], y)


def partial_sums(x: Tensor, config: TokenConfig, *, stats: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Memory for the sums of tokens that several programs share, float32 [M, parts, K], and for their sums of |h|,
    float32 [M, parts], where it is needed."""
    (tokens, hidden), parts = x.shape, config.parts
    if parts == 1:
        return None, None
    rows = x.new_empty(tokens, parts, hidden, dtype=torch.float32)
    return rows, x.new_empty(tokens, parts, dtype=torch.float32) if stats else None


def programs_for(config: TokenConfig, tokens: int, sm_count: int) -> int:
    """The number of programs of a pass over tokens."""
    return min(sm_count * config.programs, tokens) if config.chunk else tokens * config.parts


@dataclass(frozen=True)
class Device:
    """What the choice of configurations depends on."""

    capability: tuple[int, int]
    sm_count: int


@functools.cache
def device(device: torch.device) -> Device:
    """The compute capability and number of SMs of a device; those of a small Hopper GPU in the interpreter."""
    if device.type == "cpu":
        return Device((9, 0), 2)
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count)
