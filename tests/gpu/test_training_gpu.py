"""Training with the Hopper kernels: layers that become sparse, too little capacity, torch.compile."""

import pytest
import torch
from fragile_backend import always_faster
from programs import run_shards, run_two
from same_run import final

from experiments import train
from experiments.bench.training_step import Form, TrainingStep
from experiments.models.llama import build_model
from experiments.run.train_config import ModelConfig
from experiments.training import block_plans, metrics
from twell.tuning import training

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_hopper")]
CUDA = torch.device("cuda", 0)
LAYERS, NEURONS = 3, 1024
SHAPE = (
    f"model.layers={LAYERS}",
    "model.hidden_size=256",
    f"model.intermediate_size={NEURONS}",
    "model.attention_heads=4",
    "model.key_value_heads=4",
    "model.max_positions=128",
    "training.sequence_length=128",
    "training.tokens_per_step=4096",
    "training.precision=bfloat16",
    "training.steps=6",
    "optimizer.learning_rate=1e-3",
    "sparsity.l1=1e-3",
    "sparsity.dead_neuron_reinit=true",
    "execution.sparse.hot_neurons=false",  # a young model's are all hot, and would leave the sparse kernels nothing
    "execution.micro_batch=16",
    "run.evaluate_every=3",
)
BOTH = pytest.mark.parametrize("compiled", [False, True])


@pytest.fixture
def start(make):
    def run(*options, compiled=False, name="run"):
        config = make(*SHAPE, *options, f"execution.compile={str(compiled).lower()}", name=name)
        train.main(config)
        return config, metrics.read_metrics(config.run.folder)

    return run


@pytest.mark.parametrize("name", ["hopper", "dense"])
def test_each_block_of_a_benchmarked_step_is_right(name):
    """As `bench_training` checks it, on the inputs and output gradients of a young model."""
    shape = dict(option.removeprefix("model.").split("=") for option in SHAPE if option.startswith("model."))
    config = ModelConfig(name="small", vocab_size=512, **{key: int(value) for key, value in shape.items()})
    step = TrainingStep(build_model(config, seed=0, device=CUDA), torch.bfloat16)
    tokens = torch.randint(512, (4, 129), device=CUDA, generator=torch.Generator(CUDA).manual_seed(0))
    assert 0 < step.check(Form(name, name, 1e-3), tokens) < 0.05


def pays_at_once(monkeypatch):
    monkeypatch.setattr(training, "quick_times", always_faster)
    monkeypatch.setattr(training, "queued_times", lambda calls, other, device: always_faster(calls, device))
    monkeypatch.setattr(block_plans, "MOST_NONZEROS", 1.0)


def assert_alike(ours, others):
    """All but for rounding."""
    for one, other in zip(ours, others, strict=True):
        assert one["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=5e-3), one["step"]
        assert one["nonzeros"] == pytest.approx(other["nonzeros"], rel=0.05), one["step"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.1), one["step"]


@BOTH
def test_layers_become_sparse_and_the_loss_stays(start, compiled, monkeypatch):
    pays_at_once(monkeypatch)
    _, dense = start("execution.sparse.backend=dense", compiled=compiled, name="dense")
    _, ours = start(compiled=compiled)
    assert [record["backend"] for record in ours] == [["dense"] * LAYERS, *[["hopper"] * LAYERS] * 5]
    assert_alike(ours, dense)
    assert ours[-1]["validation_cross_entropy"] == pytest.approx(dense[-1]["validation_cross_entropy"], rel=5e-3)


@BOTH
def test_hot_neurons_change_nothing(start, compiled, monkeypatch):
    pays_at_once(monkeypatch)
    _, dense = start("execution.sparse.backend=dense", compiled=compiled, name="dense")
    _, ours = start("execution.sparse.hot_neurons=true", compiled=compiled)
    assert ours[0]["hot_neurons"] == [0] * LAYERS
    assert all(min(record["hot_neurons"]) >= 128 for record in ours[1:])
    assert_alike(ours, dense)


@BOTH
def test_layers_are_what_is_measured(start, compiled, monkeypatch):
    """With the real times, whichever is faster at this small size."""
    monkeypatch.setattr(block_plans, "MOST_NONZEROS", 1.0)
    config, records = start(compiled=compiled)
    assert {name for record in records for name in record["backend"]} <= {"dense", "hopper"}
    plans = final(config).state["plans"]
    assert [plan.get("backend", "dense") for plan in plans["plans"]] == records[-1]["backend"]
    assert all(plans["measured"])


@BOTH
@pytest.mark.parametrize("more", [(), ("execution.activation_checkpointing=true",)])
def test_too_little_capacity_changes_nothing_but_rounding(start, compiled, more):
    forced = ("execution.sparse.backend=hopper", *more)
    _, roomy = start(*forced, f"execution.sparse.capacity={NEURONS}", compiled=compiled, name="roomy")
    _, tight = start(*forced, "execution.sparse.capacity=1", compiled=compiled, name="tight")
    _, grown = start(*forced, compiled=compiled, name="grown")
    assert tight[-1]["capacity"] == [1] * LAYERS
    assert all(capacity > 128 for capacity in grown[-1]["capacity"])
    assert_alike(tight, roomy)
    assert_alike(grown, roomy)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_that_fails_alone_ends_the_others(arguments):
    """With NCCL, leaving the group in order would wait for the others, who wait for this one."""
    logged = run_two(["failure", *arguments(*SHAPE, "execution.device=cuda")], module="one_of_two", code=1, fork=False)
    assert "RuntimeError: the second process fails alone" in logged


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["dense", "hopper", "triton"])
def test_two_gpus_shard_blocks(backend, tmp_path):
    """FSDP2 with NCCL, as README.md says."""
    for found in run_shards(tmp_path / "store", backend):
        assert float(found.removeprefix("off by ")) < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(start, arguments):
    """Sparse layers with too little capacity, and DDP with NCCL."""
    options = ("execution.sparse.backend=hopper", "execution.sparse.capacity=1")
    config, one = start(*options, name="one")
    run_two(arguments(*SHAPE, *options, "execution.device=cuda", name="two"), fork=False)
    two = metrics.read_metrics(config.run.folder.parent / "two")
    assert [record["backend"] for record in two] == [["hopper"] * LAYERS] * 6
    for ours, other in zip(two, one, strict=True):
        assert ours["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=5e-3), ours["step"]
        assert ours["nonzeros"] == pytest.approx(other["nonzeros"], rel=0.05), ours["step"]
