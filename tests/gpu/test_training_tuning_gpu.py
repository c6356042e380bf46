"""`autotune_training` on a GPU: dense products while many neurons fire, the sparse kernels once few do."""

import pytest
import torch
from torch import nn

from kernels import SparseFeedForward, autotune_training
from kernels.testing import make_problem

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, NEURONS = 16384, 2048, 5632


def a_block(mean_nnz: float) -> tuple[SparseFeedForward, torch.Tensor]:
    problem = make_problem(TOKENS, HIDDEN, NEURONS, mean_nnz, device="cuda")
    block = SparseFeedForward(HIDDEN, NEURONS, device="cuda", dtype=torch.bfloat16)
    for part, weight in ((block.gate_proj, problem.w_gate), (block.up_proj, problem.w_up)):
        part.weight.data.copy_(weight)
    block.down_proj.weight.data = problem.w_down.t()
    return block, problem.x


def test_a_block_is_sparse_once_that_is_faster(backend):
    for mean_nnz, chosen in ((10, backend), (1200, "dense")):
        block, x = a_block(mean_nnz)
        (choice,) = autotune_training(block, x, backends=[backend])
        print(mean_nnz, choice)
        assert (choice.backend, block.backend) == (chosen, chosen)
        assert choice.mean_nonzeros == pytest.approx(mean_nnz, rel=0.1)


def test_a_training_step_is_right_after_it(backend):
    """Two blocks, of which one is sparse after it: outputs and gradients are those of dense products."""
    (busy, x), (quiet, _) = a_block(1200), a_block(10)
    model = nn.Sequential(quiet, nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16), busy)
    found = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        (y.float().square().mean() + 1e-3 * quiet.stats.l1).backward()
        found.append((y.detach(), *(weight.grad for weight in model.parameters())))
        choices = autotune_training(model, x, backends=[backend])
        print(choices)
    assert quiet.backend == backend
    for dense, sparse in zip(*found, strict=True):
        error = (sparse.float() - dense.float()).norm() / dense.float().norm()
        assert error < 0.02, f"{error} of {tuple(dense.shape)}"
