"""`autotune`: every block gets the fastest alternative for its own input. With backends that take as long as they are
told, in place of a GPU."""

import dataclasses
import time

import pytest
import torch
from calls import firing_block, rising_tokens

from twell import Plan, autotune, prune_silent, registry
from twell.registry import BackendUnavailable
from twell.tuning import Choice, Form, Tuning, common, forward
from twell.tuning.forward import contenders
from twell.tuning.timing import sustained_times

NEURONS = 512
DENSE, QUICK = Form("dense"), Form("quick")


def model(*rates) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Reset(firing_block(torch.as_tensor(r).expand(NEURONS))) for r in rates)).eval()


class Reset(torch.nn.Module):
    """Gives its block the same input whatever came before."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        self.block(rising_tokens())
        return x


def test_each_block_gets_what_is_fastest_for_it(backends):
    backends(quick=lambda nonzeros, neurons: 4 * nonzeros, slow=lambda nonzeros, neurons: 30.0)
    built = model(0.002, 0.2, 0.017)  # 1, 102 and 9 non-zeros; the last two are too many or just not hot
    first, second, third = autotune(built, torch.zeros(1), backends=["quick", "slow"])
    assert (first.plan.backend, first.plan.hot) == ("quick", 0)
    assert first.mean_nonzeros == pytest.approx(0.002 * NEURONS, abs=0.6)
    assert set(first.milliseconds) == {DENSE, QUICK, Form("slow")}
    assert first.milliseconds[QUICK] < first.milliseconds[Form("slow")]
    assert (second.plan.backend, second.plan.hot_count) == ("quick", NEURONS), "all fire often"
    assert third.plan.backend == "dense"
    assert [child.block.plan.backend for child in built] == ["quick", "quick", "dense"]
    assert not any(child.block._forward_pre_hooks for child in built)
    assert Form("slow") not in autotune(built, torch.zeros(1))[0].milliseconds, "not the first one, and not named"


def test_hot_neurons_are_an_alternative(backends):
    backends(quick=lambda nonzeros, neurons: nonzeros)
    rates = torch.full((NEURONS,), 0.001)
    rates[:128] = 0.6
    (choice,) = autotune(model(rates), torch.zeros(1), backends=["quick"])
    assert choice.plan == Plan("quick", tuple(range(128)), choice.plan.up_to)
    hot = choice.milliseconds[Form("quick", hot=True)]
    assert hot < choice.milliseconds[DENSE] < 60 < choice.milliseconds[QUICK]


def test_autotune_tries_screened_neurons_on_a_backend_that_can(backends, monkeypatch):
    backends(quick=lambda nonzeros, neurons: nonzeros / 4)
    plain, get = registry.get("quick"), registry.get
    asked = []

    def forward_screened(x, weights, options):
        asked.append(options.screened)
        return plain.forward(x, weights, options)

    quick = dataclasses.replace(plain, screens=True, forward=forward_screened)
    monkeypatch.setattr(registry, "get", lambda name: quick if name == "quick" else get(name))
    monkeypatch.setattr(forward, "SCREENS_FROM", 1000)
    monkeypatch.setattr(forward, "LEAST_SCREENED", 200)
    rates = torch.zeros(NEURONS)
    rates[-200:] = 0.05
    built = model(rates)
    (choice,) = autotune(built, torch.zeros(1), backends=["quick"])
    assert set(asked) == {0, NEURONS - 256}, "the 200 that fire are rounded up to 256 hot ones"
    assert Form("quick", screened=True) in choice.milliseconds


def test_what_cannot_be_measured_is_reported():
    with pytest.raises(ValueError, match="has no SparseFeedForward"):
        autotune(torch.nn.Linear(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match="backend must be one of"):
        autotune(model(0.01), torch.zeros(1), backends=["quickest"])
    with pytest.raises(ValueError, match="one by one"):
        autotune(model(0.01), torch.zeros(1), backends=["auto"])
    with pytest.raises(BackendUnavailable, match="hopper"):
        autotune(model(0.01), torch.zeros(1), backends=["hopper"])
    built = model(0.01, 0.01)
    built.forward = lambda x: built[0](x)
    with pytest.raises(
        ValueError, match=r"ran 1 of its 2 blocks, and 1\.block is the first that it did not: .* images too"
    ):
        autotune(built, torch.zeros(1))


def test_misspelled_settings_are_refused_though_the_model_takes_any():
    built = model(0.01)
    built.forward = lambda x, **named: built[0](x)
    for wrong, message in (("backend", "did you mean 'backends'"), ("compile", "did you mean 'compiled'")):
        with pytest.raises(TypeError, match=f"autotune has no setting '{wrong}'; {message}"):
            autotune(built, torch.zeros(1), **{wrong: True})
    autotune(built, torch.zeros(1), attention_mask=None)
    built.forward = lambda x, backend: built[0](x)
    autotune(built, torch.zeros(1), backend=None)
    wrapper = torch.nn.Sequential(built)
    wrapper.forward = lambda *inputs, **named: built(*inputs, **named)
    autotune(wrapper, torch.zeros(1), backend=None)


def test_a_batch_that_is_not_unpacked_is_refused():
    built = model(0.01)
    built.forward = lambda x, attention_mask=None: built[0](x)
    with pytest.raises(TypeError, match=r"autotune got inputs in a dict: unpack it, with \*\* before it"):
        autotune(built, {"x": torch.zeros(1)})
    with pytest.raises(TypeError, match="prune_silent got inputs in a dict"):
        prune_silent(built, {"x": torch.zeros(1)})
    built.forward = lambda batch: built[0](batch["x"])
    autotune(built, {"x": torch.zeros(1)})


def test_a_name_alone_is_no_sequence_of_backends():
    with pytest.raises(ValueError, match="backends must be a sequence of names, got 'reference'"):
        autotune(model(0.01), torch.zeros(1), backends="reference")


@pytest.mark.parametrize("training", [False, True])
def test_inputs_with_nan_are_refused(training):
    block = firing_block(torch.zeros(NEURONS)).train(training)
    with pytest.raises(ValueError, match="autotune needs inputs that are finite in each block"):
        autotune(block, rising_tokens() / 0)


def test_blocks_that_no_sparse_backend_here_can_run_are_told_of_once(backends, monkeypatch, caplog):
    backends(quick=lambda nonzeros, neurons: 1.0)
    common._warn_once.cache_clear()
    quick, get = dataclasses.replace(registry.get("quick"), supports=lambda request: "bfloat16 only"), registry.get
    monkeypatch.setattr(registry, "get", lambda name: quick if name == "quick" else get(name))
    decisions = autotune(model(0.01, 0.01), torch.zeros(1))
    assert [choice.plan.backend for choice in decisions] == ["dense"] * 2
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "blocks stay dense: quick: bfloat16 only"
    ]


def test_why_neurons_are_not_sorted_is_logged(caplog):
    built = model(0.01, 0.01)
    built[1].block.l1_weight = torch.ones(NEURONS)
    with caplog.at_level("INFO"):
        autotune(built, torch.zeros(1))
    assert any("the neurons of 1 of 2 blocks are not sorted" in record.message for record in caplog.records)


def test_the_result_prints_as_a_table():
    hot = Form("hopper", hot=True)
    found = Tuning(
        [
            Choice(
                Plan("hopper", (3, 7), ((16, "triton"),)), 120.54, {DENSE: 13.5, Form("hopper"): 18.25, hot: 9.1234}
            ),
            Choice(Plan(), 22.0, {DENSE: 13.5, Form("hopper"): 14.0}),
        ]
    )
    assert str(found).splitlines() == [
        "layer  non-zeros  dense (ms)  hopper (ms)  hopper, hot (ms)  plan",
        "    0      120.5      13.500       18.250             9.123  "
        "hopper, triton up to 16 tokens, 2 hot neurons by index",
        "    1       22.0      13.500       14.000                 -  dense",
    ]


@pytest.mark.parametrize(
    ("dense", "sparse", "found"),
    [
        (9.0, [8.0, 7.0, 20.0, 7.5], ["dense", 7.0, 7.5, 8.0]),
        (9.0, [10.0], ["dense", 10.0]),
        (9.0, [3.0, 4.0], []),  # clearly faster
        (9.0, [15.0, 16.0], []),  # clearly slower
        (0.25, [0.24], []),  # too short to heat a GPU
        (0.3, [0.26], ["dense", 0.26]),
        (9.0, [], []),
        (None, [3.0, 4.0], [3.0, 4.0]),  # nothing says that one is clear
    ],
)
def test_only_long_calls_about_as_fast_as_dense_products_are_measured_again_under_load(dense, sparse, found):
    times = {Plan("hopper", count): each for count, each in enumerate(sparse)}
    times |= {} if dense is None else {Plan(): dense}
    assert [times[plan] if plan.backend != "dense" else "dense" for plan in contenders(times)] == found


def test_sustained_times_follow_a_time_to_settle(own_clock):
    calls = []

    def slows_down():
        calls.append("slows down")
        time.sleep(0.002 if len(calls) < 100 else 0.004)

    found = sustained_times({"slows down": slows_down, "steady": lambda: time.sleep(0.003)}, torch.device("cpu"))
    assert found == pytest.approx({"slows down": 4, "steady": 3}, rel=0.01)
