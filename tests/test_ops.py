"""`sparse_ffn` as an operator: inputs of every kind, autograd, autocast, torch.compile, opcheck, choice of backend."""

import functools
import itertools
import logging

import pytest
import torch
from calls import Operators, change, leaves, make, make_block, run_ffn, upstream, y_and_l1
from tiny_models import TOKENS, llama
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from twell import Plan, available_backends, registry, sparse_ffn, sparsify
from twell.backends import dense
from twell.interface import Availability, Needs, Options, Weights
from twell.registry import BackendUnavailable, why_not
from twell.testing import Problem, check, evaluate, plain_ffn, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FORWARD, BACKWARD = torch.ops.twell.sparse_ffn.default, torch.ops.twell.sparse_ffn_backward.default


@pytest.fixture(params=["dense", "reference"])
def backend(request):
    """Each backend that runs on a CPU."""
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


# Inputs


@pytest.mark.parametrize("shape", [(16,), (1, 16), (30, 16), (2, 3, 16), (2, 1, 3, 4, 16), (0, 16), (3, 0, 16)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_any_leading_dimensions(backend, shape, gated, activation):
    _, gate, up, down = make(gated)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, stats = run_ffn(x, gate, up, down, backend=backend, activation=activation)
    wanted, l1 = plain_ffn(x, gate, up, down, activation)
    assert y.shape == x.shape
    assert relative_error(y, wanted) < 1e-14
    assert relative_error(stats.l1, l1) < 1e-14  # 0 for zero tokens
    pre = (x @ (up if gate is None else gate).t()).relu()
    assert stats.nonzeros.dtype == torch.int32
    assert torch.equal(stats.nonzeros, (pre != 0).sum(-1, dtype=torch.int32))
    assert torch.equal(stats.fired, (pre != 0).reshape(-1, 40).any(0))
    assert (stats.overflow.dtype, stats.overflow.shape, stats.backend) == (torch.int64, (), backend)
    (y.sum() + stats.l1).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("by_neuron", [False, True])
def test_the_gradient_of_dense_down_weights_is_made_in_their_layout(by_neuron):
    problem = make()
    down = problem.w_down.t().contiguous() if by_neuron else problem.w_down.contiguous().t()
    weights, options = Weights(problem.w_gate, problem.w_up, down), Options(stats=False, training=True)
    saved = dense.BACKEND.forward(problem.x, weights, options).saved
    dy, needs = torch.ones_like(problem.x), Needs(x=False, gate=False, up=False, down=True)
    gradient = dense.BACKEND.backward(dy, None, problem.x, weights, saved, needs, "relu").down
    assert gradient.stride() == down.stride()
    h = (problem.x @ problem.w_gate.t()).relu() * (problem.x @ problem.w_up.t())
    torch.testing.assert_close(gradient, h.t() @ dy)


def test_strided_inputs(backend):
    x, gate, up, down = make()
    strided = Problem(
        x.t().contiguous().t(),
        gate.repeat_interleave(2, 0)[::2],
        torch.cat([up, up], 1)[:, :16],
        down.t().contiguous().t(),
    )
    assert not any(t.is_contiguous() for t in strided)
    dy = torch.randn(30, 16, dtype=torch.float64).t().contiguous().t()
    got = evaluate(lambda *p: y_and_l1(*p, backend=backend), strided, dy, 2.0)
    wanted = evaluate(plain_ffn, Problem(x, gate, up, down), dy, 2.0)
    for name in wanted:
        assert relative_error(got[name], wanted[name]) < 1e-13, name
    # Expanded along the tokens: stride 0.
    y, _ = run_ffn(x[:1].expand(5, 16), gate, up, down, backend=backend)
    assert relative_error(y, run_ffn(x[:1], gate, up, down)[0].expand(5, 16)) < 1e-14


@pytest.mark.parametrize("gated", [True, False])
def test_gradients_exactly_where_they_are_asked_for(backend, gated):
    problem, dy = make(gated), torch.randn(30, 16, dtype=torch.float64)
    names = [name for name, t in problem._asdict().items() if t is not None]
    wanted = evaluate(plain_ffn, problem, dy, 2.0)
    for asked in itertools.product([True, False], repeat=len(names)):
        inputs = problem._asdict()
        for name, required in zip(names, asked, strict=True):
            inputs[name] = inputs[name].detach().clone().requires_grad_(required)
        y, l1 = y_and_l1(*inputs.values(), backend=backend)
        assert y.requires_grad == any(asked)
        if any(asked):
            ((y * dy).sum() + 2 * l1).backward()
        for name, required in zip(names, asked, strict=True):
            assert (inputs[name].grad is not None) == required
            if required:
                assert relative_error(inputs[name].grad, wanted[f"d{name}"]) < 1e-13


@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (False, "relu"), (True, "relu2")])
@pytest.mark.parametrize("needs", [Needs(True, True, True, True), Needs(False, True, False, False)])
def test_gradients_of_a_call_past_its_capacity_are_those_of_its_pieces(gated, activation, needs, monkeypatch):
    x, gate, up, down = make(gated)
    dy, dl1, weights = torch.randn_like(x), torch.tensor(2.0, dtype=torch.float64), Weights(gate, up, down.t())
    whole = dense.gradients(dy, dl1, x, weights, needs, activation)
    monkeypatch.setattr(dense, "PIECE", 7)  # of 30 tokens
    for piece, expected in zip(dense.gradients(dy, dl1, x, weights, needs, activation), whole, strict=True):
        assert (piece is None) == (expected is None)
        if piece is not None:
            assert piece.dtype == expected.dtype
            assert relative_error(piece, expected) < 1e-13


def test_only_l1_or_only_y_reaches_the_loss(backend):
    problem = make()
    for used in (0, 1):
        ours, plain = leaves(problem), leaves(problem)
        y_and_l1(*ours, backend=backend)[used].sum().backward()
        plain_ffn(*plain)[used].sum().backward()
        for name in ("x", "w_gate", "w_up"):
            assert relative_error(getattr(ours, name).grad, getattr(plain, name).grad) < 1e-13


@pytest.mark.parametrize(
    ("plan", "gated", "activation", "compiled"),
    [
        (Plan("dense"), True, "relu", False),
        (Plan("dense"), False, "relu2", False),
        (Plan("dense"), True, "relu2", True),
        (Plan("reference"), True, "relu", False),
        (Plan("reference", hot=(1, 5, 30)), True, "relu2", False),
        (Plan("reference", hot=12, backup=0.25), False, "relu", True),
        (Plan("reference", capacity=1), False, "relu2", False),
        (Plan("reference", up_to=((100, "dense"),)), True, "relu", False),
    ],
    ids=str,
)
def test_neurons_have_weights_in_the_l1_term(plan, gated, activation, compiled):
    problem = make(gated)
    weight = torch.rand(40).mul(2).round()
    block = torch.compile(sparse_ffn, backend="aot_eager", fullgraph=True) if compiled else sparse_ffn

    def run(*operands):
        y, stats = block(*operands, activation, plan, return_stats=True, l1_weight=weight)
        return y, stats.l1

    check(run, problem, torch.randn_like(problem.x), 3.0, activation, weight)
    check(run, problem, None, 0.0, activation, weight)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_is_plain_torch_bit_for_bit(dtype, gated, activation):
    problem = make(gated, dtype)
    ours, plain = (
        evaluate(functools.partial(f, activation=activation), problem, upstream(problem))
        for f in (functools.partial(y_and_l1, backend="dense"), plain_ffn)
    )
    assert torch.equal(ours["y"], plain["y"])
    assert torch.equal(sparse_ffn(*problem, activation, "dense"), plain["y"])
    for name in plain:
        assert relative_error(ours[name], plain[name]) <= 8 * torch.finfo(dtype).eps, name


@pytest.mark.parametrize("neurons", [1, 97, 128, 1000, 4096])
def test_dense_counts_are_exact_for_any_width(neurons):
    # They are summed in bytes, 128 columns at a time at most.
    x, up, down = torch.ones(3, 4), torch.ones(neurons, 4), torch.ones(4, neurons)
    up[0] = 0
    _, stats = run_ffn(x, None, up, down, backend="dense")
    assert stats.nonzeros.tolist() == [neurons - 1] * 3
    assert stats.fired.tolist() == [False] + [True] * (neurons - 1)


def test_dense_nan_is_active():
    x, gate, up, down = make(dtype=torch.bfloat16)
    x[5, 3] = float("nan")
    _, stats = run_ffn(x, gate, up, down, backend="dense")
    assert stats.nonzeros[5] == 40
    assert stats.fired.all()
    assert stats.l1.isnan()


BAD = {
    "x must be a tensor, got list": {"x": [1.0]},
    "w_up must be a tensor, got NoneType": {"w_up": None},
    "x must have one of the dtypes .* got torch.int64": {"x": torch.zeros(3, 16, dtype=torch.int64)},
    "w_down must have one of the dtypes .* got torch.bool": {"w_down": torch.zeros(16, 40, dtype=torch.bool)},
    "must be a plain .* tensor, got layout torch.sparse_coo": {"w_up": torch.zeros(40, 16).double().to_sparse()},
    "x must have shape .* got a scalar": {"x": torch.zeros(()).double()},
    r"x must have shape \[..., 16\] to fit w_up \[40, 16\], got \[3, 15\]": {"x": torch.zeros(3, 15).double()},
    r"to fit w_up \[40, 16\], got \[3, 0\]": {"x": torch.zeros(3, 0).double()},
    r"w_up must have shape \[intermediate, hidden\].* got \[40\]": {"w_up": torch.zeros(40).double()},
    r"neither of them 0, got \[40, 0\]": {"x": torch.zeros(3, 0).double(), "w_up": torch.zeros(40, 0).double()},
    r"w_down must have shape \[16, 40\] .*, got \[40, 16\]": {"w_down": torch.zeros(40, 16).double()},
    r"w_gate must have the shape of w_up, \[40, 16\], got \[16, 40\]": {"w_gate": torch.zeros(16, 40).double()},
    "the same dtype, got x: torch.float32, w_gate: torch.float64": {"x": torch.zeros(3, 16)},
    "the same device, got x: cpu, w_gate: cpu, w_up: meta": {"w_up": torch.zeros(40, 16, device="meta").double()},
    "backend must be one of auto, dense, reference.* got 'cuda'": {"backend": "cuda"},
    "backup must be a share of the tokens from 0 to 1, got 1.5": {"backup": 1.5},
    "backup must be a share of the tokens from 0 to 1, got True": {"backup": True},
    "backup must be a share of the tokens from 0 to 1, got nan": {"backup": float("nan")},
    "activation must be one of relu, relu2, got 'gelu'": {"activation": "gelu"},
    r"l1_weight must have the shape \[40\] and be on cpu, got \[39\] on cpu": {"l1_weight": torch.ones(39)},
    "l1_weight must be a floating tensor": {"l1_weight": torch.ones(40, dtype=torch.int64)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_says_what_came_and_what_is_wanted(message):
    arguments = {**make()._asdict(), **BAD[message]}
    with pytest.raises((TypeError, ValueError), match=message):
        run_ffn(**arguments)


# Autograd


def test_second_derivative_raises(backend):
    problem = leaves(make())
    y, l1 = y_and_l1(*problem, backend=backend)
    (dx,) = torch.autograd.grad(y.square().sum() + l1, problem.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        dx.sum().backward()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_activation_checkpointing_and_compile(backend, activation):
    problem, dy = make(), torch.randn(30, 16, dtype=torch.float64)
    run = functools.partial(y_and_l1, backend=backend, activation=activation)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    wanted = evaluate(functools.partial(plain_ffn, activation=activation), problem, dy, 3.0)
    for function in (compiled, lambda *p: checkpoint(run, *p, use_reentrant=False)):
        got = evaluate(function, problem, dy, 3.0)
        for name in wanted:
            assert relative_error(got[name], wanted[name]) < 1e-13, name


def test_a_changed_weight_is_noticed_before_the_backward():
    problem = leaves(make())
    y, _ = run_ffn(*problem, backend="dense")
    with torch.no_grad():
        problem.w_up.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_gradients_nothing_is_saved(backend):
    problem = make()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y, stats = run_ffn(*leaves(problem), backend=backend)
        assert y.grad_fn is None
        assert stats.l1.grad_fn is None
    *_, saved = FORWARD(*problem, None, None, backend, True, False, 128, 0.0, "relu", 0, 0)
    assert saved == []


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear_does(backend, dtype):
    problem = leaves(make(dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        y, stats = run_ffn(*problem, backend=backend)
        mixed, _ = run_ffn(problem.x.to(dtype), *problem[1:], backend=backend)
        (y.float().sum() + stats.l1).backward()  # the backward under autocast too
    assert (y.dtype, mixed.dtype, stats.l1.dtype) == (dtype, dtype, torch.float32)
    assert torch.equal(y, mixed)
    plain = leaves(make(dtype=torch.float32))
    with torch.autocast("cpu", dtype):
        wanted, l1 = plain_ffn(*plain)
    (wanted.float().sum() + l1).backward()
    for ours, theirs in zip(problem, plain, strict=True):
        assert ours.grad.dtype == torch.float32
        assert relative_error(ours.grad, theirs.grad) < 0.02


def test_autocast_leaves_float64_alone():
    problem = make()
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = run_ffn(*problem)
        with pytest.raises(ValueError, match="autocast does not cast float64"):
            run_ffn(problem.x.float(), *problem[1:])
    assert y.dtype == torch.float64


# The registered operators


@pytest.mark.parametrize(
    ("gated", "activation", "stats"), [(True, "relu", True), (True, "relu2", False), (False, "relu2", True)]
)
def test_opcheck(backend, gated, activation, stats):
    problem, weight = make(gated, torch.float32), None if gated else torch.ones(40)
    torch.library.opcheck(FORWARD, (*problem, None, weight, backend, stats, False, 128, 0.0, activation, 0, 0))
    for backup in (0.0, 0.3):
        torch.library.opcheck(
            FORWARD, (*leaves(problem), None, weight, backend, stats, True, 128, backup, activation, 0, 0)
        )


@pytest.mark.parametrize(
    ("gated", "activation"),
    [(True, "relu"), *(pytest.param(gated, "relu2", marks=pytest.mark.slow) for gated in (True, False))],
)
def test_opcheck_of_the_backward(backend, gated, activation):
    problem = make(gated, torch.float32)
    *_, saved = FORWARD(*problem, None, None, backend, True, True, 128, 0.0, activation, 0, 0)
    dy, dl1, weight = torch.randn(30, 16), torch.tensor(2.0), None if gated else torch.ones(40)
    for needs in ([True, gated, True, True], [False, gated, False, True]):
        for incoming in ((dy, dl1), (dy, None), (None, dl1)):
            torch.library.opcheck(BACKWARD, (*incoming, *problem, None, weight, saved, backend, needs, activation))


def test_what_is_saved_has_the_promised_shapes(backend):
    for tokens, neurons in ((30, 40), (0, 40), (9, 300), (3, 70_000)):
        if backend == "reference" and neurons > 65_536:
            continue
        x, up = torch.randn(tokens, 16), torch.randn(neurons, 16)
        problem = (x, up, up.clone(), torch.randn(16, neurons))
        for backup in (0.0, 0.3, 1.0):
            *_, saved = FORWARD(*problem, None, None, backend, True, True, 128, backup, "relu2", 0, 0)
            promised = registry.get(backend).saved_like(
                x, Weights(up, up, up), Options(stats=True, training=True, capacity=128, backup=backup)
            )
            assert [(t.shape, t.dtype, t.stride()) for t in saved] == [(t.shape, t.dtype, t.stride()) for t in promised]


# torch.compile


@pytest.mark.parametrize(
    ("stats", "how", "dtype", "most"),
    [
        (True, {"backend": "aot_eager", "dynamic": True}, torch.float64, 1e-13),
        pytest.param(False, {"backend": "aot_eager", "dynamic": False}, torch.float64, 1e-13, marks=pytest.mark.slow),
        pytest.param(True, {"backend": "inductor"}, torch.float32, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_compile_fullgraph(backend, stats, how, dtype, most):
    def loss(x, w_gate, w_up, w_down):
        y, seen = run_ffn(x, w_gate, w_up, w_down, backend=backend, stats=stats)
        total = y.square().sum()
        return total + 3 * seen.l1 if stats else total

    compiled = torch.compile(loss, fullgraph=True, **how)
    for gated in (True, False):
        ours, plain = leaves(make(gated, dtype=dtype)), leaves(make(gated, dtype=dtype))
        compiled(*ours).backward()
        loss(*plain).backward()
        for a, b in zip(ours, plain, strict=True):
            assert a is None or relative_error(a.grad, b.grad) < most
        with torch.no_grad():
            assert relative_error(compiled(*ours), loss(*ours)) < most


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_with_a_backup_that_changes(dynamic):
    def loss(x, backup, *weights):
        y, stats = run_ffn(x, *weights, backend="reference", capacity=4, backup=backup)
        return y.square().sum() + 3 * stats.l1

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens, backup in ((30, 0.125), (30, 0.3), (30, 0.0), (17, 0.3), (30, 1.0)):
        ours, plain = leaves(make()), leaves(make())
        compiled(ours.x[:tokens], backup, *ours[1:]).backward()
        loss(plain.x[:tokens], backup, *plain[1:]).backward()
        assert all(relative_error(a.grad, b.grad) < 1e-13 for a, b in zip(ours, plain, strict=True))


def test_compiled_statistics(backend):
    def statistics(*problem):
        return run_ffn(*problem, backend=backend)[1]

    problem = make(dtype=torch.float32)
    got = torch.compile(statistics, backend="aot_eager", fullgraph=True)(*problem)
    wanted = statistics(*problem)
    assert torch.equal(got.nonzeros, wanted.nonzeros)
    assert torch.equal(got.fired, wanted.fired)
    assert relative_error(got.l1, wanted.l1) < 1e-6
    assert (got.backend, got.nonzeros.dtype, got.overflow.dtype) == (backend, torch.int32, torch.int64)


def test_compile_under_autocast(backend):
    def forward(*problem):
        with torch.autocast("cpu", torch.bfloat16):
            return run_ffn(*problem, backend=backend)[0]

    problem = make(dtype=torch.float32)
    y = torch.compile(forward, backend="aot_eager", fullgraph=True)(*problem)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, forward(*problem)) < 0.01


# Choice of the backend


def test_available_backends():
    found = available_backends("cpu")
    assert found["dense"] is found["reference"] is None
    assert "needs a CUDA device" in found["hopper"]
    if not torch.cuda.is_available():
        assert available_backends() == found
        assert "CUDA" in available_backends("cuda")["dense"]


def test_auto_says_why_once(caplog):
    registry._resolve.cache_clear()
    problem = make()
    with caplog.at_level(logging.INFO, logger="twell.registry"):
        for _ in range(3):
            assert run_ffn(*problem)[1].backend == "dense"
    (record,) = [r for r in caplog.records if r.name == "twell.registry"]
    assert "auto -> dense for gated inference, hidden 16, intermediate 40, torch.float64 on cpu" in record.message
    assert "need a CUDA device" in record.message


@pytest.fixture
def gpu_with(monkeypatch):
    """What auto means on a GPU on which only these backends run. Nothing is launched."""

    def resolved(*names, dtype=torch.bfloat16):
        registry._resolve.cache_clear()
        answers = {True: Availability(True, "a test"), False: Availability(False, "not on this GPU")}
        monkeypatch.setattr(registry, "probe", lambda name, device: answers[name in names])
        return registry.resolve("auto", torch.device("cuda", 0), dtype, 64, 256, True, False)

    yield resolved
    registry._resolve.cache_clear()


def test_auto_is_the_fastest_sparse_backend_of_a_gpu(gpu_with, caplog):
    caplog.set_level(logging.INFO, logger="twell.registry")
    assert gpu_with("dense", "reference", "hopper", "triton") == "hopper"
    assert gpu_with("dense", "reference", "triton") == "triton"
    assert "hopper: not on this GPU" in caplog.messages[-1]
    assert gpu_with("dense", "reference") == "dense"
    assert gpu_with("dense", "hopper", "triton", dtype=torch.float32) == "dense"
    assert "hopper: it computes in bfloat16 only, not in torch.float32" in caplog.messages[-1]
    with pytest.raises(BackendUnavailable, match="no backend can run this"):
        gpu_with()


def test_why_not():
    block = {"hidden": 4, "intermediate": 65_537, "dtype": torch.float32}
    assert why_not("reference", device="cpu") is None
    assert why_not("reference", device="cpu", hidden=4, intermediate=65_536, dtype=torch.float32) is None
    assert "at most 65536, got 65537" in why_not("reference", device="cpu", **block)
    assert why_not("dense", device="cpu", **block) is why_not("auto", device="cpu", **block) is None
    assert "needs a CUDA device" in why_not("hopper", device="cpu", **block)
    assert "needs a CUDA device" in why_not("hopper", device="cpu", training=True)
    with pytest.raises(ValueError, match=r"backend must be one of auto, dense, .* got 'gpu'"):
        why_not("gpu")
    with pytest.raises(ValueError, match=r"backend must be one of auto, dense, .* got \['dense'\]"):
        why_not(["dense"])
    with pytest.raises(ValueError, match="activation must be one of relu, relu2, got 'gelu'"):
        why_not("dense", activation="gelu")


def test_a_backend_by_name_that_cannot_run_raises():
    x, up = torch.randn(2, 4), torch.randn(65_537, 4)
    with pytest.raises(BackendUnavailable, match=r"'reference' cannot run this .* at most 65536, got 65537"):
        run_ffn(x, None, up, up.t(), backend="reference")
    assert run_ffn(x, None, up, up.t(), backend="auto")[1].backend == "dense"
    assert issubclass(BackendUnavailable, RuntimeError)


def test_an_observed_call_does_not_bypass_the_dispatcher():
    problem = make(dtype=torch.float32)
    y, stats = run_ffn(*problem)
    with Operators() as seen:
        observed, observed_stats = run_ffn(*problem)
    assert "twell::sparse_ffn" in seen.names
    assert torch.equal(observed, y)
    assert all(torch.equal(a, b) for a, b in zip(observed_stats[:4], stats[:4], strict=True))
    graph = make_fx(lambda x: run_ffn(x, *problem[1:])[0])(problem.x).graph
    assert FORWARD in {node.target for node in graph.nodes}


@pytest.mark.parametrize("gated", [True, False])
def test_transformations_of_torch_func_are_those_of_plain_torch(gated):
    problem, (grad, vmap) = make(gated), (torch.func.grad, torch.func.vmap)
    batched = problem.x.view(6, 5, 16)

    def loss(function):
        def total(x, *weights):
            y, l1 = function(x, *weights)
            return y.square().sum() + 0.3 * l1

        return total

    def transformed(function):
        total, weights = loss(function), problem[1:]
        argnums = tuple(n for n, t in enumerate(problem) if t is not None)
        return [
            *grad(total, argnums)(*problem),
            *vmap(grad(total, argnums), (0, None, None, None))(batched, *weights),  # of each sample
            vmap(lambda x: function(x, *weights)[0])(batched),
            *torch.func.jvp(lambda x: function(x, *weights), (batched,), (batched.sin(),))[1],
            torch.func.jacrev(lambda x: function(x, *weights)[0])(problem.x[0]),
            grad(lambda x: grad(total)(x, *weights).square().sum())(problem.x),
        ]

    ours = functools.partial(y_and_l1, backend="dense")
    for got, wanted in zip(transformed(ours), transformed(plain_ffn), strict=True):
        torch.testing.assert_close(got, wanted)


def test_forward_mode_derivatives_are_those_of_plain_torch():
    problem = make()
    with forward_ad.dual_level():
        x = forward_ad.make_dual(problem.x, problem.x.sin())
        y, wanted = run_ffn(x, *problem[1:], backend="dense")[0], plain_ffn(x, *problem[1:])[0]
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(wanted).tangent)


def test_sparse_backends_refuse_transformations_of_torch_func():
    problem = make()

    def run(x):
        return run_ffn(x, *problem[1:], backend="reference")[0]

    refused = pytest.raises(
        NotImplementedError, match=r"backend 'reference' has neither a forward-mode derivative .*\(grad"
    )
    for transform in (torch.func.vmap, torch.func.jacrev, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with refused:
            transform(run)(problem.x)
    with refused:
        torch.func.jvp(run, (problem.x,), (problem.x,))
    with refused, forward_ad.dual_level():
        run(forward_ad.make_dual(problem.x, problem.x))


@pytest.mark.parametrize("strict", [True, False])
def test_export_takes_any_number_of_tokens(backend, strict):
    torch.manual_seed(0)
    block = make_block(16, 40, backend=backend).eval().requires_grad_(False)
    sizes = ({0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("positions", max=64)},)
    exported = torch.export.export(block, (torch.randn(3, 5, 16),), dynamic_shapes=sizes, strict=strict).module()
    for shape in ((2, 7, 16), (9, 2, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(exported(x), block(x))


def test_statistics_print_as_a_summary():
    problem = make()
    stats = run_ffn(*problem, backend="reference")[1]
    mean, largest, fired = stats.nonzeros.double().mean(), stats.nonzeros.max(), stats.fired.sum()
    assert str(stats) == (
        f"FFNStats(30 tokens; non-zeros of 40 neurons: mean {mean:.1f}, largest {largest}; {fired} fired; "
        f"l1={stats.l1:.4g}, overflow={stats.overflow}, backend='reference')"
    )
    nothing = run_ffn(problem.x[:0], *problem[1:])[1]
    assert "0 tokens; non-zeros of 40 neurons: none; 0 fired" in str(nothing)
    empty = run_ffn(*problem.each(lambda t: t.to("meta")), backend="dense")[1]
    assert str(empty) == "FFNStats(30 tokens; 40 neurons, without values, backend='dense')"


# Squared ReLU, y = (relu(x Wg^T)^2 * (x Wu^T)) Wd^T


@pytest.mark.parametrize("gated", [True, False])
def test_a_square_that_overflows_does_so_as_in_plain_torch(backend, gated):
    """relu(z) = 1e25 is finite in bfloat16, its square is not; its slope, 2e25, is."""
    problem = make(gated, torch.bfloat16)
    (problem.w_up if problem.w_gate is None else problem.w_gate)[7, 0] = 1e25  # x[:, 0] is 1
    ours, plain = (
        evaluate(functools.partial(f, activation="relu2"), problem, upstream(problem))
        for f in (functools.partial(y_and_l1, backend=backend), plain_ffn)
    )
    assert not plain["y"].isfinite().any()
    for name in plain:
        assert torch.equal(ours[name].isfinite(), plain[name].isfinite()), name
    assert torch.equal(ours["y"].isnan(), plain["y"].isnan())


def test_a_block_of_another_activation_is_refused():
    with pytest.raises(ValueError, match="activation must be one of relu, relu2, got 'silu'"):
        make_block(4, 8, activation="silu")


def test_a_block_that_squares():
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


def test_allocated_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(2, 2, dtype=torch.bfloat16)).isnan().all()
    assert (torch.ones(()).new_empty((), dtype=torch.int64) < 0).all()
    assert (torch.empty(4, dtype=torch.uint8) == 0xA5).all()
