"""Timing, energy, memory, and the rows of a comparison."""

import math
import time
import types
from collections import Counter
from contextlib import nullcontext

import pynvml
import pytest
import torch
from fake_gpu import FakeGpu
from torch.profiler import DeviceType

from experiments.timing import measure
from experiments.timing.compare import Absent, Candidate, CheckFailed, TimingConfig, check, compare
from experiments.timing.measure import (
    Consumer,
    Repeated,
    device_time,
    held_memory,
    host_time,
    peak_memory,
    spread,
    time_alternatives,
)
from experiments.timing.power import NvmlMeter, PowerSlope, Unavailable, energy_meter, power_state

CPU = torch.device("cpu")
NO_METER = Unavailable("no counter in this test")
SHORT = TimingConfig(seconds=0.02, rounds=2, settle_seconds=0.0)


class SteppingMeter:
    """A counter of 700 W that advances every 100 ms only, read on a clock of its own."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def millijoules(self):
        return math.floor(self.now / 0.1) * 70_000


def test_spread_is_the_median_and_the_20th_and_80th_percentile():
    result = spread([float(value) for value in range(101)])
    assert (result.value, result.low, result.high, result.n) == (50.0, 20.0, 80.0, 101)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_spread_refuses_what_is_no_measurement(samples):
    with pytest.raises(ValueError, match="samples"):
        spread(samples)


@pytest.mark.usefixtures("own_clock")
def test_what_a_call_uses_up_is_made_outside_the_timing():
    made = []

    def make():
        time.sleep(0.01)
        made.append(len(made))
        return made[-1]

    used = []
    consumer = Consumer(make, used.append)
    timing = time_alternatives({"a": consumer}, CPU, NO_METER, seconds=0.05, rounds=2)["a"]
    assert used == made, "each is used once"
    assert timing.time().value < 5
    consumer()
    assert used == made


@pytest.mark.usefixtures("own_clock")
def test_the_energy_of_what_uses_something_up_is_without_that_of_making_it(monkeypatch):
    joules = 0.0

    def burn(seconds, watts):
        nonlocal joules
        time.sleep(seconds)
        joules += seconds * watts

    class ExactSlope(nullcontext):
        def __enter__(self):
            self.start, self.before = time.perf_counter(), joules

        def watts(self):
            return (joules - self.before) / (time.perf_counter() - self.start)

    monkeypatch.setattr(measure, "PowerSlope", ExactSlope)
    consumer = Consumer(lambda: burn(0.003, 300.0), lambda made: burn(0.002, 700.0))
    timing = time_alternatives({"a": consumer}, CPU, SteppingMeter(), seconds=0.1, rounds=2)["a"]
    assert timing.time().value == pytest.approx(2.0, rel=0.01)
    assert timing.energy(tokens=10).value == pytest.approx(700.0 * 2.0 / 10, rel=0.01)


@pytest.mark.usefixtures("own_clock")
def test_a_call_of_several_has_the_time_and_the_energy_of_one():
    calls = {"one": sleeper(0.002), "three": Repeated(sleeper(0.006), 3)}
    timings = time_alternatives(calls, CPU, NO_METER, seconds=0.05, rounds=2)
    for timing in timings.values():
        assert timing.time().value == pytest.approx(2.0, rel=0.01)
        assert timing.throughput(tokens=10).value == pytest.approx(5.0, rel=0.01)
        timing.watts = [500.0]
        assert timing.energy(tokens=10).value == pytest.approx(500.0 * 2.0 / 10, rel=0.01)
    assert timings["three"].time().n < timings["one"].time().n


@pytest.mark.usefixtures("own_clock")
def test_alternatives_are_timed_in_turning_rounds():
    order = []

    def call(name, seconds):
        def run():
            order.append(name)
            time.sleep(seconds)

        return run

    timings = time_alternatives(
        {"fast": call("fast", 0.001), "slow": call("slow", 0.005)}, CPU, NO_METER, seconds=0.04, rounds=2
    )
    assert timings["fast"].time().value == pytest.approx(1.0, rel=0.01)
    assert timings["slow"].time().value == pytest.approx(5.0, rel=0.01)
    switches = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert switches == ["fast", "slow", "fast"], "the second round starts with the other alternative"
    assert Counter(order)["fast"] == timings["fast"].time().n + 2, "one settling call each round is not counted"


@pytest.mark.parametrize("seconds", [2e-5, 1e-3, 0.03, 1.3])
def test_a_loop_on_a_device_ends_on_time_and_is_never_drained(monkeypatch, seconds):
    gpu, milliseconds = FakeGpu(monkeypatch), seconds * 1e3
    monkeypatch.setattr(measure.time, "perf_counter", lambda: gpu.now / 1e3)
    # A call is launched in less than it takes, if only just.
    timing = time_alternatives(
        {"call": lambda: gpu.issue("call", milliseconds * 0.9, milliseconds)},
        torch.device("cuda"),
        NO_METER,
        seconds=2.0,
        rounds=1,
        settle_seconds=0.5,
    )["call"]
    assert timing.time().value == pytest.approx(milliseconds)
    assert gpu.now / 1e3 < 2.5 + 4.5 * seconds + 0.25, "each loop waits for what it queued, and that is little"
    assert timing.time().n >= max(1, 2.0 / seconds * 0.99 - 2)
    assert gpu.idle < 4 * milliseconds, "only the first calls of the two loops find an idle device"


def test_the_power_slope_is_free_of_the_counters_steps():
    meter = SteppingMeter()
    slope = PowerSlope(meter, clock=meter.clock)
    assert slope.watts() is None
    while meter.now < 1.03:
        meter.now += 0.0101
        slope.read()
    assert slope.watts() == pytest.approx(700.0, rel=0.02)
    plain = meter.millijoules() / 1e3 / meter.now
    assert abs(plain - 700) > 15, "the plain difference has the error that the slope avoids"


def test_without_a_driver_the_energy_is_unavailable_with_nvmls_words(monkeypatch):
    def no_library():
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    meter = energy_meter(torch.device("cuda", 0))
    assert isinstance(meter, Unavailable)
    assert "NVML" in meter.reason
    assert power_state(meter) == "sustained"


def test_the_power_state_names_the_limit(monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: 700_000)
    assert power_state(NvmlMeter(None)) == "sustained, 700 W limit"


def test_the_cpu_says_what_it_cannot_measure():
    assert peak_memory(lambda: None, CPU).value is None
    assert host_time(lambda: None, CPU).value is None
    assert device_time(lambda: None, CPU).value is None
    assert isinstance(energy_meter(CPU), Unavailable)


def test_the_time_of_the_device_is_that_of_its_kernels_and_short_pauses(monkeypatch):
    calls, seen = [], [(2000.0, 2400.0), (100.0, 500.0), (300.0, 700.0), (350.0, 400.0), (702.0, 1000.0)]

    def event(start, end, on=DeviceType.CUDA, annotation=False):
        spent = types.SimpleNamespace(start=start, end=end)
        return types.SimpleNamespace(is_user_annotation=annotation, device_type=on, time_range=spent)

    def events():
        others = event(0.0, 9999.0, on=DeviceType.CPU), event(0.0, 9999.0, annotation=True)
        return [*others, *(event(*times) for times in seen)]

    profile = types.SimpleNamespace(events=events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    cuda = torch.device("cuda", 0)
    assert device_time(lambda: calls.append("call"), cuda).value == pytest.approx(0.9 + 0.4)
    assert calls == ["wait", "call", "wait"], "nothing else is profiled, and all of it"
    seen.clear()
    assert "saw no kernel" in device_time(lambda: None, cuda).missing


def test_held_memory_counts_saved_storages_once_and_neither_inputs_nor_output():
    x = torch.randn(8, 32, requires_grad=True)
    w = torch.randn(64, 32, requires_grad=True)

    def forward():
        hidden = torch.nn.functional.linear(x, w)
        return hidden.sigmoid() * hidden.sigmoid().exp()

    # Saved [8, 64] float32: two sigmoids and one exp; `hidden` itself is not.
    assert held_memory(forward, [x, w]).value == pytest.approx(3 * 8 * 64 * 4 / 1e6)


@pytest.fixture
def columns():
    return {"study": "test", "item": "bench", "op": "ffn_forward", "hidden": 4, "intermediate": 8, "tokens": 10}


def sleeper(seconds):
    return lambda: time.sleep(seconds)


@pytest.mark.usefixtures("own_clock")
def test_the_baseline_is_the_fastest_dense_and_ratios_are_improvements(columns):
    rows = compare(
        [
            Candidate("dense_eager", "dense", sleeper(0.004), 1e-3),
            Candidate("dense_fused", "dense", sleeper(0.002), 1e-3),
            Candidate("reference", "twell", sleeper(0.006), 2e-3),
            Candidate("larger", "hybrid", sleeper(0.006), 2e-3, tokens=20),
            Absent("hopper", "twell_ordered", "needs compute capability 9.0"),
        ],
        CPU,
        SHORT,
        ["time", "throughput", "energy", "held_memory"],
        **columns,
    )
    by_key = {(row["backend"], row["metric"]): row for row in rows}
    assert len(by_key) == 20
    ours, dense = by_key["reference", "time"], by_key["dense_fused", "time"]
    assert ours["baseline"] == "dense_fused"
    assert ours["ratio"] == pytest.approx(dense["value"] / ours["value"])
    assert dense["ratio"] == 1.0
    assert by_key["reference", "throughput"]["ratio"] == pytest.approx(ours["ratio"], rel=0.05)
    assert ours["check_error"] == 2e-3
    assert by_key["reference", "energy"]["value"] is None
    assert by_key["reference", "energy"]["missing"].startswith("no energy counter for a cpu device")
    larger = by_key["larger", "time"]
    assert (larger["tokens"], larger["ratio"]) == (20, None), "times of different sizes have no ratio"
    assert by_key["larger", "throughput"]["ratio"] == pytest.approx(2 * ours["ratio"], rel=0.3)
    absent = by_key["hopper", "time"]
    assert (absent["value"], absent["missing"]) == (None, "needs compute capability 9.0")


@pytest.mark.usefixtures("own_clock")
def test_without_a_dense_candidate_there_is_no_ratio(columns):
    (row,) = compare([Candidate("reference", "twell", sleeper(0.001), 0.0)], CPU, SHORT, ["time"], **columns)
    assert row["ratio"] is None
    assert not row["baseline"]


@pytest.mark.parametrize("error", [0.011, math.nan, math.inf])
def test_a_failed_check_gives_no_number(error):
    with pytest.raises(CheckFailed, match="hopper"):
        check("hopper", error, 0.01)
    assert check("hopper", 0.01, 0.01) == 0.01
