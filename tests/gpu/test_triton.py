"""What is particular to the Triton backend: its configurations. The rest is in test_sparse_backends.py."""

import pytest
import torch

from kernels import neuron_major, sparse_ffn
from kernels.registry import probe
from kernels.testing import check, make_problem, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_triton():
    availability = probe("triton", torch.device("cuda", 0))
    if not availability.ok:
        pytest.skip(f"no Triton backend here: {availability.reason}")


def y_and_l1(x, w_gate, w_up, w_down):
    y, stats = sparse_ffn(x, w_gate, w_up, w_down, backend="triton")
    return y, stats.l1


def test_packing_is_exact():
    from kernels.triton import twell

    p = make_problem(1000, 256, 1500, 20.0, device="cuda")
    device = twell.device(p.x.device)
    configs = {twell.gate_config(device.capability, tokens, 1500, device.processors) for tokens in (1, 10**3, 10**6)}
    for config in configs:
        packed = twell.gate_pack(p.x, p.w_gate, p.w_up, neuron_major(p.w_down).t(), config)
        format_ = packed.to_twell()
        format_.validate()
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


@pytest.mark.parametrize("hidden", [16, 80, 336, 1040])
def test_hidden_sizes_that_no_step_divides(hidden):
    check(y_and_l1, make_problem(300, hidden, 520, 20.0, device="cuda"))


@pytest.mark.parametrize(("team", "across", "chunk"), [(1, 1, 0), (1, 1, 4), (2, 2, 0), (4, 1, 8), (1, 2, 32)])
def test_every_way_to_share_a_token(team, across, chunk, monkeypatch):
    """Also the queues, with fewer tokens a chunk than there are programs on a processor: the race for a new chunk."""
    from kernels.triton import twell

    config = twell.DownConfig(team=team, across=across, chunk=chunk, programs=12 // (team * across))
    monkeypatch.setattr(twell, "down_config", lambda *args: config)
    p = make_problem(20000, 512, 1024, 15.0, device="cuda")
    check(y_and_l1, p)
    first = sparse_ffn(*p, backend="triton")[0]
    for _ in range(5):
        assert torch.equal(sparse_ffn(*p, backend="triton")[0], first)


def test_offsets_past_32_bits():
    tokens, intermediate = 400_000, 12_000
    p = make_problem(tokens, 64, intermediate, 3.0, device="cuda")
    y = sparse_ffn(*p, backend="triton", stats="none")[0]
    last = p._replace(x=p.x[-500:])
    check(lambda *args: (y[-500:], y_and_l1(*args)[1]), last)
