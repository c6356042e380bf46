"""The backends of calls with fewer tokens than a block was tuned on: chosen by `autotune`, used by the block."""

import copy
import dataclasses
import warnings

import pytest
import torch
from calls import change, make_block
from torch import nn

from twell import SparseFeedForward, autotune, hot_split, load_plans, registry, save_plans
from twell.gpu.adapter import Kernels, are_read_in_place, forward_and_backward
from twell.gpu.saved_csr import SavedCSR
from twell.interface import Cold, HotSteps, Options, Weights
from twell.tuning import forward
from twell.tuning.forward import COUNTS, ranges
from twell.tuning.timing import Cost, cold_costs

HIDDEN, NEURONS = 16, 64


def a_block(**settings) -> SparseFeedForward:
    torch.manual_seed(0)
    return make_block(HIDDEN, NEURONS, **{"keep_stats": False, **settings}).eval()


def used(block, tokens) -> str:
    block.keep_stats = True
    block(torch.randn(tokens, HIDDEN))
    return block.stats.backend


# The block


def test_a_call_has_the_backend_of_its_number_of_tokens():
    block = a_block()
    change(block, up_to=[(4, "reference"), (20, "dense"), (30, "reference")])
    found = {tokens: used(block, tokens) for tokens in (0, 1, 4, 5, 20, 21, 30, 31)}
    sparse = {tokens for tokens, name in found.items() if name == "reference"}
    assert sparse == {0, 1, 4, 21, 30}
    block(torch.randn(2, 2, HIDDEN))
    assert block.stats.backend == "reference", "counted over all leading dimensions"
    assert copy.deepcopy(block).plan == block.plan
    block.plan = "dense"
    assert used(block, 1) == "dense", "a name is a plan of its own"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([(4, "dense"), (4, "reference")], r"ascending numbers of tokens, at least 1, got \[4, 4\]"),
        ([(0, "dense")], "at least 1, got .0."),
        ([(2.0, "dense")], "ascending numbers"),
        ([(True, "dense")], "ascending numbers"),
        ([(4, "fastest")], "backend must be one of auto, dense, .* got 'fastest'"),
        ([(4, "auto")], 'one by one, got "auto"'),
        ([4], r"must hold pairs \(tokens, backend\), got \[4\]"),
        (None, "must hold pairs"),
    ],
)
def test_wrong_ranges_are_refused(wrong, message):
    block = a_block()
    change(block, up_to=[(4, "reference")])
    with pytest.raises(ValueError, match=message):
        change(block, up_to=wrong)
    assert block.plan.up_to == ((4, "reference"),)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_for_any_number_of_tokens_has_one_backend(strict):
    block, x = a_block(), torch.randn(2, 6, HIDDEN)
    change(block, up_to=[(4, "reference"), (20, "dense")])
    sizes = {"x": {1: torch.export.Dim("tokens", min=2, max=100)}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(block, (x,), dynamic_shapes=sizes, strict=strict).module()
        for tokens in (2, 3, 50):
            x = torch.randn(2, tokens, HIDDEN)
            torch.testing.assert_close(program(x), block(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_programs_take_the_backend_of_their_sizes(dynamic):
    block = a_block()
    change(block, up_to=[(4, "reference"), (20, "dense")])
    operators = []

    def backend(graph, inputs):
        operators.append({str(node.target).split(".")[0] for node in graph.graph.nodes if node.op == "call_function"})
        return graph.forward

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    torch.compiler.reset()
    with torch.no_grad():
        for tokens in (3, 10):
            x = torch.randn(tokens, HIDDEN)
            torch.testing.assert_close(compiled(x), block(x))
    few, more = operators
    assert "twell" in few
    assert "twell" not in more, "dense products are plain torch there"


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize("hot", [torch.arange(8), 8], ids=["by index", "in front"])
def test_compiled_programs_with_hot_neurons_take_any_number_of_tokens(monkeypatch, dynamic, hot):
    """Whether so few tokens need no hot neurons is asked of the backend, which cannot take a symbol."""
    block = with_few_tokens(monkeypatch)
    change(block, hot=hot)
    for _ in right_when_compiled(block, dynamic):
        pass


def with_few_tokens(monkeypatch, **changes) -> SparseFeedForward:
    """A block whose backend, the reference with these changes, takes up to four tokens for few."""
    get = registry.get
    own = dataclasses.replace(get("reference"), few_tokens=lambda tokens, hidden: tokens <= 4, **changes)
    monkeypatch.setattr(registry, "get", lambda name: own if name == "reference" else get(name))
    return a_block(backend="reference")


def right_when_compiled(block, dynamic):
    """Gives the number of tokens of each call after it was compared with plain torch."""
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.compiler.reset()
    for tokens in (2, 3, 10, 4):
        x = torch.randn(tokens, HIDDEN)
        with torch.no_grad():
            plain = block.down_proj(block.gate_proj(x).relu() * block.up_proj(x))
            torch.testing.assert_close(compiled(x), plain)
        yield tokens


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_programs_compute_hot_neurons_once_if_the_backend_leaves_them_out(monkeypatch, dynamic):
    """As hopper does: few tokens have kernels of their own for all neurons, others leave the hot ones out."""
    calls, plain = [], registry.get("reference")

    def gather(hot, weights, with_cold):
        left = torch.ones(NEURONS, dtype=torch.bool).index_fill(0, hot, False).nonzero().flatten()
        rows = hot_split.gather(hot, weights, with_cold)
        return rows._replace(cold=Cold(weights.pattern[left], left)) if with_cold else rows

    def forward(x, weights, options, cold=None):
        calls.append((len(x), cold is not None))
        if cold is not None:
            weights = Weights(*(t if t is None else t[cold.neurons] for t in weights))
        return plain.forward(x, weights, options)

    steps = HotSteps(hot_split.activate, hot_split.derive, gather, hot_split.scatter)
    block = with_few_tokens(monkeypatch, forward=forward, hot=steps)
    change(block, hot=torch.arange(8))
    for tokens in right_when_compiled(block, dynamic):
        assert calls == [(tokens, tokens > 4)]
        calls.clear()


@pytest.mark.parametrize("entries", [10, 2**31, 2**33])
def test_kernels_that_look_ahead_stay_within_31_bits(entries):
    saved = SavedCSR(*(torch.empty(entries, dtype=torch.int32, device="meta") for _ in range(4)))
    assert saved.room <= entries
    assert saved.room - 1 + 64 < 2**31


@pytest.mark.parametrize("cold", [None, "cold"])
def test_gpu_kernels_for_few_tokens_compute_all_neurons_or_are_not_taken(cold):
    taken = []

    def gate_pack(x, weights, **options):
        taken.append(options.get("cold"))

    def few(x, weights, **options):
        taken.append("few")
        return x

    kernels = Kernels(gate_pack, lambda packed, x, *others, **options: (x, None), None, lambda *sizes: True, few)
    forward, _ = forward_and_backward(lambda: kernels, HotSteps(*[None] * 4))
    weights = Weights(*(torch.ones(NEURONS, HIDDEN) for _ in range(3)))
    forward(torch.ones(2, HIDDEN), weights, Options(False, False, 8, 0.0, "relu"), cold)
    assert taken == ["few" if cold is None else "cold"]


@pytest.mark.parametrize("neurons", [1, 2])
def test_a_row_with_another_stride_is_not_read_in_place(neurons):
    x, whole = torch.ones(2, 8), torch.ones(neurons, 8)
    assert are_read_in_place(x, Weights(whole, whole, whole))
    assert are_read_in_place(x, Weights(None, whole, whole))
    other = torch.ones(8, neurons).t()
    assert other.is_contiguous() == (neurons == 1)
    assert not are_read_in_place(x, Weights(other, whole, whole))
    assert are_read_in_place(torch.ones(8, 1).t(), Weights(None, whole, whole)), "one token"


# What autotune chooses


@pytest.mark.parametrize(
    ("best", "wanted"),
    [
        ({1: "a", 16: "a", 128: "dense", 1024: "a", 5000: "a"}, ((16, "a"), (1023, "dense"))),
        ({1: "dense", 16: "dense", 20: "a"}, ((19, "dense"),)),
        ({1: "a", 4: "dense", 50: "dense"}, ((1, "a"),)),
        ({1: "a", 4: "b", 16: "dense", 50: "a"}, ((1, "a"), (4, "b"), (49, "dense"))),
        ({1: "a", 4: "a", 50: "a"}, ()),
        ({1: "dense"}, ()),
    ],
)
def test_between_two_counts_calls_are_dense_if_one_of_them_is(best, wanted):
    assert ranges(best) == wanted


def test_sparse_must_win_both_eagerly_and_in_a_graph():
    dense = Cost(device=2.0, eager=3.0)
    assert Cost(1.0, 2.9).beats(dense)
    assert not Cost(1.0, 3.1).beats(dense)
    assert not Cost(2.1, 2.5).beats(dense)
    assert not dense.beats(dense)


class Repeats(nn.Module):
    """Gives its block the inputs of `sorted_tokens`, whatever comes in."""

    def __init__(self):
        super().__init__()
        self.block = make_block(HIDDEN, NEURONS, keep_stats=False).eval()
        with torch.no_grad():  # neuron n fires where the first column exceeds n
            self.block.gate_proj.weight.zero_()
            self.block.gate_proj.weight[:, 0], self.block.gate_proj.weight[:, 1] = 1, -torch.arange(NEURONS)
        self.eval()

    def forward(self, x):
        return self.block(sorted_tokens())


def sorted_tokens() -> torch.Tensor:
    """[200, K]: token t has t / 4 non-zeros, but in no order of tokens."""
    x = torch.zeros(200, HIDDEN)
    x[:, 0], x[:, 1] = torch.randperm(200, generator=torch.Generator().manual_seed(0)) / 4, 1
    return x


@pytest.fixture
def told(monkeypatch):
    """The costs are what a function of the backend and the number of tokens says. Returns the tokens measured."""
    seen = {}

    def tell(milliseconds):
        def costs(calls, device):
            found = {}
            for name, call in calls.items():
                call()
                x = seen["x"]
                assert seen["backend"] == name
                seen[len(x)] = x
                found[name] = Cost(milliseconds(name, len(x)), milliseconds(name, len(x)))
            return found

        real = forward.compute

        def noted(inputs, call):
            seen["x"], seen["backend"] = inputs[0], call.plan.backend
            return real(inputs, call)

        monkeypatch.setattr(forward, "LONG_CALL", 1e9)
        monkeypatch.setattr(forward, "cold_costs", costs)
        monkeypatch.setattr(forward, "compute", noted)
        return seen

    return tell


def test_each_number_of_tokens_gets_the_fastest(backends, told):
    backends(quick=lambda nonzeros, neurons: 1.0, slow=lambda nonzeros, neurons: 30.0)
    seen = told(
        lambda name, tokens: {"dense": 5, "quick": 9 if tokens == 16 else 4, "slow": 3 if tokens == 1 else 7}[name]
    )
    model = Repeats()
    (choice,) = autotune(model, torch.zeros(1))
    assert choice.plan == model.block.plan
    assert choice.plan.backend == "quick"
    assert model.block.plan.up_to == ((1, "slow"), (4, "quick"), (63, "dense"))
    assert set(choice.plan.backends) == {"quick", "slow", "dense"}
    assert {tokens for tokens in seen if isinstance(tokens, int)} == {n for n in COUNTS if n < 200}
    nonzeros = (seen[4][:, 0]).ceil().tolist()
    assert nonzeros == [7, 19, 32, 44], "the middle of each quarter"
    again = Repeats()
    load_plans(again, save_plans(model))
    assert again.block.plan == choice.plan


@pytest.mark.parametrize(
    ("quick", "quick_at_64", "up_to"),
    [(1.0, 1.0, [(63, "dense")]), (1.0, 25.0, [(127, "dense")]), (25.0, 10.0, [])],
)
def test_what_takes_long_is_measured_as_the_full_input_is(backends, told, monkeypatch, quick, quick_at_64, up_to):
    """Dense products take 20 ms. From 50 tokens on, or from 3 where they are the fastest of 200, until a count has the
    full input's backend."""
    backends(quick=lambda nonzeros, neurons: quick_at_64 if len(seen["x"]) == 64 else quick, slow=lambda *_: 0.1)
    seen = told(lambda name, tokens: {"dense": 5, "quick": 6, "slow": 7}[name])
    monkeypatch.setattr(forward, "LONG_CALL", 0.25)
    (choice,) = autotune(Repeats(), torch.zeros(1))
    assert choice.plan.up_to == tuple(up_to)
    assert choice.plan.backend == ("quick" if quick < 20 else "dense")


def test_dense_products_may_be_the_fastest_for_many_tokens_alone(backends, told):
    backends(quick=lambda nonzeros, neurons: 30.0)
    told(lambda name, tokens: {"dense": 5, "quick": 4 if tokens == 1 else 6}[name])
    tuning = autotune(model := Repeats(), torch.zeros(1))
    assert tuning[0].plan.backend == "dense"
    assert model.block.plan.up_to == ((1, "quick"),)
    assert str(tuning).splitlines()[1].endswith("dense, quick up to 1 tokens")
    autotune(model, torch.zeros(1), backends=[])
    assert model.block.plan.up_to == (), "of a former tuning"


def test_on_a_cpu_both_costs_are_the_time_of_a_loop(own_clock):
    import time

    costs = cold_costs({"a": lambda: time.sleep(0.002), "b": lambda: time.sleep(0.001)}, torch.device("cpu"))
    assert costs["a"] == pytest.approx((2, 2), rel=0.01)
    assert costs["b"].beats(costs["a"])
