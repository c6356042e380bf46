"""Hybrid: ELL for the many rows with few entries, a dense backup for the few rows with many (the paper's figure 1).

Activations in training are uneven: the longest row has tens of times the mean, and plain ELL is as wide as its longest
row. M rows, N columns, W slots per ELL row, C rows in the backup.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .capacity import RAISE, CapacityError, check_policy, check_sizes
from .ell import ELL
from .layout import Entries, check_matrix, to_keep

WIDTH, BACKUP_SHARE = 128, 1 / 8
IN_ELL, SPILLED = -1, -2


def backup_capacity(rows: int, share: float = BACKUP_SHARE) -> int:
    """The planned number of backup rows: this share of all rows (one in eight), rounded up."""
    return math.ceil(share * rows)


@dataclass(frozen=True, eq=False)
class Hybrid:
    """ell: ELL [M, N], where a row that is not in it has length 0; backup: [C, N]; row_map: int32 [M].

    row_map[m] is -1 for a row in `ell`, the index of a row in `backup`, and -2 for a row that `spill` removed, which
    its owner must recompute and put back (`with_rows`). A row in the backup is whole: all of its N values count as
    stored. Backup rows without an entry in row_map are undefined.
    """

    ell: ELL
    backup: Tensor
    row_map: Tensor

    @classmethod
    def from_dense(
        cls,
        dense: Tensor,
        width: int = WIDTH,
        capacity: int | None = None,
        *,
        on_overflow: str = RAISE,
        keep: Tensor | None = None,
    ) -> "Hybrid":
        """Pack a floating matrix [M, N]. width: maximum entries of an ELL row; capacity: backup rows (None: ceil(M/8)).

        keep: bool [M, N], entries to store even if they are zero. If more than `capacity` rows have more than `width`
        entries, on_overflow="grow" enlarges the backup and "raise" raises CapacityError.
        """
        check_matrix(dense)
        check_policy(on_overflow)
        check_sizes(1, width=width)
        check_sizes(0, capacity=capacity)
        keep_MN = to_keep(dense, keep)
        long_M = keep_MN.sum(-1) > width
        needed = int(long_M.sum())
        capacity = backup_capacity(dense.shape[0]) if capacity is None else capacity
        if needed > capacity:
            if on_overflow == RAISE:
                what = f"Hybrid: {needed} rows have more than {width} entries, and the backup holds {capacity}"
                raise CapacityError(what, "capacity", capacity=capacity, needed=needed)
            capacity = needed
        row_map = torch.where(long_M, long_M.cumsum(0) - 1, IN_ELL).to(torch.int32)
        backup = dense.new_zeros(capacity, dense.shape[1])
        backup[row_map[row_map >= 0].long()] = dense[row_map >= 0]
        short = ELL.from_dense(
            dense.where(~long_M.unsqueeze(-1), 0), min(width, dense.shape[1]), keep=keep_MN & ~long_M.unsqueeze(-1)
        )
        return cls(short, backup, row_map)

    @property
    def shape(self) -> tuple[int, int]:
        return self.ell.shape

    def spilled(self) -> Tensor:
        """int64: the rows that are not stored (spilled)."""
        return (self.row_map == SPILLED).nonzero().squeeze(-1)

    def in_backup(self) -> tuple[Tensor, Tensor]:
        """(rows, their index in the backup), both int64, by row."""
        rows = (self.row_map >= 0).nonzero().squeeze(-1)
        return rows, self.row_map[rows].long()

    def spill(self, capacity: int) -> "Hybrid":
        """The same structure with a backup of exactly `capacity` rows (at most its present number); further rows are
        removed and marked. For saving in shapes that do not depend on the data."""
        row_map = torch.where(self.row_map >= capacity, SPILLED, self.row_map)
        return Hybrid(self.ell, self.backup[:capacity].clone(), row_map)

    def with_rows(self, rows: Tensor, values: Tensor) -> "Hybrid":
        """The same matrix with these rows (int64 [R], distinct) replaced by whole ones [R, N] in a larger backup."""
        row_map, lengths = self.row_map.clone(), self.ell.lengths.clone()
        row_map[rows] = self.backup.shape[0] + torch.arange(rows.numel(), dtype=torch.int32, device=rows.device)
        lengths[rows] = 0
        return Hybrid(replace(self.ell, lengths=lengths), torch.cat([self.backup, values]), row_map)

    def entries(self) -> Entries:
        """Every stored entry: of the ELL part, then the whole rows of the backup. CapacityError if any are spilled."""
        self.require_complete()
        rows, index = self.in_backup()
        columns = torch.arange(self.shape[1], device=rows.device)
        whole = Entries(
            rows.repeat_interleave(columns.numel()), columns.repeat(rows.numel()), self.backup[index].flatten()
        )
        return Entries(*(torch.cat(parts) for parts in zip(self.ell.entries(), whole, strict=True)))

    def to_dense(self) -> Tensor:
        """The matrix [M, N], exactly as it was packed (except that -0.0 in the ELL part becomes +0.0).

        Raises CapacityError while rows are spilled.
        """
        self.require_complete()
        dense = self.ell.to_dense()
        rows, index = self.in_backup()
        dense[rows] = self.backup[index]
        return dense

    def require_complete(self) -> None:
        """Raises CapacityError while rows are spilled."""
        if count := self.spilled().numel():
            capacity = self.backup.shape[0]
            what = f"Hybrid: {count} rows are spilled, and only their owner can put them back (with_rows)"
            raise CapacityError(what, "capacity", capacity=capacity, needed=capacity + count)
