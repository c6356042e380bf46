"""A few small calls of each GPU backend, through every way its kernels can take: for `make sanitize`, which runs them
20 to 100 times slower under compute-sanitizer. Inputs and everything that results are compared with stay on the CPU, so
that the sanitizer has none but our kernels to look at."""

from unittest import mock

import pytest
import torch
from calls import run_ffn

from twell import ops
from twell.gpu import saved_csr
from twell.hopper import inference, screen
from twell.memory import neuron_major
from twell.testing import check, make_problem, plain_ffn, relative_error

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
# (tokens, non-zeros): a tile of rows not full; several warps a token; a warp a token, with long tokens at the end.
SIZES = [(1, 20.0), (63, 20.0), (300, 20.0), (9000, 10.0)]
HIDDEN, INTERMEDIATE = 192, 776


def on_gpu(backend, **options):
    """The block as a function of tensors on the CPU, differentiable: (y, l1)."""

    def function(*operands):
        y, stats = run_ffn(*(t if t is None else t.to(CUDA) for t in operands), backend=backend, **options)
        return y.cpu(), y.new_zeros((), device="cpu") if stats is None else stats.l1.cpu()

    return function


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "nnz"), SIZES)
def test_sizes(backend, tokens, nnz, gated):
    check(on_gpu(backend), make_problem(tokens, HIDDEN, INTERMEDIATE, nnz, gated=gated))


@pytest.mark.parametrize("tokens", [130, 9000])
def test_tiles_with_more_nonzeros_than_slots_and_long_tokens(backend, tokens):
    problem = make_problem(tokens, 64, INTERMEDIATE, 250.0)
    check(on_gpu(backend), problem)
    stats = run_ffn(*(t.to(CUDA) for t in problem), backend=backend)[1]
    assert int(stats.overflow) > 0


def test_without_statistics(backend):
    problem = make_problem(300, HIDDEN, INTERMEDIATE, 20.0)
    assert torch.equal(on_gpu(backend, stats=False)(*problem)[0], on_gpu(backend)(*problem)[0])


def test_more_than_one_slice_of_the_hidden_size(backend):
    check(on_gpu(backend), make_problem(140, 2112, INTERMEDIATE, 20.0))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 70, 700])
def test_nonfinite_inputs(backend, tokens, gated):
    """Such a token fires every neuron, and none past the end: N is no multiple of a tile."""
    problem = make_problem(tokens, 64, INTERMEDIATE, 10.0, gated=gated)
    problem.x[0, 5] = float("nan")
    here = [t if t is None else t.to(CUDA).requires_grad_() for t in problem]
    for options in ({}, {"stats": False}, {"hot": torch.arange(3, 139, device=CUDA)}, {"capacity": INTERMEDIATE}):
        y, stats = run_ffn(*here, backend=backend, **options)
        fires_every_neuron(y, stats)
        gradients = torch.autograd.grad(y.sum(), [t for t in here if t is not None])
        assert not gated or gradients[0].cpu()[0].isnan().all()
    with torch.no_grad():
        here[3] = neuron_major(here[3])
        for prefix in (100, 136, 771):
            for stats in (True, False):
                fires_every_neuron(*run_ffn(*here, backend=backend, hot=prefix, stats=stats))


def fires_every_neuron(y, stats):
    """The first token, and it is the only one that is not finite."""
    y = y.detach().cpu()
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    if stats is not None:
        assert int(stats.nonzeros.cpu()[0]) == INTERMEDIATE
        assert stats.fired.cpu().all()


def test_strided_input(backend):
    problem = make_problem(70, 64, INTERMEDIATE, 10.0)

    def function(x, *weights):
        wide = torch.zeros(70, 128, device=CUDA, dtype=x.dtype)
        wide[:, ::2] = x.to(CUDA)
        return on_gpu(backend)(wide[:, ::2], *weights)

    check(function, problem)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "nnz"), SIZES)
def test_gradients(backend, tokens, nnz, gated):
    problem = make_problem(tokens, HIDDEN, INTERMEDIATE, nnz, gated=gated)
    dy = torch.randn(problem.x.shape, generator=torch.Generator().manual_seed(1)).to(problem.x.dtype)
    check(on_gpu(backend, capacity=INTERMEDIATE), problem, dy, 0.5)


def test_gradients_of_frequent_neurons_and_rows_that_were_not_saved(backend, monkeypatch):
    monkeypatch.setattr(saved_csr, "is_capturing", lambda tensor: True)  # the kernels run whatever the count says
    problem = make_problem(700, 64, INTERMEDIATE, 250.0)
    for capacity in (10, INTERMEDIATE):
        leaves = [t.detach().requires_grad_() for t in problem]
        y, _ = on_gpu(backend, capacity=capacity)(*leaves)
        gradients = torch.autograd.grad(y.sum(), leaves)
        assert all(gradient.isnan().any() == (capacity == 10) for gradient in gradients)


@pytest.mark.parametrize("gated", [True, False])
def test_hot_neurons(backend, gated):
    problem = make_problem(300, 64, INTERMEDIATE, 20.0, gated=gated)
    dy = torch.randn(problem.x.shape, generator=torch.Generator().manual_seed(1)).to(problem.x.dtype)
    hot = torch.arange(3, 139, device=CUDA)
    check(on_gpu(backend, capacity=INTERMEDIATE, hot=hot), problem, dy, 0.5)


@pytest.mark.parametrize("gated", [True, False])
def test_squared_relu(backend, gated):
    problem = make_problem(300, 64, INTERMEDIATE, 20.0, gated=gated)
    dy = torch.randn(problem.x.shape, generator=torch.Generator().manual_seed(1)).to(problem.x.dtype)
    options = {"capacity": INTERMEDIATE, "activation": "relu2"}
    check(on_gpu(backend, **options), problem, dy, 0.5, "relu2")
    hot = torch.arange(3, 139, device=CUDA)
    check(on_gpu(backend, hot=hot, **options), problem, dy, 0.5, "relu2")


@torch.no_grad()
def test_a_prefix_of_hot_neurons(backend):
    problem = make_problem(300, 64, INTERMEDIATE, 20.0)
    there = [t.to(CUDA) for t in problem]
    there[3] = neuron_major(there[3])
    wanted = on_gpu(backend)(*problem)[0]
    for prefix in (0, 136):
        for _ in range(2):  # the second one prepared
            y, _ = run_ffn(*there, backend=backend, stats=False, hot=prefix)
            assert relative_error(y.cpu(), wanted) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("screened", [300, INTERMEDIATE - 136])
def test_screened_neurons(backend, screened, monkeypatch):
    for module in (ops, screen):
        monkeypatch.setattr(module, "SCREENS_FROM", 300)
    marked = mock.patch.object(inference, "launch_screened", wraps=inference.launch_screened)
    problem = make_problem(300, 64, INTERMEDIATE, 20.0)
    problem.x[3, 5] = float("inf")
    there = [t.to(CUDA) for t in problem]
    wanted = on_gpu(backend)(*problem)[0]
    for hot in (0, 136):
        with marked as launches:
            y = run_ffn(*there, backend=backend, stats=False, hot=hot, screened=screened)[0].cpu()
        assert launches.called == (backend == "hopper")
        assert y[3].isnan().all()
        assert relative_error(torch.cat((y[:3], y[4:])), torch.cat((wanted[:3], wanted[4:]))) < 0.01


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(1, 64, 250), (9, 576, 1000), (16, 2112, 264)])
def test_few_tokens(backend, tokens, hidden, intermediate, gated):
    problem = make_problem(tokens, hidden, intermediate, 20.0, gated=gated)
    there = [t if t is None else t.to(CUDA) for t in problem]
    wanted = plain_ffn(*problem)[0]
    y, _ = run_ffn(*there, backend=backend, stats=False)
    assert relative_error(y.cpu(), wanted) < 0.02
