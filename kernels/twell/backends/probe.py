"""The tiny checked launch by which a backend proves that it runs on a device."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..interface import Availability, Forward, Options, Weights

TOKENS, HIDDEN, INTERMEDIATE = 3, 4, 5


def launch(
    forward: Callable[[Tensor, Weights, Options], Forward],
    device: torch.device,
    dtype: torch.dtype,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
) -> Availability:
    """Run `forward` (see interface.Backend) on a few whole numbers, and compare.

    With a hidden size up to 64 the gate is exact in every dtype, and sums are exact in float32.
    """
    if device.type == "meta":
        return Availability(True, "shapes only")

    def numbers(rows: int, columns: int, start: int) -> Tensor:
        return ((torch.arange(rows * columns) + start) % 5 - 2).view(rows, columns)

    x, gate = numbers(TOKENS, hidden, 0), numbers(intermediate, hidden, 1)
    up, down = numbers(intermediate, hidden, 2), numbers(intermediate, hidden, 3)
    h = (x @ gate.t()).relu() * (x @ up.t())
    try:
        there = [t.to(device, dtype) for t in (x, gate, up, down)]
        y = forward(there[0], Weights(*there[1:]), Options(stats=False, training=False)).y.cpu()
    except torch.OutOfMemoryError:
        raise  # says nothing about the backend, and answers are kept
    except Exception as error:  # noqa: BLE001 of a compiler, its cache, the driver: whatever it is, it cannot run here
        return Availability(False, f"a tiny launch failed: {type(error).__name__}: {error}", lasting=False)
    if not torch.equal(y, (h @ down).to(dtype)):
        return Availability(False, "a tiny launch gave a wrong result")
    return Availability(True, f"a tiny launch on {device} gave the right result")
