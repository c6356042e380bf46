"""Time, energy and memory of calls, compared fairly on one device.

Everything that is compared is timed in one process, in rounds. Each round runs every alternative in a back-to-back
loop, and the order rotates from round to round, so that a slow drift (heat, clocks, other load) affects all of them
alike. On CUDA the loop keeps a few calls queued and never drains, so that the card works in the state it would have in
a long run.

What a device cannot measure becomes a `Measurement` without a value but with the reason; it is never 0.0 or a guess.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from experiments.timing.power import NvmlMeter, PowerSlope, Unavailable

Call = Callable[[], object]

# Calls queued ahead of the one that runs: enough to hide the launch, few enough that a loop ends on time.
QUEUED_CALLS, QUEUED_MILLISECONDS = 16, 100.0
LAUNCHED_AT_ONCE = 8  # where the host is timed: of some tens of launches each, and the queue holds a thousand
HOST_SECONDS = 0.5  # after which the host is timed no more, since each time waits for the device
FEWEST_REPETITIONS, MOST_REPETITIONS = 5, 30
PAUSE = 3.0  # us: kernels of a CUDA graph follow each other within 2; the host needs 5 and more to launch one
MEGA, GIGA = 1e6, 1e9


@dataclass(frozen=True)
class Consumer:
    """A call that uses up its input: `make` makes a new one before each `use`, and only `use` is timed.

    On CUDA the loop goes on without a pause, so `use` runs right behind `make`, as it does in earnest. Energy is that
    of both, less that of `make`, in loops of their own; memory is counted with what `make` made.
    """

    make: Callable[[], Any]
    use: Callable[[Any], object]

    def __call__(self) -> object:
        return self.use(self.make())


@dataclass(frozen=True)
class Repeated:
    """A call of `run`, which does the same `count` times. `time_alternatives` gives the time of one of them: an equal
    share of the time of `run`."""

    run: Callable[[], object]
    count: int

    def __call__(self) -> object:
        return self.run()


@dataclass(frozen=True)
class Measurement:
    """A median with the 20th and 80th percentile of `n` repetitions, or the reason why there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    missing: str = ""

    @property
    def known(self) -> float:
        """The value of a measurement that any device can make.

        Raises:
            ValueError: when there is none.
        """
        if self.value is None:
            raise ValueError(f"nothing was measured: {self.missing}")
        return self.value

    def columns(self) -> dict[str, object]:
        """The columns of a result row that this measurement fills."""
        if self.value is None:
            return {"missing": self.missing}
        return {"value": self.value, "low": self.low, "high": self.high, "n": self.n}


def spread(samples: Sequence[float]) -> Measurement:
    """Median, 20th and 80th percentile of `samples`.

    Raises:
        ValueError: without samples, or with one that is not a finite number.
    """
    if not len(samples):
        raise ValueError("no samples to summarise: the timing loop made no call")
    values = numpy.asarray(samples, dtype=numpy.float64)
    if not numpy.isfinite(values).all():
        raise ValueError(f"samples must be finite numbers, got {values[~numpy.isfinite(values)][:3]}")
    low, median, high = numpy.quantile(values, (0.2, 0.5, 0.8))
    return Measurement(float(median), float(low), float(high), len(values))


def missing(reason: str) -> Measurement:
    """A measurement that this device cannot make."""
    return Measurement(None, missing=reason)


@dataclass
class Timing:
    """What the rounds of one alternative gave: milliseconds of each call, watts of each round."""

    milliseconds: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    no_energy: str = ""

    def time(self) -> Measurement:
        """Milliseconds of one call."""
        return spread(self.milliseconds)

    def throughput(self, tokens: int) -> Measurement:
        """Tokens per millisecond."""
        return spread([tokens / ms for ms in self.milliseconds])

    def rate(self, amount: float) -> Measurement:
        """What one call does, in any unit, per second."""
        return spread([amount / (ms / 1e3) for ms in self.milliseconds])

    def energy(self, tokens: int) -> Measurement:
        """Millijoules per token: mean power of a round (mW = mJ/s) times the mean duration of a call."""
        if not self.watts:
            return missing(self.no_energy or "no round was long enough for the energy counter to advance twice")
        seconds_per_call = float(numpy.mean(self.milliseconds)) / 1e3
        return spread([watts * 1e3 * seconds_per_call / tokens for watts in self.watts])


def time_alternatives(
    calls: Mapping[str, Call],
    device: torch.device,
    meter: NvmlMeter | Unavailable,
    *,
    seconds: float,
    rounds: int = 3,
    settle_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time every call of `calls` in rounds, as described above.

    Args:
        calls: name -> call without arguments (or a Consumer, or Repeated); what it returns is dropped at once.
        device: where the calls run: CUDA events time them there, `perf_counter` on the CPU.
        meter: from `experiments.timing.power.energy_meter`.
        seconds: measured loop of one alternative, summed over its rounds; each round measures at least one call.
        rounds: number of rounds.
        settle_seconds: loop before each measured one (at least one call), to reach caches, clocks and power limit.
    """
    loop = _loop_cuda if device.type == "cuda" else _loop_host
    no_energy = meter.reason if isinstance(meter, Unavailable) else ""
    timings = {name: Timing(no_energy=no_energy) for name in calls}

    def measured(call: Call) -> tuple[list[float], float | None]:
        """Milliseconds of the calls of a loop that has settled, and its mean power in watts if it can be told."""
        loop(call, settle_seconds, device)
        slope = None if isinstance(meter, Unavailable) else PowerSlope(meter)
        with slope or contextlib.nullcontext():
            durations = loop(call, seconds / rounds, device)
        return durations, None if slope is None else slope.watts()

    def power_of_use(call: Consumer, durations: list[float]) -> float | None:
        """Watts of `use`, with its milliseconds: from the energy of both parts less that of `make`."""
        both, make = (measured(part) for part in (call.__call__, call.make))
        if both[1] is None or make[1] is None:
            return None
        joules = both[1] * numpy.mean(both[0]) - make[1] * numpy.mean(make[0])
        return float(joules / numpy.mean(durations)) if joules > 0 else None  # else the difference is noise

    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _give_cached_memory_back(device)
            call = calls[name]
            durations, watts = measured(call)
            if isinstance(call, Consumer) and watts is not None:
                watts = power_of_use(call, durations)
            timings[name].milliseconds += [
                each / (call.count if isinstance(call, Repeated) else 1) for each in durations
            ]
            if watts is not None:
                timings[name].watts.append(watts)
    return timings


def _give_cached_memory_back(device: torch.device) -> None:
    """A call that just fits needs the memory that others left cached in other sizes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _loop_host(call: Call, seconds: float, device: torch.device) -> list[float]:
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while not durations or time.perf_counter() < end:
        run = _ready(call)
        start = time.perf_counter()
        run()
        durations.append((time.perf_counter() - start) * 1e3)
    return durations


def _ready(call: Call) -> Call:
    """The part of a call that is timed, with its input already made."""
    return functools.partial(call.use, call.make()) if isinstance(call, Consumer) else call


def _loop_cuda(call: Call, seconds: float, device: torch.device) -> list[float]:
    """Durations in ms between the events around consecutive calls; the queue is bounded but never drained. The first
    call, for whose launch the device waited, is not counted."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        durations: list[float] = []
        queue: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        last = _recorded_event()
        end = time.perf_counter() + seconds
        while len(durations) + len(queue) < 2 or time.perf_counter() < end:
            run = _ready(call)
            start = _recorded_event() if isinstance(call, Consumer) else last
            run()
            last = _recorded_event()
            queue.append((start, last))
            # By the duration of the last call that ended: how many to keep behind the one that runs.
            ahead = QUEUED_MILLISECONDS / max(durations[-1], 1e-3) if durations else 1
            if len(queue) > max(1, int(min(QUEUED_CALLS, ahead))):
                durations.append(_duration(*queue.popleft()))
        durations += [_duration(*events) for events in queue]
    return durations[1:]


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _duration(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end)


def host_time(call: Call, device: torch.device) -> Measurement:
    """Microseconds that the host needs to launch a call: one of LAUNCHED_AT_ONCE in a row, as a model makes them, which
    the device's queue takes without waiting. The first finds caches cold."""
    if device.type != "cuda":
        return missing("the CPU is the host: its launch time is part of the time")
    durations: list[float] = []
    end = time.perf_counter() + HOST_SECONDS
    while len(durations) < FEWEST_REPETITIONS or (len(durations) < MOST_REPETITIONS and time.perf_counter() < end):
        runs = [_ready(call) for _ in range(LAUNCHED_AT_ONCE)]
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for run in runs:
            run()
        durations.append((time.perf_counter() - start) * 1e6 / LAUNCHED_AT_ONCE)
    torch.cuda.synchronize(device)
    return spread(durations)


def device_time(call: Call, device: torch.device) -> Measurement:
    """Milliseconds that the device is busy in one call, as CUDA's profiler (CUPTI) records kernels and copies, in
    graphs too, with the pauses of up to PAUSE microseconds between them: in the rest of the call it waits for the
    host. Overlapping kernels count once."""
    if device.type != "cuda":
        return missing("the time of a device is counted by CUDA's profiler only")
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.profiler.DeviceType.CUDA and not event.is_user_annotation
    ]
    if not spans:
        return missing("CUDA's profiler saw no kernel")
    busy, until = 0.0, -math.inf  # microseconds
    for start, end in sorted(spans):
        busy += max(0.0, end - (until if start - until <= PAUSE else start))
        until = max(until, end)
    return Measurement(busy / 1e3, n=1)


def peak_memory(call: Call, device: torch.device, inputs: Sequence[torch.Tensor] | None = None) -> Measurement:
    """Largest allocated device memory during one call, in GB (1e9 bytes).

    With `inputs` (weights among them): these, and what the call allocates itself, whatever else there is. Without: all
    that is allocated on the device.
    """
    if device.type != "cuda":
        return missing("peak memory is counted by the CUDA allocator only; resident size is that of the whole process")
    gc.collect()
    _give_cached_memory_back(device)
    others = 0
    if inputs is not None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in inputs}
        others = torch.cuda.memory_allocated(device) - sum(storages.values())
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return Measurement((torch.cuda.max_memory_allocated(device) - others) / GIGA, n=1)


def held_memory(forward: Callable[[], torch.Tensor], known: Sequence[torch.Tensor]) -> Measurement:
    """Memory that autograd holds between `forward` and its backward, in MB (1e6 bytes).

    Counted as the distinct storages that the graph saved, on any device alike, without those of `known` (inputs and
    weights, which exist anyway) and without that of the output.
    """
    storages: dict[int, int] = {}
    # The tensors saved must stay alive while counting, or an address could be counted for two of them.
    alive: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()
    for tensor in (*known, output):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return Measurement(sum(storages.values()) / MEGA, n=1)
