"""Loads cubins and launches them on torch's current stream, through cuda.bindings.

`cuda.bindings` is imported where it is used: a machine without it can still import this package.
"""

import ctypes
import functools
import struct
import threading

import torch

from . import compiler


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


class _LaunchState(threading.local):
    """What a launch fills in place, one for each thread: configuration, parameters, and where they stand."""

    def __init__(self, threads: int, shared_bytes: int, cluster: int, size: int) -> None:
        self.attribute = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(cluster, 1, 1))
        self.config = _LaunchConfig(
            (1, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.addressof(self.attribute), int(cluster > 1)
        )
        self.buffer = ctypes.create_string_buffer(size)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.addresses = ctypes.addressof(self.config), ctypes.addressof(self.pointers)


class Kernel:
    """One function of a cubin, loaded on one device. Launching needs that device to be torch's current one.

    Launches go to the driver's library through ctypes with structures kept from call to call: the objects of
    cuda.bindings cost some microseconds more.
    """

    def __init__(
        self,
        name: str,
        macros: dict[str, int],
        device_index: int,
        layout: str,
        *,
        threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """name, macros: see compiler.cubin; layout: of the parameter struct, as the struct module writes it; threads:
        of a CTA; shared_bytes: of dynamic shared memory; cluster: CTAs in a cluster."""
        from cuda.bindings import driver

        code = compiler.cubin(name, tuple(sorted(macros.items())))
        with torch.cuda.device(device_index):
            self._module = checked("cuModuleLoadData", driver.cuModuleLoadData(code))
            function = checked("cuModuleGetFunction", driver.cuModuleGetFunction(self._module, name.encode()))
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        self._function = int(function)
        self._layout = struct.Struct(layout)
        self._state = _LaunchState(threads, shared_bytes, cluster, self._layout.size)
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        self._launch.argtypes = (ctypes.c_void_p,) * 4

    def launch(self, grid: int, stream: int, *parameters: int | bytes) -> None:
        """Start `grid` CTAs on a stream with the fields of the parameter struct. Returns at once, like any launch."""
        state = self._state
        self._layout.pack_into(state.buffer, 0, *parameters)
        state.config.grid[0] = grid
        state.config.stream = stream
        config, pointers = state.addresses
        if status := self._launch(config, self._function, pointers, None):
            raise DriverError(f"cuLaunchKernelEx: error {status}")


def stream(device_index: int) -> int:
    """torch's current stream of a device, as the driver's handle. The public way builds an object at each call; this
    one is what torch's own compiler and Triton use."""
    return torch._C._cuda_getCurrentRawStream(device_index)


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, columns: int, row_bytes: int, box_rows: int) -> bytes:
    """A TMA descriptor for boxes of `box_rows` x 64 of a bfloat16 matrix, 128-byte swizzle, zeros outside.

    A pure function of its arguments, hence the cache: making one takes 2 microseconds.
    """
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
    return ctypes.string_at(made.getPtr(), 128)
