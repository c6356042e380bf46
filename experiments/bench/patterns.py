"""Problems for the kernel benchmarks: synthetic patterns, and real ones saved as bit-packed masks.

Real ones are in `nonzeros_masks.parquet`, which `gather_nonzeros` writes beside `nonzeros_by_layer.parquet`: one row a
token in sequence order, and of each layer a column of bytes, `numpy.packbits` of the token's neurons.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import torch
from pyarrow import parquet

from experiments.run.errors import DataError
from experiments.run.values import in_one_line
from kernels.testing import Problem

log = logging.getLogger(__name__)

SIZES = "nonzeros_by_layer.parquet"


def load_mask(path: Path, layer: int) -> torch.Tensor:
    """The mask of one layer, bool [tokens, intermediate].

    Raises:
        DataError: the file is missing or damaged, or has no such layer (the message lists those there), or
            nonzeros_by_layer.parquet, which has the sizes, is not beside it.
    """
    if layer not in mask_layers(path):
        raise DataError(f"{path} has no column layer_{layer}, only those of layers {mask_layers(path)}")
    sizes = _read(path.with_name(SIZES), ["layer", "neurons"]).to_pydict()
    neurons = dict(zip(sizes["layer"], sizes["neurons"], strict=True)).get(layer)
    packed = _read(path, [f"layer_{layer}"])[f"layer_{layer}"].to_pylist()
    if neurons is None or not packed or {len(row or b"") for row in packed} != {-(-neurons // 8)}:
        raise DataError(f"{path}: layer_{layer} does not hold a bit for each of the {neurons} neurons in {SIZES}")
    mask_TN = numpy.unpackbits(numpy.frombuffer(b"".join(packed), dtype=numpy.uint8).reshape(len(packed), -1), axis=1)
    return torch.from_numpy(mask_TN[:, :neurons]).bool()


def mask_layers(path: Path) -> list[int]:
    """Indices of the layers in a mask file, ascending. Raises `DataError`, as `load_mask` does."""
    names = _reading(parquet.read_schema, path).names
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"layer_([0-9]{1,6})", name)))


def _read(path: Path, columns: list[str]) -> pyarrow.Table:
    return _reading(parquet.read_table, path, columns=columns)


def _reading(read: Callable[..., Any], path: Path, **named: Any) -> Any:
    try:
        return read(path, **named)
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
    _require_pattern(x_TK, gate_NK, mask_TN)
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


def _require_pattern(x_TK: torch.Tensor, gate_NK: torch.Tensor, mask_TN: torch.Tensor) -> None:
    wrong = int(((x_TK.float() @ gate_NK.float().T > 0) != mask_TN).sum())
    if wrong:
        raise ValueError(f"{wrong} of {mask_TN.numel()} entries differ from the mask after rounding to {x_TK.dtype}")
