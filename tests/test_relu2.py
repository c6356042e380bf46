"""Squared ReLU, y = (relu(x Wg^T)^2 * (x Wu^T)) Wd^T, in the backends that run on a CPU. The numbers of the Triton
kernels are tested in triton_interpreter."""

import functools

import pytest
import torch
from calls import change, make, make_block, run_ffn, upstream, y_and_l1
from tiny_models import TOKENS, llama
from torch.nn import functional as F

from twell import sparsify
from twell.testing import evaluate, plain_ffn, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BACKENDS = ("dense", "reference")

run = functools.partial(y_and_l1, activation="relu2")
squared = functools.partial(plain_ffn, activation="relu2")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_is_plain_torch_bit_for_bit(dtype, gated):
    problem = make(gated, dtype)
    ours, plain = (evaluate(f, problem, upstream(problem)) for f in (lambda *p: run(*p, backend="dense"), squared))
    assert torch.equal(ours["y"], plain["y"])
    for name in plain:
        assert relative_error(ours[name], plain[name]) <= 8 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_pattern_is_that_of_relu(backend, gated):
    problem = make(gated)
    _, ours = run_ffn(*problem, backend=backend, activation="relu2")
    _, relu = run_ffn(*problem, backend=backend)
    assert torch.equal(ours.nonzeros, relu.nonzeros)
    assert torch.equal(ours.fired, relu.fired)
    assert ours.l1 != relu.l1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [True, False])
def test_a_square_that_overflows_does_so_as_in_plain_torch(backend, gated):
    """relu(z) = 1e25 is finite in bfloat16, its square is not; its slope, 2e25, is."""
    problem = make(gated, torch.bfloat16)
    (problem.w_up if problem.w_gate is None else problem.w_gate)[7, 0] = 1e25  # x[:, 0] is 1
    dy = upstream(problem)
    ours, plain = evaluate(lambda *p: run(*p, backend=backend), problem, dy), evaluate(squared, problem, dy)
    assert not plain["y"].isfinite().any()
    for name in plain:
        assert torch.equal(ours[name].isfinite(), plain[name].isfinite()), name
    assert torch.equal(ours["y"].isnan(), plain["y"].isnan())


def test_the_block():
    torch.manual_seed(0)
    block, x = make_block(16, 40, activation="relu2"), torch.randn(5, 16)
    wanted = block.down_proj(F.relu(block.gate_proj(x)).square() * block.up_proj(x))
    assert torch.equal(block(x), wanted)
    change(block, backend="reference")
    torch.testing.assert_close(block(x), wanted)
    assert "activation='relu2'" in repr(block)
    assert block.activation == "relu2"


@torch.no_grad()
def test_sparsify_puts_the_square_in_place_of_another_activation():
    model = sparsify(llama("silu"), activation="relu2")
    assert model.config.hidden_act == "relu2"
    torch.testing.assert_close(model(TOKENS).logits, llama("relu2")(TOKENS).logits)
