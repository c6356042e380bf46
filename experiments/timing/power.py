"""Energy and power state of a GPU through NVML's millijoule counter."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pynvml
import torch

# The counter advances every 20 to 100 ms: reading it more often than this only costs host time.
READ_INTERVAL_SECONDS = 0.01


@dataclass(frozen=True)
class Unavailable:
    """No energy counter on this device, and why."""

    reason: str


@dataclass(frozen=True)
class NvmlMeter:
    """`nvmlDeviceGetTotalEnergyConsumption` of one GPU (Volta and later)."""

    handle: object

    def millijoules(self) -> int:
        """Energy used since the driver was loaded."""
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)

    def power_limit_watts(self) -> float:
        """Limit in force (the smaller of the board's and the administrator's)."""
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(self.handle) / 1e3


def energy_meter(device: torch.device) -> NvmlMeter | Unavailable:
    """The energy counter of `device`, tried by one reading, or the reason why it has none."""
    if device.type != "cuda":
        return Unavailable(f"no energy counter for a {device.type} device (NVML measures NVIDIA GPUs)")
    try:
        pynvml.nvmlInit()
        # By UUID, since CUDA_VISIBLE_DEVICES renumbers torch's devices but not NVML's.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        meter = NvmlMeter(pynvml.nvmlDeviceGetHandleByUUID(name))
        meter.millijoules()
    except pynvml.NVMLError as error:
        return Unavailable(f"NVML: {error}")
    return meter


def power_state(meter: NvmlMeter | Unavailable) -> str:
    """The column `power_state` of a sustained loop: with the power limit where NVML tells it."""
    if not isinstance(meter, NvmlMeter):
        return "sustained"
    try:
        return f"sustained, {meter.power_limit_watts():.0f} W limit"
    except pynvml.NVMLError as error:
        return f"sustained, limit unknown ({error})"


class PowerSlope:
    """Mean power inside the `with` block, from the moments at which the counter was seen to advance.

    The counter advances every 20 to 100 ms. Two plain readings are off by up to one such interval; the slope between
    the first and the last advance is not. A separate thread reads the counter: one reading can take longer than many
    calls that are being timed, and the device would run out of work meanwhile.
    """

    def __init__(self, meter: NvmlMeter, clock=time.perf_counter):
        self._meter, self._clock = meter, clock
        self._count = meter.millijoules()
        self._advances: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._reader = threading.Thread(target=self._read_on, daemon=True)

    def __enter__(self) -> PowerSlope:
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._reader.join()

    def _read_on(self) -> None:
        while not self._done.wait(READ_INTERVAL_SECONDS):
            self.read()

    def read(self) -> None:
        now, count = self._clock(), self._meter.millijoules()
        if count != self._count:
            self._count = count
            self._advances.append((now, count))

    def watts(self) -> float | None:
        """Mean power in W between the first and the last advance; None when fewer than two were seen."""
        if len(self._advances) < 2:
            return None
        (start, first), (end, last) = self._advances[0], self._advances[-1]
        return (last - first) / 1e3 / (end - start)
