"""Generation on a GPU: decoding steps are CUDA graphs, and sparse blocks are inside them."""

import pytest
import torch

from experiments.bench.generation import Generation, _Checker
from experiments.models.llama import build_model
from experiments.run.train_config import ModelConfig
from experiments.timing.compare import Candidate
from experiments.timing.measure import time_alternatives
from experiments.timing.power import energy_meter

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SHAPE = ModelConfig("tiny", 2, 256, 1024, 4, 4, vocab_size=512, max_positions=64)


@pytest.mark.parametrize("batch", [1, 3])
def test_every_alternative_is_right_again_after_the_others_ran(backend, batch):
    model = build_model(SHAPE, seed=1, device=CUDA, dtype=torch.bfloat16).eval()
    prompts = torch.randint(512, (batch, 16), generator=torch.Generator().manual_seed(0)).to(CUDA)
    generation = Generation(model, prompts, 16)
    found = generation.alternatives(["dense_eager", "dense_compiled"], [backend, "auto"])
    assert all(isinstance(one, Candidate) for one in found), found
    assert [one.backend for one in found[:4]] == ["dense_eager", "dense_compiled", backend, f"{backend}_compiled"]
    checker = _Checker(generation.as_it_comes, range(batch))
    for one in found * 2:  # what was recorded for one is still right after the others ran
        _, tokens = checker.check(one.name, one.call)
        assert tokens.shape == (batch, 16)


def test_a_compiled_decoding_step_launches_graphs_not_kernels(backend):
    model = build_model(SHAPE, seed=1, device=CUDA, dtype=torch.bfloat16).eval()
    prompts = torch.zeros(1, 16, dtype=torch.int64, device=CUDA)
    _, compiled = Generation(model, prompts, 16).alternatives(["dense_compiled"], [backend])
    compiled.call()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        compiled.call()
    launches = {event.key: event.count for event in profile.key_averages()}
    assert launches.get("cudaGraphLaunch", 0) >= 15, "one for each step behind the prompts' forward"
    timed = time_alternatives({"one": compiled.call}, CUDA, energy_meter(CUDA), seconds=0.2, rounds=1, settle_seconds=0)
    assert 0 < compiled.known["device_time"].value < timed["one"].time().value
