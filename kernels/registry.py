"""Which backends exist, which can run here, and which one a call gets.

A backend is one file in `backends/` that ends with `BACKEND = Backend(...)`, and one line in `_FILES`. It is chosen in
plain Python before the torch operator is called; the operator then receives its name as a string.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kept import EntryCount

logger = logging.getLogger(__name__)

AUTO = "auto"
# The order is the preference of backend="auto": the first that can run takes the call.
_FILES = {
    "dense": ".backends.dense",
    "reference": ".backends.reference",
    "hopper": ".backends.hopper",
    "triton": ".backends.triton",
}


class Availability(NamedTuple):
    """Whether a backend can run, and why (or why not)."""

    ok: bool
    reason: str


class BackendUnavailable(RuntimeError):
    """A backend asked for by name that cannot run here, or not on this request."""


@dataclass(frozen=True)
class Request:
    """What a backend must know to say whether it can take a call. The number of tokens is not part of it: a backend
    takes any number, and plans for it inside."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    intermediate: int
    gated: bool
    training: bool  # a gradient will be asked for

    def __str__(self) -> str:
        block, use = "gated" if self.gated else "non-gated", "training" if self.training else "inference"
        return f"{block} {use}, hidden {self.hidden}, intermediate {self.intermediate}, {self.dtype} on {self.device}"


class Forward(NamedTuple):
    """What a backend's forward returns: y [M, K] in x's dtype; the statistics, or None where not asked for; and what
    its backward wants to have saved (empty when `training` is False)."""

    y: Tensor
    nonzeros: Tensor | None  # int32 [M]
    l1: Tensor | None  # float32 (float64 for float64 input), no dimensions
    fired: Tensor | None  # bool [N]
    overflow: Tensor | None  # int64, no dimensions; None where not asked for, or with no capacity to exceed
    saved: Sequence[Tensor] = ()
    count: EntryCount | None = None  # of the entries saved, for `Backend.needed`


class HotSteps(NamedTuple):
    """What is done element by element with what dense products made, of hot neurons or of the tokens of a backup:
    `hot.activate` and `hot.derive`, or a backend's own."""

    activate: Callable[..., tuple[Tensor, Forward]]
    derive: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Backend:
    """One way to compute the block. Shapes: x [M, K], w_gate and w_up [N, K], w_down [K, N], dy [M, K], dl1 scalar.

    probe(device) -> Availability: proven by a tiny checked launch, not by an import that worked.
    supports(request) -> None, or the reason why not.
    forward(x, w_gate, w_up, w_down, *, stats, training, capacity, backup) -> Forward; see `sparse_ffn` for the last
        two, which only matter in training.
    backward(dy, dl1, x, w_gate, w_up, w_down, saved, needs) -> four gradients, None where `needs` (four bools, same
        order as the inputs) is False. dl1 is None when l1 has no gradient.
    saved_like(x, w_gate, w_up, capacity, backup) -> empty tensors of the shapes, dtypes and device that a training
        forward saves. They may depend on the last two and on shapes, never on values, so that torch.compile can plan
        for them.
    repeat(x, w_gate, w_up, w_down) -> None, or a function x -> y that makes this forward again, without statistics, for
        tensors that lie where these do, with their shapes and strides; it must not hold on to the tensors. x is
        contiguous, with M >= 1. It is asked at every such call until it gives one, so a None must cost next to
        nothing. For backends whose calls take the host longer than their kernels take the device.
    needed(saved, count) -> None, or the capacity that this training forward would have needed; its gradients are then
        computed densely, without calling `backward`. None for a backend whose backward is exact whatever was saved.
    """

    name: str
    probe: Callable[[torch.device], Availability]
    supports: Callable[[Request], str | None]
    forward: Callable[..., Forward]
    backward: Callable[..., Sequence[Tensor | None]]
    saved_like: Callable[..., Sequence[Tensor]]
    sparse: bool = True  # pays for each non-zero, so that hot neurons are better left to dense products
    hot: HotSteps | None = None
    repeat: Callable[..., Callable[[Tensor], Tensor] | None] | None = None
    needed: Callable[[Sequence[Tensor], EntryCount | None], int | None] | None = None


def check_name(name: str) -> None:
    """Raises ValueError for a backend that does not exist (whether or not it can run here)."""
    if name != AUTO and name not in _FILES:
        raise ValueError(f"backend must be one of {', '.join((AUTO, *_FILES))}, got {name!r}")


@functools.cache
def get(name: str) -> Backend:
    """The backend of this name, which must be registered."""
    return importlib.import_module(_FILES[name], __package__).BACKEND


@functools.cache
def probe(name: str, device: torch.device) -> Availability:
    """Whether this backend runs on this device; asked once per process."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return Availability(False, "torch finds no CUDA device")
    return get(name).probe(device)


def available_backends(device: torch.device | str | None = None) -> dict[str, Availability]:
    """Each backend with whether it can run on `device` (default: CUDA if there is one, else the CPU) and why."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: probe(name, torch.device(device)) for name in _FILES}


def _obstacle(name: str, request: Request) -> str | None:
    """Why this backend cannot take this request, or None."""
    availability = probe(name, request.device)
    return get(name).supports(request) if availability.ok else availability.reason


@functools.cache
def _resolve(requested: str, device_type: str, device_index: int | None, *rest) -> str:
    # Cached by plain values: making and hashing a Request at each call takes some microseconds.
    check_name(requested)
    device = torch.device(device_type) if device_index is None else torch.device(device_type, device_index)
    request = Request(device, *rest)
    if requested != AUTO:
        if reason := _obstacle(requested, request):
            raise BackendUnavailable(f"backend {requested!r} cannot run this ({request}): {reason}")
        return requested
    obstacles = {}
    for name in _FILES:
        if (reason := _obstacle(name, request)) is None:
            _log_choice(name, request, obstacles)
            return name
        obstacles[name] = reason
    raise BackendUnavailable(f"no backend can run this ({request}): {_listed(obstacles)}")


def _listed(obstacles: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in obstacles.items())


def _log_choice(name: str, request: Request, obstacles: dict[str, str]) -> None:
    passed_over = f"; passed over: {_listed(obstacles)}" if obstacles else ""
    logger.info("backend auto -> %s for %s: %s%s", name, request, probe(name, request.device).reason, passed_over)


@torch.compiler.assume_constant_result
def resolve(
    requested: str,
    device_type: str,
    device_index: int | None,
    dtype: torch.dtype,
    hidden: int,
    intermediate: int,
    gated: bool,
    training: bool,
) -> str:
    """The name of the backend that takes this call; decided and logged once per kind of request.

    Raises ValueError for an unknown name, BackendUnavailable for one asked for by name that cannot run. Takes plain
    values, since torch.compile calls it once while tracing and keeps the answer.
    """
    return _resolve(requested, device_type, device_index, dtype, hidden, intermediate, gated, training)


@torch.compiler.assume_constant_result
def is_sparse(name: str) -> bool:
    """Whether this backend, which must be registered, pays for each non-zero."""
    return get(name).sparse
