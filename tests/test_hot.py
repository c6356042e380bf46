"""Hot neurons: the split between dense products and a sparse backend is exact for any choice of neurons."""

import dataclasses
import functools
import math

import pytest
import torch
from calls import change, leaves, make, make_block, run_ffn, upstream, y_and_l1
from torch._subclasses.fake_tensor import FakeTensorMode

from twell import Plan, hot, hot_split, memory, ops, registry, sparse_ffn
from twell.backends import dense, hopper
from twell.interface import Availability, HotSteps
from twell.launch_cache import LAUNCHES
from twell.testing import check, make_problem, plain_ffn, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORWARD = torch.ops.twell.sparse_ffn.default


INDEX = torch.tensor([1, 5, 30])


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [[], [3], [0, 39, 7, 20], list(range(40)), 1, 17, 39, 40], ids=str)
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_every_result_and_gradient(hot, gated, backend, activation):
    """Of neurons by index, and of a number of leading ones."""
    problem = make(gated)
    run = functools.partial(y_and_l1, backend=backend, hot=hot, activation=activation)
    check(run, problem, upstream(problem), 0.3, activation)
    with torch.no_grad():
        check(run, problem, None, 0.3, activation)


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("hot", [[5, 5], [40], [-1]])
def test_neurons_that_are_not_distinct_are_refused_on_a_cpu(hot, backend):
    with pytest.raises(ValueError, match=r"distinct neurons, got|40 neurons, got"):
        run_ffn(*make(), backend=backend, hot=hot)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [INDEX, 1, 12], ids=str)
def test_statistics_are_those_of_the_whole(hot, gated):
    x, *weights = make(gated)
    x = x.view(3, 10, 16)
    y, whole = run_ffn(x, *weights, backend="reference")
    got, parts = run_ffn(x, *weights, backend="reference", hot=hot)
    assert got.shape == x.shape
    assert torch.equal(parts.nonzeros, whole.nonzeros)
    assert parts.nonzeros.dtype == torch.int32
    assert torch.equal(parts.fired, whole.fired)
    assert (parts.overflow.dtype, parts.backend) == (torch.int64, "reference")
    torch.testing.assert_close((got, parts.l1), (y, whole.l1))
    bare, _ = run_ffn(x, *weights, backend="reference", hot=hot, stats=False)
    assert torch.equal(bare, got)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [INDEX, 12, 40], ids=str)
def test_infinite_inputs_give_what_plain_torch_gives(hot, gated, value):
    problem = make(gated)
    for column in range(problem.x.shape[1]):
        x = problem.x.clone()
        x[2, column] = value
        leaf, plain_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, stats = run_ffn(leaf, *problem[1:], backend="reference", hot=hot)
        assert stats.nonzeros[2] == 40 or not math.isnan(value)
        wanted, l1 = plain_ffn(plain_leaf, *problem[1:])
        torch.testing.assert_close(y, wanted, equal_nan=True)
        torch.testing.assert_close(stats.l1, l1, equal_nan=True)
        y.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(leaf.grad, plain_leaf.grad, equal_nan=True)


def test_less_is_left_to_the_backend():
    problem = make(dtype=torch.float32)
    every = torch.arange(40)
    *_, saved = FORWARD(*leaves(problem), every, None, "reference", True, True, 128, 0.0, "relu", 0, 0)
    assert tuple(saved[-1].shape) == (30, 80)
    assert not saved[1].any()  # the lengths of the ELL rows


@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (False, "relu2")])
def test_opcheck(gated, activation):
    problem, hot = make(gated, torch.float32), torch.tensor([1, 5, 30])
    for inputs, training in ((problem, False), (leaves(problem), True)):
        torch.library.opcheck(FORWARD, (*inputs, hot, None, "reference", True, training, 128, 0.3, activation, 0, 0))
    torch.library.opcheck(FORWARD, (*problem, None, None, "reference", True, False, 128, 0.0, activation, 0, 7))


def test_the_block_takes_them_along():
    torch.manual_seed(0)
    block = make_block(16, 40, backend="reference")
    x = torch.randn(5, 16)
    plain = block(x)
    change(block, hot=torch.tensor([0, 4, 39]))
    torch.testing.assert_close(block(x), plain)
    assert set(block.state_dict()) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert block.double()._hot.dtype == torch.int64
    for wrong, message in (((0, 40), "the block's 40 neurons"), ((1, 1), "distinct neurons"), (41, "40 neurons")):
        with pytest.raises(ValueError, match=message):
            change(block, hot=wrong)
    change(block, hot=0)
    assert block.plan.hot == 0


@pytest.mark.parametrize(
    ("overhead", "multiple", "count"),
    [(2, 1, 3), (3, 1, 0), (0, 2, 4), (0, 301, 0)],  # three at a rate of 1 save less than 3
)
def test_the_busiest_are_found(overhead, multiple, count, monkeypatch):
    monkeypatch.setattr(hot, "OVERHEAD", overhead)
    monkeypatch.setattr(hot, "MULTIPLE", multiple)
    x, gate = torch.ones(100, 4), torch.zeros(300, 4)
    gate[:, 0] = -1
    gate[[7, 50, 299]] = 1
    found = hot.hot_neurons(x, gate).tolist()
    assert len(found) == count
    assert not count or {7, 50, 299} <= set(found)
    assert hot.hot_neurons(torch.zeros(0, 4), gate).tolist() == []


@pytest.mark.parametrize("hot", [(3, 7), 5])
def test_dense_products_with_hot_neurons_take_the_short_way(hot, monkeypatch):
    """A block that is dense for few tokens alone keeps its hot neurons: such calls wait for the host."""
    problem = make()
    wanted = plain_ffn(*problem)[0]

    def resolve(*request):
        raise AssertionError("the long way")

    monkeypatch.setattr(registry, "resolve", resolve)
    y, _ = run_ffn(*problem, backend="reference", up_to=((len(problem.x), "dense"),), stats=False, hot=hot)
    torch.testing.assert_close(y, wanted)
    with pytest.raises(AssertionError, match="the long way"):
        run_ffn(*problem, backend="reference", stats=False, hot=hot)


def test_a_backend_with_few_tokens_is_called_without_hot_neurons(monkeypatch):
    backend = dataclasses.replace(registry.get("reference"), few_tokens=lambda tokens, hidden: tokens * hidden <= 64)
    monkeypatch.setattr(registry, "get", lambda name: backend)
    problem = make_problem(8, 16, 32, 4.0)
    hot = torch.arange(8)
    calls = []
    for part in ("forward", "add_prefix"):
        whole = getattr(hot_split, part)
        monkeypatch.setattr(hot_split, part, lambda *given, whole=whole: calls.append(1) or whole(*given))
    for tokens, options, splits in (
        (4, {"stats": False}, 0),
        (5, {"stats": False}, 1),
        (4, {"stats": True}, 1),
    ):
        few = problem._replace(x=problem.x[:tokens])
        wanted = run_ffn(*few, backend="reference", **options)[0]
        for given in ({"hot": hot}, {"hot": 8}):
            y, _ = run_ffn(*few, backend="reference", **given, **options)
            assert relative_error(y, wanted) < 0.01
            assert len(calls) == splits
            calls.clear()
    run_ffn(*leaves(problem._replace(x=problem.x[:4])), backend="reference", hot=hot, stats=False)
    assert len(calls) == 1
    with pytest.raises(ValueError, match="32 neurons, got 33"):
        run_ffn(*problem._replace(x=problem.x[:4]), backend="reference", hot=33, stats=False)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [torch.tensor([1, 5, 30]), 6], ids=["index", "prefix"])
def test_products_for_y_alone_come_in_pieces(hot, gated, monkeypatch):
    tokens = []

    def activate(pre, *others):
        tokens.append(len(pre))
        return hot_split.activate(pre, *others)

    steps = HotSteps(activate, hot_split.derive, hot_split.gather, hot_split.scatter)
    backend = dataclasses.replace(registry.get("reference"), hot=steps)
    monkeypatch.setattr(registry, "get", lambda name: backend)
    monkeypatch.setattr(memory, "PIECE", 14)
    problem = make(gated)
    for stats, pieces in ((False, [14, 14, 2]), (True, [30])):
        y, _ = run_ffn(*problem, backend="reference", hot=hot, stats=stats)
        torch.testing.assert_close(y, plain_ffn(*problem)[0])
        assert tokens == pieces
        tokens.clear()
    run_ffn(*leaves(problem), backend="reference", hot=hot, stats=False)
    assert tokens == [30]


@pytest.mark.parametrize("hot", [torch.tensor([1, 5, 30]), 3])
@pytest.mark.parametrize("taken", [True, False])
def test_a_backend_computes_h_alone_where_nothing_else_is_wanted(hot, taken, monkeypatch):
    calls = []

    def hidden(x, gate, up, activation):
        calls.append(activation)
        return (x @ gate.t()).relu().square() * (x @ up.t()) if taken else None

    steps = HotSteps(hot_split.activate, hot_split.derive, hot_split.gather, hot_split.scatter, hidden)
    backend = dataclasses.replace(registry.get("reference"), hot=steps)
    monkeypatch.setattr(registry, "get", lambda name: backend)
    options = {"backend": "reference", "hot": hot, "activation": "relu2"}
    problem = make()
    y, _ = run_ffn(*problem, stats=False, **options)
    assert calls == ["relu2"]
    torch.testing.assert_close(y, run_ffn(*problem, **options)[0])
    run_ffn(*make(gated=False), stats=False, **options)
    run_ffn(*leaves(problem), stats=False, **options)
    assert calls == ["relu2"]


@pytest.mark.parametrize(
    ("taken", "changed"),
    [
        (True, lambda x, gate, up: (x, gate, up)),
        (True, lambda x, gate, up: (x.view(2, 8, 64), gate, up)),
        (True, lambda x, gate, up: (x.t().contiguous().t(), gate, up)),
        (False, lambda x, gate, up: (x[1:], gate, up)),
        (False, lambda x, gate, up: (x.float(), gate.float(), up.float())),
        (False, lambda x, gate, up: (x, gate.t().contiguous().t(), up)),
    ],
    ids=["2-D", "3-D", "strided x", "few tokens", "float32", "strided weights"],
)
def test_dense_inference_takes_h_from_one_kernel_where_it_can(taken, changed, monkeypatch):
    monkeypatch.setattr(dense, "H_AT_ONCE", 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(registry, "_can_run", lambda *_: True)
    monkeypatch.setattr(hopper, "h_at_once", lambda x, gate, up, activation: (x @ gate.t()).relu() * (x @ up.t()))
    x, gate, up = changed(*(torch.randn(rows, 64).bfloat16() for rows in (16, 24, 24)))

    def h_at_once():
        return dense.h_at_once(x, gate, up, "relu") if dense.makes_h_at_once(x, gate, up, "relu") else None

    h = h_at_once()
    assert (h is not None) == taken
    if h is not None:
        torch.testing.assert_close(h, (x @ gate.t()).relu() * (x @ up.t()))
    asked = torch.compile(lambda *of: x.sum() if dense.makes_h_at_once(*of, "relu") else None, fullgraph=True)
    assert (asked(x, gate, up) is not None) == dense.makes_h_at_once(x, gate, up, "relu")
    assert dense.makes_h_at_once(x, gate, up, "silu") == dense.makes_h_at_once(x, gate, up, "relu")
    assert not dense.makes_h_at_once(x, gate, up, "relu2")
    assert not dense.makes_h_at_once(x, None, up, "relu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert (h_at_once() is not None) == taken
    assert not dense.makes_h_at_once(x, gate, up, "silu"), "another kernel, which is not loaded"
    LAUNCHES.clear()
    monkeypatch.setattr(registry, "_can_run", lambda *_: pytest.fail("asked while a graph is captured"))
    assert h_at_once() is None, "no kernel can be loaded then"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(registry, "_can_run", lambda *_: False)
    assert h_at_once() is None


def graph_of(plan, dynamic=None, **options):
    """A compiled `sparse_ffn`, and the texts of its graphs."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    torch.compiler.reset()
    call = functools.partial(sparse_ffn, plan=plan, **options)
    return torch.compile(lambda *problem: call(*problem), backend=keep, fullgraph=True, dynamic=dynamic), graphs


@torch.no_grad()
@pytest.mark.parametrize(
    ("left", "shape", "dtype", "options"),
    [
        (True, (2, dense.H_AT_ONCE // 2, 64), torch.bfloat16, {"plan": "dense"}),
        (True, (8192, 64), torch.bfloat16, {"plan": Plan("triton", up_to=((20_000, "dense"),))}),
        (False, (2, dense.H_AT_ONCE // 2 - 1, 64), torch.bfloat16, {"plan": "dense"}),
        (False, (8192, 64), torch.float32, {"plan": "dense"}),
        (False, (8192, 64), torch.bfloat16, {"plan": "dense", "dynamic": True}),
        (False, (8192, 64), torch.bfloat16, {"plan": "dense", "activation": "relu2"}),
        (False, (8192, 64), torch.bfloat16, {"plan": "dense", "return_stats": True}),
    ],
)
def test_a_compiled_program_leaves_dense_products_to_the_operator_where_one_kernel_makes_h(
    left, shape, dtype, options, monkeypatch
):
    """With fake tensors of a GPU, on which nothing is computed."""
    monkeypatch.setattr(registry, "probe", lambda name, device: Availability(True, "a test"))
    for name in ("_resolve", "_can_run"):
        monkeypatch.setattr(registry, name, functools.cache(getattr(registry, name).__wrapped__))
    run, graphs = graph_of(**options)
    with FakeTensorMode():
        run(*(torch.empty(size, device="cuda", dtype=dtype) for size in (shape, (256, 64), (256, 64), (64, 256))))
    assert ("twell.sparse_ffn" in graphs[-1]) == left


def test_the_operator_computes_dense_products_too_and_a_training_has_none_of_it(monkeypatch):
    monkeypatch.setattr(ops, "_makes_h_at_once", lambda inputs, options: not options.training)
    run, graphs = graph_of("dense")
    problem = make()
    torch.testing.assert_close(run(*problem), plain_ffn(*problem)[0])
    assert "twell.sparse_ffn" in graphs[-1]
    run(*leaves(problem)).sum().backward()
    assert "twell.sparse_ffn" not in graphs[-1]


def test_a_compiled_program_leaves_leading_hot_neurons_to_the_operator(monkeypatch):
    monkeypatch.setattr(ops, "_makes_h_at_once", lambda *_: pytest.fail("Hopper's kernels are of no use to it"))
    run, graphs = graph_of(Plan("reference", 7))
    problem = make()
    torch.testing.assert_close(run(*problem), plain_ffn(*problem)[0])
    assert "twell.sparse_ffn" in graphs[0]
    assert "linear" not in graphs[0]
