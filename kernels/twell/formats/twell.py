"""TwELL: tile-wise ELL (the paper's figure 1). M rows, N columns in tiles of T; S slots per row and tile.

A tile is as wide as the output tile of the matmul that produces it, so a thread block packs its own tile in the
epilogue without synchronising with others. An entry is one word, with the column in the low 16 bits and the value
above; for 16-bit values this is the 32-bit word of the paper. The column counts from the start of the row, not of the
tile: a consumer finds the weight row from the word alone, and N may be up to 65,536 for any tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .capacity import RAISE, CapacityError, check_policy, check_sizes
from .ell import NARROW_COLUMNS
from .layout import Entries, check_matrix, in_use, left_align, longest, to_keep

TILE, SLOTS = 256, 32


@dataclass(frozen=True, eq=False)
class TwELL:
    """lanes: uint16 [M, ceil(N/T), S, 1 + value bits / 16]: each word as 16-bit lanes, the column first.
    counts: int32 [M, ceil(N/T)]; dense_width: N; tile: T; dtype: of the values.

    The first counts[m, t] slots of a tile hold its entries, in distinct columns of that tile; the contents of other
    slots are undefined. An entry may be an explicit zero. Zeros that are not stored are unpacked as +0.0.
    """

    lanes: Tensor
    counts: Tensor
    dense_width: int
    tile: int
    dtype: torch.dtype

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        tile: int = TILE,
        slots: int = SLOTS,
        *,
        on_overflow: str = RAISE,
        keep: Tensor | None = None,
    ) -> "TwELL":
        """Pack a floating matrix [M, N], N at most 65,536 and not necessarily a multiple of the tile.

        keep: bool [M, N], entries to store even if they are zero. If a tile has more entries than `slots`, all tiles
        get more slots (on_overflow="grow") or CapacityError is raised ("raise").
        """
        check_matrix(dense)
        check_policy(on_overflow)
        check_sizes(1, tile=tile, slots=slots)
        rows, width = dense.shape
        if width > NARROW_COLUMNS:
            raise ValueError(f"TwELL columns have 16 bits: at most {NARROW_COLUMNS} columns, got {width}")
        keep_RT = _into_tiles(to_keep(dense, keep), tile)
        counts = keep_RT.sum(-1)
        needed = longest(counts)
        if needed > slots:
            if on_overflow == RAISE:
                what = (
                    f"TwELL: {int((counts > slots).sum())} tiles have more than {slots} entries, the fullest {needed}"
                )
                raise CapacityError(what, "slots", capacity=slots, needed=needed)
            slots = needed
        columns, values = left_align(_into_tiles(dense, tile), keep_RT, slots)
        tiles = -(-width // tile)
        starts = torch.arange(tiles, device=dense.device) * tile
        columns = columns.view(rows, tiles, slots, 1) + starts.view(-1, 1, 1)
        value_lanes = values.view(rows, tiles, slots, 1).view(torch.uint16)
        lanes = torch.cat([columns.to(torch.uint16), value_lanes], dim=-1)
        return cls(lanes, counts.view(rows, tiles).to(torch.int32), width, tile, dense.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.counts.shape[0], self.dense_width

    @property
    def slots(self) -> int:
        return self.lanes.shape[2]

    def overflowing(self, slots: int) -> Tensor:
        """int64 scalar: the number of tiles with more than `slots` entries."""
        return (self.counts > slots).sum()

    def entries(self) -> Entries:
        """Every stored entry, row by row."""
        rows, tiles, slots = in_use(self.counts, self.slots).nonzero(as_tuple=True)
        # As signed numbers: torch has no indexing of uint16 on CUDA devices.
        lanes = self.lanes.view(torch.int16)[rows, tiles, slots].view(torch.uint16)
        values = lanes[:, 1:].clone(memory_format=torch.contiguous_format).view(self.dtype).squeeze(-1)
        return Entries(rows, lanes[:, 0].long(), values)

    def to_dense(self) -> Tensor:
        """The matrix [M, N], exactly as it was packed (except that -0.0 becomes +0.0)."""
        return self.entries().dense(self.shape)


def _into_tiles(dense_MN: Tensor, tile: int) -> Tensor:
    """[M * tiles, tile]: the last tile of each row padded with zeros."""
    missing = -dense_MN.shape[1] % tile
    return torch.nn.functional.pad(dense_MN, (0, missing)).reshape(-1, tile)
