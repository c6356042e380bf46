"""Saves and restores the states of all random generators, as JSON values."""

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
    """The states of Python's, numpy's and torch's generators (of the CPU, and of this process's GPU if it is used) as
    JSON values. They are on the host, so nothing waits for the GPU."""
    version, numbers, gauss = random.getstate()
    of_numpy: Any = numpy.random.get_state(legacy=True)  # noqa: NPY002
    name, keys, *rest = of_numpy
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": encode(torch.get_rng_state()),
        "cuda": encode(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
    }


def restore(values: dict[str, Any]) -> None:
    """The inverse of `capture`."""
    version, numbers, gauss = values["python"]
    name, keys, *rest = values["numpy"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(decode(values["torch"]))
    if values["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(decode(values["cuda"]))


def encode(state: Tensor) -> str:
    """A generator's state (uint8) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def decode(text: str) -> Tensor:
    """The inverse of `encode`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
