"""Problems with realistic activation patterns, and all tolerances.

A backend is compared with plain torch in float64. Its error may be twice that of plain torch in the same dtype, plus
one rounding of the result (as FlashAttention-3's tests do). Tests and benchmarks use the same functions.
Shapes: M tokens, K hidden, N intermediate.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .interface import RELU, RELU2

SEQUENCE = 2048  # the correlation along the sequence restarts after so many tokens
CORRELATION = 0.5  # of neighbouring tokens
RATE_SPREAD = 1.0  # standard deviation of the logarithm of the firing rates
HIGHEST_RATE = 0.6
PEAK, PEAK_SIGMA = 8.5, 4.3  # at 4.3 sigma (one token in 100,000), 8.5 times the mean non-zeros
SILENT = 100.0  # a threshold that nothing reaches
CALIBRATION_TOKENS = 4096
CHUNK_TOKENS = 8192


class Problem(NamedTuple):
    """One call of the block: x [M, K], w_gate [N, K] or None, w_up [N, K], w_down [K, N]."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> "Problem":
        """The problem with the function applied to each of its tensors."""
        x, w_gate, w_up, w_down = self
        return Problem(function(x), None if w_gate is None else function(w_gate), function(w_up), function(w_down))


def make_problem(
    tokens: int,
    hidden: int,
    intermediate: int,
    mean_nnz: float,
    *,
    gated: bool = True,
    dead: float = 0.3,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Problem:
    """A block whose activations resemble those of a trained block. A share `dead` of the neurons never fires; the rates
    of the others are log-normal. Tokens differ widely in their non-zeros, and neighbouring tokens are similar. The mean
    number of non-zeros per token is `mean_nnz` within a few per cent.

    x[:, 0] is 1, which makes w_gate[:, 0] a threshold; x[:, 1] sets how active a token is; the other coordinates are
    Gaussian. With gated=False, w_up has the pattern. The same seed and device give the same problem.
    Raises ValueError for a mean that these rates cannot reach.
    """
    if hidden < 8:
        raise ValueError(f"hidden must be at least 8, got {hidden}")
    generator = torch.Generator(device).manual_seed(seed)
    x_MK = _tokens(tokens, hidden, generator).to(dtype)
    alive_N = torch.rand(intermediate, generator=torch.Generator().manual_seed(seed)) >= dead
    thresholds_N, token_weight = _thresholds(mean_nnz, alive_N, seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device) * scale

    pattern_NK = normal(intermediate, hidden)
    pattern_NK[:, :2] = 0
    pattern_NK /= pattern_NK.norm(dim=1, keepdim=True)
    pattern_NK[:, 0], pattern_NK[:, 1] = -thresholds_N.to(device), token_weight
    pattern_NK[alive_N.to(device), 0] += _calibration(x_MK, pattern_NK.to(dtype), alive_N.to(device), mean_nnz)
    up_NK = normal(intermediate, hidden, scale=hidden**-0.5)
    down_KN = normal(hidden, intermediate, scale=hidden**-0.5).to(dtype)
    if not gated:
        return Problem(x_MK, None, pattern_NK.to(dtype), down_KN)
    return Problem(x_MK, pattern_NK.to(dtype), up_NK.to(dtype), down_KN)


def _tokens(tokens: int, hidden: int, generator: torch.Generator) -> Tensor:
    """float32 [M, K]: Gaussian, each token correlated with the one before it in its sequence."""
    steps = min(tokens, SEQUENCE)
    sequences = -(-tokens // steps) if steps else 0
    x = torch.randn(sequences, steps, hidden, generator=generator, device=generator.device)
    for step in range(1, steps):
        x[:, step].mul_(math.sqrt(1 - CORRELATION**2)).add_(x[:, step - 1], alpha=CORRELATION)
    x[..., 0] = 1
    return x.view(-1, hidden)[:tokens]


def _thresholds(mean_nnz: float, alive_N: Tensor, seed: int) -> tuple[Tensor, float]:
    """(thresholds [N], weight c of s): a neuron fires where z + c s > threshold, z and s Gaussian."""
    alive = int(alive_N.sum())
    if not 0 <= mean_nnz <= 0.9 * HIGHEST_RATE * alive:
        limit = 0.9 * HIGHEST_RATE * alive
        raise ValueError(f"mean_nnz must be from 0 to {limit:.1f} with {alive} neurons that fire, got {mean_nnz}")
    generator = torch.Generator().manual_seed(seed + 1)
    shape_N = torch.exp(RATE_SPREAD * torch.randn(alive, generator=generator, dtype=torch.float64))

    def rates(scale: float) -> Tensor:
        return (scale * shape_N).clamp(1e-9, HIGHEST_RATE)

    normal_N = torch.special.ndtri(rates(_bisect(lambda scale: rates(scale).sum(), mean_nnz, 0.0, 1e3)))

    def peak(c: float) -> Tensor:
        return torch.special.ndtr(c * PEAK_SIGMA + normal_N * math.sqrt(1 + c * c)).sum()

    c = _bisect(peak, min(PEAK * mean_nnz, 0.8 * alive), 0.0, 5.0)
    thresholds_N = torch.full(alive_N.shape, SILENT)
    thresholds_N[alive_N] = (-normal_N * math.sqrt(1 + c * c)).float()
    return thresholds_N, c


def _calibration(x_MK: Tensor, pattern_NK: Tensor, alive_N: Tensor, mean_nnz: float) -> float:
    """The offset of the living neurons' thresholds that gives these tokens the requested mean."""
    sample_MK = x_MK[:: max(1, x_MK.shape[0] // CALIBRATION_TOKENS)]
    if not sample_MK.shape[0] or not mean_nnz:
        return 0.0
    pre_MN = sample_MK.float() @ pattern_NK[alive_N].float().t()
    return _bisect(lambda shift: (pre_MN > -shift).sum() / sample_MK.shape[0], mean_nnz, -10.0, 10.0, steps=30)


def _bisect(function: Callable[[float], Tensor], target: float, low: float, high: float, steps: int = 100) -> float:
    """The argument at which an increasing function reaches the target."""
    for _ in range(steps):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return 0.5 * (low + high)


def plain_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    activation: str = RELU,
    l1_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, l1) in plain torch, in its inputs' dtype, differentiable by autograd: the basis of all comparisons."""
    up = F.linear(x, w_up)
    active = F.relu(up if w_gate is None else F.linear(x, w_gate))
    active = active.square() if activation == RELU2 else active
    h = active if w_gate is None else active * up
    wide = torch.promote_types(h.dtype, torch.float32)
    size = h.abs() if l1_weight is None else h.abs() * l1_weight.to(wide)
    return F.linear(h, w_down), size.sum(dtype=wide) / max(h[..., 0].numel(), 1)


def relative_error(out: Tensor, ref: Tensor) -> float:
    """|out - ref| / |ref| in the 2-norm. Infinite if NaN, +Inf or -Inf are at different positions; positions where both
    have the same nonfinite value are ignored."""
    out, ref = out.detach().double(), ref.detach().double()
    finite = out.isfinite() & ref.isfinite()
    if not torch.allclose(out[~finite], ref[~finite], equal_nan=True):
        return math.inf
    difference, norm = (out - ref)[finite].norm().item(), ref[finite].norm().item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def tolerance(plain_error: float, dtype: torch.dtype, *, scalar: bool = False) -> float:
    """The relative error allowed for a result in `dtype` if plain torch in that dtype has `plain_error`.

    Twice that, plus one rounding of the result (off by at most eps/2 for one value, by less than eps/4 in the norm of
    many), plus four units of the accumulation dtype, because the order of summation matters. A scalar gets eps for its
    rounding: its plain error may be small by chance.
    """
    rounding = torch.finfo(dtype).eps * (1 if scalar else 1 / 4)
    order = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return 2 * plain_error + rounding + order


Function = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]


def evaluate(function: Function, problem: Problem, dy: Tensor | None = None, l1: float = 0.0) -> dict[str, Tensor]:
    """The results of `function` (x, w_gate, w_up, w_down) -> (y, l1): "y" and "l1"; with dy [M, K] also the gradients
    of sum(y dy) + l1 times its l1 term: "dx", "dw_gate" (if gated), "dw_up", "dw_down"."""
    if dy is None:
        with torch.no_grad():
            y, penalty = function(*problem)
        return {"y": y, "l1": penalty}
    leaves = problem.each(lambda tensor: tensor.detach().requires_grad_())
    y, penalty = function(*leaves)
    named = {f"d{name}": leaf for name, leaf in leaves._asdict().items() if leaf is not None}
    gradients = torch.autograd.grad((y * dy).sum() + l1 * penalty, list(named.values()))
    return {"y": y.detach(), "l1": penalty.detach(), **dict(zip(named, gradients, strict=True))}


def evaluate_exactly(
    problem: Problem,
    dy: Tensor | None = None,
    l1: float = 0.0,
    activation: str = RELU,
    l1_weight: Tensor | None = None,
) -> dict[str, Tensor]:
    """`evaluate` for plain torch in float64 (no TF32, negligible rounding), some thousand tokens at a time."""
    plain = functools.partial(plain_ffn, activation=activation, l1_weight=l1_weight)
    wide = problem.each(Tensor.double)
    tokens = max(wide.x.shape[0], 1)
    total: dict[str, Tensor] = {}
    for start in range(0, tokens, CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        share = wide.x[part].shape[0] / tokens
        dy_part = None if dy is None else dy[part].double()
        results = evaluate(plain, wide._replace(x=wide.x[part]), dy_part, l1 * share)
        results["l1"] = results["l1"] * share
        for name, value in results.items():
            if name not in total:
                total[name] = value
            elif name in ("y", "dx"):
                total[name] = torch.cat([total[name], value])
            else:
                total[name] += value
    return total


class Comparison(NamedTuple):
    """The relative error of one named result, and the allowed error."""

    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed


def compare(
    function: Function,
    problem: Problem,
    dy: Tensor | None = None,
    l1: float = 0.0,
    activation: str = RELU,
    l1_weight: Tensor | None = None,
) -> dict[str, Comparison]:
    """The error of each result of `function` (see `evaluate`) against plain torch in float64, and the allowed error."""
    exact = evaluate_exactly(problem, dy, l1, activation, l1_weight)
    plain = evaluate(functools.partial(plain_ffn, activation=activation, l1_weight=l1_weight), problem, dy, l1)
    ours = evaluate(function, problem, dy, l1)
    return {
        name: Comparison(
            relative_error(ours[name], exact[name]),
            tolerance(relative_error(plain[name], exact[name]), problem.x.dtype, scalar=exact[name].ndim == 0),
        )
        for name in exact
    }


def check(
    function: Function,
    problem: Problem,
    dy: Tensor | None = None,
    l1: float = 0.0,
    activation: str = RELU,
    l1_weight: Tensor | None = None,
) -> dict[str, Comparison]:
    """Raises AssertionError naming every result of `compare` whose error is larger than allowed."""
    comparisons = compare(function, problem, dy, l1, activation, l1_weight)
    wrong = [f"{name}: {c.error:.3g}, allowed {c.allowed:.3g}" for name, c in comparisons.items() if not c.ok]
    if wrong:
        raise AssertionError("relative errors over tolerance: " + "; ".join(wrong))
    return comparisons
