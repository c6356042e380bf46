"""Weights are scanned for nonfinite values once for each version."""

import dataclasses
import gc

import pytest
import torch
from torch import nn

from twell import SparseFeedForward, registry, sparse_ffn
from twell.finiteness import WeightFiniteness
from twell.testing import make_problem


@pytest.fixture
def weights():
    return tuple(nn.Parameter(torch.randn(6, 4)) for _ in range(3))


def test_it_is_known_from_the_second_call_on(weights):
    known = WeightFiniteness()
    assert [known.known(weights) for _ in range(3)] == [False, True, True]
    assert known.known((None, *weights[1:]))
    assert known.known(tuple(weight[2:] for weight in weights)), "slices of them"
    transposed = (torch.randn(4, 6).t(),)  # a view of what nobody else holds
    assert [known.known(transposed) for _ in range(3)] == [False, True, True]
    known.clear()
    assert not known.known(weights)


def test_nothing_is_remembered_in_a_process_group(weights, tmp_path):
    """FSDP2 gathers a step's weights into the same tensor, at the same address and with the same version."""
    known = WeightFiniteness()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert [known.known(weights) for _ in range(3)] == [False] * 3
    finally:
        torch.distributed.destroy_process_group()
    assert [known.known(weights) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", [0, 1, 2])
@torch.no_grad()
def test_what_changes_in_place_is_asked_again(weights, which, bad):
    known = WeightFiniteness()
    for value, finite in ((bad, False), (1.0, True)):
        for _ in range(2):
            known.known(weights)
        weights[which][3, 2] = value
        assert not known.known(weights), "at once"
        assert [known.known(weights) for _ in range(2)] == [finite] * 2
    weights[which].t()[2:][1, 3] = bad  # through a view
    assert not any(known.known(weights) for _ in range(3))


def test_weights_that_change_before_every_call_are_never_asked(weights, monkeypatch):
    known, asked = WeightFiniteness(), []
    monkeypatch.setattr(torch.linalg, "vector_norm", lambda *arguments: asked.append(arguments))
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert not known.known(weights)
    assert not asked


def test_other_tensors_at_the_same_address_are_asked_anew(weights):
    known = WeightFiniteness()
    for _ in range(2):
        known.known(weights)
    other = tuple(weight.detach() for weight in weights)
    assert [weight.data_ptr() for weight in other] == [weight.data_ptr() for weight in weights]
    assert not known.known(other)
    weights[0].data = torch.full((6, 4), float("nan"))
    assert not any(known.known(weights) for _ in range(3)), "at another address"


def test_it_keeps_no_tensor_alive(weights):
    known = WeightFiniteness()
    temporary = torch.randn(3, 3)
    known.known((temporary,))
    del temporary
    gc.collect()
    known.known(weights)
    assert len(known._answers) == 3


def test_inference_tensors_have_no_version_and_others_no_values():
    known = WeightFiniteness()
    for made in (torch.empty(6, 4, device="meta"), torch.eye(4).to_sparse()):
        assert not any(known.known((made,)) for _ in range(3))
    with torch.inference_mode():
        made = (torch.randn(6, 4),)
        assert not any(known.known(made) for _ in range(3))


@pytest.fixture
def asked_for(monkeypatch):
    """`Options.finite` of each forward of the reference backend from now on."""
    seen, backend = [], registry.get("reference")

    def forward(x, weights, options):
        seen.append(options.finite)
        return backend.forward(x, weights, options)

    monkeypatch.setattr(registry, "get", lambda name: dataclasses.replace(backend, forward=forward))
    return seen


def test_what_the_caller_guarantees_holds_for_inference_only(asked_for):
    problem = make_problem(3, 16, 12, 2.0)

    def call(operands=problem, **options):
        sparse_ffn(*operands, backend="reference", **options)
        return asked_for.pop()

    assert not call()
    assert call(finite_weights=True)
    assert call(finite_weights=True, stats="none")
    assert call(finite_weights=True, hot_prefix=4)
    assert not call([tensor.detach().requires_grad_() for tensor in problem], finite_weights=True)
    with torch.autocast("cpu"):  # a cast could make Inf of a large weight
        assert not call(finite_weights=True)
    block = SparseFeedForward(16, 12, backend="reference", finite_weights=True, dtype=torch.bfloat16)
    with torch.no_grad():
        block(problem.x)
    assert asked_for.pop()


def test_compiled_calls_rely_on_the_guarantee_alone(asked_for):
    problem = make_problem(3, 16, 12, 2.0)
    for guaranteed in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *operands, g=guaranteed: sparse_ffn(*operands, backend="reference", finite_weights=g)[0],
            backend="eager",
            fullgraph=True,
        )
        with torch.no_grad():
            for _ in range(3):  # by then an eager call would know
                compiled(*problem)
        assert asked_for == [guaranteed] * 3
        asked_for.clear()
