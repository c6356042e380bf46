"""`autotune` in training mode on a GPU: dense products while many neurons fire, the sparse kernels once few do."""

import time

import pytest
import torch
from calls import make_block
from torch import nn

from twell import SparseFeedForward, autotune
from twell.testing import make_problem
from twell.tuning import training

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, NEURONS = 16384, 2048, 5632


def a_trained_block() -> tuple[SparseFeedForward, torch.Tensor]:
    """A block with ten non-zeros, and its input."""
    problem = make_problem(TOKENS, HIDDEN, NEURONS, 10, device="cuda")
    block = an_untrained_block()
    parts = (block.gate_proj, block.up_proj, block.down_proj)
    for part, weight in zip(parts, (problem.w_gate, problem.w_up, problem.w_down), strict=True):
        part.weight.data = weight
    return block, problem.x


def an_untrained_block() -> SparseFeedForward:
    """Half of its neurons fire."""
    torch.manual_seed(0)
    return make_block(HIDDEN, NEURONS, device="cuda", dtype=torch.bfloat16)


def test_a_block_is_sparse_once_that_is_faster(backend):
    """Where half of the neurons fire for each token, dense products compute nearly all of them: in the dense form, or
    as hot neurons, which may be as fast."""
    trained, x = a_trained_block()
    (choice,) = autotune(trained, x, backends=[backend])
    assert (choice.plan.backend, trained.plan) == (backend, choice.plan), choice
    assert choice.mean_nonzeros == pytest.approx(10, rel=0.1)
    untrained = an_untrained_block()
    (choice,) = autotune(untrained, x, backends=[backend])
    assert untrained.plan == choice.plan
    assert choice.plan.backend == "dense" or choice.plan.hot_count > 0.9 * NEURONS, choice
    assert choice.mean_nonzeros == pytest.approx(NEURONS / 2, rel=0.1)


def test_a_training_step_is_right_after_it(backend):
    """Two blocks, of which one is sparse after it: outputs and gradients are those of dense products."""
    quiet, x = a_trained_block()
    model = nn.Sequential(quiet, nn.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16), an_untrained_block())
    found = []
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        (y.float().square().mean() + 1e-3 * quiet.stats.l1).backward()
        found.append((y.detach(), *(weight.grad for weight in model.parameters())))
        autotune(model, x, backends=[backend])
    assert quiet.plan.backend == backend
    for dense, sparse in zip(*found, strict=True):
        error = (sparse.float() - dense.float()).norm() / dense.float().norm()
        assert error < 0.02, f"{error} of {tuple(dense.shape)}"


def test_in_a_compiled_model_dense_products_are_compiled_too(backend):
    block, x = a_trained_block()
    assert not inductor_kernels_of(lambda: autotune(block, x, backends=[backend]))
    block.compile()
    assert inductor_kernels_of(lambda: autotune(block, x, backends=[backend]))
    assert block.plan.backend == backend, "with ten non-zeros it is faster than these, too"


def test_the_hosts_time_does_not_count_where_the_block_runs_compiled(backend, monkeypatch):
    """Sparse forwards that the host takes 30 ms to issue."""
    training._compile()  # the function as it is
    real = training._output_and_l1

    def slow(*arguments, **settings):
        time.sleep(0.03)
        return real(*arguments, **settings)

    monkeypatch.setattr(training, "_output_and_l1", slow)
    block, x = a_trained_block()
    for compiled in (False, True):
        (choice,) = autotune(block, x, backends=[backend], compiled=compiled)
        sparse = [ms for form, ms in choice.milliseconds.items() if form.backend == backend]
        assert sparse
        assert all((ms < 30) == compiled for ms in sparse), choice


def inductor_kernels_of(call) -> set[str]:
    """Names of the Triton kernels made by torch.compile's Inductor that ran in `call()`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    made_by_inductor = ("triton_poi", "triton_red", "triton_per")  # pointwise, reduction, persistent reduction
    return {event.name for event in profile.events() if event.name.startswith(made_by_inductor)}
