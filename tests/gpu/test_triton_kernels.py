"""Tests that are specific to the Triton backend: its configurations. The rest is in test_sparse_backends.py."""

import pytest
import torch
from calls import run_ffn
from packed_formats import as_twell

from twell.interface import Weights
from twell.memory import neuron_major
from twell.testing import check, evaluate, make_problem, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_triton", "poisoned_memory")]


def y_and_l1(x, w_gate, w_up, w_down):
    y, stats = run_ffn(x, w_gate, w_up, w_down, backend="triton")
    return y, stats.l1


def test_packing_is_exact():
    from twell.triton import inference

    p = make_problem(1000, 256, 1500, 20.0, device="cuda")
    device = inference.device(p.x.device)
    configs = {inference.gate_config(device.capability, tokens, 1500, device.sm_count) for tokens in (1, 10**3, 10**6)}
    for config in configs:
        packed = inference.gate_pack(p.x, Weights(p.w_gate, p.w_up, neuron_major(p.w_down).t()), config)
        format_ = as_twell(packed, 1500, config.tile)
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


@pytest.mark.parametrize("hidden", [16, 80, 336, 1040])
def test_hidden_sizes_that_no_step_divides(hidden):
    check(y_and_l1, make_problem(300, hidden, 520, 20.0, device="cuda"))


WAYS = [
    {"chunk": 4, "programs": 12},  # fewer tokens a chunk than there are programs: the race for a new one
    {"chunk": 32, "programs": 6, "across": 2},
    {"chunk": 0},
    {"chunk": 0, "parts": 4, "share": 5},
    {"chunk": 0, "parts": 16, "share": 1, "across": 2},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_that_tokens_come_to_programs(way, monkeypatch):
    from twell.triton import backward, inference

    config = inference.TokenConfig(**{"across": 1, **way})
    for module in (inference, backward):
        monkeypatch.setattr(module, "token_config", lambda *args, **options: config)
    p = make_problem(20000, 512, 1024, 15.0, device="cuda")
    dy = torch.randn_like(p.x)
    check(y_and_l1, p, dy, 0.5)
    first = evaluate(y_and_l1, p, dy, 0.5)
    for _ in range(5):
        again = evaluate(y_and_l1, p, dy, 0.5)
        assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize(("slice_", "ahead"), [(32, 1), (256, 8), (512, 4), (1024, 2)])
def test_every_way_to_add_up_weight_gradients(slice_, ahead, monkeypatch):
    from twell.triton import backward

    monkeypatch.setattr(backward, "weight_config", lambda hidden: backward.WeightConfig(slice_, ahead))
    p = make_problem(3000, 528, 700, 15.0, device="cuda")
    check(y_and_l1, p, torch.randn_like(p.x), 0.5)


@pytest.mark.parametrize("hidden", [16, 80, 336, 1040])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_of_hidden_sizes_that_no_step_divides(hidden, gated):
    p = make_problem(300, hidden, 520, 20.0, gated=gated, device="cuda")
    check(y_and_l1, p, torch.randn_like(p.x), 0.5)


def test_offsets_past_32_bits():
    tokens, intermediate = 400_000, 12_000
    p = make_problem(tokens, 64, intermediate, 3.0, device="cuda")
    y = run_ffn(*p, backend="triton", stats=False)[0]
    last = p._replace(x=p.x[-500:])
    check(lambda *args: (y[-500:], y_and_l1(*args)[1]), last)
