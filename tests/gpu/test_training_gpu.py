"""Training with the Hopper kernels: layers that switch, steps that are retried, torch.compile."""

import itertools

import pytest
import torch
from fragile_backend import just_enough
from programs import run_two
from same_run import final, without_times

from experiments import train
from experiments.bench.training_step import Form, TrainingStep
from experiments.models.llama import build_model
from experiments.run.train_config import ModelConfig
from experiments.training import backend_scheduler, metrics
from experiments.training.layer_costs import Costs, Setting, measure_costs

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
PLAN = {"backend", "capacity", "hot_neurons", "retried_steps"}
BOTH = pytest.mark.parametrize("compiled", [False, True])


@pytest.fixture
def deterministic(monkeypatch):
    """Attention's backward is not, by default."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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


def numbers(records):
    return [{key: value for key, value in record.items() if key not in PLAN} for record in without_times(records)]


def pays_below(break_even, monkeypatch):
    monkeypatch.setattr(backend_scheduler, "measure_costs", lambda *_: Costs(1.0, 0.0, 1 / break_even))


@BOTH
def test_layers_switch_and_the_loss_stays(start, compiled, monkeypatch):
    pays_below(1e6, monkeypatch)
    _, dense = start("execution.sparse.backend=dense", compiled=compiled, name="dense")
    _, ours = start(compiled=compiled)
    assert [record["backend"] for record in ours] == [["dense"] * LAYERS, *[["hopper"] * LAYERS] * 5]
    for one, other in zip(dense, ours, strict=True):
        assert other["cross_entropy"] == pytest.approx(one["cross_entropy"], rel=5e-3), one["step"]
        assert other["nonzeros"] == pytest.approx(one["nonzeros"], rel=0.05), one["step"]
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1), one["step"]
    assert ours[-1]["validation_cross_entropy"] == pytest.approx(dense[-1]["validation_cross_entropy"], rel=5e-3)


@BOTH
def test_hot_neurons_change_nothing(start, compiled, monkeypatch):
    pays_below(1e6, monkeypatch)
    _, dense = start("execution.sparse.backend=dense", compiled=compiled, name="dense")
    _, ours = start("execution.sparse.hot_neurons=true", compiled=compiled)
    assert ours[0]["hot_neurons"] == [0] * LAYERS
    assert all(min(record["hot_neurons"]) >= 128 for record in ours[1:])
    for one, other in zip(dense, ours, strict=True):
        assert other["cross_entropy"] == pytest.approx(one["cross_entropy"], rel=5e-3), one["step"]
        assert other["nonzeros"] == pytest.approx(one["nonzeros"], rel=0.05), one["step"]


def test_layers_follow_measured_costs(start):
    """Whichever is faster at this small size: layers are as the costs in the checkpoint say."""
    config, records = start()
    plan = final(config).state["scheduler"]
    assert plan["setting"]["backend"] == "hopper"
    costs = Costs(**plan["costs"])
    assert costs.dense_ms > 0
    for before, record in itertools.pairwise(records):
        for layer, backend in enumerate(before["backend"]):
            limit = (0.9 if backend == "dense" else 1.0) * costs.break_even
            assert record["backend"][layer] == ("hopper" if before["nonzeros"][layer] < limit else "dense")


def test_costs_at_a_size_that_pays():
    """The break-even lies far from both ends, and nothing stays in memory but what cuBLAS keeps."""
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated(CUDA)
    costs = measure_costs(Setting("hopper", "", "bfloat16", 16384, 2048, 5632, True, compiled=False), CUDA)
    assert 0 < costs.fixed_ms < costs.dense_ms
    assert 25 < costs.break_even < 400
    after, peak = torch.cuda.memory_allocated(CUDA), torch.cuda.max_memory_allocated(CUDA)
    torch._C._cuda_clearCublasWorkspaces()
    left = torch.cuda.memory_allocated(CUDA)
    assert left <= held + 2**20
    assert peak <= held + (after - left) + 2**20


@pytest.mark.parametrize("more", [(), ("execution.activation_checkpointing=true",)])
def test_retried_steps_leave_no_trace(start, deterministic, more, monkeypatch):
    """Starting at one non-zero per token, capacities grow to exactly what a step needs."""
    forced = ("execution.sparse.backend=hopper", *more)
    _, roomy = start(*forced, f"execution.sparse.capacity={NEURONS}", name="roomy")
    monkeypatch.setattr(backend_scheduler, "capacity_for", just_enough)
    _, tight = start(*forced, "execution.sparse.capacity=1")
    assert roomy[-1]["retried_steps"] == 0
    assert tight[-1]["retried_steps"] >= 1
    assert numbers(tight) == numbers(roomy)


def test_a_step_is_retried_under_torch_compile(start, deterministic):
    forced = ("execution.sparse.backend=hopper", "training.steps=3")
    _, roomy = start(*forced, f"execution.sparse.capacity={NEURONS}", compiled=True, name="roomy")
    _, tight = start(*forced, "execution.sparse.capacity=1", compiled=True)
    assert [record["retried_steps"] for record in tight] == [1, 1, 1]
    assert numbers(tight) == numbers(roomy)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_process_that_fails_alone_ends_the_others(arguments):
    """With NCCL, leaving the group in order would wait for the others, who wait for this one."""
    logged = run_two(["failure", *arguments(*SHAPE, "execution.device=cuda")], module="one_of_two", code=1, fork=False)
    assert "RuntimeError: the second process fails alone" in logged


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(start, arguments):
    """Sparse layers that retry steps, DDP with NCCL, and a sharded optimizer."""
    options = ("execution.sparse.backend=hopper", "execution.sparse.capacity=1", "execution.shard_optimizer=true")
    config, one = start(*options, name="one")
    run_two(arguments(*SHAPE, *options, "execution.device=cuda", name="two"), fork=False)
    two = metrics.read_metrics(config.run.folder.parent / "two")
    assert [record["backend"] for record in two] == [["hopper"] * LAYERS] * 6
    assert two[-1]["retried_steps"] >= 1
    for ours, other in zip(two, one, strict=True):
        assert ours["cross_entropy"] == pytest.approx(other["cross_entropy"], rel=5e-3), ours["step"]
        assert ours["nonzeros"] == pytest.approx(other["nonzeros"], rel=0.05), ours["step"]
