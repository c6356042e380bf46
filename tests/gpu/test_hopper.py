"""Tests that are specific to the Hopper backend; the rest is in test_sparse_backends.py."""

import pytest
import torch

from kernels import neuron_major, sparse_ffn
from kernels.hopper import twell
from kernels.interface import Weights
from kernels.testing import check, make_problem, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_hopper", "poisoned_memory")]
CUDA = "cuda"


def test_packing_is_exact():
    p = make_problem(1000, 256, 1500, 20.0, device="cuda")
    for tiling in (twell.WIDE, twell.NARROW):
        packed = twell.gate_pack(p.x, Weights(p.w_gate, p.w_up, neuron_major(p.w_down).t()), tiling)
        format_ = packed.to_twell()
        format_.validate()
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


def test_hundreds_of_thousands_of_tokens():
    p = make_problem(300_001, 64, 512, 12.0, device=CUDA)

    def hopper(*operands):
        y, stats = sparse_ffn(*operands, backend="hopper")
        return y, stats.l1

    check(hopper, p)


def test_offsets_past_32_bits():
    # The dense rows of overflowing tiles alone are 4.7 GB here.
    tokens = 520_000
    p = make_problem(2000, 64, 4520, 40.0, device=CUDA)
    x = p.x.repeat(tokens // 2000, 1)
    x[-1] = p.x[5]
    # Not to the bit: with fewer tokens several warps share one, and add up in another order.
    expected = sparse_ffn(*p, backend="hopper")[0]
    y = sparse_ffn(x, *p[1:], backend="hopper")[0]
    assert relative_error(y[:2000], expected) < 2**-8
    assert relative_error(y[-2000:-1], expected[:-1]) < 2**-8
    assert relative_error(y[-1], expected[5]) < 2**-8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_another_device_than_the_current_one():
    p = make_problem(700, 128, 512, 12.0, device="cuda:1")
    leaves = [t.detach().requires_grad_() for t in p]
    there = [t.detach().to("cuda:0").requires_grad_() for t in p]
    for operands in (leaves, there):
        y, stats = sparse_ffn(*operands, backend="hopper")
        (y.float().square().sum() + stats.l1).backward()
    for one, other in zip(leaves, there, strict=True):
        assert one.grad.device == one.device
        assert torch.equal(one.grad.cpu(), other.grad.cpu())
