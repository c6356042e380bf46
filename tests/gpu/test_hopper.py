"""Tests that are specific to the Hopper backend; the rest is in test_sparse_backends.py."""

from unittest import mock

import pytest
import torch
from calls import run_ffn
from packed_formats import as_twell

from twell import hot_split
from twell.hopper import hot_steps, inference, screen
from twell.interface import Forward, Gradients, Weights
from twell.memory import SCREENS_FROM, neuron_major
from twell.testing import check, make_problem, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_hopper", "poisoned_memory")]
CUDA = "cuda"


def test_packing_is_exact():
    p = make_problem(1000, 256, 1500, 20.0, device="cuda")
    for tiling in (inference.WIDE, inference.NARROW):
        packed = inference.gate_pack(p.x, Weights(p.w_gate, p.w_up, neuron_major(p.w_down).t()), tiling)
        format_ = as_twell(packed, 1500, tiling.tile)
        plain = torch.relu(p.x.float() @ p.w_gate.float().t())
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


def test_hundreds_of_thousands_of_tokens():
    p = make_problem(300_001, 64, 512, 12.0, device=CUDA)

    def hopper(*operands):
        y, stats = run_ffn(*operands, backend="hopper")
        return y, stats.l1

    check(hopper, p)


def test_offsets_past_32_bits():
    # The dense rows of overflowing tiles alone are 4.7 GB here.
    tokens = 520_000
    p = make_problem(2000, 64, 4520, 40.0, device=CUDA)
    x = p.x.repeat(tokens // 2000, 1)
    x[-1] = p.x[5]
    # Not to the bit: with fewer tokens several warps share one, and add up in another order.
    expected = run_ffn(*p, backend="hopper")[0]
    y = run_ffn(x, *p[1:], backend="hopper")[0]
    assert relative_error(y[:2000], expected) < 2**-8
    assert relative_error(y[-2000:-1], expected[:-1]) < 2**-8
    assert relative_error(y[-1], expected[5]) < 2**-8


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gradients_on_another_device_than_the_current_one():
    p = make_problem(700, 128, 512, 12.0, device="cuda:1")
    leaves = [t.detach().requires_grad_() for t in p]
    there = [t.detach().to("cuda:0").requires_grad_() for t in p]
    for operands in (leaves, there):
        y, stats = run_ffn(*operands, backend="hopper")
        (y.float().square().sum() + stats.l1).backward()
    for one, other in zip(leaves, there, strict=True):
        assert one.grad.device == one.device
        assert torch.equal(one.grad.cpu(), other.grad.cpu())


def _weights(gated: bool, in_place: bool) -> Weights:
    gate, up, down = (torch.randn(1000, 2 * 192, device=CUDA).bfloat16() for _ in range(3))
    parts = [w[:, :192] if not in_place else w[:, :192].contiguous() for w in (gate, up, down)]
    return Weights(parts[0] if gated else None, *parts[1:])


@pytest.mark.parametrize("neurons", [19456, 20480, 24576, 40960, 65536])
def test_rows_of_hot_neurons_of_wide_blocks(neurons):
    """The list of the other neurons is in dynamic shared memory, beside 8 KB of static one."""
    w = torch.randn(neurons, 64, device=CUDA).bfloat16()
    chosen = torch.randperm(neurons, device=CUDA)[:40]
    ours = hot_steps.gather(chosen, Weights(w, w, w), True)
    others = torch.ones(neurons, dtype=torch.bool, device=CUDA).index_fill_(0, chosen, False).nonzero().flatten()
    assert torch.equal(ours.inner, torch.cat((w[chosen], w[chosen])))
    assert torch.equal(ours.down, w[chosen])
    assert torch.equal(ours.cold.neurons[: neurons - 40].long(), others)
    assert torch.equal(ours.cold.rows, w[others])


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("in_front", [True, False])
@pytest.mark.parametrize("hidden", [64, 2048])
@pytest.mark.parametrize("count", [8, 128, 136, 512, 1408])
@pytest.mark.parametrize("tokens", [1, 17, 129, 8192 + 77, 20480])
def test_hidden_of_hot_neurons(tokens, count, hidden, in_front, activation):
    """Of whole numbers, whose products are exact in any order: to the bit the two steps' result."""
    x, inner = (torch.randint(-2, 3, (rows, hidden), device=CUDA).bfloat16() for rows in (tokens, 2 * count))
    if tokens > 1000:
        x[7, 3], x[-1, 5], x[300, hidden - 1] = float("nan"), float("inf"), -float("inf")
    gate, up = inner.chunk(2)
    if in_front:
        gate, up = (torch.cat((w, torch.full_like(w, 5)))[:count] for w in (gate, up))
    h = hot_steps.hidden(x, gate, up, activation)
    pre = (x.float() @ inner.float().t()).bfloat16()
    rest = Forward(x, None, None, None, None)
    wanted, _ = hot_steps.activate(pre, torch.arange(count, device=CUDA), True, rest, activation)
    torch.testing.assert_close(h, wanted, rtol=0, atol=0, equal_nan=True)
    assert h[8:300].isfinite().all()


@pytest.mark.parametrize("hidden", [64, 2048])
@pytest.mark.parametrize("tokens", [77, 8192, 40_000])
def test_hidden_of_hot_neurons_is_as_near_as_two_steps(tokens, hidden):
    x, gate, up = (torch.randn(rows, hidden, device=CUDA).bfloat16() for rows in (tokens, 200, 200))
    wanted = (x.double() @ gate.double().t()).relu() * (x.double() @ up.double().t())
    two_steps = (x @ gate.t()).relu() * (x @ up.t())
    error = relative_error(hot_steps.hidden(x, gate, up, "relu"), wanted)
    assert error <= 1.01 * relative_error(two_steps, wanted)


@torch.no_grad()
@pytest.mark.parametrize("hot", [torch.arange(3, 139), 136])
@pytest.mark.parametrize("tokens", [77, 8192])
def test_hot_neurons_without_statistics_give_what_they_give_with_them(tokens, hot):
    p = make_problem(tokens, 64, 776, 20.0, device=CUDA)
    wanted, _ = run_ffn(*p, backend="hopper", hot=hot)
    assert relative_error(run_ffn(*p, backend="hopper", hot=hot, stats=False)[0], wanted) < 2**-8


def _screened_and_plain(x, weights, hot, screened, activation="relu"):
    """y of a plan that screens so many neurons, and of one that screens none."""
    operands, plain = (x, *weights[:2], weights[2].t()), {"backend": "hopper", "stats": False, "hot": hot}
    marked = mock.patch.object(inference, "launch_screened", wraps=inference.launch_screened)
    with torch.no_grad(), marked as launches:
        y, _ = run_ffn(*operands, activation=activation, screened=screened, **plain)
        assert launches.called
        return y, run_ffn(*operands, activation=activation, **plain)[0]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("hot", "screened"), [(0, 776), (0, 300), (136, 400), (136, 640)])
@pytest.mark.parametrize("hidden", [64, 192, 2048, 2112])
@pytest.mark.parametrize("tokens", [SCREENS_FROM, SCREENS_FROM + 77, 40_000])
def test_screened_neurons(tokens, hidden, hot, screened, activation):
    """Of whole numbers, whose products are exact in any order: to the bit the plan's without them (sums of squares are
    not). Nearly half of the neurons fire, so that tiles overflow; others miss it by nothing."""
    g = torch.Generator(CUDA).manual_seed(0)
    x, gate, up, down = (
        torch.randint(-1, 2, (rows, hidden), generator=g, device=CUDA).bfloat16() for rows in (tokens, 776, 776, 776)
    )
    gate[:, ::3] *= torch.rand((776, 1), generator=g, device=CUDA) < 0.5
    gate[300:400] = x[1000:1100]
    gate[400:500] = -x[2000:2100]
    gate[500:520] = 0
    x[40:50] = 0
    few = torch.arange(hidden, device=CUDA) < 64
    up, down = up * few, down * few
    x[77, 3], x[-1, 5], x[300, hidden - 1] = float("nan"), float("inf"), -float("inf")
    y, wanted = _screened_and_plain(x, (gate, up, down), hot, screened, activation)
    most = 0 if activation == "relu" else 2**-7 * wanted[:77].abs().max().item()
    torch.testing.assert_close(y, wanted, rtol=2**-7 if most else 0, atol=most, equal_nan=True)
    assert y[:77].isfinite().all()
    assert y[[77, -1, 300]].isnan().all()


@pytest.mark.parametrize("hot", [0, 128])
@pytest.mark.parametrize("tokens", [SCREENS_FROM + 77, 40_000])
def test_screened_neurons_are_as_near_as_others(tokens, hot):
    """Outlier channels, and neurons that all fire, so that tiles overflow."""
    p = make_problem(tokens, 2048, 2816, 30.0, device=CUDA)
    x, gate, up, down = p.x, p.w_gate, p.w_up, p.w_down.t().contiguous()
    x[:, 7] *= 300
    gate[:, 7] /= 300
    gate[1100:1400] = gate[1100:1400].abs() * x[5].sign()  # all fire for token 5
    y, wanted = _screened_and_plain(x, (gate, up, down), hot, 2560)
    assert relative_error(y, wanted) < 2**-8
    torch.testing.assert_close(y[5], wanted[5], rtol=0.05, atol=0.02 * float(wanted[5].float().abs().max()))


def test_what_is_screened_out_does_not_fire():
    """Rows at right angles to x but for a rounding, and tiny and huge ones: where the product is positive is a mark."""
    tokens, hidden, neurons = SCREENS_FROM, 2048, 512
    g = torch.Generator(CUDA).manual_seed(0)
    x, w = (torch.randn((rows, hidden), generator=g, device=CUDA) for rows in (tokens, neurons))
    w -= (w * x[:neurons]).sum(1, keepdim=True) / x[:neurons].square().sum(1, keepdim=True) * x[:neurons]
    x[50:60], x[60:70], w[100:110] = x[50:60] * 2.0**-126, x[60:70] * 2.0**100, w[100:110] * 2.0**-110
    x, w = x.bfloat16(), w.bfloat16()
    weights = Weights(w, w, w)
    packed = inference.gate_pack(x, weights, stats=False, screen=screen.screen(x, weights, neurons))
    lanes = packed.words.view(torch.int16).view(tokens, 2, -1, 2)
    exact = x.double() @ w.double().t()
    kept = torch.arange(packed.words.shape[-1], device=CUDA) < packed.counts[..., None]
    for tile in range(2):
        fits = packed.counts[:, tile] <= packed.words.shape[-1]
        marked = torch.zeros(tokens, neurons, dtype=torch.bool, device=CUDA)
        rows, slots = (kept[:, tile] & fits[:, None]).nonzero(as_tuple=True)
        marked[rows, lanes[rows, tile, slots, 0].long()] = True
        part = slice(256 * tile, 256 * tile + 256)
        assert marked[fits][:, part][exact[fits][:, part] > 0].all()
        dense = packed.spilled[~fits, tile].view(torch.int16)
        assert (dense[exact[~fits][:, part] > 0] == -(2**15)).all()


def test_neurons_that_do_not_exist_are_not_marked():
    tokens, neurons = 3, 40
    around = torch.zeros(256, dtype=torch.bool, device=CUDA)
    counts = torch.zeros(tokens, dtype=torch.int32, device=CUDA)
    fired = around[64 : 64 + neurons]
    rest = Forward(torch.zeros(tokens, 64, device=CUDA), counts, torch.zeros(tokens, device=CUDA), fired, None)
    chosen = torch.tensor([-1, -50, 3, neurons, neurons + 7, 39, 2**40, 0], device=CUDA)
    hot_steps.activate(torch.ones(tokens, 2 * 8, device=CUDA).bfloat16(), chosen, True, rest, "relu")
    assert fired.nonzero().flatten().tolist() == [0, 3, 39]
    assert int(around.sum()) == 3


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("count", [1, 130, 1000])
def test_rows_of_hot_neurons(count, gated, in_place):
    weights, neurons = _weights(gated, in_place), torch.randperm(1000, device=CUDA)[:count]
    ours = hot_steps.gather(neurons, weights, count < 1000)
    plain = hot_split.gather(neurons, weights, False)
    assert torch.equal(ours.inner, plain.inner)
    assert torch.equal(ours.down, plain.down)
    if in_place and count < 1000:
        others = torch.ones(1000, dtype=torch.bool, device=CUDA).index_fill_(0, neurons, False).nonzero().flatten()
        assert torch.equal(ours.cold.neurons[: 1000 - count].long(), others)
        assert torch.equal(ours.cold.rows, weights.pattern[others])
    else:
        assert ours.cold is None
    for missing in (None, 1, 2, 3):
        kept = [torch.ones_like(w) if w is not None and missing != i else None for i, w in enumerate(weights[:3], 1)]
        expected = [None if t is None else t.clone() for t in kept]
        parts = (None if kept[0] is None and kept[1] is None else ours.inner, None if kept[2] is None else ours.down)
        hot_steps.scatter(neurons, *parts, Gradients(None, *kept))
        hot_split.scatter(neurons, *parts, Gradients(None, *expected))
        for t, wanted in zip(kept, expected, strict=True):
            assert t is wanted is None or torch.equal(t, wanted)
