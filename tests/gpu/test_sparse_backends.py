"""The sparse backends against plain torch in float64, on shapes and patterns where such kernels tend to fail."""

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from calls import change, exact_pattern, make_block, run_ffn
from pairwise import pairwise

from twell import autotune, registry
from twell.launch_cache import LAUNCHES
from twell.memory import PIECE, neuron_major
from twell.registry import BackendUnavailable, why_not
from twell.testing import Problem, check, evaluate_exactly, make_problem, plain_ffn, relative_error, tolerance
from twell.tuning import Form
from twell.tuning.order import restore_order

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
CUDA = "cuda"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def ffn(backend):
    return partial(run_ffn, backend=backend)


@pytest.fixture
def y_and_l1(ffn):
    """As `check` wants it."""

    def run(x, w_gate, w_up, w_down):
        y, stats = ffn(x, w_gate, w_up, w_down)
        return y, stats.l1

    return run


def problem(tokens, hidden=256, intermediate=1024, nnz=20.0, **kwargs):
    return make_problem(tokens, hidden, intermediate, nnz, device=CUDA, **kwargs)


def check_y_alone(backend, y_alone, y, p, activation="relu"):
    """With stats=False, few tokens have kernels of their own, which add up in another order; all others are equal."""
    if not registry.has_few_tokens(backend, *p.x.shape):
        assert torch.equal(y_alone, y)
    else:
        exact = evaluate_exactly(p, None, 0.0, activation)["y"]
        plain_error = relative_error(plain_ffn(*p, activation)[0], exact)
        assert relative_error(y_alone, exact) <= tolerance(plain_error, p.x.dtype)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 63, 128, 129, 300, 2500, 30000])
def test_any_number_of_tokens(y_and_l1, tokens, gated):
    check(y_and_l1, problem(tokens, gated=gated))


@pytest.mark.parametrize("hidden", [64, 192, 448, 2048, 2112, 4096, 5120, 8192])
@pytest.mark.parametrize("tokens", [40, 1500])
def test_any_hidden_size(y_and_l1, tokens, hidden):
    check(y_and_l1, problem(tokens, hidden, 520))


@pytest.mark.parametrize("intermediate", [8, 250, 256, 264, 5632, 65536])
def test_any_intermediate_size(y_and_l1, intermediate):
    check(y_and_l1, problem(700, 128, intermediate, min(20.0, intermediate / 4)))


@pytest.mark.parametrize("nnz", [0.0, 1.0, 120.0, 400.0])
@pytest.mark.parametrize("tokens", [300, 25000])
def test_any_density(y_and_l1, tokens, nnz):
    check(y_and_l1, problem(tokens, 128, 1536, nnz))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (300, 2048), (2500, 256), (30000, 256), (1500, 5120)])
def test_squared_relu(ffn, tokens, hidden, gated):
    p = problem(tokens, hidden, gated=gated)

    def run(*operands):
        y, stats = ffn(*operands, activation="relu2")
        return y, stats.l1

    check(run, p, activation="relu2")
    _, relu = ffn(*p)
    y, stats = ffn(*p, activation="relu2")
    assert torch.equal(stats.nonzeros, relu.nonzeros)
    assert torch.equal(stats.fired, relu.fired)
    with torch.no_grad():
        squared, plain = (ffn(*p, activation=name, stats=False)[0] for name in ("relu2", "relu"))
        assert relative_error(squared, y) < 2**-8  # not to the bit: few tokens without statistics have other kernels
        for _ in range(2):  # the second one prepared, for relu2 and for relu with the same operands
            assert torch.equal(ffn(*p, activation="relu2", stats=False)[0], squared)
            assert torch.equal(ffn(*p, stats=False)[0], plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["x", "w_gate"])
def test_squared_relu_of_nonfinite_inputs(ffn, which, bad):
    p = problem(2000)
    getattr(p, which)[3, 5] = bad

    def run(*operands):
        y, stats = ffn(*operands, activation="relu2")
        return y, stats.l1

    check(run, p, activation="relu2")


@pytest.mark.parametrize("hot", [None, [7, 9]])
def test_a_square_that_overflows_shows_as_in_plain_torch(ffn, hot):
    """relu(z) = 1e25 is finite in bfloat16, its square is not."""
    p = problem(300)
    p.w_gate[7, 0] = 1e25  # x[:, 0] is 1
    options = {} if hot is None else {"hot": torch.tensor(hot, device=CUDA)}
    y, _ = ffn(*p, activation="relu2", **options)
    plain, _ = plain_ffn(*p, "relu2")
    assert not plain.isfinite().any()
    assert torch.equal(y.isnan(), plain.isnan())
    assert torch.equal(y.sign()[~y.isnan()], plain.sign()[~plain.isnan()])


@torch.no_grad()
@pairwise(gated=[True, False], activation=["relu", "relu2"], count=[1, 20, 128, 900, 1024], tokens=[1, 300, 9000])
def test_a_prefix_of_hot_neurons(ffn, backend, tokens, count, gated, activation):
    p = problem(tokens, gated=gated)
    p = p._replace(w_down=neuron_major(p.w_down))
    how = {"hot": count, "activation": activation}

    def run(*operands):
        y, stats = ffn(*operands, **how)
        return y, stats.l1

    check(run, p, None, 0.0, activation)
    y, stats = ffn(*p, **how)
    _, whole = ffn(*p)
    # Another product adds up in another order, so that a neuron near zero may fire in one and not in the other.
    assert int((stats.nonzeros - whole.nonzeros).abs().sum()) <= 1e-3 * int(whole.nonzeros.sum()) + 2
    assert int((stats.fired != whole.fired).sum()) <= 5
    y_alone = ffn(*p, stats=False, **how)[0]
    check_y_alone(backend, y_alone, y, p, activation)
    assert torch.equal(ffn(*p, stats=False, **how)[0], y_alone)  # prepared
    p.x[0, 3] = float("nan")
    y, stats = ffn(*p, **how)
    assert int(stats.nonzeros[0]) == 1024
    assert torch.equal(y.isnan(), plain_ffn(*p, activation)[0].isnan())


@torch.no_grad()
def test_a_prefix_copies_no_weights_and_runs_in_a_graph(ffn):
    p = problem(300, 2048, 5632)._replace(w_down=neuron_major(problem(300, 2048, 5632).w_down))
    wanted = ffn(*p, hot=256, stats=False)[0]

    def allocated(**options):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert options == {} or torch.equal(ffn(*p, stats=False, **options)[0], wanted)
        ffn(*p, stats=False, **options)
        return torch.cuda.max_memory_allocated() - before

    # The hot neurons' products of 300 tokens, and y: the weights are 23 MB each.
    assert allocated(hot=256) - allocated() < 5e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = ffn(*p, hot=256, stats=False)[0]
    p.x.copy_(problem(300, 2048, 5632, seed=5).x)
    graph.replay()
    assert torch.equal(ours, ffn(*p, hot=256, stats=False)[0])


PLANS_WITH_HOT = [{}, {"hot": torch.arange(1, 513, 2)}, {"hot": 256}]


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("plan", PLANS_WITH_HOT, ids=["none", "index", "prefix"])
def test_pieces_of_y_alone(ffn, plan, gated):
    p = problem(2 * PIECE + 77, gated=gated)
    p = p._replace(w_down=neuron_major(p.w_down))
    run = partial(ffn, **plan)
    y = run(*p, stats=False)[0]
    assert torch.equal(run(*p, stats=False)[0], y)
    assert torch.equal(y, torch.cat([run(x, *p[1:], stats=False)[0] for x in p.x.split(PIECE)]))
    assert relative_error(y, plain_ffn(*p)[0]) < 0.02
    p.x[PIECE, 3] = float("nan")
    assert run(*p, stats=False)[0].isnan().any(1).nonzero().tolist() == [[PIECE]]


@torch.no_grad()
@pytest.mark.unpoisoned
@pytest.mark.parametrize("plan", PLANS_WITH_HOT, ids=["none", "index", "prefix"])
def test_memory_of_many_tokens(ffn, plan):
    p = problem(131072, 2048, 5632, 30.0)
    p = p._replace(w_down=neuron_major(p.w_down))
    ffn(*p, stats=False, **plan)  # what stays, as the workspace of torch's products
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = ffn(*p, stats=False, **plan)[0]
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + 4000 * len(y)


def test_blocks_in_the_order_that_autotune_chose(backend):
    p = problem(16384, 1024, 4096, 60.0)
    block = make_block(1024, 4096, device=CUDA, dtype=torch.bfloat16, keep_stats=False).eval()
    block.load_state_dict({f"{n}_proj.weight": getattr(p, f"w_{n}") for n in ("gate", "up", "down")})
    with torch.no_grad():
        wanted = block(p.x)
        tuning = autotune(block, p.x, backends=[backend])
        assert Form(backend, in_front=True) in tuning[0].milliseconds
        assert relative_error(block(p.x), wanted) < 0.02
        restore_order(block)
        assert torch.equal(block.gate_proj.weight, p.w_gate)
        assert torch.equal(block.down_proj.weight, p.w_down)


def test_calls_of_any_number_of_tokens_after_autotune(backend):
    p = problem(16384, 1024, 4096, 20.0)
    block = make_block(1024, 4096, device=CUDA, dtype=torch.bfloat16, keep_stats=False).eval()
    block.load_state_dict({f"{n}_proj.weight": getattr(p, f"w_{n}") for n in ("gate", "up", "down")})
    with torch.no_grad():
        (choice,) = autotune(block, p.x, backends=[backend])
        assert block.plan == choice.plan
        assert set(choice.plan.backends) <= {"dense", backend}
        block.keep_stats = True
        for tokens in (1, 2, 5, 16, 17, 128, 1000, 1024, 8000, 16384):
            block(p.x[:tokens])  # the second call launches what this one prepared
            assert relative_error(block(p.x[:tokens]), plain_ffn(p.x[:tokens], *p[1:])[0]) < 0.02
            assert block.stats.backend == block.plan.backend_for(tokens)
        change(block, up_to=[(16, backend)])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(p.x[:4])
        assert block.stats.backend == backend
        graph.replay()
        assert relative_error(y, plain_ffn(p.x[:4], *p[1:])[0]) < 0.02


@pytest.mark.parametrize("repeat", [1, 40, 700])
def test_ugly_rows(ffn, y_and_l1, repeat):
    counts = [0, 1, 15, 16, 17, 31, 32, 33, 192, 256] * repeat
    p = exact_pattern(counts, 128, 256, 3, CUDA)
    check(y_and_l1, p)
    _, stats = ffn(*p)
    assert stats.nonzeros.tolist() == [3 * c for c in counts]
    assert bool(stats.fired.all())
    assert int(stats.overflow) > 0


def test_statistics(ffn, backend):
    p = problem(900, 256, 1024, 30.0)
    y, stats = ffn(*p)
    exact = evaluate_exactly(p)
    g = torch.relu(p.x.double() @ p.w_gate.double().t())
    assert relative_error(y, exact["y"]) < 0.01
    assert (stats.nonzeros - (g != 0).sum(1)).abs().max() <= 2  # values that rounding moves across zero
    assert relative_error(stats.l1, exact["l1"]) < 0.01
    assert (stats.fired != (g != 0).any(0)).sum() <= 2
    assert stats.backend == backend
    bare, _ = ffn(*p, stats=False)
    assert torch.equal(bare, y)


def test_results_do_not_depend_on_timing(ffn):
    for tokens in (100, 3000, 30000):
        p = problem(tokens, 256, 1024, 60.0)
        first = ffn(*p)[0]
        for _ in range(5):
            assert torch.equal(ffn(*p)[0], first)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_inputs_show_as_in_plain_torch(ffn, y_and_l1, bad):
    for tokens in (50, 3000):
        p = problem(tokens)
        p.x[7, 5] = bad
        check(y_and_l1, p)
        assert ffn(*p)[0][7].isnan().all()


@pytest.mark.parametrize("intermediate", [8, 250, 520, 1056])
@pytest.mark.parametrize("tokens", [1, 50, 3000])
def test_a_token_that_is_not_finite_fires_the_neurons_that_exist(ffn, y_and_l1, tokens, intermediate):
    """None past the end, where N is no multiple of a tile."""
    p = problem(tokens, 256, intermediate, 2.0)
    p.x[0, 5] = float("nan")
    check(y_and_l1, p)
    _, stats = ffn(*p)
    assert int(stats.nonzeros[0]) == intermediate
    assert int(stats.nonzeros.max()) == intermediate
    assert stats.fired.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [200, 2000, 12000])
def test_a_weight_that_is_not_finite_shows_where_its_neuron_fires(ffn, y_and_l1, tokens, bad):
    p = problem(tokens)
    p.w_gate[3, 5] = bad
    check(y_and_l1, p)
    p = problem(tokens)
    fires = torch.nn.functional.linear(p.x, p.w_gate) > 0
    first, second = fires.sum(0).topk(2).indices.tolist()
    p.w_up[first, 5] = p.w_down[7, second] = bad
    y, plain = ffn(*p)[0], plain_ffn(*p)[0]
    for neuron, columns in ((first, slice(None)), (second, 7)):
        ours, theirs = (each[fires[:, neuron]][:, columns].isfinite() for each in (y, plain))
        assert not ours.any()
        assert torch.equal(ours, theirs)
    assert y[~fires[:, first] & ~fires[:, second]].isfinite().all()


def test_strided_inputs(ffn):
    p = problem(400)
    wide = torch.zeros(400, 2 * 256, device=CUDA, dtype=torch.bfloat16)
    wide[:, ::2] = p.x
    padded = torch.zeros(400, 256 + 3, device=CUDA, dtype=torch.bfloat16)
    padded[:, 1:257] = p.x
    expected = ffn(*p)[0]
    for x in (wide[:, ::2], padded[:, 1:257], p.x.t().contiguous().t()):
        assert torch.equal(ffn(x, *p[1:])[0], expected)
    transposed = [w.t().contiguous().t() for w in p[1:]]
    assert torch.equal(ffn(p.x, *transposed)[0], expected)
    batched = ffn(p.x.view(4, 100, 256), *p[1:])
    assert torch.equal(batched[0].view(400, 256), expected)
    assert batched[1].nonzeros.shape == (4, 100)


def misaligned(tensor):
    """The same, contiguous, two bytes past a multiple of 16."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return moved.copy_(tensor)


def test_operands_anywhere_in_memory(ffn):
    p = problem(400)
    leaves = [t.detach().requires_grad_() for t in p]
    expected = torch.autograd.grad(ffn(*leaves)[0].sum(), leaves)
    elsewhere = [misaligned(t).requires_grad_() for t in p]
    laid_out = misaligned(p.w_down.t()).t()
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(ffn(*elsewhere, stats=False)[0], ffn(*p)[0])
            assert torch.equal(ffn(*elsewhere[:3], laid_out, stats=False)[0], ffn(*p)[0])
        padded = torch.zeros(1, 256 + 3, device=CUDA, dtype=torch.bfloat16)
        padded[:, 1:257] = p.x[:1]
        assert torch.equal(ffn(padded[:, 1:257], *p[1:])[0], ffn(p.x[:1].clone(), *p[1:])[0])
    for ours, wanted in zip(torch.autograd.grad(ffn(*elsewhere)[0].sum(), elsewhere), expected, strict=True):
        assert torch.equal(ours, wanted)
    dy = problem(400, seed=1).x
    by_dy = [torch.autograd.grad(ffn(*leaves)[0], leaves, one) for one in (dy, misaligned(dy))]
    assert all(map(torch.equal, *by_dy))


@torch.no_grad()
@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 256, 3000])
def test_the_same_call_again(ffn, backend, tokens, laid_out):
    LAUNCHES.clear()
    p = problem(tokens)
    if laid_out:
        p = p._replace(w_down=neuron_major(p.w_down))
    results = []
    for seed in range(4):
        p.x.copy_(problem(tokens, seed=seed).x)
        p.w_up.mul_(-1.1)
        ours = ffn(*p, stats=False)[0]
        check_y_alone(backend, ours, ffn(*p)[0], p)
        results.append((ours, ffn(*p, stats=False)[0], ffn(p.x.view(1, tokens, 256), *p[1:], stats=False)[0]))
        p = p._replace(w_gate=p.w_gate.clone()) if seed == 2 else p
    # Both shapes of x, with the first gate weights and their copy.
    assert sum(key[0] == backend for key in LAUNCHES._entries) == (
        4 if laid_out and registry.get(backend).prepare else 0
    )
    for first, again, batched in results:
        assert torch.equal(again, first)
        assert torch.equal(batched[0], first)


@torch.no_grad()
def test_the_same_call_again_on_streams_and_in_a_graph(ffn):
    p = problem(300)._replace(w_down=neuron_major(problem(300).w_down))
    wanted = ffn(*p)[0]
    for _ in range(3):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            ours = ffn(*p, stats=False)[0]
        side.synchronize()
        assert torch.equal(ours, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = ffn(*p, stats=False)[0]
    p.x.copy_(problem(300, seed=5).x)
    graph.replay()
    assert torch.equal(ours, ffn(*p)[0])


def test_zero_tokens(ffn):
    p = problem(4)
    y, stats = ffn(p.x[:0], *p[1:])
    assert y.shape == (0, 256)
    assert stats.nonzeros.shape == (0,)
    assert float(stats.l1) == 0


def test_side_stream(ffn):
    p = problem(20000)
    expected = ffn(*p)[0]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x = p.x * 1  # made on the side stream, behind the sleep
        y = ffn(x, *p[1:])[0]
    side.synchronize()
    assert torch.equal(y, expected)


def test_cuda_graph(ffn):
    p = problem(3000)
    x = p.x.clone()
    ffn(x, *p[1:], stats=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, stats = ffn(x, *p[1:], stats=True)
    for seed in (1, 2):
        other = problem(3000, seed=seed).x
        x.copy_(other)
        graph.replay()
        expected, expected_stats = ffn(other, *p[1:], stats=True)
        assert torch.equal(y, expected)
        assert torch.equal(stats.nonzeros, expected_stats.nonzeros)


@pytest.mark.unpoisoned  # which would use it
def test_a_thread_that_has_not_used_the_gpu_yet(ffn):
    p = problem(300)
    wanted, found = ffn(*p)[0], []
    torch.empty_like(wanted)  # torch's allocator has what it will be asked for, and asks the GPU nothing
    thread = threading.Thread(target=lambda: found.append(ffn(*p)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


FIRST_IN_ITS_THREAD = """
import torch
from twell import Plan, sparse_ffn
leaves = [torch.rand(shape, device="cuda").to(torch.bfloat16).sub_(0.4).requires_grad_() for shape in SHAPES]
dy, room = torch.rand_like(leaves[0]), [torch.empty(1 << 22, device="cuda") for _ in range(8)]
y, stats = sparse_ffn(*leaves, plan=Plan(BACKEND, capacity=512), return_stats=True)
del room
gradients = torch.autograd.grad([y, stats.l1], leaves, [dy, torch.tensor(0.5, device="cuda")])
assert all(gradient.isfinite().all() for gradient in gradients)
print("done")
"""


def test_a_backward_that_is_the_first_in_its_thread(backend):
    """In a new process, where autograd's thread has not been used."""
    shapes = [(300, 256), (512, 256), (512, 256), (256, 512)]
    program = FIRST_IN_ITS_THREAD.replace("SHAPES", str(shapes)).replace("BACKEND", repr(backend))
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.stdout.strip() == "done", result.stderr


def test_blocks_are_given_what_is_fastest(backend):
    """A sparse block of many tokens, and one in which every second neuron fires."""
    sparse, full = (problem(16384, 1024, 4096, nnz) for nnz in (10.0, 1200.0))
    model = torch.nn.Sequential(*(make_block(1024, 4096, device=CUDA, dtype=torch.bfloat16) for _ in range(2))).eval()
    for block, p in zip(model, (sparse, full), strict=True):
        block.load_state_dict({f"{n}_proj.weight": getattr(p, f"w_{n}") for n in ("gate", "up", "down")})
    model.forward = lambda x: [block(x) for block in model]
    first, second = autotune(model, sparse.x, backends=[backend])
    assert (first.plan.backend, first.mean_nonzeros) == (backend, pytest.approx(10, rel=0.2))
    own, dense = Form(backend), Form("dense")
    assert first.milliseconds[own] < first.milliseconds[dense]
    assert second.milliseconds[own] > second.milliseconds[dense] / 2
    plain = [run_ffn(sparse.x, *p[1:], backend="dense")[0] for p in (sparse, full)]
    assert all(relative_error(ours, y) < 0.02 for ours, y in zip(model(sparse.x), plain, strict=True))


def test_auto_is_the_fastest_sparse_backend():
    p = problem(300)
    with torch.no_grad():
        name = run_ffn(*p)[1].backend
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert name == ("hopper" if hopper else "triton")
    assert why_not(name, device=CUDA, hidden=256, intermediate=1024) is None
    assert "bfloat16" in why_not(name, device=CUDA, hidden=256, intermediate=1024, dtype=torch.float32)
    wide = Problem(*(t.float() for t in p))
    assert run_ffn(*wide, backend="auto")[1].backend == "dense"


@torch.no_grad()
def test_calls_after_the_launch_cache_was_cleared(ffn):
    p = problem(300)._replace(w_down=neuron_major(problem(300).w_down))
    wanted = ffn(*p)[0]
    for _ in range(3):
        assert torch.equal(ffn(*p, stats=False)[0], wanted)
        LAUNCHES.clear()
        assert not LAUNCHES._entries


def test_two_models_and_compile(backend):
    first, second = (make_block(256, 1024, backend=backend, device=CUDA, dtype=torch.bfloat16) for _ in "ab")
    x = torch.randn(5, 60, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        alone = first(x), second(x)
        assert torch.equal(first(x), alone[0])
        compiled = torch.compile(first, fullgraph=True)
        assert torch.equal(compiled(x), alone[0])
        assert torch.equal(second(x), alone[1])


def test_what_no_backend_can_do_is_reported(ffn):
    p = problem(16)
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        ffn(*(t.half() for t in p))
    with pytest.raises(BackendUnavailable, match="CUDA"):
        ffn(*(t.cpu() for t in p))
    with pytest.raises(BackendUnavailable, match="multiple of"):
        ffn(p.x[:, :100], p.w_gate[:, :100], p.w_up[:, :100], p.w_down[:100])
    with pytest.raises(ValueError, match="same device"):
        ffn(p.x.cpu(), *p[1:])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(ffn):
    p = problem(300)
    expected = ffn(*p)[0]
    other = ffn(*(t.to("cuda:1") for t in p))[0]
    assert other.device.index == 1
    assert torch.equal(other.cpu(), expected.cpu())
