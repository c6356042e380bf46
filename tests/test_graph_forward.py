"""A block's forward in a CUDA graph, with a graph that the CPU can replay in place of a real one."""

import pytest
import torch
from test_bench import rows_of

from experiments import bench_kernels
from experiments.bench import feedforward, graph_forward
from experiments.bench.feedforward import DENSE_FORMS
from experiments.bench.graph_forward import CHOSEN_ON_FEW, MOST_COPIES, alternatives, copies_of
from experiments.run.config import parse
from experiments.run.errors import ConfigError
from experiments.timing import graphs
from experiments.timing.compare import Absent, Candidate, CheckFailed, TimingConfig, compare
from experiments.timing.graphs import CannotCapture
from twell.testing import make_problem

CPU = torch.device("cpu")
COPIES = 3
METRICS = ["time", "throughput", "energy"]


class ReplayedOnTheHost:
    """Calls the captured functions again and writes into the same outputs, as a CUDA graph does."""

    def __init__(self, calls, device):
        self.calls, self.outputs, self.replays = calls, [call() for call in calls], 0

    def __call__(self):
        self.replays += 1
        for call, (y, _) in zip(self.calls, self.outputs, strict=True):
            y.copy_(call()[0])


@pytest.fixture(params=[True, False], ids=["gated", "non-gated"])
def problem(request):
    return make_problem(4, 32, 64, 8.0, gated=request.param, seed=3)


@pytest.fixture
def graphs_on_the_host(monkeypatch):
    """With an L2 cache for which COPIES copies of the problem's weights are needed."""
    monkeypatch.setattr(graph_forward, "why_no_graph", lambda device: "")
    monkeypatch.setattr(graph_forward, "CapturedCalls", ReplayedOnTheHost)
    monkeypatch.setattr(graph_forward, "l2_cache_bytes", lambda device: 64 * 32 * 2 * COPIES // 4)


@pytest.mark.usefixtures("graphs_on_the_host")
def test_a_replay_uses_each_copy_of_the_weights_once(problem, monkeypatch):
    used, right = [], feedforward.compute

    def noted(inputs, call):
        used.append(([None if t is None else t.data_ptr() for t in inputs], inputs[3].stride(), call))
        return right(inputs, call)

    monkeypatch.setattr(feedforward, "compute", noted)
    (found,) = alternatives(problem, [], ["reference"])
    assert (found.backend, found.plan, found.call.count) == ("reference", "twell", COPIES)
    assert 0 < found.check_error < 0.01
    used.clear()
    found.call()
    assert len(used) == COPIES
    x, gate, up, down = ({addresses[i] for addresses, _, _ in used} for i in range(4))
    assert x == {problem.x.data_ptr()}
    assert len(gate) == (COPIES if problem.w_gate is not None else 1)
    assert len(up) == len(down) == COPIES
    assert {strides for _, strides, _ in used} == {(1, 32)}, "neuron by neuron, each of them"
    assert not any(call.stats for _, _, call in used)


@pytest.mark.usefixtures("graphs_on_the_host", "own_clock")
def test_rows_are_of_one_call_relative_to_the_fastest_dense_form(problem):
    found = alternatives(problem, ["dense_eager", "dense_fused"], ["dense", "reference"])
    assert [one.backend for one in found] == [
        *("dense_eager", *["dense_fused"] * (problem.w_gate is not None)),
        *("dense", "reference"),
    ]
    rows = compare(found, CPU, TimingConfig(seconds=1e-3, rounds=1, settle_seconds=0), METRICS, tokens=4)
    times = [row for row in rows if row["metric"] == "time"]
    replays = {one.backend: one.call.run.replays for one in found}
    for row in times:
        assert row["n"] == replays[row["backend"]] - 2, "but for the check and a settling one"
        assert row["ratio"] == pytest.approx(times[0]["ratio"] * times[0]["value"] / row["value"])
        assert row["value"] == pytest.approx(1e-3 / COPIES, rel=1e-6), "the clock advances a microsecond a replay"


@pytest.mark.usefixtures("graphs_on_the_host")
def test_a_replay_with_a_wrong_or_missing_result_is_refused(problem, monkeypatch):
    def without_the_last(graph):
        for call, (y, _) in list(zip(graph.calls, graph.outputs, strict=True))[:-1]:
            y.copy_(call()[0])

    monkeypatch.setattr(ReplayedOnTheHost, "__call__", without_the_last)
    with pytest.raises(CheckFailed, match="dense_eager y in a CUDA graph: relative error inf"):
        alternatives(problem, ["dense_eager"], [])


@pytest.mark.usefixtures("graphs_on_the_host")
def test_a_wrong_result_is_refused_before_the_capture(problem, monkeypatch):
    right = feedforward.compute
    monkeypatch.setattr(feedforward, "compute", lambda *given: (right(*given)[0] * 1.1, None))
    monkeypatch.setattr(graph_forward, "CapturedCalls", lambda *_: pytest.fail("must not be captured"))
    with pytest.raises(CheckFailed, match="reference y: "):
        alternatives(problem, [], ["reference"])


@pytest.mark.usefixtures("graphs_on_the_host")
def test_what_cannot_be_captured_is_absent_with_the_reason(problem, monkeypatch):
    def refuse(calls, device):
        raise CannotCapture("it waits")

    monkeypatch.setattr(graph_forward, "CapturedCalls", refuse)
    assert alternatives(problem, [], ["reference"]) == [Absent("reference", "twell", "it waits")]


@pytest.mark.usefixtures("graphs_on_the_host")
def test_hot_neurons_and_their_order_are_refused(problem):
    names = [f"reference{suffix}" for suffix in ("+hot", "+hot+backup", "+ordered", "+live", "+backup", "")]
    backup, plain, *refused = alternatives(problem, [], names)
    assert backup == Absent("reference", "twell", "only training has a dense backup", 0.125)
    assert isinstance(plain, Candidate)
    assert [(one.plan, one.backup) for one in refused] == [
        *(("twell_hot", None), ("twell_hot", 0.125), ("twell_ordered", None), ("twell_live", None))
    ]
    assert {one.reason for one in refused} == {CHOSEN_ON_FEW}


def test_copies_exceed_the_cache_four_times_by_what_every_form_reads():
    problem = make_problem(1, 32, 64, 8.0)
    size = 64 * 32 * 2
    assert [copies_of(problem, l2) for l2 in (1, size // 4, size // 4 + 1, size, 10 * size)] == [1, 1, 2, 4, 40]


@pytest.mark.usefixtures("graphs_on_the_host")
def test_weights_too_small_for_a_graph_of_copies_are_absent(problem, monkeypatch):
    monkeypatch.setattr(graph_forward, "l2_cache_bytes", lambda device: 50_000_000)
    found = alternatives(problem, ["dense_eager"], ["reference"])
    assert [one.reason for one in found] == [
        f"it would take 48829 copies of the weights to evict them from the L2 cache, at most {MOST_COPIES}"
    ] * 2


def test_without_a_cuda_device_every_form_is_absent(tmp_path):
    options = ["tokens=[1,4]", "hidden=32", "intermediate=64", "mean_nnz=[8]", "ops=[ffn_forward_graph]"]
    rows = rows_of(bench_kernels, tmp_path, *options, "backends=[reference,hopper,hopper+hot]")
    forms = [*((name, "dense") for name in DENSE_FORMS), *((b, "twell") for b in ("reference", "hopper"))]
    forms.append(("hopper", "twell_hot"))
    assert [(row["tokens"], row["backend"], row["plan"], row["metric"]) for row in rows] == [
        (tokens, *form, metric) for tokens in (1, 4) for form in forms for metric in METRICS
    ]
    assert {(row["value"], row["missing"]) for row in rows} == {(None, "CUDA graphs need a CUDA device")}


def test_a_graph_has_no_memory_and_no_host_time_of_its_own():
    with pytest.raises(ConfigError, match="nothing to time: ffn_forward_graph"):
        parse(bench_kernels.BenchKernelsConfig, ["ops=[ffn_forward_graph]", "metrics=[peak_memory,host_time]"])


def test_a_call_that_waits_for_the_device_cannot_be_captured(monkeypatch):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with graphs._no_waiting():
        assert modes[-1] == "error"
    with pytest.raises(CannotCapture, match="waits for the device"), graphs._no_waiting():
        raise RuntimeError("called a synchronizing CUDA operation")
    with pytest.raises(RuntimeError, match="something else"), graphs._no_waiting():
        raise RuntimeError("something else")
    assert modes[-1] == 0
