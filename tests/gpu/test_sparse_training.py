"""Each gradient of the sparse backends against plain torch in float64, and edge cases."""

from functools import partial

import pytest
import torch
from calls import change, make_block, run_ffn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch.utils.checkpoint import checkpoint

from twell import registry
from twell.hot import hot_neurons
from twell.memory import neuron_major
from twell.testing import Problem, check, evaluate, make_problem, plain_ffn, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CUDA = "cuda"


def run(backend, x, w_gate, w_up, w_down, capacity=128, **options):
    y, stats = run_ffn(x, w_gate, w_up, w_down, backend=backend, capacity=capacity, **options)
    return y, stats.l1


@pytest.fixture(scope="module")
def ffn(backend):
    """As `check` wants it."""
    return partial(run, backend)


@pytest.fixture(scope="module")
def roomy(backend):
    """With room for as many entries as there can be."""
    return lambda *problem: run(backend, *problem, capacity=problem[2].shape[0])


def problem(tokens, hidden=256, intermediate=1024, nnz=20.0, **kwargs):
    return make_problem(tokens, hidden, intermediate, nnz, device=CUDA, **kwargs)


def upstream(p: Problem, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(p.x.shape, device=CUDA, generator=generator).to(p.x.dtype)


@pairwise(gated=[True, False], l1=[0.0, 0.5], tokens=[1, 63, 64, 65, 300, 2500, 9000])
def test_any_number_of_tokens(ffn, tokens, l1, gated):
    p = problem(tokens, gated=gated)
    check(ffn, p, upstream(p), l1)


@pairwise(gated=[True, False], hot=[1, 20, 128, 1024], tokens=[1, 300, 9000])
def test_hot_neurons(backend, tokens, hot, gated):
    p = problem(tokens, gated=gated)
    neurons = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:hot].sort().values.to(CUDA)
    check(lambda *operands: run(backend, *operands, hot=neurons), p, upstream(p), 0.5)
    y, stats = run_ffn(*p, backend=backend, hot=neurons)
    _, whole = run_ffn(*p, backend=backend)
    # Another product adds up in another order, so that a neuron near zero may fire in one and not in the other.
    assert int((stats.nonzeros - whole.nonzeros).abs().sum()) <= 1e-3 * int(whole.nonzeros.sum()) + 2
    assert int((stats.fired != whole.fired).sum()) <= 5
    y_alone = run_ffn(*p, backend=backend, hot=neurons, stats=False)[0]
    if not registry.has_few_tokens(backend, *p.x.shape):
        assert torch.equal(y_alone, y)
    else:  # kernels of few tokens, which add up in another order
        check(lambda *_: (y_alone, stats.l1), p)
    _, strided = run_ffn(*p, backend=backend, hot=neurons.repeat_interleave(2)[::2])
    assert torch.equal(strided.fired, stats.fired)
    p.x[0, 3] = float("nan")
    y, stats = run_ffn(*p, backend=backend, hot=neurons)
    assert int(stats.nonzeros[0]) == 1024
    assert torch.equal(y.isnan(), plain_ffn(*p)[0].isnan())


@pairwise(
    gated=[True, False],
    way=["plain", "hot", "backup", "hot and backup", "capacity", "compile"],
    sizes=[(1, 256), (300, 2048), (9000, 256), (1500, 5120)],
)
def test_squared_relu(backend, sizes, way, gated):
    tokens, hidden = sizes
    p = problem(tokens, hidden, gated=gated)
    options = {"activation": "relu2", "capacity": 1 if way == "capacity" else 128}
    if "hot" in way:
        options["hot"] = torch.arange(40, 168, device=CUDA)
    if "backup" in way:
        options["backup"] = 0.125

    def function(*operands):
        return run(backend, *operands, **options)

    check(torch.compile(function, fullgraph=True) if way == "compile" else function, p, upstream(p), 0.5, "relu2")


@pytest.mark.parametrize(
    ("options", "gated"),
    [
        ({}, True),
        ({"hot": 128, "activation": "relu2"}, False),
        ({"hot": 128, "backup": 0.125}, True),
        ({"capacity": 1, "activation": "relu2"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 256), (300, 2048), (9000, 256), (1500, 5120)])
def test_weights_of_the_l1_term(backend, tokens, hidden, options, gated):
    p = problem(tokens, hidden, gated=gated)
    activation, weight = options.get("activation", "relu"), torch.rand(len(p.w_up), device=CUDA).mul(2).round()

    def function(*operands):
        return run(backend, *operands, l1_weight=weight, **options)

    check(function, p, upstream(p), 0.5, activation, weight)
    check(function, p, None, 0.0, activation, weight)


@pytest.mark.parametrize("where", ["x", "dy"])
def test_squared_relu_is_nonfinite_wherever_plain_torch_is(backend, where):
    p = problem(300)
    dy = upstream(p)
    (dy if where == "dy" else getattr(p, where))[7, 5] = float("inf")
    ours = evaluate(lambda *q: run(backend, *q, activation="relu2"), p, dy)
    for name, value in evaluate(lambda *q: plain_ffn(*q, "relu2"), p, dy).items():
        assert not (~value.isfinite() & ours[name].isfinite()).any(), name


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("share", [0.125, 1.0])
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 1024), (300, 1024), (300, 250), (9000, 1024)])
def test_a_backup(backend, tokens, intermediate, share, gated):
    p = problem(tokens, intermediate=intermediate, gated=gated)
    check(lambda *operands: run(backend, *operands, backup=share), p, upstream(p), 0.5)
    leaves = [t if t is None else t.detach().requires_grad_() for t in p]
    _, stats = run_ffn(*leaves, backend=backend, backup=share)
    _, whole = run_ffn(*leaves, backend=backend)
    assert torch.equal(stats.nonzeros, whole.nonzeros)
    # Another product adds up in another order, so that a neuron near zero may fire in one and not in the other.
    assert int((stats.fired != whole.fired).sum()) <= 5


def test_a_backup_takes_the_tokens_that_need_most_room(backend):
    """At a real size, with tokens of several hundred non-zeros beside a mean of 60; also beside hot neurons."""
    p = problem(16384, 2048, 5632, 60.0)
    counts = run_ffn(*p, backend=backend)[1].nonzeros
    assert int(counts.max()) > 128
    left = counts.sort().values[: 16384 - 2048].sum()
    enough = -(-int(left) // 16384)
    assert enough < 50
    dy = upstream(p)
    check(lambda *operands: run(backend, *operands, capacity=enough, backup=0.125), p, dy, 0.5)
    hot = hot_neurons(p.x, p.w_gate)
    assert len(hot)
    check(lambda *operands: run(backend, *operands, capacity=enough, backup=0.125, hot=hot), p, dy, 0.5)
    leaves = Problem(*(t.detach().requires_grad_() for t in p))
    own, without = (run_ffn(*leaves, backend=backend, capacity=enough, backup=b)[1].overflow for b in (0.125, 0.0))
    assert int(without) > int(own), "without a backup it is too little"


def test_a_backup_in_a_cuda_graph(backend):
    p = problem(3000)
    leaves, dy = Problem(*(t.detach().clone().requires_grad_() for t in p)), upstream(p)
    dl1 = torch.tensor(0.5, device=CUDA)

    def step():
        y, stats = run_ffn(*leaves, backend=backend, backup=0.125)
        return y, *torch.autograd.grad([y, stats.l1], list(leaves), [dy, dl1])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        leaves.x.data.copy_(problem(3000, seed=seed).x)
        graph.replay()
        assert all(relative_error(ours, eager) < 1e-3 for ours, eager in zip(captured, step(), strict=True))


def test_more_tokens_than_16_bits_count(ffn):
    p = problem(70001, 64, 256, 8.0)
    check(ffn, p, upstream(p), 0.5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hidden", [64, 192, 448, 2048, 2112, 4096, 5120, 8192])
@pytest.mark.parametrize("tokens", [40, 1500])
def test_any_hidden_size(ffn, tokens, hidden, gated):
    p = problem(tokens, hidden, 520, gated=gated)
    check(ffn, p, upstream(p), 0.5)


@pytest.mark.parametrize("intermediate", [8, 250, 264, 5632, 8200, 65536])
def test_any_intermediate_size(roomy, intermediate):
    p = problem(700, 128, intermediate, min(20.0, intermediate / 4))
    check(roomy, p, upstream(p), 0.5)


@pytest.mark.parametrize("nnz", [0.0, 1.0, 120.0, 400.0])
@pytest.mark.parametrize("tokens", [300, 9000])
def test_any_density(roomy, tokens, nnz):
    p = problem(tokens, 128, 1536, nnz)
    check(roomy, p, upstream(p), 0.5)


def test_a_neuron_that_every_token_fires(ffn):
    p = problem(5000)
    p.w_gate[3] = 0
    p.w_gate[3, 0] = 1  # x[:, 0] is 1
    check(ffn, p, upstream(p), 0.5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    tokens=st.integers(1, 700),
    hidden=st.integers(1, 20),
    intermediate=st.integers(8, 700),
    density=st.floats(0.0, 0.4),
    gated=st.booleans(),
    l1=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
)
def test_random_shapes(roomy, tokens, hidden, intermediate, density, gated, l1, seed):
    # The last entry below the mean is hardly more than zero, so that tensor cores, which do not sum up as exactly as
    # float32 can, get few of its digits: it must not be the only one.
    nnz = max(density * intermediate * 0.7, 2)
    p = problem(tokens, 64 * hidden, intermediate, nnz, gated=gated, dead=0.1, seed=seed)
    check(roomy, p, upstream(p), l1)


def test_only_what_is_needed(backend, ffn):
    p = problem(300)
    expected = evaluate(ffn, p, upstream(p))
    for needed in ("x", "w_gate", "w_up", "w_down"):
        leaves = Problem(*(t.detach().requires_grad_(name == needed) for name, t in p._asdict().items()))
        y, _ = run_ffn(*leaves, backend=backend)
        y.backward(upstream(p))
        for name, leaf in leaves._asdict().items():
            assert (leaf.grad is None) == (name != needed)
        assert torch.equal(getattr(leaves, needed).grad, expected[f"d{needed}"])


def test_deterministic_whatever_the_strides(backend, ffn):
    p = problem(3000, 256, 1024, 60.0)
    dy = upstream(p)
    first = evaluate(ffn, p, dy, 0.5)
    for down in (p.w_down, neuron_major(p.w_down)):
        for _ in range(3):
            again = evaluate(ffn, p._replace(w_down=down), dy, 0.5)
            assert all(torch.equal(again[name], value) for name, value in first.items())
    leaves = Problem(*(t.detach().requires_grad_() for t in p))
    wide = torch.zeros(3000, 512, device=CUDA, dtype=torch.bfloat16)
    wide[:, ::2] = dy
    y, stats = run_ffn(*leaves, backend=backend)
    torch.autograd.backward([y, stats.l1], [wide[:, ::2], torch.tensor(0.5, device=CUDA)])
    assert torch.equal(leaves.x.grad, first["dx"])


def test_gradients_lie_as_the_weights_do(backend):
    p = problem(200)
    leaves = Problem(*(t.detach().requires_grad_() for t in p._replace(w_down=neuron_major(p.w_down))))
    run_ffn(*leaves, backend=backend)[0].sum().backward()
    assert leaves.w_down.grad.stride() == leaves.w_down.stride()


def test_no_result_depends_on_the_capacity(backend, ffn):
    p = problem(600, 128, 1024, 50.0)
    needed = int(run_ffn(*p, backend=backend)[1].nonzeros.sum())
    leaves = Problem(*(t.detach().requires_grad_() for t in p))
    y, stats = run_ffn(*leaves, backend=backend, capacity=8)
    assert torch.equal(y, run_ffn(*p, backend=backend)[0])
    _, enough = run_ffn(*leaves, backend=backend, capacity=-(-needed // 600))
    assert int(stats.overflow) > int(enough.overflow)
    for capacity in (1, 8, needed // 600 - 1, -(-needed // 600)):
        check(lambda *q: ffn(*q, capacity=capacity), p, upstream(p), 0.5)  # noqa: B023


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("way", ["plain", "hot", "backup", "hot and backup", "checkpoint", "compile", "side stream"])
def test_exceeded_capacity(backend, way, gated):
    p = problem(700, 128, 1024, 60.0, gated=gated)
    options = {"capacity": 4}
    if "hot" in way:
        options["hot"] = torch.arange(40, 168, device=CUDA)
    if "backup" in way:
        options["backup"] = 0.125

    def function(*operands):
        return run(backend, *operands, **options)

    if way == "compile":
        function = torch.compile(function, fullgraph=True)
    if way == "checkpoint":
        function = partial(checkpoint, function, use_reentrant=False)
    side = torch.cuda.Stream() if way == "side stream" else torch.cuda.current_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check(function, p, upstream(p), 0.5)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("capacity", [4, 128])
def test_asking_for_the_count_waits_for_no_more_than_the_forward(backend, capacity):
    """Copies that wait for the whole stream raise here; the event behind the forward is waited for."""
    p = problem(3000, nnz=60.0)
    leaves, dy = [t.detach().requires_grad_() for t in p], upstream(p)
    run(backend, *leaves, capacity=capacity)[0].backward(dy)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(backend, *leaves, capacity=capacity)[0].backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_exceeded_capacity_in_a_cuda_graph_is_nan(backend):
    """The count cannot be read there: gradients are NaN, not wrong, and exact if the capacity is sufficient."""
    small, large = problem(600, nnz=10.0), problem(600, nnz=300.0)
    leaves, dy = Problem(*(t.detach().clone().requires_grad_() for t in small)), upstream(small)

    def step():
        y, _ = run_ffn(*leaves, backend=backend, capacity=64)
        return torch.autograd.grad(y, list(leaves), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(relative_error(ours, eager) < 1e-3 for ours, eager in zip(captured, step(), strict=True))
    for leaf, value in zip(leaves, large, strict=True):
        leaf.data.copy_(value)
    graph.replay()
    assert all(gradient.isnan().any() for gradient in captured)
    assert all(gradient.isfinite().all() for gradient in step())


def test_a_module_raises_its_capacity(backend):
    torch.manual_seed(0)
    block = make_block(256, 1024, backend=backend, device=CUDA, dtype=torch.bfloat16)
    block._capacity = 8
    x = torch.randn(5, 60, 256, device=CUDA, dtype=torch.bfloat16)
    for _ in range(2):
        block(x).sum().backward()
        assert all(w.grad.isfinite().all() for w in block.parameters())
    assert block._capacity == 1024, "half of the neurons fire"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("gated", [True, False])
def test_nan_is_wherever_plain_torch_has_it(ffn, where, bad, gated):
    p = problem(300, gated=gated)
    dy = upstream(p)
    (dy if where == "dy" else getattr(p, where))[7, 5] = bad
    ours, plain = evaluate(ffn, p, dy), evaluate(plain_ffn, p, dy)
    for name, value in plain.items():
        hidden = ~value.isfinite() & ours[name].isfinite()
        assert not hidden.any(), f"{name}: {int(hidden.sum())} values that are not finite in plain torch are here"
    others = torch.arange(300, device=CUDA) != 7
    assert ours["dx"][others].isfinite().all()


def test_a_nonfinite_gradient_of_l1(backend):
    p = problem(100)
    leaves = Problem(*(t.detach().requires_grad_() for t in p))
    _, stats = run_ffn(*leaves, backend=backend)
    (stats.l1 * float("nan")).backward()
    assert leaves.x.grad.isnan().all()
    assert leaves.w_up.grad.isnan().all()


def test_zero_tokens(backend):
    p = problem(4)
    leaves = Problem(p.x[:0].detach().requires_grad_(), *(t.detach().requires_grad_() for t in p[1:]))
    y, stats = run_ffn(*leaves, backend=backend)
    (y.sum() + stats.l1).backward()
    assert leaves.x.grad.shape == (0, 256)
    assert not leaves.w_up.grad.any()


def test_what_is_saved_is_small(backend):
    p = problem(4096, 512, 4096, 20.0)
    leaves = Problem(*(t.detach().requires_grad_() for t in p))
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        run_ffn(*leaves, backend=backend)
    for leaf in leaves:
        saved.pop(leaf.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) < 4096 * 128 * 6.2  # a word and u for each entry, and little besides


@pytest.mark.parametrize("way", ["plain", "checkpoint", "compile", "side stream"])
def test_modules_in_training(backend, way):
    torch.manual_seed(0)
    block = make_block(256, 1024, backend=backend, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(5, 60, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)

    def gradients(call):
        block.zero_grad()
        x.grad = None
        y = call(x)
        (y.float().square().sum() + 0.1 * block.stats.l1).backward()
        return [x.grad.clone(), *(w.grad.clone() for w in block.parameters())]

    change(block, capacity=1024)
    expected = gradients(block)
    if way == "plain":
        got = gradients(block)
    elif way == "checkpoint":
        got = gradients(lambda x: checkpoint(block, x, use_reentrant=False))
    elif way == "compile":
        got = gradients(torch.compile(block, fullgraph=True))
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = gradients(block)
        stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
