"""Saves and restores the states of all random generators, within a process or as JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The states of Python's, numpy's and torch's generators (of the CPU, and of this process's GPU if it is used)."""

    python: tuple
    numpy: tuple
    torch: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls) -> RandomState:
        """The current states. Takes microseconds: the states are on the host, so nothing waits for the GPU."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numbers = numpy.random.get_state(legacy=True)  # noqa: NPY002
        assert isinstance(numbers, tuple)  # as legacy=True says
        return cls(random.getstate(), numbers, torch.get_rng_state(), cuda)

    def apply(self) -> None:
        """Restore these states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch (every device)."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 (the generator that libraries use)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """`RandomState.now()` as JSON values."""
    state = RandomState.now()
    version, numbers, gauss = state.python
    name, keys, position, has_gauss, cached = state.numpy
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": encode(state.torch),
        "cuda": None if state.cuda is None else encode(state.cuda),
    }


def restore(values: dict[str, Any]) -> None:
    """The inverse of `capture`."""
    version, numbers, gauss = values["python"]
    name, keys, *rest = values["numpy"]
    RandomState(
        python=(version, tuple(numbers), gauss),
        numpy=(name, numpy.array(keys, dtype=numpy.uint32), *rest),
        torch=decode(values["torch"]),
        cuda=None if values["cuda"] is None else decode(values["cuda"]),
    ).apply()


def encode(state: Tensor) -> str:
    """A generator's state (uint8) as text."""
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def decode(text: str) -> Tensor:
    """The inverse of `encode`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
