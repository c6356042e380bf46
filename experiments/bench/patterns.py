"""Problems for the kernel benchmarks: synthetic patterns, and real ones saved as bit-packed masks.

A mask file is an .npz with one array per layer, `layer0`, `layer1`, ...: `numpy.unpackbits(z["layer3"], axis=1)` gives
[tokens, intermediate] of 0 and 1 in sequence order (`gather_nonzeros` writes them).
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy
import torch

from experiments.run.errors import DataError
from experiments.run.values import in_one_line
from kernels.testing import Problem

log = logging.getLogger(__name__)


def load_mask(path: Path, layer: int) -> torch.Tensor:
    """The mask of one layer, bool [tokens, intermediate].

    Raises:
        DataError: the file is missing or damaged, or has no such layer; the message lists those there.
    """
    with _open_masks(path) as masks:
        if f"layer{layer}" not in masks:
            raise DataError(f"{path} has no array layer{layer}, only {sorted(masks)}")
        packed = masks[f"layer{layer}"]
        if packed.dtype != numpy.uint8 or packed.ndim != 2 or not packed.size:
            raise DataError(
                f"{path}: layer{layer} must be uint8 [tokens, neurons / 8], got {packed.dtype} {packed.shape}"
            )
        return torch.from_numpy(numpy.unpackbits(packed, axis=1)).bool()


def mask_layers(path: Path) -> list[int]:
    """Indices of the layers in a mask file, ascending. Raises `DataError`, as `load_mask` does."""
    with _open_masks(path) as masks:
        if unknown := [name for name in masks if not re.fullmatch(r"layer[0-9]{1,6}", name)]:
            raise DataError(f"{path} is no file of masks: it has {', '.join(unknown[:5])}")
        return sorted(int(name.removeprefix("layer")) for name in masks)


@contextlib.contextmanager
def _open_masks(path: Path) -> Iterator[Mapping[str, numpy.ndarray]]:
    try:
        with numpy.load(path, allow_pickle=False) as masks:
            if not isinstance(masks, Mapping):
                raise DataError(f"{path} is no .npz file")
            yield masks
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise DataError(f"{path} is missing, damaged, or no .npz file: {in_one_line(error)}") from error


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
