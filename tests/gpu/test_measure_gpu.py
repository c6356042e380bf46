"""The measurements that need a GPU: events, energy, memory."""

import gc
import time

import pytest
import torch

from experiments import bench_kernels
from experiments.bench.training_step import largest_batch, peak_memory_of, usable_memory, without_retries
from experiments.run.config import parse
from experiments.run.results import read_rows
from experiments.timing.measure import held_memory, host_time, peak_memory, time_alternatives
from experiments.timing.power import NvmlMeter, energy_meter, power_state
from twell import available_backends
from twell.testing import plain_ffn

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BRIEFLY = ("timing.seconds=0.3", "timing.settle_seconds=0.05")


@pytest.fixture
def product():
    a = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    return lambda: a @ a


def test_events_agree_with_the_wall_clock(product):
    product()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        product()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) * 1e3 / 200
    timing = time_alternatives(
        {"product": product}, CUDA, energy_meter(CUDA), seconds=0.3, rounds=3, settle_seconds=0.1
    )
    assert timing["product"].time().value == pytest.approx(wall, rel=0.3)


def test_energy_is_that_of_a_busy_gpu(product):
    meter = energy_meter(CUDA)
    assert isinstance(meter, NvmlMeter)
    assert "W limit" in power_state(meter)
    timing = time_alternatives({"product": product}, CUDA, meter, seconds=3.0, rounds=2, settle_seconds=0.3)["product"]
    limit = meter.power_limit_watts()
    assert all(0.2 * limit < watts < 1.1 * limit for watts in timing.watts)
    per_call = timing.energy(tokens=1)
    assert per_call.value == pytest.approx(timing.time().value * sum(timing.watts) / len(timing.watts), rel=0.1)


def test_peak_memory_counts_what_the_call_allocates():
    gc.collect()  # garbage of other tests that is freed meanwhile would count as negative
    before = torch.cuda.memory_allocated() / 1e9
    peak = peak_memory(lambda: torch.empty(256_000_000, dtype=torch.uint8, device=CUDA), CUDA)
    assert peak.value - before == pytest.approx(0.256, rel=0.02)


def test_peak_memory_of_given_inputs_leaves_out_the_rest():
    x = torch.empty(64_000_000, dtype=torch.uint8, device=CUDA)
    other = torch.empty(512_000_000, dtype=torch.uint8, device=CUDA)
    peak = peak_memory(lambda: x + 1, CUDA, inputs=[x, x[1:]])
    assert peak.value == pytest.approx(0.128, rel=0.02)
    assert len(other)


def test_held_memory_is_what_the_allocator_says():
    x, gate, up = (torch.randn(2048, 1024, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    down = torch.randn(1024, 2048, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    held = held_memory(lambda: plain_ffn(x, gate, up, down)[0], [x, gate, up, down])
    before = torch.cuda.memory_allocated()
    y, _ = plain_ffn(x, gate, up, down)
    allocated = torch.cuda.memory_allocated() - before - y.nbytes
    assert held.value == pytest.approx(allocated / 1e6, rel=0.05)


def test_the_host_time_is_shorter_than_the_call(product):
    timing = time_alternatives({"product": product}, CUDA, energy_meter(CUDA), seconds=0.1, rounds=1)["product"]
    assert host_time(product, CUDA).value < timing.time().value * 1e3


def test_running_out_of_memory_is_survived():
    free, total = torch.cuda.mem_get_info()
    sixteenth = total // 16

    def peak_of(batch):
        return peak_memory_of(lambda: torch.empty(batch * sixteenth, dtype=torch.uint8, device=CUDA), CUDA)

    found = largest_batch(peak_of, usable_memory(CUDA), limit=64)
    assert 1 <= found <= 16
    assert torch.cuda.mem_get_info()[0] > 0.9 * free


@pytest.mark.parametrize("how", ["memory", "time"])
def test_a_call_that_just_fits_finds_no_memory_in_pieces(how):
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]

    def call(*shares):
        return [torch.empty(int(share * free), dtype=torch.uint8, device=CUDA) for share in shares]

    call(0.55)  # stays cached: 0.3 of it would be taken, and the rest of it lost
    if how == "memory":
        assert peak_memory(lambda: call(0.3, 0.3, 0.35), CUDA).value > 0.9 * free / 1e9
    else:
        calls = {"one": lambda: call(0.55), "other": lambda: call(0.3, 0.3, 0.35)}
        assert len(time_alternatives(calls, CUDA, energy_meter(CUDA), seconds=0.01, rounds=2)) == 2
    torch.cuda.empty_cache()


def test_a_step_that_needs_memory_in_other_pieces_is_no_steady_one():
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]

    def step():
        torch.empty(int(0.7 * free), dtype=torch.uint8, device=CUDA)

    torch.empty(int(0.5 * free), dtype=torch.uint8, device=CUDA)  # stays cached: 0.7 are free only without it
    with pytest.raises(torch.OutOfMemoryError, match="gave its cache back"):
        without_retries(step, CUDA)
    without_retries(step, CUDA)  # finds what the first left
    torch.cuda.empty_cache()


def test_kernel_rows_on_the_gpu(tmp_path):
    arguments = [
        "tokens=[1000]",
        "hidden=256",
        "intermediate=1024",
        "mean_nnz=[10]",
        "backends=[]",
        f"run.dir={tmp_path}",
    ]
    bench_kernels.main(parse(bench_kernels.BenchKernelsConfig, [*arguments, *BRIEFLY, "device=cuda"]))
    rows = read_rows(tmp_path / "rows.csv")
    times = {row["backend"]: row for row in rows if row["op"] == "ffn_forward" and row["metric"] == "time"}
    assert {"dense_eager", "dense_compiled", "dense_fused", "reference"} <= set(times)
    assert all(row["value"] or row["missing"] for row in rows)
    assert all(row["value"] for row in rows if row["metric"] in ("peak_memory", "host_time") and row["check_error"])


def test_rows_of_fp8_on_the_gpu(tmp_path):
    arguments = ["tokens=[1000]", "hidden=256", "intermediate=1024", "mean_nnz=[10]", "backends=[]", "device=cuda"]
    arguments += ["ops=[ffn_forward]", "dense=[dense_eager,dense_fp8]", f"run.dir={tmp_path}", *BRIEFLY]
    bench_kernels.main(parse(bench_kernels.BenchKernelsConfig, arguments))
    rows = [row for row in read_rows(tmp_path / "rows.csv") if row["plan"] == "dense_fp8" and row["metric"] == "time"]
    assert [0 < row["check_error"] < 0.25 for row in rows] == [True]
    assert rows[0]["baseline"] == "dense_eager"


def test_rows_with_neurons_in_order_on_the_gpu(tmp_path):
    backend = next(name for name in ("hopper", "triton", "reference") if available_backends(CUDA)[name] is None)
    arguments = ["tokens=[4096]", "hidden=256", "intermediate=4096", "mean_nnz=[40]", "dense=[dense_eager]"]
    arguments += [
        "ops=[ffn_forward]",
        f"backends=[{backend},{backend}+hot,{backend}+ordered,{backend}+live,dense+live]",
    ]
    arguments += [f"run.dir={tmp_path}", *BRIEFLY, "device=cuda"]
    bench_kernels.main(parse(bench_kernels.BenchKernelsConfig, arguments))
    rows = {row["plan"]: row for row in read_rows(tmp_path / "rows.csv") if row["metric"] == "time"}
    assert list(rows) == ["dense", "twell", "twell_hot", "twell_ordered", "twell_live", "dense_live"]
    assert all(row["value"] for row in rows.values())
    assert rows["twell_ordered"]["hot"] % 128 == 0
    assert 0 < rows["twell_live"]["silent"] == rows["dense_live"]["silent"] < 4096


def test_rows_of_a_forward_in_a_cuda_graph(tmp_path):
    """Dense forms read all weights from device memory, so they take at least as long as that; a time that was not
    divided by the number of copies, some thirty, would be far longer."""
    arguments = ["tokens=[1,64]", "hidden=1024", "intermediate=4096", "mean_nnz=[10]", f"run.dir={tmp_path}"]
    arguments += ["ops=[ceiling_copy,ffn_forward_graph]", *BRIEFLY, "device=cuda"]
    bench_kernels.main(parse(bench_kernels.BenchKernelsConfig, arguments))
    rows = read_rows(tmp_path / "rows.csv")
    copied = next(row["value"] for row in rows if row["op"] == "ceiling_copy")  # GB/s
    reading_ms = 3 * 1024 * 4096 * 2 / (copied * 1e9) * 1e3
    times = {(row["tokens"], row["backend"]): row for row in rows if row["metric"] == "time"}
    available = available_backends(CUDA)
    for tokens in (1, 64):
        for backend in ("dense_eager", "dense_compiled", "dense_fused"):
            assert 0.7 * reading_ms < times[tokens, backend]["value"] < 20 * reading_ms
            assert 0 < times[tokens, backend]["check_error"] < 0.01
        for backend in ("hopper", "triton"):
            assert bool(times[tokens, backend]["value"]) == (available[backend] is None)
        assert "waits for the device" in times[tokens, "reference"]["missing"]
