"""Problems for the kernel benchmarks: synthetic patterns, and real ones saved as bit-packed masks.

Real ones are in `nonzeros_masks.parquet`, which `gather_nonzeros` writes beside `nonzeros_by_layer.parquet`: one row a
token in sequence order, and of each layer a column of bytes, `numpy.packbits` of the token's neurons. The folder of a
built set of tables, such as `paper_figures/h200`, has both files with the rows of several runs, by the column `item`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import numpy
import pandas
import pyarrow
import torch

from experiments.run.errors import DataError
from experiments.run.values import in_one_line
from twell.testing import Problem

log = logging.getLogger(__name__)

SIZES = "nonzeros_by_layer.parquet"


class Masks(NamedTuple):
    """The masks of one run: the file, and the run's item in it."""

    path: Path
    item: str

    @classmethod
    def of(cls, path: Path, item: str | None = None) -> Masks:
        """The masks in a file. item: of a file of several runs, the one to take.

        Raises:
            DataError: the file is missing or damaged, or it does not hold this item (the message lists those there), or
                it holds several and none is named.
        """
        items = _read(path, ["item"])["item"].unique().tolist()
        if item is None and len(items) == 1:
            item = items[0]
        if item not in items:
            raise DataError(f"{path} holds the masks of {', '.join(map(str, items))}: name one of them, got {item!r}")
        return cls(path, str(item))

    def layers(self) -> list[int]:
        """Indices of the layers, ascending. Raises `DataError`, as `load` does."""
        return sorted(self._neurons())

    def load(self, layer: int) -> torch.Tensor:
        """The mask of one layer, bool [tokens, intermediate].

        Raises:
            DataError: the file is missing or damaged, or has no such layer (the message lists those there), or
                nonzeros_by_layer.parquet, which has the sizes, is not beside it.
        """
        if layer not in (sizes := self._neurons()):
            raise DataError(f"{self.path} has no column layer_{layer}, only those of layers {sorted(sizes)}")
        neurons = sizes[layer]
        packed = _read(self.path, [f"layer_{layer}"], self.item)[f"layer_{layer}"].tolist()
        if not packed or {len(row or b"") for row in packed} != {-(-neurons // 8)}:
            raise DataError(
                f"{self.path}: layer_{layer} does not hold a bit for each of the {neurons} neurons in {SIZES}"
            )
        bytes_TB = numpy.frombuffer(b"".join(packed), dtype=numpy.uint8).reshape(len(packed), -1)
        return torch.from_numpy(numpy.unpackbits(bytes_TB, axis=1)[:, :neurons]).bool()

    def _neurons(self) -> dict[int, int]:
        """The neurons of each layer."""
        sizes = _read(self.path.with_name(SIZES), ["layer", "neurons"], self.item)
        return dict(zip(sizes["layer"].tolist(), sizes["neurons"].tolist(), strict=True))


def _read(path: Path, columns: list[str], item: str | None = None) -> pandas.DataFrame:
    """These columns, of one item or of all."""
    try:
        return pandas.read_parquet(path, columns=columns, filters=[("item", "==", item)] if item is not None else None)
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is missing, damaged, or no file of masks: {in_one_line(error)}") from error


def problem_from_mask(
    mask_TN: torch.Tensor,
    tokens: int,
    hidden: int,
    *,
    gated: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Problem:
    """A block's input and weights whose gate fires exactly where `mask_TN` says.

    For T <= hidden tokens, inputs X with orthonormal rows and W_gate = Z^T X produce any pre-activation Z [T, N]. The
    first min(hidden, tokens, T) tokens of the mask are taken and repeated up to `tokens`, so that every block of tokens
    has a real pattern, at any size. Z is -1 where the gate is silent and 1 + |normal| where it fires: far enough from
    zero that rounding to `dtype` flips no sign.

    Args:
        mask_TN: bool, [T, intermediate], in sequence order.
        tokens: M of the problem.
        hidden: K of the problem.

    Raises:
        ValueError: if rounding still changed the pattern.
    """
    generator = torch.Generator().manual_seed(seed)
    distinct, intermediate = min(hidden, tokens, len(mask_TN)), mask_TN.shape[1]
    mask_TN = mask_TN[:distinct]
    z_TN = torch.where(mask_TN, 1 + torch.randn(mask_TN.shape, generator=generator).abs(), -1.0)
    x_TK = torch.linalg.qr(torch.randn(hidden, distinct, generator=generator)).Q.T
    # Scaled so that x has unit variance, as after a normalisation layer, and the weights by the inverse.
    scale = hidden**0.5
    gate_NK = (z_TN.T @ x_TK / scale).to(dtype)
    x_TK = (x_TK * scale).to(dtype)
    if wrong := int(((x_TK.float() @ gate_NK.float().T > 0) != mask_TN).sum()):
        raise ValueError(f"{wrong} of {mask_TN.numel()} entries differ from the mask after rounding to {dtype}")
    repeats = -(-tokens // distinct)
    if repeats > 1:
        log.info("%d different tokens of the mask, repeated to %d", distinct, tokens)
    up_NK = torch.randn(intermediate, hidden, generator=generator) / scale
    down_KN = torch.randn(hidden, intermediate, generator=generator) / intermediate**0.5
    return Problem(
        x=x_TK.repeat(repeats, 1)[:tokens].to(device),
        w_gate=gate_NK.to(device) if gated else None,
        w_up=up_NK.to(device, dtype) if gated else gate_NK.to(device),
        w_down=down_KN.to(device, dtype),
    )
