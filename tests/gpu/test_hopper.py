"""What is particular to the Hopper backend; the rest is in test_sparse_backends.py."""

import pytest
import torch

from kernels import neuron_major
from kernels.registry import probe
from kernels.testing import make_problem, relative_error

pytestmark = pytest.mark.gpu


def test_packing_is_exact():
    availability = probe("hopper", torch.device("cuda", 0))
    if not availability.ok:
        pytest.skip(f"no Hopper backend here: {availability.reason}")
    from kernels.hopper import twell

    p = make_problem(1000, 256, 1500, 20.0, device="cuda")
    for tiling in (twell.WIDE, twell.NARROW):
        packed = twell.gate_pack(p.x, p.w_gate, p.w_up, neuron_major(p.w_down), tiling)
        format_ = packed.to_twell()
        format_.validate()
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))
