"""The Hopper backend against plain torch in float64, on the shapes and patterns where such kernels go wrong."""

import pytest
import torch

from kernels import BackendUnavailable, SparseFeedForward, neuron_major, sparse_ffn
from kernels.registry import probe
from kernels.testing import Problem, check, evaluate_exactly, make_problem, relative_error

pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(autouse=True, scope="module")
def _needs_hopper():
    availability = probe("hopper", torch.device(CUDA, 0))
    if not availability.ok:
        assert torch.cuda.get_device_capability() != (9, 0), f"a Hopper GPU, but: {availability.reason}"
        pytest.skip(f"no Hopper backend here: {availability.reason}")


def hopper(x, w_gate, w_up, w_down):
    y, stats = sparse_ffn(x, w_gate, w_up, w_down, backend="hopper")
    return y, stats.l1


def problem(tokens, hidden=256, intermediate=1024, nnz=20.0, **kwargs):
    return make_problem(tokens, hidden, intermediate, nnz, device=CUDA, **kwargs)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 63, 128, 129, 300, 2500, 30000])
def test_any_number_of_tokens(tokens, gated):
    check(hopper, problem(tokens, gated=gated))


@pytest.mark.parametrize("hidden", [64, 192, 448, 2048, 2112, 4096, 5120, 8192])
@pytest.mark.parametrize("tokens", [40, 1500])
def test_any_hidden_size(tokens, hidden):
    check(hopper, problem(tokens, hidden, 520))


@pytest.mark.parametrize("intermediate", [8, 250, 256, 264, 5632, 65536])
def test_any_intermediate_size(intermediate):
    check(hopper, problem(700, 128, intermediate, min(20.0, intermediate / 4)))


@pytest.mark.parametrize("nnz", [0.0, 1.0, 120.0, 400.0])
@pytest.mark.parametrize("tokens", [300, 25000])
def test_any_density(tokens, nnz):
    check(hopper, problem(tokens, 128, 1536, nnz))


def exact_pattern(counts, hidden=128, intermediate=768, tile=256):
    """A problem whose token i has exactly counts[i] non-zeros in each tile."""
    generator = torch.Generator(CUDA).manual_seed(0)
    tokens = len(counts)
    x = torch.zeros(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor(counts, dtype=torch.bfloat16)
    x[:, 1] = 1
    x[:, 2:] = torch.randn(tokens, hidden - 2, device=CUDA, generator=generator)
    gate = torch.zeros(intermediate, hidden, device=CUDA, dtype=torch.bfloat16)
    order = torch.stack([torch.randperm(tile, device=CUDA, generator=generator) for _ in range(intermediate // tile)])
    gate[:, 0] = 1
    gate[:, 1] = -order.flatten().to(torch.bfloat16)  # active where count > order
    up = torch.randn(intermediate, hidden, device=CUDA, generator=generator).to(torch.bfloat16) / 8
    down = torch.randn(hidden, intermediate, device=CUDA, generator=generator).to(torch.bfloat16) / 8
    return Problem(x, gate, up, down)


@pytest.mark.parametrize("repeat", [1, 40, 700])
def test_ugly_rows(repeat):
    counts = [0, 1, 15, 16, 17, 31, 32, 33, 192, 256] * repeat
    p = exact_pattern(counts)
    check(hopper, p)
    _, stats = sparse_ffn(*p, backend="hopper")
    assert stats.nonzeros.tolist() == [3 * c for c in counts]
    assert bool(stats.fired.all())
    assert int(stats.overflow) > 0


def test_packing_is_exact():
    from kernels.hopper import twell

    p = problem(1000, 256, 1500)
    for tiling in (twell.WIDE, twell.NARROW):
        packed = twell.gate_pack(p.x, p.w_gate, p.w_up, neuron_major(p.w_down), tiling)
        format_ = packed.to_twell()
        format_.validate()
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


def test_statistics():
    p = problem(900, 256, 1024, 30.0)
    y, stats = sparse_ffn(*p, backend="hopper")
    exact = evaluate_exactly(p)
    g = torch.relu(p.x.double() @ p.w_gate.double().t())
    assert relative_error(y, exact["y"]) < 0.01
    assert (stats.nonzeros - (g != 0).sum(1)).abs().max() <= 2  # values that rounding moves across zero
    assert relative_error(stats.l1, exact["l1"]) < 0.01
    assert (stats.fired != (g != 0).any(0)).sum() <= 2
    assert stats.backend == "hopper"
    bare, none = sparse_ffn(*p, backend="hopper", stats="none")
    assert torch.equal(bare, y)
    assert none.nonzeros is None
    assert none.l1 is None


def test_results_do_not_depend_on_timing():
    for tokens in (100, 3000, 30000):
        p = problem(tokens, 256, 1024, 60.0)
        first = sparse_ffn(*p, backend="hopper")[0]
        for _ in range(5):
            assert torch.equal(sparse_ffn(*p, backend="hopper")[0], first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_inputs_show_as_in_plain_torch(bad):
    for tokens in (50, 3000):
        p = problem(tokens)
        p.x[7, 5] = bad
        check(hopper, p)
        assert sparse_ffn(*p, backend="hopper")[0][7].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["w_gate", "w_up", "w_down"])
@pytest.mark.parametrize("tokens", [200, 2000, 12000])
def test_not_finite_weights_show_as_in_plain_torch(which, bad, tokens):
    p = problem(tokens)
    weight = getattr(p, which)
    weight[3, 5] = weight[200, 250] = bad
    check(hopper, p)
    bare = problem(tokens, gated=False)
    if which != "w_gate":
        getattr(bare, which)[3, 5] = bad
        check(hopper, bare)


def test_strided_inputs():
    p = problem(400)
    wide = torch.zeros(400, 2 * 256, device=CUDA, dtype=torch.bfloat16)
    wide[:, ::2] = p.x
    padded = torch.zeros(400, 256 + 3, device=CUDA, dtype=torch.bfloat16)
    padded[:, 1:257] = p.x
    expected = sparse_ffn(*p, backend="hopper")[0]
    for x in (wide[:, ::2], padded[:, 1:257], p.x.t().contiguous().t()):
        assert torch.equal(sparse_ffn(x, *p[1:], backend="hopper")[0], expected)
    transposed = [w.t().contiguous().t() for w in p[1:]]
    assert torch.equal(sparse_ffn(p.x, *transposed, backend="hopper")[0], expected)
    batched = sparse_ffn(p.x.view(4, 100, 256), *p[1:], backend="hopper")
    assert torch.equal(batched[0].view(400, 256), expected)
    assert batched[1].nonzeros.shape == (4, 100)


def test_zero_tokens():
    p = problem(4)
    y, stats = sparse_ffn(p.x[:0], *p[1:], backend="hopper")
    assert y.shape == (0, 256)
    assert stats.nonzeros.shape == (0,)
    assert float(stats.l1) == 0


def test_side_stream():
    p = problem(20000)
    expected = sparse_ffn(*p, backend="hopper")[0]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x = p.x * 1  # made on the side stream, behind the sleep
        y = sparse_ffn(x, *p[1:], backend="hopper")[0]
    side.synchronize()
    assert torch.equal(y, expected)


def test_cuda_graph():
    p = problem(3000)
    x = p.x.clone()
    sparse_ffn(x, *p[1:], backend="hopper", stats="full")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, stats = sparse_ffn(x, *p[1:], backend="hopper", stats="full")
    for seed in (1, 2):
        other = problem(3000, seed=seed).x
        x.copy_(other)
        graph.replay()
        expected, expected_stats = sparse_ffn(other, *p[1:], backend="hopper", stats="full")
        assert torch.equal(y, expected)
        assert torch.equal(stats.nonzeros, expected_stats.nonzeros)


def test_two_models_and_compile():
    first, second = (SparseFeedForward(256, 1024, backend="hopper", device=CUDA, dtype=torch.bfloat16) for _ in "ab")
    x = torch.randn(5, 60, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        alone = first(x), second(x)
        assert torch.equal(first(x), alone[0])
        compiled = torch.compile(first, fullgraph=True)
        assert torch.equal(compiled(x), alone[0])
        assert torch.equal(second(x), alone[1])


def test_what_it_cannot_do_is_said():
    p = problem(16)
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        sparse_ffn(*(t.half() for t in p), backend="hopper")
    with pytest.raises(BackendUnavailable, match="CUDA"):
        sparse_ffn(*(t.cpu() for t in p), backend="hopper")
    with pytest.raises(BackendUnavailable, match="multiple of 64"):
        sparse_ffn(p.x[:, :100], p.w_gate[:, :100], p.w_up[:, :100], p.w_down[:100], backend="hopper")
    with pytest.raises(ValueError, match="same device"):
        sparse_ffn(p.x.cpu(), *p[1:], backend="hopper")
