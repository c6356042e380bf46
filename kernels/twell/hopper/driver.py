"""Loads cubins and launches them on torch's current stream, through cuda.bindings.

`cuda.bindings` is imported where it is used: a machine without it can still import this package.
"""

import ctypes
import threading
from collections.abc import Hashable
from typing import Any

import torch

from .. import torch_internals
from ..launch_cache import LAUNCHES
from . import compiler, params


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed; the message names the call and the driver's error."""


def checked(call: str, result: tuple):
    """The payload of a call of cuda.bindings.driver. Raises DriverError where it failed."""
    status, *payload = result
    if status.value != 0:
        raise DriverError(f"{call}: {status.name}")
    return payload[0] if len(payload) == 1 else payload


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Launch:
    """One launch of a kernel with everything filled in; may be started any number of times, by any thread."""

    __slots__ = ("_addresses", "_function", "_kept", "_start")

    def __init__(self, start, function: int, config: _LaunchConfig, parameters: bytes) -> None:
        buffer = ctypes.create_string_buffer(parameters, len(parameters))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._start, self._function = start, function
        self._kept = config, buffer, pointers
        self._addresses = ctypes.addressof(config), ctypes.addressof(pointers)

    def __call__(self) -> None:
        """Starts it; returns at once, like any launch."""
        config, pointers = self._addresses
        if status := self._start(config, self._function, pointers, None):
            raise DriverError(f"cuLaunchKernelEx: error {status}")


class Kernel:
    """One function of a cubin, loaded on one device. Launching needs that device to be torch's current one.

    Launches go to the driver's library through ctypes with structures that are filled once: the objects of
    cuda.bindings cost some microseconds more at each call.
    """

    def __init__(
        self,
        name: str,
        macros: dict[str, int],
        device_index: int,
        *,
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        early: bool = False,
    ) -> None:
        """name, macros: see compiler.cubin; threads: of a CTA; shared_bytes: of dynamic shared memory; cluster: CTAs in
        a cluster; early: the kernel may start before the one ahead of it in the stream has ended, and waits for it
        itself (programmatic dependent launch)."""
        from cuda.bindings import driver

        code = compiler.cubin(name, tuple(sorted(macros.items())))
        with torch.cuda.device(device_index):
            need_context(device_index)
            self._module = checked("cuModuleLoadData", driver.cuModuleLoadData(code))
            function = checked("cuModuleGetFunction", driver.cuModuleGetFunction(self._module, name.encode()))
        if shared_bytes:  # beside static shared memory, less than 48 KB may be too much without it
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        self._function = int(function)
        self._name = name
        self._threads, self._shared_bytes = threads, shared_bytes
        wanted: list[tuple[int, tuple[int, ...]]] = [(_CLUSTER_DIMENSION, (cluster, 1, 1))] if cluster > 1 else []
        wanted += [(_PROGRAMMATIC_SERIALIZATION, (1,))] if early else []
        self._attributes = (_LaunchAttribute * 2)(
            *(_LaunchAttribute(name, 0, (ctypes.c_uint * 16)(*values)) for name, values in wanted)
        )
        self._attribute_count = len(wanted)
        self._start = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._start.argtypes = (ctypes.c_void_p,) * 4

    def prepare(self, grid: int, stream: int, parameters: tuple[Any, ...]) -> Launch:
        """A launch of `grid` CTAs on a stream; parameters: the kernel's tuple of params.py."""
        attributes = ctypes.addressof(self._attributes)
        config = _LaunchConfig(
            *((grid, 1, 1), (self._threads, 1, 1), self._shared_bytes),
            *(stream, attributes, self._attribute_count),
        )
        return Launch(self._start, self._function, config, params.pack(self._name, parameters))


class PreparedPair:
    """A forward of two launches for operands at fixed addresses: everything is decided, so that a call costs two
    allocations and the launches. Called with x [..., K], contiguous, it returns y. It holds no tensor."""

    __slots__ = ("_index", "_workspace_bytes")

    def __init__(self, device_index: int, workspace_bytes: int) -> None:
        self._index, self._workspace_bytes = device_index, workspace_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.fill(torch.empty_like(x))

    def fill(self, y: torch.Tensor) -> torch.Tensor:
        """Computes y, contiguous, and returns it."""
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=y.device)
        key = self._key(), stream(self._index), workspace.data_ptr(), y.data_ptr()
        if (launches := LAUNCHES.get(key)) is None:
            launches = self._launches(*key[1:])
            LAUNCHES.put(key, launches)
        first, second = launches
        first()
        second()
        return y

    def _key(self) -> Hashable:
        """What decides about the launches, apart from the stream and the addresses of workspace and result."""
        return self

    def _launches(self, stream: int, workspace: int, y: int) -> tuple[Launch, Launch]:
        """The two launches for these addresses, in their order."""
        raise NotImplementedError


_this_thread = threading.local()


def need_context(device_index: int) -> None:
    """Gives this thread the device's context if it has none. A new thread, such as autograd's, has not used CUDA yet;
    the runtime would set the context at its first call, the driver does not."""
    if hasattr(_this_thread, "has_context"):
        return
    from cuda.bindings import driver

    if not int(checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())):
        # torch's own, never released: it lives as long as the process.
        context = checked("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(device_index))
        checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    _this_thread.has_context = True


def stream(device_index: int) -> int:
    """torch's current stream of a device, as the driver's handle, for a launch in this thread."""
    need_context(device_index)
    return torch_internals.current_cuda_stream(device_index)


def address(tensor: torch.Tensor | None) -> int:
    """The address of the tensor's data as a launch parameter; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def tensor_map(address: int, rows: int, columns: int, row_bytes: int, box_rows: int) -> bytes:
    """A TMA descriptor for boxes of `box_rows` x 64 of a bfloat16 matrix, 128-byte swizzle, zeros outside."""
    key = "tensor_map", address, rows, columns, row_bytes, box_rows
    if (known := LAUNCHES.get(key)) is not None:
        return known
    from cuda.bindings import driver

    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    made = checked(
        "cuTensorMapEncodeTiled",
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            address,
            [wide(columns), wide(rows)],
            [wide(row_bytes)],
            [narrow(64), narrow(box_rows)],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
    )
    found = ctypes.string_at(made.getPtr(), 128)
    LAUNCHES.put(key, found)
    return found
