"""Screened neurons: the bound that int8 products are given, in plain torch, and how a plan's reach the kernels."""

import dataclasses

import pytest
import torch
from calls import make_block, plan_with

from twell import Plan
from twell.gpu.adapter import Kernels, functions
from twell.interface import HotSteps, Options, Weights
from twell.memory import H_AT_ONCE
from twell.testing import make_problem

INF, NAN = float("inf"), float("nan")


def quantised(x, factors):
    """quantise.cu: (rows in int8 as float64, n [M], e [M])."""
    v = x.float() * factors.float()
    most = v.abs().amax(1).nan_to_num(INF)
    bounded = (most > 2.0**-100) & (most < 2.0**100)
    exact = v * torch.where(bounded, 127 / most, 0)[:, None]
    q = exact.round().nan_to_num(0, 0, 0)
    lost, size = (exact - q).square().sum(1).sqrt(), exact.square().sum(1).sqrt()
    n = (size + lost) * (1 + 2**-10)
    e = lost * (1 + 2**-10) + (x.shape[1] + 64) * 2.0**-24 * n
    unbounded = torch.where(most == 0, 0, INF)
    assert q.abs().max() <= 127
    return q.double(), torch.where(bounded, n, unbounded), torch.where(bounded, e, unbounded)


def candidates(x, w):
    """The entries that are marked, bool [M, N]: the epilogue of gate_pack."""
    factors = [torch.ones(x.shape[1], dtype=torch.bfloat16)] * 2
    of_x, of_w = (rows.float().norm(dim=0) for rows in (x, w))
    exponents = (of_x / of_w).log2().div(2).round().nan_to_num(0).clamp(-16, 16)
    factors = [torch.exp2(sign * exponents).bfloat16() for sign in (-1, 1)]
    (q_x, n_x, e_x), (q_w, n_w, e_w) = quantised(x, factors[0]), quantised(w, factors[1])
    most = (q_x @ q_w.t()).float() + n_x[:, None] * e_w + e_x[:, None] * n_w
    return ~(most <= 0)


def hard_rows(hidden, seed):
    """x [M, K], w [N, K]: rows at right angles but for roundings, outlier channels, tiny, huge and zero ones."""
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, hidden, generator=g) for rows in (96, 160))
    w[:96] -= (w[:96] * x).sum(1, keepdim=True) / x.square().sum(1, keepdim=True) * x
    x[:, 3], w[:, 3] = x[:, 3] * 300, w[:, 3] / 300
    x[:, 7], w[:, 11] = 0, 0
    x[:8], w[:8] = x[:8] * 2.0**-130, w[:8] * 2.0**126
    x[8:16], w[8:16] = x[8:16] * 2.0**120, w[8:16] * 2.0**-120
    x[16:20], w[20:24] = 0, 0
    w[24:40] *= -1
    w[40:48] = x[40:48] * 1e-3
    w[48:56] = -x[48:56]
    return x.bfloat16(), w.bfloat16()


@pytest.mark.parametrize("hidden", [64, 192, 2048])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_fires_is_screened_out(hidden, seed):
    x, w = hard_rows(hidden, seed)
    marked = candidates(x, w)
    exact = x.double() @ w.double().t()
    rounded = (x.float() @ w.float().t()).bfloat16()  # in the float32 of a row that is computed again
    assert marked[exact > 2.0**-134].all()
    assert marked[(rounded > 0) | rounded.isnan()].all()
    assert not marked[16:20, 16:].any(), "rows of zeros, whose weights have a bound"


def test_little_that_does_not_fire_is_computed():
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(300, 2048, generator=g) for _ in range(2))
    x, w = x + 0.5, w - 0.15  # products of -150 +- 50 or so
    x[:, 3], w[:, 3] = x[:, 3] * 300, w[:, 3] / 300
    x, w = x.bfloat16(), w.bfloat16()
    fires = (x.double() @ w.double().t()) > 0
    assert candidates(x, w)[fires].all()
    assert (candidates(x, w) & ~fires).float().mean() < 0.05


def test_what_is_not_finite_is_always_computed():
    x, w = hard_rows(64, 0)
    x[30, 5], x[31, 6], w[33, 9] = NAN, -INF, INF
    marked = candidates(x, w)
    assert marked[30:32].all()
    assert marked[:, 33].all()


def test_a_plan_has_screened_neurons():
    plan = Plan("hopper", 256, screened=1000)
    assert Plan.of(plan.as_dict()) == plan
    assert str(plan) == "hopper, 256 hot neurons, 1000 screened neurons"
    assert [each.of_sorted for each in (plan, Plan(screened=1), Plan("hopper", (3,)))] == [True, True, False]
    plan.check_fits(1256)
    with pytest.raises(ValueError, match="at most the 999 neurons that are not hot, got 1000"):
        plan.check_fits(1255)
    with pytest.raises(ValueError, match="number of trailing neurons, got -1"):
        Plan(screened=-1)
    with pytest.raises(ValueError, match="hot must be a number"):
        Plan("hopper", (3,), screened=8)


def test_other_calls_compute_all_neurons_alike():
    p = make_problem(40, 64, 300, 10.0, dtype=torch.float32)
    block = make_block(64, 300, keep_stats=False)
    wanted = block(p.x)
    block.plan = plan_with(backend="reference", hot=20, screened=200)
    torch.testing.assert_close(block(p.x), wanted)


@pytest.mark.parametrize(
    ("tokens", "gated", "stats", "cold", "wanted"),
    [
        (H_AT_ONCE, True, False, None, "screen"),
        (H_AT_ONCE - 1, True, False, None, None),
        (H_AT_ONCE, False, False, None, None),
        (H_AT_ONCE, True, False, "cold", None),
        (H_AT_ONCE, True, True, None, None),
    ],
)
def test_which_calls_are_screened(tokens, gated, stats, cold, wanted):
    asked = []

    def gate_pack(x, weights, **options):
        asked.append(options.get("screen"))
        return dataclasses.make_dataclass("Packed", ["overflow"])(None)

    def gated_down(packed, x, weights, **options):
        return x, (x, x, x)

    kernels = Kernels(gate_pack, gated_down, None, screen=lambda x, weights, count: f"screen{count}"[:6])
    forward = functions(lambda: kernels, HotSteps(*[None] * 4)).forward
    weights = Weights(*(torch.ones(8, 4) for _ in range(3)))
    options = Options(stats, False, screened=5)
    forward(torch.ones(tokens, 4), weights if gated else weights._replace(gate=None), options, cold)
    assert asked == [wanted]
