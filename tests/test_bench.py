"""The three benchmarks on tiny problems: right rows, wrong results refused, backends that cannot run recorded."""

import contextlib
import gc
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import fragile_backend
import numpy
import pandas
import pytest
import torch
from pairwise import pairwise
from tiny_run import make_run
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from analysis.load import load
from analysis.schema import NAMES, PLANS
from experiments import bench_forward, bench_generate, bench_kernels, bench_training
from experiments.bench import decoder as decoder_module
from experiments.bench import feedforward, single_ops, training_step
from experiments.bench.decoder import Decoder, decoder_alternatives
from experiments.bench.feedforward import alternatives
from experiments.bench.options import FP8, SINGLE_OPS, exists_for
from experiments.bench.training_step import Form, TrainingStep, checked, forms, largest_batch, without_retries
from experiments.models.llama import ReluFeedForward
from experiments.models.subject import load_subject
from experiments.run.config import parse
from experiments.run.errors import ConfigError, RunError
from experiments.run.results import read_rows
from experiments.timing import compare as timing_compare
from experiments.timing.compare import Absent, Candidate, CheckFailed
from experiments.timing.measure import Repeated
from experiments.timing.options import CEILINGS
from experiments.timing.plans import SUFFIXES, Name, layers_columns, plan_of
from experiments.training.loss import LossModel
from twell import Plan, registry
from twell.interface import Availability
from twell.testing import make_problem
from twell.tuning import Choice, Tuning, common, training
from twell.tuning import Form as PlanForm
from twell.tuning import forward as tuning_forward
from twell.tuning.order import order_neurons

CPU = torch.device("cpu")
QUICK = ["backends=[reference]", "timing.seconds=0.01", "timing.rounds=1", "timing.settle_seconds=0", "device=cpu"]
QUICK_LAYERS = ["layer_timing.seconds=0.01", "layer_timing.rounds=1", "layer_timing.settle_seconds=0"]
CONFIGS = {
    bench_forward: bench_forward.BenchForwardConfig,
    bench_generate: bench_generate.BenchGenerateConfig,
    bench_kernels: bench_kernels.BenchKernelsConfig,
    bench_training: bench_training.BenchTrainingConfig,
}
# Names of backends that a whole model has not.
NOT_OF_MODELS = ("reference+hot", "hopper+live", "reference+hot+backup", "cuda")
SMALL = ["hidden=32", "intermediate=64", "mean_nnz=[8]", "dense=[dense_eager]"]


def configured(program, *options):
    return parse(CONFIGS[program], [*QUICK, *(QUICK_LAYERS if program is bench_forward else ()), *options])


def rows_of(program, folder, *options):
    """The rows that a program writes into this folder."""
    program.main(configured(program, *options, f"run.dir={folder}"))
    return read_rows(folder / "rows.csv")


def of(*runs):
    """Options for these runs; those that are given later win."""
    return [f"checkpoints=[{','.join(map(str, runs))}]", "sequence=32", "dense=[dense_eager]"]


def after_compute(monkeypatch, change):
    """Calls of the operator give `change(inputs, call, y, stats)`."""
    right = feedforward.compute
    monkeypatch.setattr(feedforward, "compute", lambda inputs, call: change(inputs, call, *right(inputs, call)))


@pytest.fixture
def problem():
    return make_problem(48, 32, 64, 8.0, seed=3)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_every_alternative_is_checked_and_runs(training, gated):
    problem = make_problem(48, 32, 64, 8.0, gated=gated, seed=3)
    found = alternatives(problem, ["dense_eager", "dense_fused"], ["dense", "reference"], blocks=int(training), l1=1e-3)
    assert [one.backend for one in found] == ["dense_eager", *["dense_fused"] * gated, "dense", "reference"]
    plans = {one.backend: one.plan for one in found}
    assert plans["reference"] == ("hybrid" if training else "twell")
    for one in found:
        assert isinstance(one, Candidate)
        assert 0 < one.check_error < 0.01
        one.call()
        assert (one.held is not None) == training


def test_a_stack_runs_all_forwards_before_the_first_backward(problem, monkeypatch):
    order = []

    def watched(inputs, call, y, stats):
        order.append("forward")
        y.register_hook(lambda _: order.append("backward"))
        return y, stats

    (alone,) = alternatives(problem, [], ["reference"], blocks=1, l1=1e-3)
    (stack,) = alternatives(problem, [], ["reference"], blocks=3, l1=1e-3)
    after_compute(monkeypatch, watched)
    alone.call()
    assert order == ["forward", "backward"]
    order.clear()
    stack.call()
    assert order == ["forward"] * 3 + ["backward"] * 3
    assert isinstance(stack.call, Repeated)
    assert stack.call.count == 3, "the time is that of one"
    assert not isinstance(alone.call, Repeated)


def test_a_stack_has_a_time_and_no_memory_of_its_own(tmp_path):
    rows = rows_of(bench_kernels, tmp_path, *SMALL, "tokens=[8]", "ops=[ffn_training_stack]")
    assert {row["op"] for row in rows} == {"ffn_training_stack"}
    assert {row["backend"]: row["plan"] for row in rows} == {"dense_eager": "dense", "reference": "hybrid"}
    assert {"time"} <= {row["metric"] for row in rows} <= {"time", "throughput", "energy"}
    assert all(float(row["value"]) > 0 for row in rows if row["metric"] == "time")


def test_the_gradient_of_l1_is_part_of_the_check(problem, monkeypatch):
    def without_l1(inputs, call, y, stats):
        return y, stats._replace(l1=stats.l1.detach() + 0 * y.sum().float())

    alternatives(problem, [], ["dense"], blocks=1, l1=10.0)
    after_compute(monkeypatch, without_l1)
    with pytest.raises(CheckFailed, match="dense dx"):
        alternatives(problem, [], ["dense"], blocks=1, l1=10.0)


def test_a_wrong_result_stops_the_benchmark_and_leaves_no_rows(tmp_path, monkeypatch):
    options = [*SMALL, "tokens=[48]", "ops=[ffn_forward]"]
    assert rows_of(bench_kernels, tmp_path, *options)
    (tmp_path / "rows.csv").unlink()

    def wrong(inputs, call, y, stats):
        y[::7] = 0
        return y, stats

    after_compute(monkeypatch, wrong)
    with pytest.raises(CheckFailed, match="reference y"):
        rows_of(bench_kernels, tmp_path, *options)
    assert not (tmp_path / "rows.csv").exists()


def test_a_backend_that_cannot_run_is_recorded_with_its_reason_and_named_once(problem, monkeypatch, caplog):
    feedforward._say_left_out.cache_clear()
    monkeypatch.setattr(feedforward, "why_not", lambda name, device: "needs an H100")
    for _ in range(2):
        assert alternatives(problem, [], ["hopper"]) == [Absent("hopper", "twell", "needs an H100")]
    assert caplog.text.count("hopper cannot run here and is left out: needs an H100") == 1


@pytest.mark.parametrize(
    ("name", "parts", "training", "inference"),
    [
        ("dense", ("dense", "", False), "dense", "dense"),
        ("reference", ("reference", "", False), "hybrid", "twell"),
        ("hopper", ("hopper", "", False), "csr", "twell"),
        ("hopper+hot", ("hopper", "+hot", False), "csr_hot", "twell_hot"),
        ("hopper+backup", ("hopper", "", True), "hybrid", "twell"),
        ("hopper+hot+backup", ("hopper", "+hot", True), "hybrid_hot", "twell_hot"),
        ("hopper+ordered", ("hopper", "+ordered", False), None, "twell_ordered"),
        ("hopper+live", ("hopper", "+live", False), None, "twell_live"),
        ("hopper+live+backup", ("hopper+live", "", True), "hybrid", "twell"),  # which no backend is called
    ],
)
def test_what_a_name_says(name, parts, training, inference):
    assert Name.of(name) == parts
    assert plan_of(name, training=False) == inference
    said = re.escape(f"for a forward only, got {name!r} in training")
    with contextlib.nullcontext() if training else pytest.raises(ValueError, match=said):
        assert plan_of(name, training=True) == training


@pytest.mark.parametrize(
    ("backends", "hot", "backup", "plan", "backend"),
    [
        (["hopper"], 0, None, "csr", "hopper"),
        (["hopper"], 7, None, "csr_hot", "hopper"),
        (["hopper"], 3, 0.125, "hybrid_hot", "hopper"),
        (["hopper", "dense"], None, None, "by_layer", "hopper"),
        (["triton", "dense", "hopper"], None, None, "by_layer", "hopper, triton"),
    ],
)
def test_columns_of_the_layers_of_a_training(backends, hot, backup, plan, backend):
    columns = layers_columns(backends, hot=hot, backup=backup)
    assert columns == {"plan": plan, "backend": backend, "hot": hot, "backup": backup}
    assert set(columns) <= set(NAMES)
    assert plan in PLANS
    assert layers_columns(["dense", "dense"]) == {"plan": "dense", "backend": "dense"}


@pytest.mark.parametrize("suffix", ["+hot", "+backup", "+hot+backup"])
def test_a_backend_with_hot_neurons_and_a_backup(suffix, monkeypatch):
    """They reach the operator, and its results with them are checked too."""
    problem, seen = make_problem(48, 32, 256, 60.0, seed=3), []

    def noted(inputs, call, *result):
        seen.append((call.hot is not None, call.plan.backup))
        return result

    after_compute(monkeypatch, noted)
    (ours,) = alternatives(problem, [], [f"reference{suffix}"], blocks=1, l1=1e-3)
    assert (ours.backend, ours.plan) == ("reference", "hybrid_hot" if "+hot" in suffix else "hybrid")
    assert ours.backup == (0.125 if "+backup" in suffix else None)
    assert (ours.hot is not None) == ("+hot" in suffix)
    assert set(seen) == {("+hot" in suffix, 0.125 if "+backup" in suffix else 0.0)}
    (ours,) = alternatives(problem, [], [f"reference{suffix}"])
    if "+backup" in suffix:
        assert ours.reason == "only training has a dense backup"
    else:
        assert isinstance(ours, Candidate)


@pytest.fixture
def told_times(monkeypatch):
    """Makes this number of hot neurons the fastest; returns each trial as (numbers of hot neurons, neurons in all)."""
    tried = []

    def tell(fastest):
        def times(calls, device):
            if calls:  # none where there is nothing to screen
                (neurons,) = {len(call.args[0][2]) for call in calls.values()}
                tried.append(([call.args[1].plan.hot for call in calls.values()], neurons))
            return {plan: abs(plan.hot - fastest) for plan in calls}

        monkeypatch.setattr(tuning_forward, "quick_times", times)
        return tried

    return tell


def test_blocks_in_order_of_firing_are_screened_where_that_is_faster(monkeypatch):
    problem, asked = make_problem(64, 32, 512, 40.0, seed=3), []

    def plans(times, rare, tokens):
        asked.append((rare, tokens))
        return [replace(min(times, key=times.__getitem__), screened=100)]

    def times(calls, device):
        for call in calls.values():
            call()
        return {plan: plan.hot - plan.screened for plan in calls}

    monkeypatch.setattr(tuning_forward, "screening_plans", plans)
    monkeypatch.setattr(tuning_forward, "quick_times", times)
    ran = Mock(wraps=feedforward.compute)
    monkeypatch.setattr(feedforward, "compute", ran)
    ordered, live = alternatives(problem, [], ["reference+ordered", "reference+live"])
    ran.reset_mock()
    ordered.call()
    (call,) = ran.call_args_list
    assert call.args[1].plan.screened == ordered.screened == 100
    (rare, tokens), (rare_of_live, _) = asked
    assert tokens == 64
    assert rare - rare_of_live == live.silent > 0


def kept_of(problem):
    """How many neurons are kept of those that fire: in whole groups of 64."""
    fired = (torch.nn.functional.linear(problem.x, feedforward.pattern_weight(problem)) > 0).any(0)
    return -(-int(fired.sum()) // 64) * 64


def keep_too_few(monkeypatch):
    right = feedforward.firing_order
    monkeypatch.setattr(feedforward, "firing_order", lambda *given: right(*given)._replace(kept=64))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("live", [False, True])
def test_neurons_in_order_of_firing_with_as_many_hot_ones_as_are_fastest(gated, live, told_times, monkeypatch):
    """With the silent ones or without them, which is exact on these tokens."""
    problem = make_problem(64, 32, 512, 30.0, gated=gated, seed=3)
    kept, plan = (kept_of(problem), "live") if live else (512, "ordered")
    tried = told_times(256)
    dense, ours = alternatives(problem, ["dense_eager"], [f"reference+{plan}"])
    ((counts, neurons),) = tried  # once, and not again after the check
    assert counts == sorted(counts)
    assert {0, 256} <= set(counts)
    assert neurons == kept
    assert (kept < 512) == live
    assert (ours.backend, ours.plan, ours.hot) == ("reference", f"twell_{plan}", 256)
    assert ours.silent == (512 - kept if live else None)
    assert 0 < ours.check_error < 0.01
    torch.testing.assert_close(ours.call()[0], dense.call()[0], rtol=0.05, atol=0.1)
    told_times(0)
    (ours,) = alternatives(problem, [], [f"reference+{plan}"])
    assert ours.hot == 0
    keep_too_few(monkeypatch)
    with pytest.raises(CheckFailed, match="reference y") if live else contextlib.nullcontext():
        alternatives(problem, [], [f"reference+{plan}"])


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_dense_products_without_silent_neurons(gated, monkeypatch):
    """The control of +live: the fastest of the dense forms on the neurons that fire, exact on these tokens."""
    problem = make_problem(64, 32, 512, 40.0, gated=gated, seed=3)
    kept, tried = kept_of(problem), {}

    def told(calls, device):
        ((name, call),) = calls.items()
        tried[name] = len(call.args[-1].T)
        if name == "dense_compiled":
            raise torch.OutOfMemoryError("no memory")
        return {name: 1.0 if name == "dense_eager" else 2.0}

    monkeypatch.setattr(feedforward, "quick_times", told)
    names = ["dense_eager", "dense_compiled", "dense_fused"]
    *dense, live = alternatives(problem, names, ["dense+live"])
    assert tried == {one.backend: kept for one in dense}, "each form has the live neurons alone; one cannot run"
    assert (live.backend, live.plan, live.hot, live.silent) == ("dense", "dense_live", None, 512 - kept)
    assert sorted(t.shape[0] for t in live.inputs) == sorted([64, 32, kept, *[kept] * gated])
    torch.testing.assert_close(live.call()[0], dense[0].call()[0], rtol=0.05, atol=0.1)
    keep_too_few(monkeypatch)
    with pytest.raises(CheckFailed, match="dense y"):
        alternatives(problem, ["dense_eager"], ["dense+live"])


def test_rows_say_how_many_neurons_are_hot_and_how_many_left_out(tmp_path):
    """In one comparison with the other forms; training has no such form, and so no row of one."""
    names = ["reference", "reference+hot", "reference+ordered", "reference+live", "dense+live"]
    options = [*SMALL, "tokens=[48]", "intermediate=256", "mean_nnz=[20]", "metrics=[time]", "run.study=test"]
    options += ["ops=[ffn_forward,ffn_forward_stats,ffn_training]", f"backends=[{','.join(names)}]"]
    rows_of(bench_kernels, tmp_path, *options)
    rows = load(tmp_path).rows  # as the analysis reads them: known plans, nothing twice
    told = {
        op: {(r.backend, r.plan): (pandas.notna(r.hot), pandas.notna(r.silent)) for r in own.itertuples()}
        for op, own in rows.groupby("op")
    }
    plans = {
        "twell": (False, False),
        "twell_hot": (True, False),
        "twell_ordered": (True, False),
        "twell_live": (True, True),
    }
    dense = {("dense_eager", "dense"): (False, False)}
    dense_live = {("dense", "dense_live"): (False, True)}
    assert rows.query("op == 'ffn_forward'")["value"].is_unique, "each has its own measurement"
    assert told["ffn_forward"] == dense | dense_live | {("reference", plan): what for plan, what in plans.items()}
    assert told["ffn_forward_stats"] == {("dense", "dense_live"): (False, False)} | {
        (f"reference{ending}", plan): what for plan, what in plans.items() for ending in ("", "_without_stats")
    }
    assert set(told["ffn_training"]) == {("dense_eager", "dense"), ("reference", "hybrid"), ("reference", "hybrid_hot")}
    without = rows[rows["ratio"].isna()]
    assert set(zip(without["op"], without["plan"], strict=True)) == {("ffn_forward_stats", "dense_live")}
    assert "count nothing" in without["missing"].iloc[0]


def test_a_wrong_order_of_suffixes_is_reported(problem):
    with pytest.raises(ValueError, match=r"backend must be one of .*, got 'reference\+backup'"):
        alternatives(problem, [], ["reference+backup+hot"], blocks=1)


def test_without_names_every_backend_but_dense_is_taken(monkeypatch):
    known = {name: Availability(name != "hopper", "") for name in ("dense", "reference", "hopper")}
    monkeypatch.setattr(feedforward, "available_backends", lambda device: known)
    assert feedforward.chosen([], CPU) == ["reference", "hopper"]
    assert feedforward.chosen(["dense"], CPU) == ["dense"]


def test_a_compiler_that_is_not_there_is_recorded(problem, monkeypatch):
    no_compiler = torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no C++ compiler"), None)
    monkeypatch.setattr(feedforward, "_compiled_eager", Mock(side_effect=no_compiler))
    (found,) = alternatives(problem, ["dense_compiled"], [])
    assert isinstance(found, Absent)
    assert "no C++ compiler" in found.reason


@pytest.mark.parametrize("gated", [False, True])
def test_single_operations_are_checked(gated):
    problem = make_problem(48, 32, 300, 8.0, gated=gated, seed=3)
    names = [name for name in SINGLE_OPS if exists_for(name, gated=gated)]
    assert ("down" in names) != gated
    for name in names:
        ours = single_ops.alternatives(name, problem, ["dense", "reference"])[-1]
        assert ours.backend == "reference"
        assert ours.check_error < 0.01, name
        ours.call()


def one_use(factor):
    """An inference plan on the reference's format whose packed gate can be used once; its y is multiplied by this."""
    plain = single_ops.INFERENCE["reference"]()

    def use(packed, p):
        assert packed.pop("fresh"), "used twice"
        return factor * plain.down(packed["gate"], p)

    return single_ops.Inference(
        pack=lambda p: {"fresh": True, "gate": plain.pack(p)},
        down=use,
        to_dense=lambda packed: plain.to_dense(packed["gate"]),
        consumes=True,
    )


@pytest.mark.parametrize("gated", [False, True])
def test_a_packed_gate_for_one_use_is_made_anew_for_each_call(gated, monkeypatch):
    problem = make_problem(48, 32, 300, 8.0, gated=gated, seed=3)
    plan = one_use(1)
    monkeypatch.setitem(single_ops.INFERENCE, "reference", lambda: plan)
    dense, ours = single_ops.alternatives("gated_down" if gated else "down", problem, ["reference"])
    assert (dense.backend, ours.backend) == ("dense_eager", "reference")
    for _ in range(3):
        ours.call()


def test_a_wrong_single_operation_is_refused(problem, monkeypatch):
    plan = one_use(1.02)
    monkeypatch.setitem(single_ops.INFERENCE, "reference", lambda: plan)
    single_ops.alternatives("gate_pack", problem, ["reference"])
    with pytest.raises(CheckFailed, match="reference gated_down"):
        single_ops.alternatives("gated_down", problem, ["reference"])


def test_single_operations_of_a_backend_that_cannot_run_are_recorded(problem):
    found = single_ops.alternatives("gate_pack", problem, ["hopper", "reference"])
    assert [one.backend for one in found] == ["hopper", "dense_eager", "reference"]
    assert isinstance(found[0], Absent)
    assert "CUDA" in found[0].reason


def test_packed_words_and_full_tiles_become_a_matrix_again():
    tile, slots = 4, 2
    wanted = torch.tensor([[0, 1.5, 0, -2, 0, 0, 0, 3], [1, 2, 0, 4, 0, 0, 0, 0]], dtype=torch.bfloat16)
    words = torch.full((2, 2, slots), 0x7FC00001, dtype=torch.int32)  # slots past the count: anything
    spilled = torch.full((2, 2, tile), float("nan"), dtype=torch.bfloat16)
    counts = (wanted != 0).view(2, 2, tile).sum(-1, dtype=torch.int32)
    for row, at in ((0, 0), (0, 1), (1, 1)):
        for slot, column in enumerate(torch.nonzero(wanted[row, at * tile : (at + 1) * tile]).flatten().tolist()):
            value = wanted[row, at * tile + column].view(torch.int16).item()
            words[row, at, slot] = value << 16 | (at * tile + column)
    spilled[1, 0] = wanted[1, :tile]
    assert int(counts[1, 0]) > slots
    assert torch.equal(single_ops.dense_of(words, counts, spilled), wanted)


def test_kernel_rows(tmp_path):
    rows = rows_of(bench_kernels, tmp_path, *SMALL, "tokens=[48]", "intermediate=600", "mean_nnz=[4,8]")
    assert {row["op"] for row in rows} == {*CEILINGS, "ffn_forward", "ffn_training", "gate_pack", "gated_down"}
    machine = [row for row in rows if row["op"] in CEILINGS]
    assert [(row["op"], row["tokens"]) for row in machine] == [(op, 48 if "matmul" in op else None) for op in CEILINGS]
    sparse = [row for row in rows if row["op"] == "ffn_forward" and row["metric"] == "time" and row["plan"] == "twell"]
    assert [round(row["mean_nnz"]) for row in sparse] == [4, 8]
    assert all(row["ratio"] > 0 and row["baseline"] == "dense_eager" and row["low"] <= row["high"] for row in sparse)
    assert all(row["value"] is not None or row["missing"] for row in rows)
    assert {row["metric"] for row in rows if row["value"] is None} == {"energy", "peak_memory", "host_time"}
    held = {row["backend"]: row["value"] for row in rows if row["metric"] == "held_memory" and row["mean_nnz"] < 6}
    assert held["reference"] < held["dense_eager"]


def test_kernels_on_real_masks(tmp_path):
    """Also with neurons in order of firing, and without the silent ones."""
    random = numpy.random.default_rng(0).random((40, 128))
    masks = {0: random < 0.1, 2: random < numpy.linspace(0.9, 0, 128) ** 4}
    columns = {f"layer_{n}": [row.tobytes() for row in numpy.packbits(m, 1)] for n, m in masks.items()}
    folder = tmp_path / "nonzeros_relu"
    folder.mkdir()
    item = {"item": "nonzeros_relu"}
    pandas.DataFrame({**columns, **item}).to_parquet(folder / "nonzeros_masks.parquet")
    pandas.DataFrame({"layer": [0, 2], "neurons": 128, **item}).to_parquet(folder / "nonzeros_by_layer.parquet")
    options = [f"masks={folder / 'nonzeros_masks.parquet'}", "layers=[2]", "tokens=[64]", "hidden=32"]
    options += ["ops=[ffn_forward]", "metrics=[time]", "dense=[dense_eager]"]
    rows = rows_of(bench_kernels, tmp_path, *options, "backends=[reference,reference+ordered,reference+live]")
    assert [row["plan"] for row in rows] == ["dense", "twell", "twell_ordered", "twell_live"]
    assert {(row["pattern"], row["intermediate"]) for row in rows} == {("nonzeros_relu/layer2", 128)}
    assert rows[0]["mean_nnz"] == pytest.approx(masks[2][:32].sum(1).mean())
    assert rows[3]["silent"] == (128 - int(masks[2][:32].any(0).sum())) // 64 * 64


def test_statistics_are_timed_against_the_same_without(tmp_path):
    with_stats, without = rows_of(
        bench_kernels, tmp_path, *SMALL, "tokens=[48]", "ops=[ffn_forward_stats]", "metrics=[time]"
    )
    assert (with_stats["backend"], without["backend"]) == ("reference", "reference_without_stats")
    assert with_stats["baseline"] == "reference_without_stats"
    assert with_stats["ratio"] == pytest.approx(without["value"] / with_stats["value"])


def test_wrong_statistics_are_refused(problem, monkeypatch):
    after_compute(monkeypatch, lambda _, __, y, stats: (y, stats and stats._replace(l1=1.1 * stats.l1)))
    with pytest.raises(CheckFailed, match="reference l1"):
        feedforward.with_and_without_stats(problem, "reference")


@pytest.mark.parametrize("training", [False, True])
def test_sparse_backends_get_the_down_weights_by_neuron(problem, monkeypatch, training):
    strides = {}

    def watched(inputs, call, *result):
        strides[call.plan.backend] = inputs[3].stride()
        return result

    after_compute(monkeypatch, watched)
    for one in alternatives(problem, [], ["dense", "reference"], blocks=int(training)):
        assert strides.pop(one.backend) == ((1, 32) if one.backend == "reference" else (64, 1))
        one.call()
        assert strides.pop(one.backend) == ((1, 32) if one.backend == "reference" else (64, 1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {
        "relu_l1_1e-3": make_run(root, "relu_l1_1e-3", "sparsity.l1=1e-3"),
        "silu": make_run(root, "silu", "model.activation=silu"),
        "nongated": make_run(root, "nongated", "model.gated=false"),
    }


@pytest.fixture
def decoder(runs):
    """In bfloat16, with 2 sequences of 32 tokens."""
    model = load_subject(str(runs["relu_l1_1e-3"]), CPU, torch.bfloat16).model
    return Decoder(model, torch.arange(64).view(2, 32) % 16)


@pytest.fixture
def subject(runs):
    return load_subject(str(runs["relu_l1_1e-3"]), CPU)


@pytest.fixture
def step(subject):
    """With products in bfloat16."""
    return TrainingStep(subject.model, torch.bfloat16)


def test_forward_rows_of_models_and_layers(runs, tmp_path):
    rows = rows_of(bench_forward, tmp_path, *of(*runs.values()), "batch=3")
    whole = {(r["pattern"], r["plan"]): r for r in rows if r["op"] == "model_forward" and r["metric"] == "throughput"}
    assert set(whole) == {(name, "dense") for name in runs} | {(name, "twell") for name in runs if name != "silu"}
    sparse = whole["relu_l1_1e-3", "twell"]
    assert (sparse["l1"], sparse["tokens"], sparse["baseline"]) == (1e-3, 96, "dense_eager")
    assert sparse["ratio"] == pytest.approx(sparse["value"] / whole["relu_l1_1e-3", "dense"]["value"])
    layers = [r for r in rows if r["op"] == "ffn_forward" and r["metric"] == "time" and r["plan"] == "twell"]
    assert [r["pattern"] for r in layers] == [f"{n}/layer{i}" for n in ("relu_l1_1e-3", "nongated") for i in (0, 1)]
    means = [r["mean_nnz"] for r in layers[:2]]
    assert sparse["mean_nnz"] == pytest.approx(sum(means) / 2, rel=0.01)


def test_forward_rows_on_random_ids_have_their_own_nonzeros(runs, tmp_path):
    rows = rows_of(bench_forward, tmp_path, *of(runs["relu_l1_1e-3"]), "batch=3", "random_ids=true")
    text, random = ([row for row in rows if row["op"].endswith("_random_ids") == here] for here in (False, True))
    means = [{row["pattern"]: row["mean_nnz"] for row in rows} for rows in (text, random)]
    assert list(means[0]) == list(means[1]) == ["relu_l1_1e-3", "relu_l1_1e-3/layer0", "relu_l1_1e-3/layer1"]
    assert set(means[0].values()).isdisjoint(means[1].values())
    assert {row["op"] for row in random} == {"model_forward_random_ids", "ffn_forward_random_ids"}


def test_forward_rows_of_layers_with_neurons_in_order(runs, tmp_path):
    """The decoder itself is timed with the plain backends alone."""
    backends = "backends=[reference,reference+hot,reference+ordered,reference+live,dense+live]"
    options = [*of(runs["relu_l1_1e-3"]), "batch=3", backends]
    rows = [row for row in rows_of(bench_forward, tmp_path, *options) if row["metric"] == "time"]
    assert [row["plan"] for row in rows if row["op"] == "model_forward"] == ["dense", "twell"]
    layers = [(row["layer"], row["plan"]) for row in rows if row["op"] == "ffn_forward"]
    plans = ("dense", "dense", "twell", "twell_hot", "twell_ordered", "twell_live", "dense_live")
    assert layers == [(layer, plan) for layer in (0, 1) for plan in plans]
    assert all((row["silent"] is not None) == row["plan"].endswith("_live") for row in rows)
    assert all((row["screened"] == 0) == (row["plan"] in ("twell_ordered", "twell_live")) for row in rows)


@pytest.mark.parametrize(
    ("program", "option", "message"),
    [
        *(
            (bench_kernels, f"backends=[dense{s}]", f"those that fire (+live), got 'dense{s[:4]}")
            for s in SUFFIXES[:-1]
        ),
        (
            bench_forward,
            "backends=[reference+hot] per_layer=false",
            "reference+hot: of blocks alone, so per_layer must",
        ),
        (bench_forward, "backends=[reference+backup]", "only training has a dense backup, got 'reference+backup'"),
        (bench_forward, "backends=['']", "must be one of auto, dense, "),
        (bench_forward, "backends=[cuda]", "must be one of auto, dense, "),
        *((bench_training, f"backends=[{n}]", f"got '{n.removesuffix('+backup')}'") for n in NOT_OF_MODELS),
        *((bench_training, f"backends=[{n}+backup]", "only a sparse backend has a dense") for n in ("auto", "dense")),
    ],
)
def test_options_that_are_refused(program, option, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(CONFIGS[program], option.split())


def test_wrong_hidden_states_are_refused(runs, monkeypatch):
    subject = load_subject(str(runs["nongated"]), CPU, torch.bfloat16)
    decoder = Decoder(subject.model, subject.text(3, 32)[:, :-1])
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda backend, **o: forward(backend, **o) * (1.1 if backend == "reference" else 1)
    )
    with pytest.raises(CheckFailed, match="reference"):
        decoder_alternatives(decoder, ["dense_eager"], ["reference"])


def test_the_decoder_as_is_fastest_for_each_layer(decoder, monkeypatch):
    """The plans and the order that are chosen for auto are no other alternative's."""
    (absent,) = decoder_alternatives(decoder, [], ["auto"])
    assert (absent.backend, absent.plan) == ("auto", "by_layer")
    before = [block.up_proj.weight.clone() for block in decoder.blocks]
    wanted, order = decoder.forward("dense"), torch.randperm(len(before[1]))
    plans = [Plan("reference", tuple(range(8))), Plan("reference", 8)]

    def choose(model, ids, **named):
        order_neurons(decoder.blocks[1], order)
        for block, plan in zip(decoder.blocks, plans, strict=True):
            block.plan = plan
        dense, ordered = PlanForm("dense"), PlanForm("reference", in_front=True)
        return Tuning([Choice(plans[0], 9.0, {dense: 1.0}), Choice(plans[1], 3.0, {dense: 2.0, ordered: 1.0})])

    monkeypatch.setattr(decoder_module, "autotune", choose)
    (candidate,) = decoder_alternatives(decoder, [], ["auto"])
    assert (candidate.backend, candidate.plan) == ("reference", "by_layer")
    for name in ("reference", "auto", "transformers", "auto", "reference"):
        computed = candidate.call() if name == "auto" else decoder.forward(name)
        torch.testing.assert_close(computed, wanted, rtol=0.05, atol=0.05)
        plain = [Plan("dense" if name == "transformers" else name)] * 2
        assert [block.plan for block in decoder.blocks] == (plans if name == "auto" else plain)
        assert torch.equal(decoder.blocks[1].up_proj.weight, before[1][order] if name == "auto" else before[1])
        assert torch.equal(decoder.blocks[0].up_proj.weight, before[0])
    assert torch.equal(decoder.problem(1).w_up, before[1])


@pytest.mark.slow
def test_compiled_decoders_are_one_graph_each_whose_sparse_blocks_are_operators(decoder):
    """They take turns, with weights laid out for dense products and for sparse backends."""
    wanted = decoder.forward("dense")
    found = decoder_alternatives(decoder, ["dense_compiled", "dense_twell"], ["reference"])
    dense, own, eager, sparse = found
    assert [a.backend for a in found] == ["dense_compiled", "dense_twell", "reference", "reference_compiled"]
    assert eager.plan == sparse.plan == "twell"
    decoder.forward(FP8, compiled=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for candidate in (dense, sparse, eager, own, dense, sparse):
        torch.testing.assert_close(candidate.call(), wanted, rtol=0.05, atol=0.05)
        decoder.forward(FP8, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "none is compiled again"
    decoder.set("reference")
    explained = torch._dynamo.explain(decoder.body)(decoder.ids, use_cache=False)
    assert explained.graph_break_count == 0
    called = [
        str(node.target) for graph in explained.graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert sum("sparse_ffn" in target for target in called) == len(decoder.blocks)


def test_training_rows(runs, tmp_path):
    rows = rows_of(bench_training, tmp_path, *of(*runs.values()), "micro_batch=2")
    speed = {(r["pattern"], r["plan"]): r for r in rows if r["metric"] == "throughput"}
    assert set(speed) == {(name, "dense") for name in runs} | {(name, "hybrid") for name in runs if name != "silu"}
    sparse = speed["relu_l1_1e-3", "hybrid"]
    assert sparse["ratio"] == pytest.approx(sparse["value"] / speed["relu_l1_1e-3", "dense"]["value"])
    assert all(0 < row["check_error"] < 0.05 for row in speed.values())
    assert all(r["missing"] for r in rows if r["metric"] in ("energy", "peak_memory"))


def test_a_training_step_in_the_papers_format(runs, tmp_path, monkeypatch):
    """Each block of one form has a dense backup, the same blocks in the other forms do not."""
    used = []
    real = TrainingStep._backward

    def backward(step, loss, form, tokens):
        found = real(step, loss, form, tokens)
        used.append((form.backend, {block.plan.backup for block in step.blocks}))
        return found

    monkeypatch.setattr(TrainingStep, "_backward", backward)
    backends = "backends=[reference+backup,auto,hopper+backup,reference]"
    options = [*of(runs["relu_l1_1e-3"]), "micro_batch=2", backends]
    rows = [row for row in rows_of(bench_training, tmp_path, *options) if row["metric"] == "throughput"]
    found = {(row["backend"], row["plan"], row["backup"]) for row in rows if row["value"] is not None}
    assert found == {("dense_eager", "dense", None), ("reference", "hybrid", None), ("reference", "hybrid", 0.125)}
    missing = {(row["backend"], row["plan"], row["backup"]) for row in rows if row["missing"]}
    assert missing == {("hopper", "hybrid", 0.125), ("auto", "by_layer", None)}
    shares = {name: found for name, found in used if name != "dense"}
    assert shares == {"reference+backup": {0.125}, "reference": {0.0}}


@pytest.mark.parametrize("name", ["relu_l1_1e-3", "silu"])
def test_dense_transformers_is_transformers(runs, name):
    """Hidden states, loss and gradients to the last bit; other forms then run the package's block again."""
    subject = load_subject(str(runs[name]), CPU)
    plain = LlamaForCausalLM(subject.model.config)
    plain.load_state_dict(subject.model.state_dict())
    assert type(plain.model.layers[0].mlp) is LlamaMLP
    tokens = subject.text(2, 32)
    with torch.no_grad():
        wanted = plain.eval().model(tokens[:, :-1], use_cache=False).last_hidden_state
    decoder = Decoder(subject.model.eval(), tokens[:, :-1])
    assert torch.equal(decoder.forward("transformers"), wanted)
    assert [block.stats for block in decoder.blocks] == [None, None]
    assert torch.allclose(decoder.forward("dense"), wanted)
    assert not any("forward" in vars(block) for block in decoder.blocks)

    step = TrainingStep(subject.model, torch.float32)
    (form,) = forms(step, ["dense_transformers"], [], 0.0)
    ours, gradients = step._gradients(step._loss, form, tokens)
    loss, _ = LossModel(plain.train(), precision="float32")(tokens)
    loss.backward()
    assert torch.equal(ours, loss.detach())
    assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in plain.named_parameters())


def test_forms_of_transformers_are_timed_beside_the_others(runs, tmp_path):
    options = [*of(runs["relu_l1_1e-3"]), "dense=[dense_transformers,dense_eager]"]
    rows = rows_of(bench_forward, tmp_path / "f", *options, "batch=2")
    rows += rows_of(bench_training, tmp_path / "t", *options, "micro_batch=2")
    names = {op: {row["backend"] for row in rows if row["op"] == op} for op in {row["op"] for row in rows}}
    both = {"dense_transformers", "dense_eager", "reference"}
    blocks = {"dense_eager", "dense_twell", "reference"}
    assert names == {"model_forward": both, "ffn_forward": blocks, "model_training": both}


def test_a_training_step_changes_no_weight(subject, step):
    before = {name: parameter.clone() for name, parameter in subject.model.named_parameters()}
    for form in (Form("dense_eager", "dense", 0.0), Form("reference", "reference", 1e-3)):
        step.run(form, subject.text(2, 32))
    assert all(torch.equal(before[name], parameter) for name, parameter in subject.model.named_parameters())


def test_a_training_step_has_room_for_its_tokens(subject, step, monkeypatch):
    """With a backend whose gradients are NaN if the capacity is exceeded, as no dense products replace them."""
    monkeypatch.setitem(registry.FILES, fragile_backend.NAME, "fragile_backend")
    alone = replace(fragile_backend.BACKEND, needed_capacity=None)
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: alone if name == fragile_backend.NAME else get(name))
    monkeypatch.setattr(training_step, "capacity_for", lambda nonzeros, neurons: math.ceil(nonzeros))
    form = Form("fragile", fragile_backend.NAME, 1e-3)
    few, many = subject.text(1, 32), subject.text(4, 32)
    step._capacities = [1] * len(step.blocks)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "prepare", lambda *arguments: None)
        with pytest.raises(CheckFailed, match="relative error inf"):
            step.check(form, few)
    checked(step, form, few)(many)
    step.run(form, many)
    assert all(parameter.isfinite().all() for parameter in subject.model.parameters())


def sparse_forms_take(monkeypatch, *milliseconds):
    """In tunings for training, where dense products take 2 ms: in the two layers with the few tokens of a check, and
    with the batch. Nothing is compiled for it."""
    sparse = iter(milliseconds)

    def times(calls, *_):
        ours = next(sparse)
        return {plan: 2.0 if plan.backend == "dense" else ours for plan in calls}

    monkeypatch.setattr(training, "queued_times", times)
    monkeypatch.setattr(training, "_compile", lambda: training._output_and_l1)


def test_auto_is_what_a_training_would_choose(subject, step, monkeypatch):
    monkeypatch.setitem(registry.FILES, fragile_backend.NAME, "fragile_backend")
    few, many = subject.text(1, 32), subject.text(4, 32)
    sparse_forms_take(monkeypatch, 1.0, 4.0, 1.0, 4.0)
    eager, compiled = forms(step, ["dense_compiled"], ["auto"], 1e-3)[1:]
    assert [form.name for form in (eager, compiled)] == ["fragile", "fragile_compiled"]
    assert {form.plan for form in (eager, compiled)} == {"by_layer"}
    candidate = checked(step, eager, few)(many)
    candidate.call()
    assert [block.plan.backend for block in step.blocks] == ["fragile", "dense"]
    step.run(Form("dense_eager", "dense", 0.0), many)
    assert {block.plan.backend for block in step.blocks} == {"dense"}


def test_backends_are_compiled_where_dense_forms_are(step):
    eager, both = (forms(step, dense, ["hopper"], 0.0) for dense in (["dense_eager"], ["dense_compiled"]))
    assert [form.name for form in eager] == ["dense_eager", "hopper"]
    assert [(form.name, form.compiled) for form in both] == [
        ("dense_compiled", "whole"),
        ("hopper", ""),
        ("hopper_compiled", "layers"),
    ]


@pytest.mark.slow
def test_every_way_to_compile_gives_the_same_step(step, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options, backend="aot_eager"))
    tokens = torch.randint(0, 16, (2, 33), generator=torch.Generator().manual_seed(0))
    found, graphs = forms(step, list(training_step.DENSE_FORMS), ["reference"], 1e-3), {}
    for form in found * 2:
        torch._dynamo.utils.counters.clear()
        checked(step, form, tokens)(tokens).call()
        graphs.setdefault(form.name, []).append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert {name: made for name, (made, _) in graphs.items() if made} == {
        "dense_compiled": 1,
        "dense_compiled_layers": 3,
        "reference_compiled": 2,
    }
    assert not [name for name, (_, again) in graphs.items() if again], "forms leave each other's code alone"


@pytest.mark.parametrize(
    ("loss", "gradient", "message"), [(1.02, 1, r"loss: relative error 0\.02"), (1, 1.05, "gradient of .*1.*gate_proj")]
)
def test_a_wrong_loss_or_gradient_is_refused(subject, step, monkeypatch, loss, gradient, message):
    form = Form("reference", "reference", 1e-3)
    step.check(form, subject.text(1, 32))
    gradients = step._gradients

    def wrong(loss_of, form, tokens):
        total, found = gradients(loss_of, form, tokens)
        if form.name == "reference":
            total *= loss
            found["model.layers.1.mlp.gate_proj.weight"] *= gradient
        return total, found

    monkeypatch.setattr(step, "_gradients", wrong)
    with pytest.raises(CheckFailed, match=f"^reference, {message}"):
        step.check(form, subject.text(1, 32))


def negate_gradient_of(monkeypatch, backend, part):
    """Blocks with this backend have the negative gradient of one of their weights."""
    forward = ReluFeedForward.forward

    def wrong(block, x):
        if block.plan.backend != backend:
            return forward(block, x)
        parameters = getattr(block, part)._parameters
        weight = parameters["weight"]
        with patch.dict(parameters, weight=2 * weight.detach() - weight):
            return forward(block, x)

    monkeypatch.setattr(ReluFeedForward, "forward", wrong)


def test_a_block_with_a_wrong_gradient_is_refused_where_rounding_hides_it_in_the_model(step, monkeypatch):
    """In a deep model, rounding changes gradients as a whole by as much as they are."""
    form, tokens = Form("reference", "reference", 1e-3), torch.arange(33).view(1, 33) % 16
    assert step.check(form, tokens) < 0.02
    negate_gradient_of(monkeypatch, "reference", "down_proj")
    with pytest.raises(CheckFailed, match=r"reference, gradient of model\.layers\.\d\.mlp\.down_proj"):
        step.check(form, tokens)
    real = training_step.tolerance
    monkeypatch.setattr(training_step, "tolerance", lambda error, *rest, **more: 3 + real(error, *rest, **more))
    with pytest.raises(CheckFailed, match=r"reference, layer 0, dw_down: relative error 2 "):
        step.check(form, tokens)


def test_what_auto_chooses_for_the_batch_is_checked(subject, step, monkeypatch):
    """For the few tokens of the check every layer is dense, for the batch none is."""
    monkeypatch.setattr(training_step, "sparse_backend", lambda *arguments: ("reference", ""))
    monkeypatch.setattr(common, "REFERENCE", "")  # it is tried, too
    sparse_forms_take(monkeypatch, *[4.0, 4.0, 1.0, 1.0] * 2)
    (form,) = forms(step, [], ["auto"], 1e-3)
    make, batch = checked(step, form, subject.text(1, 32)), subject.text(4, 32)
    assert 0 < make(batch).check_error < 0.02
    assert {block.plan.backend for block in step.blocks} == {"reference"}
    negate_gradient_of(monkeypatch, "reference", "up_proj")
    make = checked(step, form, subject.text(1, 32))
    with pytest.raises(CheckFailed, match=r"reference, layer 0, dw_up: relative error 2 "):
        make(batch)


def test_a_search_keeps_a_choice_for_less_than_four_times_the_tokens(subject, step, monkeypatch):
    monkeypatch.setattr(training_step, "sparse_backend", lambda *arguments: ("reference", ""))
    chosen_for = []

    def choose(loss, tokens_BS, compiled):
        chosen_for.append(len(tokens_BS))
        return [Choice(Plan(), 0.0, {})] * len(step.blocks)

    monkeypatch.setattr(training_step, "autotune", choose)
    (form,) = forms(step, [], ["auto"], 1e-3)
    for batch, roughly in ((1, True), (3, True), (4, True), (1, True), (4, False), (3, False)):
        step.prepare(form, subject.text(batch, 32), roughly=roughly)
    assert chosen_for == [1, 4, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.activation=silu", "micro_batch=1", "dense=[]"], "smoke: nothing to time: its blocks are dense"),
        (["micro_batch=0"], "micro_batch=0 searches the largest that fits, on CUDA only: give micro_batch"),
    ],
)
def test_a_training_step_that_cannot_be_timed_is_refused_before_it_is_checked(tmp_path, monkeypatch, options, message):
    monkeypatch.delattr(TrainingStep, "check")
    with pytest.raises(ConfigError, match=message):
        rows_of(bench_training, tmp_path, "model=smoke", "sequence=16", *options)


def test_blocks_of_which_no_form_can_run_on_a_cpu_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"of backends=\[hopper,hopper\+ordered\] none can run on a CPU: "):
        rows_of(bench_kernels, tmp_path, "tokens=[131072]", "backends=[hopper,hopper+ordered]")
    assert not list(tmp_path.iterdir())


def test_rows_of_other_options_are_kept_beside_the_new_ones(tmp_path, caplog):
    def measured(tokens):
        rows_of(bench_kernels, tmp_path, *SMALL, "ops=[ffn_forward]", "metrics=[time]", tokens)
        return (tmp_path / "rows.csv").read_text()

    measured("tokens=[40,48]")
    measured("tokens=[40,48]")
    assert not (tmp_path / "rows_replaced.csv").exists()
    first = (tmp_path / "rows.csv").read_text()
    assert measured("tokens=[56]") != first
    assert (tmp_path / "rows_replaced.csv").read_text() == first
    assert "tokens: [40, 48] there, [56] here" in caplog.text
    assert len(load(tmp_path).rows) == len(read_rows(tmp_path / "rows.csv"))


@pytest.mark.parametrize("retries", [0, 2])
def test_a_step_that_fits_only_after_retries_does_not_fit(retries, monkeypatch):
    stats = {"num_alloc_retries": 5}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: dict(stats))
    device, ran = torch.device("cuda", 0), []

    def step():
        ran.append(True)
        stats["num_alloc_retries"] += retries

    message = "fits only after the allocator gave its cache back 2 times"
    with pytest.raises(torch.OutOfMemoryError, match=message) if retries else contextlib.nullcontext():
        without_retries(step, device)
    assert ran == [True]
    monkeypatch.setattr(training_step, "peak_memory", lambda run, device: (run(), SimpleNamespace(value=1.5))[1])
    peak = training_step.peak_memory_of(lambda: without_retries(step, device), device)
    assert peak == (None if retries else 1.5)


def workload_of(run, *options):
    return bench_training.Workload(load_subject(str(run), CPU), configured(bench_training, *of(run), *options), CPU)


@pytest.mark.parametrize("part", ["backward", "optimizer"])
def test_a_step_that_runs_out_of_memory_leaves_no_activations(runs, monkeypatch, part):
    """What it left would count in the peak of the next size that is tried, and end the search too early."""
    workload = workload_of(runs["relu_l1_1e-3"], "dense=[]")
    (form,) = workload.forms

    def graphs():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in gc.get_objects())

    def fails(*arguments, **named):
        raise torch.OutOfMemoryError("no memory")

    workload.step.run(form, workload.tokens(2))
    before = graphs()  # L1 terms, whose activations are freed
    target = (torch.Tensor, "backward") if part == "backward" else (workload.step.optimizer, "step")
    monkeypatch.setattr(*target, fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        workload.step.run(form, workload.tokens(2))
    assert form.l1 > 0
    assert graphs() <= before
    assert all(parameter.grad is None for parameter in workload.step.model.parameters())


@pytest.mark.parametrize("steady", [True, False])
def test_the_search_runs_a_size_until_it_is_steady(runs, monkeypatch, steady):
    """Three steps; what the third has to allocate again, each further one would."""
    ran = []
    monkeypatch.setattr(TrainingStep, "run", lambda step, form, tokens: ran.append(form.name))
    monkeypatch.setattr(training_step, "allocation_retries", lambda device: min(len(ran), 2) if steady else len(ran))
    workload = workload_of(runs["silu"])
    (form,) = workload.forms
    with contextlib.nullcontext() if steady else pytest.raises(torch.OutOfMemoryError, match="gave its cache back"):
        workload._try(form, 2)
    assert ran == ["dense_eager"] * 3


def test_allocations_that_are_tried_again_while_timing_are_told(runs, tmp_path, monkeypatch, caplog):
    retries = iter(range(0, 100, 3))
    monkeypatch.setattr(training_step, "allocation_retries", lambda device: next(retries))
    rows_of(bench_training, tmp_path, *of(runs["silu"]), "micro_batch=2")
    assert "3 allocations were tried again while 2 sequences were timed" in caplog.text


def test_a_training_step_of_which_no_form_can_run_leaves_the_reasons(tmp_path):
    options = ["model=smoke", "sequence=16", "micro_batch=1", "dense=[]", "backends=[hopper]"]
    rows = rows_of(bench_training, tmp_path, *options)
    assert {row["backend"] for row in rows} == {"hopper"}
    assert all(row["value"] is None and row["missing"] for row in rows)
    assert {row["l1"] for row in rows} == {None}, "random weights were trained without L1 no more than with it"


@pytest.mark.slow
def test_the_compiled_dense_form_is_compiled_once_for_blocks_of_one_size():
    def graphs_of(seed, tokens):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        problem = make_problem(tokens, 16, 32, 4.0, seed=seed)
        (found,) = alternatives(problem, ["dense_compiled"], [])
        found.call()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    assert graphs_of(0, 40) > 0
    assert graphs_of(1, 40) == 0
    assert graphs_of(1, 48) > 0


# `lost`: share of the memory that turns out not to be usable.
@pairwise(capacity=[1, 2, 7, 8, 100, 5000], first=[2, 16, 90], lost=[0.0, 0.02, 0.3])
def test_the_largest_batch_is_found_with_few_tries(capacity, first, lost):
    asked, fixed, each = [], 10.0, 3.0
    memory = int((fixed + each * (capacity + 0.5)) / (1 - lost))

    def peak_of(batch):
        asked.append(batch)
        return int(fixed + each * batch) if batch <= capacity else None

    found = largest_batch(peak_of, memory, first)
    assert min(capacity, 4096) * 15 / 16 - 1 <= found <= min(capacity, 4096)
    assert len(asked) == len(set(asked)) <= (6 if lost < 0.1 else 16)


def test_a_search_ends_where_memory_does_not_grow_with_the_batch_or_nothing_fits():
    assert largest_batch(lambda batch: 5 if batch <= 70 else None, 1000) >= 65
    assert largest_batch(lambda batch: 5, 1000, limit=64) == 64
    with pytest.raises(RunError, match="not even one sequence"):
        largest_batch(lambda batch: None, 1000)


@pytest.mark.parametrize("fits", [3, 0])
def test_a_micro_batch_that_does_not_fit_while_it_is_timed_becomes_smaller(runs, tmp_path, monkeypatch, caplog, fits):
    compare, tried = timing_compare.compare, []

    def compare_in_little_memory(alternatives, *arguments, tokens, **columns):
        tried.append(tokens // 32)
        if tried[-1] > fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return compare(alternatives, *arguments, tokens=tokens, **columns)

    monkeypatch.setattr(timing_compare, "compare", compare_in_little_memory)
    monkeypatch.setattr(bench_training.Workload, "can_search", True)
    monkeypatch.setattr(bench_training.Workload, "micro_batch", lambda workload, form: 5)
    with contextlib.nullcontext() if fits else pytest.raises(torch.cuda.OutOfMemoryError):
        rows = rows_of(bench_training, tmp_path, *of(runs["silu"]))
    assert tried == ([5, 4, 3] if fits else [5, 4, 3, 2, 1])
    if fits:
        assert {row["tokens"] for row in rows} == {3 * 32}
        assert "out of memory while 5 sequences were timed, trying 4" in caplog.text


@pytest.fixture
def compared(runs, tmp_path, monkeypatch):
    """Which forms are compared with which baseline, by the number of sequences, where so many fit into each form."""

    def compare_at(sizes, run, *options, largest=0):
        monkeypatch.setattr(bench_training.Workload, "can_search", True)
        monkeypatch.setattr(bench_training.Workload, "micro_batch", lambda _, form: sizes.get(form.name, largest))
        monkeypatch.setattr(TrainingStep, "_loss_of", lambda step, form: step._loss)  # compiled or not: the same
        at = {}
        for row in rows_of(bench_training, tmp_path, *of(runs[run]), *options):
            if row["metric"] == "throughput" and row["value"]:
                at.setdefault(row["tokens"] // 32, {})[row["backend"]] = row["baseline"]
        return at

    return compare_at


COMPILED = {"dense_compiled_layers", "reference_compiled"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "sizes", "forms"),
    [
        (["dense_eager"], {"dense_eager": 2, "reference": 2}, {5: COMPILED, 2: {"dense_eager", "reference"}}),
        (
            ["dense_eager"],
            {"dense_eager": 2, "reference": 5},
            {5: COMPILED | {"reference"}, 2: {"dense_eager", "reference"}},
        ),
        (
            ["dense_transformers", "dense_eager"],
            {"dense_eager": 3, "dense_transformers": 2, "reference": 4},
            {5: COMPILED, 3: {"dense_eager", "reference"}, 2: {"dense_eager", "dense_transformers", "reference"}},
        ),
        ([], {"reference": 4}, {5: COMPILED}),
    ],
    ids=["where they fit", "with the compiled ones, too", "plain transformers apart", "nothing to compare with"],
)
def test_forms_with_nothing_compiled_are_compared_where_they_fit(compared, dense, sizes, forms):
    """Five sequences fit into the compiled forms. Plain transformers, which take the fewest, shrink no comparison."""
    at = compared(sizes, "relu_l1_1e-3", f"dense=[{','.join([*dense, 'dense_compiled_layers'])}]", largest=5)
    assert {size: set(found) for size, found in at.items()} == forms
    assert not dense or set(at[2].values()) <= set(dense)


def test_dense_forms_alone_are_compared_where_all_fit(compared):
    sizes = {"dense_eager": 3, "dense_transformers": 2}
    at = compared(sizes, "silu", "dense=[dense_eager,dense_transformers]")
    assert {size: set(forms) for size, forms in at.items()} == {3: {"dense_eager"}, 2: set(sizes)}


def test_an_interrupted_benchmark_leaves_what_it_measured(tmp_path, monkeypatch):
    real = bench_kernels.measure

    def second_fails(pattern, *rest):
        if pattern.tokens == 48:
            raise KeyboardInterrupt
        return real(pattern, *rest)

    monkeypatch.setattr(bench_kernels, "measure", second_fails)
    options = [*SMALL, "ops=[ffn_forward]", "tokens=[40,48]", "metrics=[time]"]
    with pytest.raises(KeyboardInterrupt):
        rows_of(bench_kernels, tmp_path, *options)
    assert not (tmp_path / "rows.csv").exists()
    assert {row["tokens"] for row in read_rows(tmp_path / "rows_so_far.csv")} == {40}
    monkeypatch.undo()
    assert {row["tokens"] for row in rows_of(bench_kernels, tmp_path, *options)} == {40, 48}
    assert not (tmp_path / "rows_so_far.csv").exists()


@pytest.mark.parametrize("program", [bench_forward, bench_training])
def test_sequences_longer_than_the_model_takes_are_refused(program, tmp_path):
    with pytest.raises(ConfigError, match="smoke takes at most 32 tokens; sequence=33"):
        rows_of(program, tmp_path, "model=smoke", "sequence=33")
