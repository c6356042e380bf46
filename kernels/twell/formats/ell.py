"""ELL: every row's entries left-aligned in W slots. M rows, N columns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .capacity import RAISE, CapacityError, check_policy, check_sizes
from .layout import Entries, check_matrix, in_use, left_align, longest, to_keep

NARROW_COLUMNS = 2**16  # up to this many columns an index fits 16 bits


def column_dtype(columns: int) -> torch.dtype:
    """The dtype of column indices: uint16 if they fit."""
    return torch.uint16 if columns <= NARROW_COLUMNS else torch.int32


@dataclass(frozen=True, eq=False)
class ELL:
    """columns: uint16 (int32 if N > 65,536) [M, W]; values: [M, W]; lengths: int32 [M]; dense_width: N.

    The first lengths[m] slots of a row hold its entries, in distinct columns; the contents of other slots are
    undefined. An entry may be an explicit zero. Zeros that are not stored are unpacked as +0.0.
    """

    columns: Tensor
    values: Tensor
    lengths: Tensor
    dense_width: int

    @classmethod
    def from_dense(
        cls, dense: Tensor, width: int | None = None, *, on_overflow: str = RAISE, keep: Tensor | None = None
    ) -> "ELL":
        """Pack a floating matrix [M, N]. width: slots per row; None: as many as the longest row needs.

        keep: bool [M, N], entries to store even if they are zero. A row with more entries than `width` widens the
        matrix (on_overflow="grow") or raises CapacityError ("raise").
        """
        check_matrix(dense)
        check_policy(on_overflow)
        check_sizes(0, width=width)
        keep_MN = to_keep(dense, keep)
        lengths = keep_MN.sum(-1)
        needed = longest(lengths)
        width = needed if width is None else width
        if needed > width:
            if on_overflow == RAISE:
                what = f"ELL: {int((lengths > width).sum())} rows have more than {width} entries, the longest {needed}"
                raise CapacityError(what, "width", capacity=width, needed=needed)
            width = needed
        columns, values = left_align(dense, keep_MN, width)
        return cls(columns.to(column_dtype(dense.shape[1])), values, lengths.to(torch.int32), dense.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.dense_width

    @property
    def width(self) -> int:
        return self.values.shape[1]

    def entries(self) -> Entries:
        """Every stored entry, row by row."""
        rows, slots = in_use(self.lengths, self.width).nonzero(as_tuple=True)
        return Entries(rows, self.columns.long()[rows, slots], self.values[rows, slots])

    def to_dense(self) -> Tensor:
        """The matrix [M, N], exactly as it was packed (except that -0.0 becomes +0.0)."""
        return self.entries().dense(self.shape)
