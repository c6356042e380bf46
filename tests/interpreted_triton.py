"""The Triton backend's numbers in Triton's interpreter, against plain torch in float64. Run by test_triton.py.

About 15 ms a program: the shapes are small.
"""

import pytest
import torch

from kernels import BackendUnavailable, neuron_major, sparse_ffn
from kernels.testing import Problem, check, evaluate_exactly, make_problem, relative_error


def backend(x, w_gate, w_up, w_down):
    y, stats = sparse_ffn(x, w_gate, w_up, w_down, backend="triton")
    return y, stats.l1


@pytest.fixture(params=[(1, 1, 3), (1, 2, 0), (4, 1, 2)], ids=str)
def down(request, monkeypatch):
    """Every way to share the work on a token; the queues hand out fewer tokens at a time than on a GPU."""
    from kernels.triton import twell

    team, across, chunk = request.param
    config = twell.DownConfig(team=team, across=across, chunk=chunk, programs=2)
    monkeypatch.setattr(twell, "down_config", lambda *args: config)


@pytest.fixture
def gate(monkeypatch):
    """Sets the configuration of `gate_pack`."""
    from kernels.triton import twell

    def use(tile, slots, rows=16, step=16, descriptors=True, persistent=False):
        config = twell.GateConfig(tile, slots, rows, step, 4, 1, descriptors, persistent)
        monkeypatch.setattr(twell, "gate_config", lambda *args: config)

    return use


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 33])
def test_any_number_of_tokens(tokens, gated):
    check(backend, make_problem(tokens, 128, 300, 20.0, gated=gated))


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 8), (80, 250), (336, 64), (2112, 70), (8192, 40)])
def test_any_size(hidden, intermediate):
    check(backend, make_problem(3, hidden, intermediate, intermediate / 8))


def test_the_widest_intermediate_size(gate):
    gate(1024, 64)
    check(backend, make_problem(1, 16, 65536, 30.0))


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_every_way_to_multiply(gate, descriptors, persistent):
    gate(32, 8, descriptors=descriptors, persistent=persistent)
    check(backend, make_problem(21, 48, 90, 8.0))


def test_every_way_to_share_a_token(down):
    check(backend, make_problem(9, 272, 130, 12.0))
    check(backend, make_problem(4, 272, 130, 12.0, gated=False))


def exact_pattern(counts, hidden, tile, tiles):
    """A problem whose token i has exactly counts[i] non-zeros in each tile."""
    generator = torch.Generator().manual_seed(0)
    tokens, intermediate = len(counts), tile * tiles
    x = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    x[:, 0], x[:, 1] = torch.tensor(counts, dtype=torch.bfloat16), 1
    gate = torch.zeros(intermediate, hidden, dtype=torch.bfloat16)
    order = torch.stack([torch.randperm(tile, generator=generator) for _ in range(tiles)])
    gate[:, 0], gate[:, 1] = 1, -order.flatten().to(torch.bfloat16)  # active where count > order
    up, down = (torch.randn(intermediate, hidden, generator=generator).to(torch.bfloat16) / 8 for _ in "ud")
    return Problem(x, gate, up, down.t())


def test_ugly_rows_and_statistics(down, gate):
    tile, slots, tiles = 64, 16, 3
    gate(tile, slots)
    counts = [0, 1, slots - 1, slots, slots + 1, tile]
    problem = exact_pattern(counts, 32, tile, tiles)
    check(backend, problem)
    y, stats = sparse_ffn(*problem, backend="triton")
    assert stats.nonzeros.tolist() == [tiles * count for count in counts]
    assert bool(stats.fired.all())
    assert int(stats.overflow) == tiles * 2
    bare, none = sparse_ffn(*problem, backend="triton", stats="none")
    assert torch.equal(bare, y)
    assert none.l1 is None


def test_fired_and_l1():
    problem = make_problem(12, 64, 200, 6.0)
    _, stats = sparse_ffn(*problem, backend="triton")
    active = torch.relu(problem.x.double() @ problem.w_gate.double().t()) != 0
    assert torch.equal(stats.fired, active.any(0))
    assert torch.equal(stats.nonzeros, active.sum(1).to(torch.int32))
    assert relative_error(stats.l1, evaluate_exactly(problem)["l1"]) < 0.01


def test_more_tiles_than_a_window(gate):
    gate(32, 8)
    check(backend, make_problem(2, 16, 32 * 37, 40.0))


def test_packing_is_exact():
    from kernels.triton import twell

    problem = make_problem(40, 64, 300, 8.0)
    for config in (
        twell.GateConfig(256, 32, 32, 64, 8, 3, descriptors=True, persistent=True),
        twell.GateConfig(64, 32, 16, 32, 4, 3, descriptors=False, persistent=False),
    ):
        packed = twell.gate_pack(problem.x, problem.w_gate, problem.w_up, neuron_major(problem.w_down).t(), config)
        format_ = packed.to_twell()
        format_.validate()
        plain = torch.relu(problem.x.float() @ problem.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_inputs_show_as_in_plain_torch(bad):
    for gated in (True, False):
        problem = make_problem(6, 32, 100, 5.0, gated=gated)
        problem.x[2, 5] = bad
        check(backend, problem)
        assert sparse_ffn(*problem, backend="triton")[0][2].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("which", ["w_gate", "w_up", "w_down"])
def test_not_finite_weights_show_as_in_plain_torch(which, bad, gate):
    gate(64, 8)
    problem = make_problem(4, 32, 130, 20.0)
    weight = getattr(problem, which)
    weight[3, 5] = weight[20, 25] = bad
    check(backend, problem)
    bare = make_problem(4, 32, 130, 20.0, gated=False)
    if which != "w_gate":
        getattr(bare, which)[3, 5] = bad
        check(backend, bare)


def test_strided_inputs():
    problem = make_problem(8, 64, 100, 6.0)
    expected = sparse_ffn(*problem, backend="triton")[0]
    padded = torch.zeros(8, 64 + 3, dtype=torch.bfloat16)
    padded[:, 1:65] = problem.x
    for x in (padded[:, 1:65], problem.x.t().contiguous().t()):
        assert torch.equal(sparse_ffn(x, *problem[1:], backend="triton")[0], expected)
    transposed = [w.t().contiguous().t() for w in problem[1:]]
    assert torch.equal(sparse_ffn(problem.x.view(2, 4, 64), *transposed, backend="triton")[0].view(8, 64), expected)


def test_zero_tokens():
    problem = make_problem(4, 32, 64, 3.0)
    y, stats = sparse_ffn(problem.x[:0], *problem[1:], backend="triton")
    assert y.shape == (0, 32)
    assert stats.nonzeros.shape == (0,)
    assert float(stats.l1) == 0


def test_what_it_cannot_do_is_said():
    problem = make_problem(4, 32, 64, 3.0)
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        sparse_ffn(*(t.half() for t in problem), backend="triton")
    with pytest.raises(BackendUnavailable, match="multiple of 16"):
        sparse_ffn(problem.x[:, :20], *(w[:, :20] for w in problem[1:3]), problem.w_down[:20], backend="triton")
    with pytest.raises(BackendUnavailable, match="training"):
        sparse_ffn(problem.x.requires_grad_(), *problem[1:], backend="triton")
