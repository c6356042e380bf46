"""Checks of packed activations: whether a structure is valid, and a GPU backend's packed gate as the format's class."""

import torch

from twell.formats import ELL, Hybrid, TwELL
from twell.formats.ell import column_dtype
from twell.formats.hybrid import IN_ELL, SPILLED
from twell.formats.layout import in_use


def check_ell(ell: ELL) -> None:
    (rows, width), (used, columns) = ell.values.shape, (in_use(ell.lengths, ell.width), ell.columns.long())
    check_tensor("columns", ell.columns, (rows, width), column_dtype(ell.dense_width))
    check_lengths(ell.lengths, (rows,), width)
    check_columns(columns, used, 0, ell.dense_width)


def check_twell(twell: TwELL) -> None:
    rows, tiles = twell.counts.shape
    assert tiles == -(-twell.dense_width // twell.tile), "tiles that do not make a row"
    check_tensor("lanes", twell.lanes, (rows, tiles, twell.slots, 1 + twell.dtype.itemsize // 2), torch.uint16)
    check_lengths(twell.counts, (rows, tiles), twell.slots)
    starts = (torch.arange(tiles, device=twell.counts.device) * twell.tile).unsqueeze(-1)
    ends = (starts + twell.tile).clamp(max=twell.dense_width)
    check_columns(twell.lanes[..., 0].long(), in_use(twell.counts, twell.slots), starts, ends)


def check_hybrid(hybrid: Hybrid) -> None:
    check_ell(hybrid.ell)
    (rows, width), capacity, index = hybrid.shape, len(hybrid.backup), hybrid.in_backup()[1]
    check_tensor("backup", hybrid.backup, (capacity, width), hybrid.ell.values.dtype)
    check_tensor("row_map", hybrid.row_map, (rows,), torch.int32)
    assert not ((hybrid.row_map < SPILLED) | (hybrid.row_map >= capacity)).any(), "rows outside the backup"
    assert index.unique().numel() == index.numel(), "two rows share a row of the backup"
    assert not ((hybrid.row_map != IN_ELL) & (hybrid.ell.lengths != 0)).any(), "rows both in the ELL part and outside"


def check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert (tensor.shape, tensor.dtype) == (shape, dtype), f"{name}: wanted {shape} of {dtype}"


def check_lengths(lengths: torch.Tensor, shape: tuple[int, ...], most: int) -> None:
    check_tensor("lengths", lengths, shape, torch.int32)
    assert not ((lengths < 0) | (lengths > most)).any(), f"lengths outside 0..{most}"


def check_columns(columns: torch.Tensor, used: torch.Tensor, start, end) -> None:
    assert not (used & ((columns < start) | (columns >= end))).any(), "columns outside their row or tile"
    ordered = torch.where(used, columns, -1).sort(-1).values
    assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(), "a column used twice"


CHECKS = {ELL: check_ell, TwELL: check_twell, Hybrid: check_hybrid}


def check_valid(packed: ELL | TwELL | Hybrid) -> None:
    CHECKS[type(packed)](packed)


def as_twell(packed, neurons: int, tile: int) -> TwELL:
    """A packed gate of a GPU backend, in which no tile overflowed."""
    twell = TwELL(packed.words.view(torch.uint16).unflatten(-1, (-1, 2)), packed.counts, neurons, tile, torch.bfloat16)
    check_twell(twell)
    return twell
