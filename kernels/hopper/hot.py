"""The elementwise steps for hot neurons on Hopper (see `hot_split.py`)."""

import functools

import torch
from torch import Tensor

from .. import hot_split
from ..interface import RELU2, Forward
from . import driver
from .params import HotBackwardParams, HotForwardParams

_WARPS, _VECTOR = 8, 8


def activate(pre: Tensor, neurons: Tensor, gated: bool, rest: Forward, activation: str) -> tuple[Tensor, Forward]:
    """As `hot_split.activate`, in bfloat16; what `rest` counted is added to in place."""
    tokens, count = pre.shape[0], neurons.shape[0]
    if not tokens or count % _VECTOR:
        return hot_split.activate(pre, neurons, gated, rest, activation)
    squared, stats = activation == RELU2, rest.nonzeros is not None
    h = pre.new_empty((tokens, count)) if gated or squared else pre
    l1_M = pre.new_empty(tokens, dtype=torch.float32) if stats else None
    parameters = HotForwardParams(
        pre=pre.data_ptr(),
        h=h.data_ptr(),
        hot=neurons.data_ptr(),
        nonzeros=driver.address(rest.nonzeros),
        l1=driver.address(l1_M),
        fired=driver.address(rest.fired),
        M=tokens,
        H=count,
        N=0 if rest.fired is None else rest.fired.shape[0],
    )
    kernel = _kernel("hot_forward", pre.device.index, gated, squared, stats)
    kernel.prepare(-(-tokens // _WARPS), driver.stream(pre.device.index), parameters)()
    if l1_M is None or rest.l1 is None:
        return h, rest
    return h, rest._replace(l1=rest.l1 + l1_M.mean())


def derive(dh: Tensor, activated: Tensor, dl1: Tensor | None, gated: bool, activation: str) -> tuple[Tensor, Tensor]:
    """As `hot_split.derive`, in bfloat16."""
    tokens, count = dh.shape
    if not tokens or count % _VECTOR:
        return hot_split.derive(dh, activated, dl1, gated, activation)
    squared = activation == RELU2
    d, h = torch.empty_like(activated), torch.empty_like(dh) if gated or squared else activated
    scalar = None if dl1 is None else dl1.to(torch.float32)
    parameters = HotBackwardParams(
        dh=dh.data_ptr(),
        activated=activated.data_ptr(),
        d=d.data_ptr(),
        h=h.data_ptr(),
        dl1=driver.address(scalar),
        M=tokens,
        H=count,
    )
    kernel = _kernel("hot_backward", dh.device.index, gated, squared, False)
    kernel.prepare(-(-tokens // _WARPS), driver.stream(dh.device.index), parameters)()
    return d, h


def macros(gated: bool, squared: bool, stats: bool) -> dict[str, int]:
    """How the kernels are compiled."""
    return {"WARPS": _WARPS, "GATED": int(gated), "SQUARED": int(squared), "STATS": int(stats)}


@functools.cache
def _kernel(name: str, device_index: int, gated: bool, squared: bool, stats: bool) -> driver.Kernel:
    return driver.Kernel(name, macros(gated, squared, stats), device_index, threads=_WARPS * 32)
