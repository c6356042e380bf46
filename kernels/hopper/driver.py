"""Loads cubins and launches them on torch's current stream, through cuda.bindings.

`cuda.bindings` is imported where it is used: a machine without it can still import this package.
"""

import ctypes
import functools
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


class Kernel:
    """One function of a cubin, loaded on one device. Launching needs that device to be torch's current one."""

    def __init__(
        self,
        name: str,
        macros: dict[str, int],
        device_index: int,
        *,
        threads: int,
        size: int,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """name, macros: see compiler.cubin; threads: of a CTA; size: bytes of the parameter struct; shared_bytes: of
        dynamic shared memory; cluster: CTAs in a cluster."""
        from cuda.bindings import driver

        self._launch = driver.cuLaunchKernelEx
        self._success = driver.CUresult.CUDA_SUCCESS
        code = compiler.cubin(name, tuple(sorted(macros.items())))
        with torch.cuda.device(device_index):
            self._module = checked("cuModuleLoadData", driver.cuModuleLoadData(code))
            self._function = checked("cuModuleGetFunction", driver.cuModuleGetFunction(self._module, name.encode()))
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked("cuFuncSetAttribute", driver.cuFuncSetAttribute(self._function, attribute, shared_bytes))
        self._settings = (threads, shared_bytes, cluster, size)
        self._local = threading.local()  # a launch fills its configuration and parameters in place

    def launch(self, grid: int, stream: int, parameters: bytes) -> None:
        """Start `grid` CTAs; `parameters` is the kernel's parameter struct. Returns at once, like any launch."""
        local = self._local
        if not hasattr(local, "config"):
            local.config, local.buffer, local.pointers = self._prepare()
        ctypes.memmove(local.buffer, parameters, len(parameters))
        local.config.gridDimX = grid
        local.config.hStream = stream
        (status,) = self._launch(local.config, self._function, ctypes.addressof(local.pointers), 0)
        if status != self._success:
            raise DriverError(f"cuLaunchKernelEx: {status.name}")

    def _prepare(self):
        from cuda.bindings import driver

        threads, shared_bytes, cluster, size = self._settings
        config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = threads
        config.sharedMemBytes = shared_bytes
        if cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimension = attribute.value.clusterDim
            dimension.x, dimension.y, dimension.z = cluster, 1, 1
            config.attrs = [attribute]
            config.numAttrs = 1
        buffer = ctypes.create_string_buffer(size)
        return config, buffer, (ctypes.c_void_p * 1)(ctypes.addressof(buffer))


def stream(device_index: int) -> int:
    """torch's current stream of a device, as the driver's handle."""
    return torch.cuda.current_stream(device_index).cuda_stream


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
