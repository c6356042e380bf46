"""A small text for the examples, byte by byte, so that they need no download. Put your tokenizer in its place."""

import argparse
import inspect
import typing
from collections.abc import Iterator

import torch
from torch import Tensor

VOCABULARY = 256


def encode(text: str) -> Tensor:
    """Token ids, int64 [bytes]."""
    return torch.tensor(list(text.encode()))


def decode(ids: Tensor) -> str:
    """The text of token ids."""
    return bytes(ids.tolist()).decode(errors="replace")


def batches(steps: int, batch: int = 16, length: int = 64) -> Iterator[Tensor]:
    """Random windows of the sources of two modules of the standard library, int64 [batch, length]."""
    ids = encode(inspect.getsource(argparse) + inspect.getsource(typing))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - length, (batch,), generator=generator)
        yield torch.stack([ids[start : start + length] for start in starts])
