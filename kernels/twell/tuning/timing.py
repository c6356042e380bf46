"""Short measurements for `autotune`: which of several calls is the fastest."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

_SECONDS, _ROUNDS = 0.02, 3
_SETTLE_SECONDS, _SUSTAINED_SECONDS = 0.3, 0.15
_COLD_SECONDS = 0.005  # in which a call of few tokens is repeated
_FEWEST = 3  # repetitions
_MOST = 20  # repetitions
_MARGIN = 0.97
# Before each call, a buffer of _TIMES_L2 times the L2 cache is read _READS times, while the host issues the call.
_TIMES_L2, _READS = 2, 5
# Of `queued_times`: how often each call is timed, and how many others at most the GPU runs before each of its halves.
_QUEUED, _MOST_OTHERS = 6, 64

Name = TypeVar("Name")
T = TypeVar("T")
Call = Callable[[], object]
Halves = Callable[[], Call]  # runs a forward and returns its backward


def quick_times(calls: dict[Name, Call], device: torch.device) -> dict[Name, float]:
    """The median time of each call over rounds, in ms, in a loop without pauses; a round runs all calls. Takes about
    0.1 s for each."""
    repetitions = {}
    for name, call in calls.items():
        call()  # the first time may compile
        repetitions[name] = max(1, min(1000, int(_SECONDS * 1e3 / max(_milliseconds(call, 2, device), 1e-6))))
    rounds = [
        {name: _milliseconds(call, repetitions[name], device) for name, call in calls.items()} for _ in range(_ROUNDS)
    ]
    return {name: statistics.median(found[name] for found in rounds) for name in calls}


def sustained_times(calls: dict[Name, Call], device: torch.device) -> dict[Name, float]:
    """The time of each call, in ms, after a GPU's clocks have settled under it. At its power limit a GPU lowers them
    within some tenths of a second, under dense products by more than under calls that wait for memory: `quick_times`
    cannot tell which of two calls a model would run faster. Takes about half a second for each."""
    found = {}
    for name, call in calls.items():
        call()  # the first time may compile
        once = _milliseconds(call, 2, device)
        for seconds in (_SETTLE_SECONDS, _SUSTAINED_SECONDS):
            found[name] = _milliseconds(call, max(1, int(seconds * 1e3 / max(once, 1e-6))), device)
    return found


def queued_times(calls: dict[Name, Halves], other: Call, device: torch.device) -> dict[Name, float]:
    """The median time of a forward and its backward, in ms, each as the GPU runs it when it finds all of it in its
    queue: what the host needs to issue it does not count. So a model runs its layers: the host is ahead of the GPU.

    The halves are timed apart, since a backward may wait for what its forward counted. other: what the GPU runs while
    the host issues a half; it waits for nothing. It runs once before each half, or up to 64 times until the host is
    ahead; if it is behind even then, its time counts. So each call takes the time of 6 runs or more, and of 12 to some
    750 of `other`, and what a forward saves is held while `other` runs. On a CPU, `quick_times` of both halves."""
    if device.type != "cuda":
        return quick_times({name: functools.partial(both_halves, call) for name, call in calls.items()}, device)
    with torch.cuda.device(device):
        for call in calls.values():
            both_halves(call)  # the first time may compile
        found: dict[Name, list[float]] = {name: [] for name in calls}
        others = dict.fromkeys(calls, 1)
        for _ in range(_QUEUED):
            for name, call in calls.items():
                milliseconds, others[name] = _queued_milliseconds(call, other, others[name])
                found[name].append(milliseconds)
    return {name: statistics.median(times) for name, times in found.items()}


def both_halves(call: Halves) -> None:
    """Run a forward and its backward."""
    call()()


def _queued_milliseconds(call: Halves, other: Call, others: int) -> tuple[float, int]:
    """The time of both halves, each behind so many runs of `other` or more, and how many these were."""
    while True:
        forward, backward, ahead = _queued(call, other, others)
        rest, _, still_ahead = _queued(backward, other, others)
        if (ahead and still_ahead) or others >= _MOST_OTHERS:
            return forward + rest, others
        others *= 2


def _queued(half: Callable[[], T], other: Call, others: int) -> tuple[float, T, bool]:
    """The time of a half in ms, what it returned, and whether it was issued before the GPU had run the others."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    for _ in range(others):
        other()
    begin.record()
    found = half()
    ahead = not begin.query()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), found, ahead


def _milliseconds(call: Call, repetitions: int, device: torch.device, *, wait: bool = True) -> float:
    """The mean time of a call in a loop; without `wait`, of what the host needs to issue it."""
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(repetitions):
        call()
    if wait:
        _synchronize(device)
    return (time.perf_counter() - begin) * 1e3 / repetitions


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Cost(NamedTuple):
    """What a call of few tokens costs, in ms.

    device: the time of its kernels in a CUDA graph, with nothing in the L2 cache: the other layers have used it since
    the last call.
    eager: the time of a loop of eager calls: the larger one of their kernels' and of what the host needs to issue them.
    """

    device: float
    eager: float

    def beats(self, other: "Cost") -> bool:
        """Whether it is less, both in a CUDA graph and eagerly, by more than such short measurements are off."""
        return self.device < _MARGIN * other.device and self.eager < _MARGIN * other.eager


def cold_costs(calls: dict[Name, Call], device: torch.device) -> dict[Name, Cost]:
    """What each call costs. On a CPU both times are those of `quick_times`."""
    if device.type != "cuda":
        return {name: Cost(found, found) for name, found in quick_times(calls, device).items()}
    with torch.cuda.device(device):
        unused = torch.zeros(_TIMES_L2 * torch.cuda.get_device_properties(device).L2_cache_size // 4, device=device)
        found = {}
        for name, call in calls.items():
            for _ in range(2):  # the first compiles, the second is prepared by it
                call()
            once = _milliseconds(call, 1, device)
            repetitions = max(_FEWEST, min(_MOST, int(_COLD_SECONDS * 1e3 / max(once, 1e-6))))
            eagerly = _cold_milliseconds(call, unused, repetitions)
            in_graph = _graph_milliseconds(call, unused, repetitions)
            issued = statistics.median(_milliseconds(call, repetitions, device, wait=False) for _ in range(_ROUNDS))
            found[name] = Cost(in_graph, max(eagerly, issued))
    return found


def _cold_milliseconds(call: Call, unused: torch.Tensor, repetitions: int) -> float:
    """The median time from the end of reading `unused` to the end of the call."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for begin, end in events:
        for _ in range(_READS):
            unused.sum()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def _graph_milliseconds(call: Call, unused: torch.Tensor, repetitions: int) -> float:
    """The same in a CUDA graph: what a replay takes longer if each reading of `unused` is followed by the call."""

    def read_and_call() -> None:
        unused.sum()
        call()

    both, reads = (_replay_milliseconds(each, repetitions) for each in (read_and_call, unused.sum))
    return (both - reads) / repetitions


def _replay_milliseconds(call: Call, repetitions: int) -> float:
    """The median time of a CUDA graph of so many calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        # Not `torch.cuda.graph`, which collects garbage and empties the cache each time.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(repetitions):
                call()
        finally:
            graph.capture_end()
        times = []
        for _ in range(1 + _ROUNDS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])
