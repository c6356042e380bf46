"""The registry of backends: which ones exist, which can run here, and which one runs a call.

A backend is chosen in plain Python before the torch operator is called; the operator receives its name as a string.
"""

import functools
import importlib
import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from .interface import RELU, Availability, Backend, Request, check_activation
from .names import AUTO, DENSE, FILES, check_name

logger = logging.getLogger(__name__)

_Kind = tuple[torch.device, torch.dtype, int, int, bool, bool, str]  # the fields of a `Request`
# The backends that plan="auto" tries on a CUDA device before dense products, fastest first.
_FASTEST = ("hopper", "triton")


class BackendUnavailable(RuntimeError):
    """A backend was requested by name, but cannot run on this device or for this request."""


@functools.cache
def get(name: str) -> Backend:
    """The backend of this name, which must be registered."""
    return importlib.import_module(FILES[name], __package__).BACKEND


_probed: dict[tuple[str, torch.device], Availability] = {}


def probe(name: str, device: torch.device) -> Availability:
    """Whether this backend runs on this device. Probed in a thread of its own: the modes of torch under which the first
    call may run (torch.export, a fake or a default device) hold for the caller's thread only. The answer is remembered,
    unless it may change: a tiny launch that failed is tried again when somebody asks again.

    Raises torch.OutOfMemoryError where the device has no memory left for it, and RuntimeError where nothing is known
    yet and a CUDA graph is being captured."""
    known = _probed.get((name, device))
    if known is not None and known.lasting:
        return known
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return Availability(False, "torch finds no CUDA device")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"backend {name!r} is first used while a CUDA graph is captured, where it cannot be tried: make the "
                "same call once before the capture"
            )
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(get(name).probe, device).result()
    _probed[name, device] = answer
    if known is not None and answer.ok:
        _resolve.cache_clear()  # plan="auto" may have chosen another backend in the meantime
        _can_run.cache_clear()
    return answer


def available_backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Each backend with the reason why it cannot run on `device` (default: CUDA if there is one, else the CPU); None if
    it can."""
    return {name: why_not(name, device=device) for name in FILES}


def why_not(
    backend: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int | None = None,
    intermediate: int | None = None,
    gated: bool = True,
    training: bool = False,
    activation: str = RELU,
) -> str | None:
    """Why this backend cannot run a block of this kind on this device, in one line; None if it can.

    device: default CUDA if there is one, else the CPU. hidden, intermediate: None asks about the device alone.
    Raises ValueError for a backend or an activation that does not exist. The backend "auto" can always run.
    """
    check_name(backend)
    check_activation(activation)
    if backend == AUTO:
        return None
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if hidden is None or intermediate is None:
        availability = probe(backend, device)
        reason = None if availability.ok else availability.reason
    else:
        reason = _why_not(backend, Request(device, dtype, hidden, intermediate, gated, training, activation))
    return None if reason is None else " ".join(reason.split())


def can_run(backend: str, device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int) -> bool:
    """Whether this backend can run a gated block of this kind in inference: for torch.compile to ask while tracing, and
    for every call, of which none repeats a tiny launch that failed."""
    return _can_run(backend, device, dtype, hidden, intermediate)


@functools.cache
def _can_run(backend: str, device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int) -> bool:
    return _why_not(backend, Request(device, dtype, hidden, intermediate, gated=True, training=False)) is None


def _why_not(name: str, request: Request) -> str | None:
    availability = probe(name, request.device)
    return get(name).supports(request) if availability.ok else availability.reason


@functools.cache
def _resolve(requested: str, *kind: *_Kind) -> str:
    # Cached by plain values: making and hashing a Request at each call takes some microseconds.
    check_name(requested)
    request = Request(*kind)
    if requested != AUTO:
        if reason := _why_not(requested, request):
            raise BackendUnavailable(f"backend {requested!r} cannot run this ({request}): {reason}")
        return requested
    reasons = {}
    for name in _FASTEST if request.device.type == "cuda" else ():
        if (reason := _why_not(name, request)) is None:
            break
        reasons[name] = reason
    else:
        name = DENSE
        if reason := _why_not(DENSE, request):
            raise BackendUnavailable(f"no backend can run this ({request}): {DENSE}: {reason}")
    because = "".join(f"; {other}: {reason}" for other, reason in reasons.items())
    if request.device.type != "cuda":
        because = "; the sparse backends that are faster than dense products need a CUDA device"
    logger.info("backend auto -> %s for %s%s", name, request, because)
    return name


def resolve(requested: str, *kind: *_Kind) -> str:
    """The name of the backend that runs calls of this kind, the fields of a `Request`; decided and logged once.

    Raises ValueError for an unknown name, and BackendUnavailable for a backend that was requested by name but cannot
    run. Takes plain values, since torch.compile calls it once while tracing and stores the result.
    """
    return _resolve(requested, *kind)


def has_few_tokens(name: str, tokens: int, hidden: int) -> bool:
    """Whether this backend needs no hot neurons for so few tokens, for which it has kernels of their own. False for
    AUTO and unknown names."""
    few_tokens = get(name).few_tokens if name in FILES else None
    return few_tokens is not None and few_tokens(tokens, hidden)


def is_sparse(name: str) -> bool:
    """Whether the cost of this backend, which must be registered, is per non-zero."""
    return get(name).sparse


for _asked in (can_run, resolve, has_few_tokens, is_sparse):
    torch.compiler.assume_constant_result(_asked)  # as a decorator it would hide their types from mypy
