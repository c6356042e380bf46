"""Functions that the formats share. R rows (tokens, or tiles of tokens), N columns, W slots a row, E entries."""

from typing import NamedTuple

import torch
from torch import Tensor


class Entries(NamedTuple):
    """The stored entries, row by row: indices int64 [E] and values [E]."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    def mask(self, shape: tuple[int, int]) -> Tensor:
        """bool of this shape: the positions with a stored entry."""
        stored = torch.zeros(shape, dtype=torch.bool, device=self.rows.device)
        stored[self.rows, self.columns] = True
        return stored

    def dense(self, shape: tuple[int, int]) -> Tensor:
        """The entries as a matrix of this shape, zero elsewhere."""
        matrix = self.values.new_zeros(shape)
        matrix[self.rows, self.columns] = self.values
        return matrix


def check_matrix(dense: Tensor) -> None:
    """Raises TypeError or ValueError unless this is a matrix of floating values."""
    if not isinstance(dense, Tensor) or not dense.is_floating_point():
        got = dense.dtype if isinstance(dense, Tensor) else type(dense).__name__
        raise TypeError(f"dense must be a floating tensor, got {got}")
    if dense.ndim != 2:
        raise ValueError(f"dense must have two dimensions, got shape {list(dense.shape)}")


def to_keep(dense_RN: Tensor, keep_RN: Tensor | None) -> Tensor:
    """bool [R, N]: the entries to store: non-zeros (NaN counts, -0.0 does not) and those that the caller requests."""
    if keep_RN is None:
        return dense_RN != 0
    if not isinstance(keep_RN, Tensor) or keep_RN.dtype != torch.bool or keep_RN.shape != dense_RN.shape:
        got = f"{keep_RN.dtype} {list(keep_RN.shape)}" if isinstance(keep_RN, Tensor) else type(keep_RN).__name__
        raise ValueError(f"keep must be a bool tensor of shape {list(dense_RN.shape)}, got {got}")
    return (dense_RN != 0) | keep_RN


def left_align(dense_RN: Tensor, keep_RN: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(columns int64 [R, W], values [R, W]): each row's entries to store in column order, then zeros.

    No row may have more than `width`.
    """
    rows, columns = keep_RN.nonzero(as_tuple=True)
    lengths = keep_RN.sum(-1)
    slots = torch.arange(rows.numel(), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    columns_RW = columns.new_zeros(dense_RN.shape[0], width)
    values_RW = dense_RN.new_zeros(dense_RN.shape[0], width)
    columns_RW[rows, slots] = columns
    values_RW[rows, slots] = dense_RN[rows, columns]
    return columns_RW, values_RW


def in_use(lengths_R: Tensor, width: int) -> Tensor:
    """bool [R, W]: the slots that hold an entry."""
    return torch.arange(width, device=lengths_R.device) < lengths_R.unsqueeze(-1)


def longest(lengths_R: Tensor) -> int:
    """The largest length; 0 if there are no rows."""
    return int(lengths_R.max()) if lengths_R.numel() else 0
