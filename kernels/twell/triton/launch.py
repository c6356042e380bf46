"""Launches of Triton kernels: immediate, or prepared so that repeating them costs little.

Triton's own launcher inspects every argument of every call to find the specialisation to run, which takes tens of
microseconds of host time. A compiled kernel can be started without that, with addresses in place of tensors.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import torch_internals
from ..launch_cache import LAUNCHES

_ALIGNMENT = 16  # bytes: kernels are compiled for pointers to multiples of it


class Launch(NamedTuple):
    """One launch of a kernel. arguments: by position; options: its constants and launch options, by name."""

    kernel: triton.JITFunction
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, object]

    def __call__(self) -> None:
        """Starts it on torch's current stream."""
        self.kernel[self.grid](*self.arguments, **self.options)

    def compiled(self) -> Callable[[Sequence[object], int], Callable[[], None]]:
        """Compiles the kernel for these arguments. Returns a function of such arguments,
        with addresses in place of tensors, and of a stream. It gives the launch, to be called any number of times."""
        kernel = self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)
        constants = [self.options[name] for name in self.kernel.arg_names[len(self.arguments) :]]
        start = kernel[(*self.grid, 1, 1)[:3]]
        return lambda arguments, stream: functools.partial(start, *arguments, *constants, stream=stream)


def _flat(argument: object) -> Iterator[object]:
    """The parts of tuples within tuples."""
    if isinstance(argument, tuple):
        for part in argument:
            yield from _flat(part)
    else:
        yield argument


class Prepared:
    """Launches that compute `result` from `operands`, prepared for operands at the same addresses. Called with x, of
    result's dtype and of any shape with as many elements, on the current device, it returns a new result of x's shape.

    All other tensors among the launches' arguments are workspace, allocated at each call. It holds no tensor.
    """

    __slots__ = ("_index", "_launches", "_size")

    def __init__(self, launches: Sequence[Launch], operands: Sequence[Tensor], result: Tensor) -> None:
        self._index, self._size = result.device.index, 0
        addresses = {0: _Address(None, 0)}  # of empty tensors
        addresses |= {t.data_ptr(): _Address(None, t.data_ptr()) for t in operands}
        addresses[result.data_ptr()] = _Address("result", 0)
        for tensor in _flat(tuple(launch.arguments for launch in launches)):
            if isinstance(tensor, Tensor) and tensor.data_ptr() not in addresses:
                addresses[tensor.data_ptr()] = _Address("workspace", self._size)
                self._size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._launches = [(each.compiled(), _relocatable(each.arguments, addresses)) for each in launches]

    def __call__(self, x: Tensor) -> Tensor:
        workspace = torch.empty(self._size, dtype=torch.uint8, device=x.device)
        result = torch.empty_like(x)
        stream = torch_internals.current_cuda_stream(self._index)
        key = self, stream, workspace.data_ptr(), result.data_ptr()
        if (launches := LAUNCHES.get(key)) is None:
            launches = self.bind(*key[1:])
            LAUNCHES.put(key, launches)
        for start in launches:
            start()
        return result

    def bind(self, stream: int, workspace: int, result: int) -> list[Callable[[], None]]:
        """The launches, for these addresses of the workspace and of the result."""
        start_of = {None: 0, "workspace": workspace, "result": result}

        def located(argument: Any) -> Any:
            if isinstance(argument, tuple):
                return tuple(map(located, argument))
            return start_of[argument.part] + argument.offset if isinstance(argument, _Address) else argument

        return [launch(located(arguments), stream) for launch, arguments in self._launches]


@dataclass(frozen=True)
class _Address:
    """Where a tensor begins: bytes from the start of the workspace or of the result, or an address."""

    part: str | None
    offset: int


@dataclass(frozen=True)
class _Memory:
    """What a tensor descriptor needs to know of its tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def _relocatable(argument: Any, addresses: dict[int, _Address]) -> Any:
    if isinstance(argument, tuple):
        return tuple(_relocatable(part, addresses) for part in argument)
    if isinstance(argument, TensorDescriptor):  # of an operand
        return replace(argument, base=_Memory(argument.base.data_ptr(), argument.base.dtype))
    return addresses[argument.data_ptr()] if isinstance(argument, Tensor) else argument
