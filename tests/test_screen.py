"""Screened neurons: the bound that int8 products are given, in plain torch, and how a plan's reach the kernels."""

import dataclasses

import pytest
import torch

from twell import Plan
from twell.gpu.adapter import Kernels, forward_and_backward
from twell.hopper.screen import channel_factors, screen
from twell.interface import HotSteps, Options, Weights
from twell.memory import SCREENS_FROM
from twell.testing import make_problem

INF, NAN = float("inf"), float("nan")


def quantised(x, factors):
    """quantise.cu: (rows in int8 as float64, n [M], e [M])."""
    v = (x * factors).float()
    most = v.abs().amax(1).nan_to_num(INF)
    bounded = (most > 2.0**-57) & (most < 2.0**57)
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
    factors = channel_factors(x, w)
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


def test_channels_are_scaled_by_powers_of_two():
    p = make_problem(600, 64, 776, 8, dtype=torch.bfloat16)
    p.x[:, 3] *= 2.0**10
    p.x[:, 5], p.w_gate[:, 6], p.x[:, 7], p.w_gate[:, 7] = 0, 0, 0, 0
    of_x, of_w = channel_factors(p.x, p.w_gate)
    assert of_x.log2().frac().eq(0).all()
    assert torch.equal(of_x * of_w, torch.ones_like(of_x))
    assert of_x[3] == of_x.median() / 2**5
    assert (of_x[5], of_x[6], of_x[7]) == (2.0**16, 2.0**-16, 1)


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


@pytest.mark.parametrize(
    ("stats", "cold", "wanted"), [(False, None, "screen 5"), (False, "cold", None), (True, None, None)]
)
def test_which_calls_are_screened(stats, cold, wanted):
    asked = []

    def gate_pack(x, weights, **options):
        asked.append(options.get("screen"))
        return dataclasses.make_dataclass("Packed", ["overflow"])(None)

    def gated_down(packed, x, weights, **options):
        return x, (x, x, x)

    kernels = Kernels(
        gate_pack, gated_down, None, lambda *sizes: False, None, lambda x, weights, count: f"screen {count}"
    )
    forward, _ = forward_and_backward(lambda: kernels, HotSteps(*[None] * 4))
    weights = Weights(*(torch.ones(8, 4) for _ in range(3)))
    forward(torch.ones(9, 4), weights, Options(stats, False, screened=5), cold)
    assert asked == [wanted]


@pytest.mark.parametrize(
    ("tokens", "gated", "count"), [(SCREENS_FROM - 1, True, 512), (SCREENS_FROM, False, 512), (SCREENS_FROM, True, 255)]
)
def test_what_does_not_pay_is_not_screened(tokens, gated, count):
    w = torch.ones(512, 64).bfloat16()
    assert screen(torch.ones(tokens, 64).bfloat16(), Weights(w if gated else None, w, w), count) is None
