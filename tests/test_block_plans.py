"""When a training's blocks are measured, and that whatever they are given leaves the training as it was."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from calls import change, make_block
from fragile_backend import NAME, always_faster
from programs import run_two
from same_run import assert_same_end, final, run, stop, without_times
from tiny_run import MODEL

from experiments.models.llama import build_model, feed_forward_blocks
from experiments.run.distributed import Processes
from experiments.run.results import read_rows
from experiments.run.train_config import SparseConfig
from experiments.training import block_plans, metrics
from experiments.training.block_plans import BlockPlans, build_plans
from experiments.training.loss import LossModel, firing_rates
from twell import Plan, registry
from twell.tuning import training

ONE = Processes(0, 1, torch.device("cpu"))
# The dense path and the double give the same bits, so that whatever a layer runs must not be seen.
SAME_BITS = ("sparsity.l1=1e-3", "sparsity.dead_neuron_reinit=true", "execution.micro_batch=2")
PLAN = {"backend", "capacity", "hot_neurons"}


@pytest.fixture
def fragile(monkeypatch):
    """The double is registered, and faster than dense products wherever it is measured."""
    monkeypatch.setitem(registry.FILES, NAME, "fragile_backend")
    monkeypatch.setattr(training, "quick_times", always_faster)
    monkeypatch.setattr(training, "queued_times", lambda calls, other, device: always_faster(calls, device))
    monkeypatch.setattr(training, "_compile", lambda: training._output_and_l1)
    monkeypatch.setattr(block_plans, "MOST_NONZEROS", 0.45)


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces, and runs what it traced without code generation, which alone takes a minute."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, **options, backend="aot_eager"))


@pytest.fixture
def tuned(monkeypatch):
    """What `autotune` is asked for. It makes the blocks sparse, with two hot neurons if it may."""
    asked = []

    def autotune(model, tokens, *, blocks, hot, compiled):
        asked.append(len(blocks))
        for block in blocks:
            change(block, backend="reference", hot=(3, 5) if hot else ())

    monkeypatch.setattr(block_plans, "autotune", autotune)
    return asked


def numbers(records):
    """What does not depend on the plans."""
    return [{key: value for key, value in record.items() if key not in PLAN} for record in without_times(records)]


def plans_of(backend="auto", layers=2, neurons=1000, **options):
    blocks = [make_block(16, neurons, backend="dense") for _ in range(layers)]
    chosen = "reference" if backend == "auto" else backend
    return BlockPlans(blocks, SparseConfig(backend=backend, **options), chosen, compiled=False)


def choose(plans, *nonzeros, rates=None):
    plans.choose(nonzeros, None, None, lambda: rates)


# --- when, and what ---------------------------------------------------------------------------------------------------


def test_dense_layers_are_measured_when_few_neurons_fire_and_sparse_ones_when_many_do(tuned):
    plans = plans_of(hot_neurons=False)  # at most 62.5 of 1000 neurons
    assert plans.due([500, 63]) == []
    assert plans.due([500, 62]) == [1]
    choose(plans, 500, 60)
    assert plans.backends == ["dense", "reference"]
    assert plans.due([500, 119]) == plans.due([500, 1]) == []
    assert plans.due([500, 120]) == [1]
    assert plans.due([60, 60]) == [0]
    choose(plans, 60, 0)
    assert tuned == [1, 1]
    plans._blocks[0].plan = Plan()  # as if dense products were still faster
    assert plans.due([200, 0]) == plans.due([31, 0]) == []
    assert plans.due([30, 0]) == [0]


def test_a_whole_training_measures_each_layer_once_and_its_hot_neurons_follow(tuned):
    """As the 0.5B model's non-zeros fall and rise again within 800 steps, by tens of steps."""
    plans, neurons = plans_of(layers=8, neurons=5632), 5632
    falling = [neurons / 2 * 0.9**step for step in range(36)]
    hot = []
    for nonzeros in (*falling, *(falling[-1] + 0.6 * step for step in range(45))):
        rates = torch.where(torch.arange(neurons) < nonzeros, 0.9, 0.001)
        choose(plans, *[nonzeros] * 8, rates=[rates] * 8)
        hot.append(plans.hot_neurons[3])
    assert sum(tuned) == 8
    assert hot[35] == 128 < max(hot[22:]) == 384
    assert plans.capacities == [128] * 8, "enough for those that are not hot"


def test_nothing_is_chosen_where_nothing_can_be():
    for backend in ("dense", "reference"):
        plans = plans_of(backend, hot_neurons=False, capacity=7)
        choose(plans, 5, 5)
        assert plans.backends == [backend] * 2
        assert plans.hot_neurons == [0, 0]
        assert plans.capacities == [7 if backend == "reference" else 0] * 2


def test_a_named_backend_has_the_hot_neurons_of_the_firing_rates():
    plans, rates = plans_of("reference", neurons=512), torch.full((512,), 0.001)
    assert plans.capacities == [128, 128], "until something is known"
    rates[7 : 7 + 200] = 0.9
    choose(plans, 180, 300, rates=[rates, torch.full((512,), 0.6)])
    assert set(range(7, 207)) <= set(plans._blocks[0].plan.indices)
    assert plans.hot_neurons == [256, 512]
    assert plans.capacities == [128, 128], "enough for those that are not hot"
    choose(plans, 170, 310, rates=None)
    assert plans.hot_neurons == [256, 512], "hardly changed"
    choose(plans, 5, 310, rates=[torch.full((512,), 0.01)] * 2)
    assert plans.hot_neurons == [0, 512]


def test_what_is_configured_is_part_of_every_plan(tuned):
    plans = plans_of(capacity=64, backup=0.25, hot_neurons=False)
    assert [block.plan for block in plans._blocks] == [Plan("dense", capacity=64, backup=0.25)] * 2
    choose(plans, 30, 500)
    assert plans._blocks[0].plan == Plan("reference", capacity=64, backup=0.25)
    assert (plans.capacities, plans.hot_neurons) == ([64, 0], [0, 0])


def again(plans, backend="auto", rank=0, **options):
    """The plans of a run that goes on from a checkpoint of these."""
    other = plans_of(backend, **options)
    other.restore(json.loads(json.dumps(plans.state([plans.capacities, [999, 0]]))), rank)
    return other


def test_plans_go_on_where_their_options_allow_it(tuned):
    plans = plans_of()
    choose(plans, 30, 500)
    plans._blocks[0].current_capacity = 777
    same = again(plans)
    assert [block.plan for block in same._blocks] == [Plan("reference", (3, 5)), Plan()]
    assert same.capacities == [777, 0]
    assert again(plans, rank=1).capacities == [999, 0], "each process has its own"
    assert again(plans, rank=2).capacities == [128, 0], "one that was not there"
    assert same.due([40, 40]) == [1], "the first was measured before"
    assert again(plans, "dense").backends == ["dense", "dense"]
    assert again(plans, "dense").due([40, 40]) == []
    assert again(plans, capacity=64).capacities == [64, 0]
    assert again(plans, backup=0.5)._blocks[0].plan == Plan("reference", (3, 5), backup=0.5)
    assert again(plans, hot_neurons=False).hot_neurons == [0, 0]
    named = again(plans, "reference")
    assert (named.backends, named.hot_neurons) == (["reference"] * 2, [2, 0])
    choose(named, 30, 40, rates=[torch.full((1000,), 0.9)] * 2)
    assert named.hot_neurons == [2, 896], "the first was fitted before"


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

    class Two(Processes):
        def all_gather(self, value):
            return [value, "triton"]

    monkeypatch.setattr(block_plans, "sparse_backend", lambda *_: ("hopper", ""))
    plans = build_plans(make(), plans_of()._blocks, Two(0, 2, ONE.device))
    assert plans.due([1, 1]) == []
    assert "every layer stays dense (not all processes have the same: hopper, triton)" in caplog.text


def test_firing_rates_are_those_of_the_blocks():
    model = LossModel(build_model(MODEL), precision="float32")
    tokens = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    rates = firing_rates(model, tokens)
    blocks = feed_forward_blocks(model.model)
    nonzeros = [block.stats.nonzeros.double().mean() for block in blocks]
    assert [float(r.sum()) for r in rates] == pytest.approx([float(n) for n in nonzeros])
    assert not any(block._forward_pre_hooks for block in blocks)


# --- in the loop ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("execution.activation_checkpointing=true",), ("execution.compile=true",)])
def test_layers_become_sparse_in_training(make, fragile, traced, more):
    """The L1 term lowers the non-zeros; all numbers are bit-identical to those of a dense run."""
    options = ("training.steps=30", "sparsity.l1=0.1", *SAME_BITS[1:], *more, "execution.sparse.hot_neurons=false")
    dense, ours = make(*options, "execution.sparse.backend=dense", name="dense"), make(*options)
    records = run(ours)
    assert numbers(records) == numbers(run(dense))
    assert records[-1]["backend"] == [NAME, NAME]
    for before, record in itertools.pairwise(records):
        for layer, nonzeros in enumerate(before["nonzeros"]):
            assert before["backend"][layer] == "dense" or record["backend"][layer] == NAME, "they do not double"
            assert record["backend"][layer] == NAME or nonzeros > 0.45 * 32
    rows = read_rows(ours.run.folder / "rows.csv")
    assert {(row["plan"], row["backend"]) for row in rows} == {("csr", NAME)}


@pytest.mark.slow
def test_training_with_a_backup(make):
    """The run is the same for any share of the backup, even if that changes during the run."""
    forced = (*SAME_BITS, "execution.sparse.backend=reference", "execution.sparse.hot_neurons=false")
    plain = run(make(*forced, name="plain"))
    run_first = make(*forced, "execution.sparse.backup=0.5", "run.max_steps=4", name="ours")
    stop(run_first)
    ours = make(*forced, "execution.sparse.backup=0.25", name="ours")
    for one, other in zip(plain, run(ours), strict=True):
        assert other["cross_entropy"] == pytest.approx(one["cross_entropy"], rel=1e-4)
        assert other["nonzeros"] == pytest.approx(one["nonzeros"], rel=1e-2)
    assert {row["plan"] for row in read_rows(ours.run.folder / "rows.csv")} == {"hybrid"}


def test_a_run_that_changes_its_plans_continues_bit_by_bit(make, fragile):
    options = ("training.steps=16", "sparsity.l1=0.1", *SAME_BITS[1:], "run.checkpoint_every=100")
    whole, parts = make(*options, name="whole"), make(*options, name="parts")
    records = run(whole)
    changes = [b["step"] for a, b in itertools.pairwise(records) if a["backend"] != b["backend"]]
    stop(make(*options, f"run.max_steps={changes[0] + 1}", name="parts"))
    run(parts)
    assert_same_end(whole, parts)
    assert final(whole).state["plans"] == final(parts).state["plans"]
    assert NAME in final(whole).state["plans"]["plans"][0].values()


@pytest.mark.parametrize("capacity", [1, None])
@pytest.mark.parametrize(
    "more", [(), pytest.param(("execution.activation_checkpointing=true",), marks=pytest.mark.slow)]
)
def test_too_little_capacity_changes_nothing(make, fragile, capacity, more, monkeypatch):
    """Of the double, gradients beyond its capacity would be NaN, and the block asks for dense products instead."""
    monkeypatch.setattr("twell.modules.CAPACITY", 1)
    monkeypatch.setattr(block_plans, "capacity_for", lambda nonzeros, neurons: 1)
    options = (*SAME_BITS, *more, "training.steps=4", "execution.sparse.hot_neurons=false")
    dense = make(*options, "execution.sparse.backend=dense", name="dense")
    number = "null" if capacity is None else capacity
    ours = make(*options, f"execution.sparse.backend={NAME}", f"execution.sparse.capacity={number}", name="ours")
    records = run(ours)
    assert numbers(records) == numbers(run(dense))
    assert (records[-1]["capacity"] == [1, 1]) == (capacity == 1)


@pytest.mark.slow
def test_two_processes_choose_alike(make, arguments):
    """Whichever of them had too little capacity."""
    options = ("sparsity.l1=0.1", *SAME_BITS[1:], "training.steps=25", "execution.sparse.hot_neurons=false")
    both, dense = make(*options, name="both"), make(*options, "execution.sparse.backend=dense", name="dense")
    run_two(arguments(*options, "execution.sparse.capacity=12", name="both"), module="fragile_backend")
    run_two(arguments(*options, "execution.sparse.backend=dense", name="dense"))
    records = metrics.read_metrics(both.run.folder)
    assert records[-1]["backend"] == [NAME] * 2
    assert numbers(records) == numbers(metrics.read_metrics(dense.run.folder))
    assert [len(final(both).state["plans"]["capacities"])] == [2]


@pytest.mark.slow
def test_a_layer_that_changes_is_compiled_once(traced):
    torch._dynamo.reset()
    model = build_model(replace(MODEL, layers=3))
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
