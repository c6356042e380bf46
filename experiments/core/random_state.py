"""The states of every random generator, as JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (every device)."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 (the generator that libraries use)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators (of the CPU, and of this process's GPU)."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()  # noqa: NPY002
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": encode(torch.get_rng_state()),
        "cuda": encode(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """The inverse of `capture`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(decode(state["cuda"]))


def encode(state: Tensor) -> str:
    """A generator's state (uint8) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def decode(text: str) -> Tensor:
    """The inverse of `encode`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
