"""The activation of a dense block in one kernel, as a compiler would fuse it: h = relu(z) * u.

Plain torch reads and writes [M, N] once more for the product than for the activation, and once more for a square.
"""

import logging
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import torch_internals
from ..launch_cache import LAUNCHES
from .inference import INTERPRET
from .launch import Launch
from .numbers import to_bits

logger = logging.getLogger(__name__)

_BLOCK = 2048
_UNUSABLE: set[int] = set()  # devices for which Triton cannot compile the kernel, for instance without a C compiler

Compiled = Callable[[Sequence[object], int], Callable[[], None]]


def apply_(z: Tensor, u: Tensor | None, *, squared: bool) -> bool:
    """Puts h in place of z: relu(z), squared if so, times u if there is one, each rounded as in plain torch. Returns
    False, and does nothing, where the kernel cannot be used: it would have to be compiled while a CUDA graph is being
    captured, or Triton cannot compile it on this machine.

    z, u: [M, N], bfloat16, contiguous, with addresses that are multiples of 16 bytes, as those of a new tensor are.
    """
    device, size = z.device, z.numel()
    if not size:
        return True
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return apply_(z, u, squared=squared)
    key = "activation", device.index, size, u is None, squared
    compiled: Compiled | None = LAUNCHES.get(key)
    if compiled is None:
        compiled = _compiled(z, u, squared)
        if compiled is None:
            return False
        LAUNCHES.put(key, compiled)
    factor = z if u is None else u
    compiled((z.data_ptr(), factor.data_ptr(), size), torch_internals.current_cuda_stream(device.index))()
    return True


def _compiled(z: Tensor, u: Tensor | None, squared: bool) -> Compiled | None:
    if z.device.index in _UNUSABLE or torch.cuda.is_current_stream_capturing():
        return None
    try:
        return launch(z, u, squared=squared).compiled()
    except Exception as error:  # noqa: BLE001 - of Triton, its compiler or the C compiler that it calls
        _UNUSABLE.add(z.device.index)
        logger.info("Triton cannot compile the activation of dense products, so torch computes it: %s", error)
        return None


def launch(z: Tensor, u: Tensor | None, *, squared: bool) -> Launch:
    """The launch that writes h to z."""
    return Launch(
        activation_kernel,
        (triton.cdiv(z.numel(), _BLOCK),),
        (z, z if u is None else u, z.numel()),
        {"GATED": u is not None, "SQUARED": squared, "BLOCK": _BLOCK, "INTERPRET": INTERPRET, "num_warps": 4},
    )


@triton.jit
def activation_kernel(
    z,  # (size) bf16, overwritten
    u,  # (size) bf16, GATED only
    size,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    bits = z.to(tl.pointer_type(tl.uint16))
    value = (tl.load(bits + at, mask=inside, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    if SQUARED:
        value = (to_bits(value * value, INTERPRET).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if GATED:
        factor = tl.load(u.to(tl.pointer_type(tl.uint16)) + at, mask=inside, other=0).to(tl.uint32) << 16
        value = value * factor.to(tl.float32, bitcast=True)
    tl.store(bits + at, to_bits(value, INTERPRET), mask=inside)
