"""Kernels that benchmarks time by themselves: checked, and right, in Triton's interpreter."""

import pytest
import torch

from experiments.bench import single_ops
from twell.testing import make_problem


@pytest.mark.parametrize("gated", [True, False])
def test_single_operations(gated):
    problem = make_problem(2, 64, 256, 70.0, gated=gated, seed=3)  # more non-zeros than a tile has slots
    for op in ("gate_pack", "gated_down" if gated else "down"):
        _, ours = single_ops.alternatives(op, problem, ["triton"])
        assert ours.backend == "triton"
        assert ours.check_error < 0.01
        ours.call()


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.bfloat16, 24), (torch.float32, 16)])
def test_the_gather_kernel_reads_every_row_once(dtype, hidden):
    from experiments.timing.row_reads import exact_sums, sum_rows

    table = torch.randn(20, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    picks = torch.randint(20, (3, 16), dtype=torch.int32)
    words = table.view(torch.int32).tolist()
    by_hand = [sum(sum(words[row]) for row in line) & 0xFFFFFFFF for line in picks.tolist()]
    exact = exact_sums(table, picks)
    assert [int(s) & 0xFFFFFFFF for s in exact] == by_hand
    for at_once in (4, 16):
        assert torch.equal(sum_rows(table, picks, warps=1, at_once=at_once), exact)
