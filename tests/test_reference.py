"""The reference against float64 autograd of plain torch: results, every gradient, NaN and Inf, ragged patterns."""

import functools
import random

import pytest
import torch
from calls import leaves, run_ffn, upstream, y_and_l1
from packed_formats import check_valid
from pairwise import pairwise

from twell import reference
from twell.formats import Hybrid, TwELL
from twell.testing import Problem, check, evaluate, make_problem, plain_ffn, relative_error, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


run = functools.partial(y_and_l1, backend="reference")


@pairwise(
    backend=["reference", "dense"],
    gated=[True, False],
    dtype=DTYPES,
    activation=["relu", "relu2"],
    plan=[{}, {"hot": [1, 5, 30]}, {"capacity": 2, "backup": 0.1}, {"capacity": 2, "backup": 1.0, "hot": [0, 39]}],
    sizes=[
        (256, 32, 512, 20),
        (100, 64, 300, 90),
        (1, 8, 40, 4),
        (63, 16, 1000, 29),
        (300, 16, 256, 0),
        (40, 16, 130, 40),
    ],
)
def test_results_and_gradients(backend, gated, dtype, activation, plan, sizes):
    tokens, hidden, intermediate, nnz = sizes
    problem = make_problem(tokens, hidden, intermediate, nnz, gated=gated, dtype=dtype)
    ours = functools.partial(y_and_l1, backend=backend, activation=activation, **plan)
    # The L1 gradient weighs as much as that of y.
    check(ours, problem, upstream(problem), 0.5 * tokens, activation)
    check(ours, problem, activation=activation)  # inference takes another plan


def test_the_check_can_fail():
    problem = make_problem(64, 16, 128, 10)

    def wrong(x, w_gate, w_up, w_down):
        y, l1 = plain_ffn(x, w_gate, w_up, w_down)
        return y * 1.02, l1

    with pytest.raises(AssertionError, match=r"over tolerance: y: 0\.02"):
        check(wrong, problem)


@pytest.mark.parametrize("gated", [True, False])
def test_the_share_of_the_backup(gated):
    """Whatever it is, results and gradients are exact; rows beyond it are spilled."""
    problem = make_problem(80, 16, 300, 60, gated=gated, dtype=torch.float64)
    heavy = (run_ffn(*problem, backend="dense")[1].nonzeros > 32).sum().item()
    for share, rows in ((0.125, 10), (0.5, 40), (0.51, 41), (1, 80), (0.0, 0), (1e-9, 1)):
        check(functools.partial(run, capacity=32, backup=share), problem, upstream(problem), l1=3.0)
        _, stats = run_ffn(*leaves(problem), backend="reference", capacity=32, backup=share)
        assert stats.overflow.item() == max(0, heavy - rows)
    assert heavy > 41


def test_inference_counts_overfull_tiles():
    problem = make_problem(50, 16, 256, 8, dtype=torch.float32)
    problem.w_gate[:, 0] = 100.0  # every neuron fires
    with torch.no_grad():
        _, stats = run_ffn(*problem, backend="reference")
    assert stats.overflow.item() == 50
    assert stats.nonzeros.tolist() == [256] * 50


@pytest.mark.parametrize("seed", range(60))
def test_nan_and_inf_are_where_plain_torch_has_them(seed):
    draw = random.Random(seed)
    dtype = draw.choice([torch.bfloat16, torch.float32])
    tokens, hidden, intermediate = draw.choice([(1, 9, 7), (40, 8, 200), (17, 12, 40)])
    problem = make_problem(
        tokens, hidden, intermediate, intermediate / 10, seed=seed, dtype=dtype, gated=seed % 2 == 0, dead=0
    )
    dy = upstream(problem)
    for _ in range(draw.randint(1, 2)):
        target = draw.choice([problem.x, dy]).view(-1)
        target[draw.randrange(target.numel())] = draw.choice([float("nan"), float("inf"), -float("inf")])
    l1, activation = draw.choice([0.0, 1.0, float("nan"), float("inf")]), draw.choice(["relu", "relu2"])
    ours, plain = functools.partial(run, activation=activation), functools.partial(plain_ffn, activation=activation)
    # oneDNN's bfloat16 products on a CPU may spread a NaN to a neighbouring row; float32's do not.
    wanted = evaluate(plain, Problem(*(t if t is None else t.float() for t in problem)), dy.float(), l1)
    got = evaluate(ours, problem, dy, l1)
    got["y in inference"], wanted["y in inference"] = evaluate(ours, problem)["y"], wanted["y"]
    for name, value in wanted.items():
        assert torch.equal(value.isnan(), got[name].isnan()), name
        assert torch.equal(value.isinf(), got[name].isinf()), name


def test_a_token_with_nan_fires_every_neuron_and_a_bad_weight_shows_where_its_neuron_fires():
    problem = make_problem(20, 16, 64, 5, dtype=torch.float32)
    x, gate, up, down = (t.clone() for t in problem)
    x[3, 4] = float("nan")
    y, stats = run_ffn(x, gate, up, down, backend="reference")
    assert stats.nonzeros[3] == 64
    assert y[3].isnan().all()
    assert y.isnan().any(-1).sum() == 1
    fires = problem.x @ gate.t() > 0
    neuron = int(fires.sum(0).argmax())
    down[2, neuron] = float("inf")
    y, _ = run_ffn(problem.x, gate, up, down, backend="reference")
    assert 0 < fires[:, neuron].sum() < 20
    assert torch.equal(y[:, 2].isinf(), fires[:, neuron])
    assert y[:, :2].isfinite().all()


# The single operations


@pytest.fixture
def problem() -> Problem:
    return make_problem(70, 16, 300, 30, dtype=torch.float64)


@pytest.fixture
def gate(problem) -> torch.Tensor:
    return (problem.x @ problem.w_gate.t()).relu()


def test_chunks_do_not_change_the_result(problem, gate, monkeypatch):
    packed = TwELL.from_dense(gate, on_overflow="grow")
    whole, _ = reference.gated_down(problem.x, packed, problem.w_up, problem.w_down.t())
    monkeypatch.setattr(reference, "CHUNK", 50)  # three entries at a time
    parts, _ = reference.gated_down(problem.x, packed, problem.w_up, problem.w_down.t())
    assert relative_error(parts, whole) < 1e-14


def test_more_tokens_than_16_bits():
    # The published kernels index tokens with 16 bits in the transposed structure.
    tokens = 70_000
    dense = torch.zeros(tokens, 4)
    dense[[0, 65_535, 65_536, 69_999], [0, 1, 2, 1]] = 3.0
    h = Hybrid.from_dense(dense, 2)
    transposed = reference.hybrid_transpose(h)
    check_valid(transposed)
    assert torch.equal(transposed.to_dense(), dense.t())
    b = torch.arange(tokens, dtype=torch.float32).unsqueeze(1)
    assert reference.hybrid_to_dense(transposed, b).flatten().tolist() == [0, 3 * (65_535 + 69_999), 3 * 65_536, 0]


# twell.testing


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("intermediate", "nnz"), [(512, 5), (512, 60), (2048, 29), (256, 90), (512, 0)])
def test_problems_have_the_requested_pattern(gated, intermediate, nnz):
    problem = make_problem(1024, 64, intermediate, nnz, gated=gated, seed=3)
    _, stats = run_ffn(*problem, backend="dense")
    counts = stats.nonzeros.double()
    assert counts.mean().item() == pytest.approx(nnz, rel=0.03)
    if nnz:
        assert 0.2 < (~stats.fired).double().mean() < 0.65  # 30% never fire, some others only for rare tokens
        assert counts.max() > 1.4 * nnz  # heavy tokens
        assert torch.corrcoef(torch.stack([counts[1:], counts[:-1]]))[0, 1] > 0.2  # neighbours are alike


def test_problems_repeat_and_refuse():
    a, b = make_problem(9, 16, 64, 5), make_problem(9, 16, 64, 5)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    assert not torch.equal(a.x, make_problem(9, 16, 64, 5, seed=1).x)
    with pytest.raises(ValueError, match=r"mean_nnz must be from 0 to .* got 60"):
        make_problem(9, 16, 64, 60)
    with pytest.raises(ValueError, match="hidden must be at least 8, got 4"):
        make_problem(9, 4, 64, 5)


def test_relative_error_sees_misplaced_nans():
    nan, inf = float("nan"), float("inf")
    ref = torch.tensor([1.0, nan, inf])
    assert relative_error(torch.tensor([1.0, nan, inf]), ref) == 0
    assert relative_error(torch.tensor([1.1, nan, inf]), ref) == pytest.approx(0.1)
    for wrong in ([1.0, 0.5, inf], [1.0, nan, -inf], [nan, nan, inf], [1.0, nan, 3e38]):
        assert relative_error(torch.tensor(wrong), ref) == inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == inf


def test_tolerance_is_twice_the_plain_error_and_a_rounding():
    assert tolerance(0.004, torch.bfloat16) == pytest.approx(0.008 + 2**-7 / 4, rel=1e-3)
    assert tolerance(0.0, torch.float64) < 1e-15
