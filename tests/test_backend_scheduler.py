"""Layers that switch between dense and sparse, and steps that are retried with more capacity."""

import dataclasses
import itertools
import json
import math
import random

import numpy
import pytest
import torch
from calls import change, make_block
from fragile_backend import BREAK_EVEN, NAME, costs, just_enough
from programs import run_two
from same_run import assert_same_end, final, without_times

from experiments import train
from experiments.models.llama import build_model, feed_forward_blocks
from experiments.run.distributed import Processes
from experiments.run.errors import ConfigError, DivergenceError, Stopped
from experiments.run.results import read_rows
from experiments.run.train_config import ModelConfig, SparseConfig
from experiments.training import backend_scheduler, layer_costs, metrics
from experiments.training.backend_scheduler import BackendScheduler
from experiments.training.dead_neurons import Activity
from experiments.training.layer_costs import Costs, Setting, fit, measure_costs
from experiments.training.loss import LossModel, firing_rates
from experiments.training.random_state import RandomState
from experiments.training.trainer import Trainer
from twell import FFNStats, Plan, registry
from twell.capacity import capacity_for

ONE = Processes(0, 1, torch.device("cpu"))
HERE = Setting("reference", "a CPU", "float32", 64, 16, 704, gated=True, compiled=False)
# The dense path and the double give the same bits, so that whatever switches or is repeated must not be seen.
SAME_BITS = ("sparsity.l1=1e-3", "sparsity.dead_neuron_reinit=true", "execution.micro_batch=2")
# From one non-zero per token on, capacities grow to just what a step needed.
TIGHT = (f"execution.sparse.backend={NAME}", "execution.sparse.capacity=1")
PLAN = {"backend", "capacity", "hot_neurons", "retried_steps"}


@pytest.fixture
def fragile(monkeypatch):
    """The double is registered, has capacity for just what was measured, and pays below BREAK_EVEN non-zeros."""
    monkeypatch.setitem(registry.FILES, NAME, "fragile_backend")
    monkeypatch.setattr(backend_scheduler, "capacity_for", just_enough)
    monkeypatch.setattr(backend_scheduler, "measure_costs", costs)


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces, and runs what it traced without code generation, which alone takes a minute."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options, backend="aot_eager"))


def run(config):
    train.main(config)
    return metrics.read_metrics(config.run.folder)


def numbers(records):
    """What does not depend on the scheduler."""
    return [{key: value for key, value in record.items() if key not in PLAN} for record in without_times(records)]


def scheduler(backend="auto", layers=2, neurons=1000, **options):
    blocks = [make_block(16, neurons, device="meta", backend="dense") for _ in range(layers)]
    setting = HERE if backend == "auto" else None
    return BackendScheduler(blocks, SparseConfig(backend=backend, **options), ONE, setting)


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs():
    found = fit(5.0, [10, 30, 50], [1.5, 2.5, 3.5])
    assert (found.fixed_ms, found.per_nonzero_ms) == pytest.approx((1.0, 0.05))
    assert found.sparse_ms(40) == pytest.approx(3.0)
    assert found.break_even == pytest.approx(80.0)
    assert fit(5.0, [10, 30], [3.0, 2.0]) == Costs(5.0, 2.5, 0.0)
    assert Costs(1.0, 2.0, 0.1).break_even == 0.0
    assert Costs(2.0, 1.0, 0.0).break_even == math.inf


@pytest.mark.parametrize("gated", [True, False])
def test_costs_are_measured(gated):
    before = RandomState.now()
    found = measure_costs(Setting("reference", "a CPU", "float32", 64, 16, 704, gated, compiled=False), ONE.device)
    assert found.dense_ms > 0
    assert found.sparse_ms(5) > found.dense_ms, "the reference is no kernel"
    after = RandomState.now()
    assert before.python == after.python
    assert torch.equal(before.torch, after.torch)


def test_costs_with_a_backup(monkeypatch):
    seen, right = [], layer_costs.sparse_ffn

    def noted(*operands, **options):
        plan = Plan.of(options["plan"])
        seen.append((plan.backend, plan.backup))
        return right(*operands, **options)

    monkeypatch.setattr(layer_costs, "sparse_ffn", noted)
    measure_costs(Setting("reference", "a CPU", "float32", 64, 16, 704, True, compiled=False, backup=0.25), ONE.device)
    assert set(seen) == {("reference", 0.25), ("dense", 0.0)}


def test_the_compiled_block_is_what_is_timed(traced, monkeypatch):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    measure_costs(Setting("reference", "a CPU", "float32", 64, 16, 704, True, compiled=True), ONE.device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nonzeros", "neurons", "capacity"),
    [(0.0, 5632, 64), (32, 5632, 64), (32.1, 5632, 128), (64, 5632, 128), (2816, 5632, 5632), (5, 32, 32)],
)
def test_capacities(nonzeros, neurons, capacity):
    assert capacity_for(nonzeros, neurons) == capacity


def test_layers_switch_with_hysteresis(caplog):
    caplog.set_level("INFO")
    ours = scheduler(to_sparse_below=0.8, to_dense_above=1.0)
    ours.costs = Costs(6.0, 1.0, 0.1)  # the break-even is at 50
    assert not ours.sparse
    seen = []
    for step, count in enumerate([500, 45, 39, 49, 45, 51, 45, 39]):
        ours.update(step, [count, 500])
        seen.append((ours.backends[0], ours.capacities[0]))
    assert seen[:2] == [("dense", 0)] * 2
    assert seen[2:5] == [("reference", 128)] * 3
    assert seen[5:7] == [("dense", 0)] * 2
    assert seen[7] == ("reference", 128)
    assert ours.backends[1] == "dense"
    messages = [record.message for record in caplog.records]
    assert len(messages) == 3
    assert messages[0] == (
        "step 2: layer 0 runs reference from now on: 39.0 non-zeros, predicted 6.000 ms dense and 4.900 ms sparse"
    )
    assert messages[1].startswith("step 5: layer 0 runs dense from now on: 51.0 non-zeros")


def busy(count, nonzeros, neurons=8000, rate=0.5):
    """Rates that add up to `nonzeros`: `count` neurons that fire half of the time, and the others."""
    rates = torch.full((neurons,), (nonzeros - count * rate) / (neurons - count))
    rates[neurons - count :] = rate
    return rates


def test_hot_neurons_count_as_fewer_nonzeros(caplog):
    caplog.set_level("INFO")
    ours = scheduler(layers=1, neurons=8000)
    ours._blocks[0].to_empty(device="cpu")
    ours.costs = Costs(6.0, 1.0, 0.1)  # the break-even is at 50
    assert ours.needs_firing_rates([80])
    assert not ours.needs_firing_rates([24])
    ours.update(1, [80], None)
    assert ours.backends == ["dense"]
    ours.update(2, [80], [busy(0, 80)])
    assert (ours.backends, ours.hot_neurons) == (["dense"], [0])
    # 128 of the 130 busy ones save 128 (0.5 - 0.0125) - 4 = 58.4 non-zeros: 21.6 are left to pay for.
    ours.update(3, [80], [busy(130, 80)])
    assert (ours.backends, ours.hot_neurons, ours.capacities) == (["reference"], [128], [256])
    assert set(ours._blocks[0].plan.hot) <= set(range(7870, 8000))
    assert "predicted 6.000 ms dense and 3.160 ms sparse" in caplog.text
    assert "layer 0 leaves 128 hot neurons to dense products, worth 58.4 non-zeros" in caplog.text
    chosen = ours._blocks[0].plan
    ours.update(4, [80], [busy(130, 80) / 2])
    assert ours._blocks[0].plan is chosen, "rates of tokens with half as many non-zeros as all of the step's"
    ours.update(4, [80], [busy(131, 80)])
    assert ours._blocks[0].plan is chosen, "another choice that is hardly better"
    ours.update(5, [200], [busy(400, 200)])
    assert ours.hot_neurons == [512]  # the 16 busy ones of the fourth 128 outweigh the 112 others
    ours.update(6, [30], [busy(0, 30)])
    assert ours.hot_neurons == [0], "it costs more than it saves now"
    ours.update(7, [80], [busy(130, 80)])
    ours.update(8, [80], [busy(0, 80)])
    assert (ours.backends, ours.hot_neurons) == (["dense"], [0])
    assert ours._blocks[0].plan == Plan()


def test_hot_neurons_are_replaced_where_that_makes_the_layer_clearly_faster():
    """Those that save 233 of 299 non-zeros are replaced by others that save 283: less than a fourth more, but 16 are
    left instead of 66."""
    ours = scheduler(layers=1, neurons=8000)
    ours._blocks[0].to_empty(device="cpu")
    ours.costs = Costs(16.0, 1.0, 0.1)
    rates = torch.full((8000,), 0.001)
    rates[:256] = 0.94
    rates[256:384] = 0.40
    total = rates.sum().item()
    ours.update(1, [total], [rates])
    assert ours.hot_neurons == [384]
    change(ours._blocks[0], hot=tuple(range(256)))
    ours.update(2, [total], [rates])
    assert ours.hot_neurons == [384]
    change(ours._blocks[0], hot=tuple(range(384 - 1)))
    ours.update(3, [total], [rates])
    assert ours.hot_neurons == [383], "hardly faster"


def test_without_costs_other_hot_neurons_must_save_a_fourth_more():
    """Of a backend that was named: nothing was timed."""
    ours = scheduler(layers=1, neurons=8000)
    ours._blocks[0].to_empty(device="cpu")
    ours._make_sparse(0, "reference", 256)
    rates = torch.full((8000,), 0.001)
    rates[:256] = 0.94
    rates[256:384] = 0.40
    for hot, wanted in ((256, 256), (128, 384)):  # saving 233 and 117; the best, 283
        change(ours._blocks[0], hot=tuple(range(hot)))
        ours.update(1, [rates.sum().item()], [rates])
        assert ours.hot_neurons == [wanted]


def test_hot_neurons_can_be_switched_off():
    ours = scheduler(layers=1, hot_neurons=False)
    ours.costs = Costs(6.0, 1.0, 0.1)
    assert not ours.needs_firing_rates([500])
    assert not scheduler("dense").needs_firing_rates([500])
    assert scheduler("reference").needs_firing_rates([500])


def test_firing_rates_are_those_of_the_blocks():
    config = ModelConfig(
        layers=2, hidden_size=16, intermediate_size=32, attention_heads=2, key_value_heads=2, vocab_size=64
    )
    model = LossModel(build_model(config, plan="dense"), precision="float32")
    tokens = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    rates = firing_rates(model, tokens)
    blocks = feed_forward_blocks(model.model)
    nonzeros = [block.stats.nonzeros.double().mean() for block in blocks]
    assert [float(r.sum()) for r in rates] == pytest.approx([float(n) for n in nonzeros])
    assert not any(block._forward_pre_hooks for block in blocks)


def test_capacities_follow_the_mean():
    ours = scheduler("reference", layers=1, neurons=5632)
    assert ours.capacities == [5632], "nothing is known yet"
    found = []
    for step, count in enumerate([2800, 600, 300, 100, 60, 40, 70, 30]):
        ours.update(step, [count])
        found += ours.capacities
    assert found == [5632, 5632, 1024, 256, 256, 256, 256, 64]
    fixed = scheduler("reference", layers=1, neurons=5632, capacity=7)
    fixed.update(1, [300])
    assert fixed.capacities == [7]


def test_capacities_grow_to_what_was_needed(caplog):
    caplog.set_level("INFO")
    ours = scheduler("reference", layers=3, capacity=64)
    assert not ours.grow_capacities(1, [640, 640, 640], tokens=10)
    assert ours.grow_capacities(2, [641, 640, 3001], tokens=10)
    assert ours.capacities == [256, 64, 1000]
    assert ours.retried_steps == 1
    assert not ours.grow_capacities(2, [641, 640, 3001], tokens=10)
    assert caplog.records[-1].message == (
        "step 2 is retried, its non-zeros per token exceeded a capacity: layer 0 had 64.1, capacity 64, now 256; "
        "layer 2 had 300.1, capacity 64, now 1000"
    )
    assert not scheduler("dense").grow_capacities(1, [9999, 9999], tokens=1)


def test_a_plan_goes_on_where_its_options_allow_it():
    ours = scheduler()
    ours.costs = Costs(6.0, 1.0, 0.1)
    ours.update(1, [30, 500])
    ours.retried_steps = 3
    state = json.loads(json.dumps(ours.state()))
    again = scheduler()
    again.restore(state)
    assert (again.backends, again.capacities, again.retried_steps) == (ours.backends, [64, 0], 3)
    assert again.costs == ours.costs
    hot = scheduler(layers=1, neurons=8000)
    hot._blocks[0].to_empty(device="cpu")
    hot.costs = ours.costs
    hot.update(1, [80], [busy(130, 80)])
    new = scheduler(layers=1, neurons=8000)
    new._blocks[0].to_empty(device="cpu")
    new.restore(json.loads(json.dumps(hot.state())))
    assert new._blocks[0].plan == hot._blocks[0].plan
    for backend, expected in (("dense", ["dense"] * 2), ("reference", ["reference"] * 2)):
        other = scheduler(backend)
        other.restore(state)
        assert other.backends == expected
        assert other.costs is None
    elsewhere = BackendScheduler(
        scheduler()._blocks, SparseConfig(), ONE, Setting(**{**vars(HERE), "device": "another"})
    )
    elsewhere.restore(state)
    assert (elsewhere.backends, elsewhere.costs) == (ours.backends, None)


def test_the_backup_is_that_of_sparse_blocks():
    def backups(one):
        return [block.plan.backup for block in one._blocks]

    ours = scheduler(backup=0.25)
    ours.costs = Costs(6.0, 1.0, 0.1)
    assert backups(ours) == [0.0, 0.0]
    ours.update(1, [30, 500])
    assert backups(ours) == [0.25, 0.0]
    again = scheduler(backup=0.125)
    again.restore(json.loads(json.dumps(ours.state())))
    assert backups(again) == [0.125, 0.0], "of the run that goes on"
    ours.update(2, [80, 30])
    assert backups(ours) == [0.0, 0.25]
    assert backups(scheduler("reference", backup=0.5)) == [0.5, 0.5]
    assert backups(scheduler("dense", backup=0.5)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "capacity"), [(128, 128, 1000), (128, 64, 64), (None, 64, 64), (128, None, 1000)]
)
def test_another_capacity_counts_when_a_run_continues(before, after, capacity):
    ours = scheduler(capacity=before)
    ours.costs = Costs(6.0, 1.0, 0.1)
    ours.update(1, [30, 500])
    ours.grow_capacities(2, [600, 0], tokens=1)  # all of its neurons
    again = scheduler(capacity=after)
    again.restore(json.loads(json.dumps(ours.state())))
    assert again.capacities == [capacity, 0]


def test_without_a_sparse_backend_all_stays_dense(make, caplog):
    caplog.set_level("INFO")
    records = run(make("training.steps=2"))
    assert [record["backend"] for record in records] == [["dense", "dense"]] * 2
    lines = [record.message for record in caplog.records if "execution.sparse.backend" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("execution.sparse.backend=auto: every layer stays dense (")
    assert "it needs a CUDA device" in lines[0]


def test_processes_with_different_backends_stay_dense(make, monkeypatch, caplog):
    caplog.set_level("INFO")
    settings = {0: "hopper", 1: "triton"}

    class Two(Processes):
        def all_gather(self, value):
            return [dataclasses.replace(value, backend=name) for name in settings.values()]

    monkeypatch.setattr(backend_scheduler, "sparse_backend", lambda *_: ("hopper", ""))
    blocks = scheduler()._blocks
    found = backend_scheduler.build_scheduler(make(), blocks, Two(0, 2, ONE.device), 4)
    found.prepare()
    assert found.costs is None
    assert "every layer stays dense (not all processes have the same: hopper, triton)" in caplog.text


def test_options_that_contradict(make):
    with pytest.raises(ConfigError, match=r"to_dense_above must be at least to_sparse_below = 0.9, got 0.5"):
        make("execution.sparse.to_dense_above=0.5")
    with pytest.raises(ConfigError, match=r"execution.sparse.backup must be at most 1, got 1.5"):
        make("execution.sparse.backup=1.5")
    with pytest.raises(ConfigError, match=r"execution.sparse.backend=reference needs model.activation=relu"):
        make("execution.sparse.backend=reference", "model.activation=silu")


# --- in the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_switch_in_training(make, fragile, caplog):
    """The L1 term lowers the non-zeros; all numbers are bit-identical to those of a dense run."""
    caplog.set_level("INFO")
    options = ("training.steps=40", "sparsity.l1=0.1", *SAME_BITS[1:])
    dense, ours = make(*options, "execution.sparse.backend=dense", name="dense"), make(*options)
    records = run(ours)
    assert numbers(records) == numbers(run(dense))
    assert records[0]["backend"] == ["dense", "dense"]
    assert records[-1]["backend"] == [NAME, NAME]
    for before, record in itertools.pairwise(records):
        for layer, backend in enumerate(before["backend"]):
            limit = (0.9 if backend == "dense" else 1.0) * BREAK_EVEN
            assert record["backend"][layer] == (NAME if before["nonzeros"][layer] < limit else "dense")
    switches = [record.message for record in caplog.records if "from now on" in record.message]
    assert len(switches) >= 2
    rows = read_rows(ours.run.folder / "rows.csv")
    assert {(row["plan"], row["backend"]) for row in rows} == {("csr", NAME)}


@pytest.mark.slow
def test_training_with_a_backup(make, fragile, monkeypatch):
    """The run is the same for any share of the backup, even if that changes during the run."""
    monkeypatch.setattr(backend_scheduler, "capacity_for", capacity_for)
    forced = (*SAME_BITS, "execution.sparse.backend=reference")
    plain = run(make(*forced, name="plain"))
    run_first = make(*forced, "execution.sparse.backup=0.5", "run.max_steps=4", name="ours")
    with pytest.raises(Stopped):
        run(run_first)
    ours = run(make(*forced, "execution.sparse.backup=0.25", name="ours"))
    for one, other in zip(plain, ours, strict=True):
        assert other["cross_entropy"] == pytest.approx(one["cross_entropy"], rel=1e-4)
        assert other["nonzeros"] == pytest.approx(one["nonzeros"], rel=1e-2)
    other = make(
        *SAME_BITS, f"execution.sparse.backend={NAME}", "execution.sparse.backup=0.25", "training.steps=2", name="other"
    )
    run(other)
    assert {row["plan"] for row in read_rows(other.run.folder / "rows.csv")} == {"hybrid"}


@pytest.mark.slow
def test_a_switching_run_continues_bit_by_bit(make, fragile):
    options = ("training.steps=30", "sparsity.l1=0.1", *SAME_BITS[1:], "run.checkpoint_every=100")
    whole, parts = make(*options, name="whole"), make(*options, name="parts")
    records = run(whole)
    changes = [b["step"] for a, b in itertools.pairwise(records) if a["backend"] != b["backend"]]
    for stop in (changes[0] - 1, 3):
        with pytest.raises(Stopped):
            run(make(*options, f"run.max_steps={stop}", name="parts"))
    run(parts)
    assert_same_end(whole, parts)
    assert final(whole).state["scheduler"] == final(parts).state["scheduler"]


def test_a_retried_step_leaves_no_trace(make, fragile):
    dense = run(make(*SAME_BITS, "execution.sparse.backend=dense", name="dense"))
    ours = run(make(*SAME_BITS, *TIGHT))
    assert ours[-1]["retried_steps"] >= 3, "otherwise this test shows nothing"
    assert numbers(ours) == numbers(dense)


def test_an_exceeded_capacity_without_a_retry_raises(make, fragile, monkeypatch):
    monkeypatch.setattr(BackendScheduler, "grow_capacities", lambda *arguments: False)
    with pytest.raises(DivergenceError):
        run(make(*SAME_BITS, *TIGHT))


@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), NAME])
@pytest.mark.parametrize(
    "more", [(), pytest.param(("execution.activation_checkpointing=true",), marks=pytest.mark.slow)]
)
def test_too_little_capacity_changes_nothing(make, fragile, backend, more, monkeypatch):
    """The first step exceeds one non-zero per token; after that, the capacity is sufficient."""
    monkeypatch.setattr(backend_scheduler, "capacity_for", capacity_for)
    options = (*SAME_BITS, *more, f"execution.sparse.backend={backend}")
    roomy, tight = (make(*options, f"execution.sparse.capacity={size}", name=str(size)) for size in (32, 1))
    expected, found = run(roomy), run(tight)
    assert [record["retried_steps"] for record in expected] == [0] * 10
    assert [record["retried_steps"] for record in found] == [1] * 10
    assert numbers(found) == numbers(expected)
    assert_same_end_but_for_capacities(roomy, tight)


def assert_same_end_but_for_capacities(one, other):
    first, second = final(one), final(other)
    for name in ("model", "optimizer"):
        expected, found = getattr(first, name), getattr(second, name)
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert first.state["random"] == second.state["random"]


def test_the_same_random_numbers_and_data_again(make, fragile, monkeypatch):
    """As with dropout, which draws from the global generators: every attempt gets the same numbers as the first."""
    seen = {}
    real = LossModel.forward

    def forward(self, tokens):
        draws = (torch.rand(2).tolist(), random.random(), numpy.random.rand())  # noqa: NPY002
        if self.training and torch.is_grad_enabled():
            seen.setdefault(trainer_step(), []).append((tokens.sum().item(), draws))
        return real(self, tokens)

    steps = []
    monkeypatch.setattr(LossModel, "forward", forward)
    count = Trainer._train_step
    monkeypatch.setattr(Trainer, "_train_step", lambda *a: (steps.append(a[1]), count(*a))[1])

    def trainer_step():
        return steps[-1]

    records = run(make("execution.micro_batch=4", *TIGHT))
    repeated = {step: calls for step, calls in seen.items() if len(calls) > 2}
    assert len(repeated) == records[-1]["retried_steps"] > 0
    for calls in repeated.values():
        assert calls[:2] == calls[2:]
        assert calls[0] != calls[1]


@pytest.mark.slow
def test_two_processes_retry_together(make, arguments):
    """Even if only one of them had too little capacity; the layers switch in both."""
    options = ("sparsity.l1=0.1", *SAME_BITS[1:], "training.steps=25", "execution.sparse.capacity=1")
    both, dense = make(*options, name="both"), make(*options, "execution.sparse.backend=dense", name="dense")
    logged = run_two(arguments(*options, name="both"), module="fragile_backend")
    run_two(arguments(*options, "execution.sparse.backend=dense", name="dense"))
    records = metrics.read_metrics(both.run.folder)
    assert records[0]["backend"] == ["dense"] * 2
    assert NAME in records[-1]["backend"]
    assert records[-1]["retried_steps"] > 0
    assert "is retried, its non-zeros per token exceeded" in logged
    assert numbers(records) == numbers(metrics.read_metrics(dense.run.folder))


# --- with torch.compile -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("execution.activation_checkpointing=true",)])
def test_steps_are_retried_under_torch_compile(make, fragile, traced, more):
    options = ("execution.compile=true", *more, *SAME_BITS, "training.steps=4", *TIGHT)
    roomy, ours = run(make(*options, "execution.sparse.capacity=32", name="roomy")), run(make(*options))
    assert roomy[-1]["retried_steps"] == 0
    assert ours[-1]["retried_steps"] > 0
    assert numbers(ours) == numbers(roomy)


@pytest.mark.slow
def test_a_layer_that_switches_is_compiled_once(traced):
    torch._dynamo.reset()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "attention_heads": 2, "key_value_heads": 2, "vocab_size": 50}
    model = build_model(ModelConfig(layers=3, **sizes), plan="dense")
    loss, blocks = LossModel(model), feed_forward_blocks(model)
    loss.compile_parts()
    tokens = torch.arange(20).view(2, 10)

    def graphs():
        torch._dynamo.utils.counters.clear()
        cross_entropy, l1 = loss(tokens)
        (cross_entropy + l1).backward()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert graphs() == 3, "a layer, the last norm, the loss"
    assert graphs() == 0
    change(blocks[1], backend="reference")
    assert graphs() == 2, "a layer before and after its block"
    change(blocks[0], backend="reference")
    change(blocks[2], backend="reference")
    assert graphs() == 0
    change(blocks[0], capacity=64)
    change(blocks[1], hot=tuple(range(8)))
    assert graphs() == 0
    for block in blocks:
        block.plan = "dense"
    assert graphs() == 0


def test_activity_counts_the_fullest_call():
    def stats(nonzeros):
        return FFNStats(torch.tensor(nonzeros, dtype=torch.int32), None, torch.ones(4, dtype=torch.bool), None, "dense")

    activity = Activity(2, 4, ONE.device)
    activity.add([stats([1, 1]), stats([4, 4])])
    activity.add([stats([3, 0]), stats([1, 2])])
    assert activity.most_nonzeros_L.tolist() == [3, 8]
    activity.clear()
    assert activity.most_nonzeros_L.tolist() == [0, 0]


def test_activity_leaves_out_the_backup():
    def stats(nonzeros):
        return FFNStats(torch.tensor(nonzeros, dtype=torch.int32), None, torch.ones(4, dtype=torch.bool), None, "dense")

    activity = Activity(2, 4, ONE.device, backup=0.5)
    activity.add([stats([1, 4, 2]), stats([4, 4, 3])])  # two of three tokens
    activity.add([stats([2, 2, 2]), stats([0, 0, 0])])
    assert activity.most_nonzeros_L.tolist() == [2, 3]
    activity.share(ONE)
    assert activity.nonzeros() == pytest.approx([13 / 6, 11 / 6])
