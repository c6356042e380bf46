"""A few small calls of each GPU backend, through every way its kernels can take: for `make sanitize`, which runs them
20 to 100 times slower under compute-sanitizer."""

import pytest
import torch

from kernels import sparse_ffn
from kernels.testing import check, make_problem

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
# (tokens, non-zeros): a tile of rows not full; several warps a token; a warp a token, with heavy tokens at the end.
SIZES = [(1, 20.0), (63, 20.0), (300, 20.0), (9000, 10.0)]
HIDDEN, INTERMEDIATE = 192, 776


def problem_of(*sizes, **options):
    """Made on the CPU: under the sanitizer each of the thousands of small steps would be slow."""
    problem = make_problem(*sizes, **options)
    return problem._replace(**{name: t.to(CUDA) for name, t in problem._asdict().items() if t is not None})


def compare(backend, problem, stats="full"):
    def function(*operands):
        y, found = sparse_ffn(*operands, backend=backend, stats=stats)
        return y, y.new_zeros(()) if found.l1 is None else found.l1

    with torch.no_grad():
        if stats == "full":
            check(function, problem)
        else:
            assert torch.equal(function(*problem)[0], sparse_ffn(*problem, backend=backend)[0])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "nnz"), SIZES)
def test_sizes(backend, tokens, nnz, gated):
    compare(backend, problem_of(tokens, HIDDEN, INTERMEDIATE, nnz, gated=gated))


@pytest.mark.parametrize("tokens", [130, 9000])
def test_tiles_with_more_nonzeros_than_slots_and_heavy_tokens(backend, tokens):
    problem = problem_of(tokens, 64, INTERMEDIATE, 250.0)
    compare(backend, problem)
    assert int(sparse_ffn(*problem, backend=backend)[1].overflow) > 0


def test_without_statistics(backend):
    compare(backend, problem_of(300, HIDDEN, INTERMEDIATE, 20.0), stats="none")


def test_more_than_one_slice_of_the_hidden_size(backend):
    compare(backend, problem_of(140, 2112, INTERMEDIATE, 20.0))


@pytest.mark.parametrize("tokens", [70, 9000])
def test_weights_that_are_not_finite(backend, tokens):
    problem = problem_of(tokens, 64, INTERMEDIATE, 10.0)
    problem.w_up[3, 5] = float("inf")
    problem.w_down[7, 700] = float("nan")
    compare(backend, problem)


def test_strided_input(backend):
    problem = problem_of(70, 64, INTERMEDIATE, 10.0)
    wide = torch.zeros(70, 128, device=CUDA, dtype=torch.bfloat16)
    wide[:, ::2] = problem.x
    compare(backend, problem._replace(x=wide[:, ::2]))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "nnz"), SIZES)
def test_gradients(backend, tokens, nnz, gated):
    problem = problem_of(tokens, HIDDEN, INTERMEDIATE, nnz, gated=gated)
    dy = torch.randn(problem.x.shape, generator=torch.Generator().manual_seed(1)).to(CUDA, problem.x.dtype)

    def function(*operands):
        y, stats = sparse_ffn(*operands, backend=backend, capacity=INTERMEDIATE)
        return y, stats.l1

    check(function, problem, dy, 0.5)


def test_gradients_of_crowded_neurons_and_rows_that_were_not_kept(backend):
    problem = problem_of(700, 64, INTERMEDIATE, 250.0)
    for capacity in (10, INTERMEDIATE):
        leaves = [t.detach().requires_grad_() for t in problem]
        y, _ = sparse_ffn(*leaves, backend=backend, capacity=capacity)
        gradients = torch.autograd.grad(y.sum(), leaves)
        assert all(gradient.isnan().any() == (capacity == 10) for gradient in gradients)
