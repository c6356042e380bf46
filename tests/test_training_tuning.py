"""`autotune` in training mode: blocks get what is fastest forward and backward, and the training stays the same."""

import logging
from functools import partial

import pytest
import torch
from calls import change, make_block
from fake_gpu import FakeGpu
from torch import nn
from transformers import PretrainedConfig

from twell import Plan, autotune, feed_forward_blocks, load_plans, save_plans
from twell.plan import CAPACITY
from twell.registry import BackendUnavailable
from twell.testing import relative_error
from twell.tuning import Form, timing, training
from twell.tuning.timing import both_halves
from twell.tuning.training import forward_backward

HIDDEN, NEURONS = 16, 512
DENSE, SPARSE, HOT = Form("dense"), Form("reference"), Form("reference", hot=True)
AS_NOW = "hot neurons as now"


@pytest.fixture
def times(monkeypatch):
    """Sets how long each alternative takes, with the hot neurons `known[AS_NOW][0]` perhaps another time; each is
    called once all the same."""
    known = {DENSE: 3.0, SPARSE: 2.0, HOT: 1.0}

    def measured(calls, device):
        for call in calls.values():
            call()
        neurons, as_now = known.get(AS_NOW, (None, 0.0))
        return {plan: as_now if plan.indices == neurons else known[Form.of(plan)] for plan in calls}

    def queued(calls, other, device):  # of blocks that run compiled
        other()
        return measured({form: partial(both_halves, call) for form, call in calls.items()}, device)

    monkeypatch.setattr(training, "quick_times", measured)
    monkeypatch.setattr(training, "queued_times", queued)
    monkeypatch.setattr(training, "MOST_SAVED", 1.0)
    return known


class Layers(nn.Module):
    """Blocks one after another, with dropout between them, that many of their neurons fire for."""

    def __init__(self, count=2, hot=0, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make_block(HIDDEN, NEURONS, **settings) for _ in range(count))
        self.dropout = nn.Dropout(0.5)
        for block in self.blocks:
            with torch.no_grad():
                pattern = block.up_proj.weight if block.gate_proj is None else block.gate_proj.weight
                pattern[:, 0] = -100.0
                pattern[:hot, 0] = 100.0

    def forward(self, x):
        for block in self.blocks:
            x = torch.cat((torch.ones_like(x[..., :1]), self.dropout(block(x))[..., 1:]), -1)
        return x


def tokens(count=200):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 1
    return x


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_block_gets_what_is_fastest(times, gated, activation):
    model = Layers(hot=128, gated=gated, activation=activation)
    first, second = autotune(model, tokens(), backends=["reference"])
    assert first.milliseconds == second.milliseconds == {DENSE: 3.0, SPARSE: 2.0, HOT: 1.0}
    assert first.plan == Plan("reference", tuple(range(128)))
    assert first.mean_nonzeros == pytest.approx(128)
    assert [block.plan.backend for block in model.blocks] == ["reference"] * 2
    assert model.blocks[0].plan == first.plan
    times[HOT] = 2.5
    autotune(model, tokens(), backends=["reference"])
    assert [block.plan for block in model.blocks] == [Plan("reference")] * 2
    times[DENSE] = 1.0
    choices = autotune(model, tokens(), backends=["reference"])
    assert [block.plan.backend for block in model.blocks] == ["dense"] * 2
    assert "dense (ms)  reference (ms)  reference, hot (ms)  plan" in str(choices).splitlines()[0]


@pytest.mark.parametrize(("hot", "settings"), [(0, {}), (128, {"hot": False})])
def test_without_hot_neurons_there_is_no_such_alternative(times, hot, settings):
    model = Layers(1, hot)
    (choice,) = autotune(model, tokens(), backends=["reference"], **settings)
    assert choice.milliseconds == {DENSE: 3.0, SPARSE: 2.0}
    assert (choice.plan, choice.mean_nonzeros) == (model.blocks[0].plan, hot)
    assert choice.plan == Plan("reference")


def test_the_present_choice_stays_unless_another_is_clearly_faster(times, caplog):
    caplog.set_level(logging.INFO)
    model = Layers(1)
    times[SPARSE] = 0.97 * times[DENSE]
    assert autotune(model, tokens(), backends=["reference"])[0].plan.backend == "dense"
    assert "from now on" not in caplog.text
    times[SPARSE] = 0.9 * times[DENSE]
    assert autotune(model, tokens(), backends=["reference"])[0].plan.backend == "reference"
    assert "runs reference instead of dense from now on" in caplog.text
    times[SPARSE] = times[DENSE] / 0.97
    assert autotune(model, tokens(), backends=["reference"])[0].plan.backend == "reference"
    times[SPARSE] = times[DENSE] / 0.9
    assert autotune(model, tokens(), backends=["reference"])[0].plan.backend == "dense"


def test_whatever_was_asked_for_before_is_replaced_by_what_was_measured(times):
    model = Layers(1, backend="auto")
    times[SPARSE] = 10.0
    assert autotune(model, tokens(), backends=["reference"])[0].plan.backend == "dense"
    assert model.blocks[0].plan.backend == "dense"


def test_the_training_goes_on_as_if_nothing_had_been_measured():
    """With the real times, the random numbers of dropout, the gradients accumulated so far, and the weights."""
    losses = []
    for tuned in (False, True):
        model, x = Layers(hot=32), tokens()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(5)
        model(x).square().mean().backward()
        if tuned:
            before = [weight.grad.clone() for weight in model.parameters()]
            assert len(autotune(model, x)) == 2
            assert all(torch.equal(weight.grad, old) for weight, old in zip(model.parameters(), before, strict=True))
        assert not any(block._forward_pre_hooks for block in model.blocks)
        model(x).square().mean().backward()
        optimizer.step()
        losses.append(model(x).square().mean().item())
    assert losses[0] == losses[1]


def test_gradients_are_those_of_dense_products_after_it(times):
    model, x = Layers(hot=128), tokens()
    gradients = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        (model(x).square().mean() + 0.1 * sum(block.stats.l1 for block in model.blocks)).backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
        autotune(model, x, backends=["reference"])
    assert [block.plan.backend for block in model.blocks] == ["reference"] * 2
    for dense, sparse in zip(*gradients, strict=True):
        assert relative_error(sparse, dense) < 1e-6


def test_what_is_timed_is_what_the_training_needs(monkeypatch):
    """All gradients that are wanted, of parametrized weights too, those of frozen weights not; the statistics if the
    block keeps them."""
    asked = []
    real = torch.autograd.grad

    def grad(outputs, inputs, gradients):
        found = real(outputs, inputs, gradients)
        asked.append((len(outputs), [tuple(gradient.shape) for gradient in found]))
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    block, x = make_block(HIDDEN, NEURONS), tokens()
    both_halves(forward_backward(block, x, Plan(), CAPACITY))
    block.gate_proj.weight.requires_grad_(False)
    block.keep_stats = False
    both_halves(forward_backward(block, x, Plan(), CAPACITY))
    for part in (block.up_proj, block.down_proj):
        torch.nn.utils.parametrizations.weight_norm(part)
    both_halves(forward_backward(block, x, Plan(), CAPACITY))
    up = (NEURONS, HIDDEN)
    frozen = (1, [(200, HIDDEN), up, up[::-1]])
    assert asked == [(2, [(200, HIDDEN), up, up, up[::-1]]), frozen, frozen]


def test_capacity_follows_the_non_zeros_that_are_not_hot(times):
    model = Layers(1, hot=100)
    block = model.blocks[0]
    block._capacity = 64
    autotune(model, tokens(), backends=["reference"])
    assert (block.plan.hot_count, block._capacity) == (128, 64), "all of them are hot"
    times[HOT] = 2.5
    autotune(model, tokens(), backends=["reference"])
    assert (block.plan.hot, block._capacity) == (0, 256)
    block._capacity = 512
    autotune(model, tokens(), backends=["reference"])
    assert block._capacity == 512, "twice as much as needed is kept"
    model.blocks[0].gate_proj.weight.data[:, 0] = -100.0
    autotune(model, tokens(), backends=["reference"])
    assert block._capacity == 64
    times[DENSE] = 0.1
    autotune(model, tokens(), backends=["reference"])
    assert (block.plan.backend, block._capacity) == ("dense", CAPACITY), "the same for all dense blocks"
    change(block, capacity=7)
    for _ in range(2):
        autotune(model, tokens(), backends=["reference"])
        assert block._capacity == 7, "the user's own"
        times[DENSE] = 3.0


def test_hot_neurons_stay_unless_others_make_the_block_clearly_faster(times):
    """Each change is a new shape, for which a compiled model is compiled anew. What counts is measured: hot neurons of
    an earlier step, most of which are hardly active any more, make a block slow although they hold its non-zeros."""
    model = Layers(1, hot=200)
    block = model.blocks[0]
    (choice,) = autotune(model, tokens(), backends=["reference"])
    before = block.plan.hot
    assert len(before) == choice.plan.hot_count == 256
    block.gate_proj.weight.data[:, 0] = -100.0
    block.gate_proj.weight.data[:100, 0] = 100.0
    times[HOT], times[AS_NOW] = 0.96, (before, 1.0)
    (choice,) = autotune(model, tokens(), backends=["reference"])
    assert block.plan.hot is before
    assert (choice.plan.hot_count, choice.milliseconds[HOT]) == (256, 1.0)
    times[HOT] = 0.94
    (choice,) = autotune(model, tokens(), backends=["reference"])
    assert len(block.plan.hot) == choice.plan.hot_count == 128
    assert choice.milliseconds[HOT] == 0.94
    del times[AS_NOW]
    before = block.plan.hot
    times[HOT] = 0.5
    autotune(model, tokens(), backends=["reference"])
    assert block.plan.hot is before, "the same neurons are not timed twice"
    block.gate_proj.weight.data[:, 0] = -100.0
    times[SPARSE] = 0.2
    autotune(model, tokens(), backends=["reference"])
    assert block.plan.hot == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "inside", "wrapped", "told", "not", "told not"])
def test_dense_products_are_timed_as_the_model_runs_them(times, monkeypatch, caplog, how):
    """torch.compile makes them faster: a sparse block has to be faster than that. Sparse ones run as they are. Blocks
    with other non-zeros, which need other capacities, share one compilation."""
    caplog.set_level(logging.INFO)
    asked, real = [], training.forward_backward

    def noted(block, x, plan, capacity, *, compiled=False):
        asked.append((Form.of(plan), compiled))
        return real(block, x, plan, capacity, compiled=compiled)

    monkeypatch.setattr(training, "forward_backward", noted)
    model = nn.Sequential(Layers(2, hot=128))
    model[0].blocks[1].gate_proj.weight.data[:128] = -100.0
    if how in ("module", "told not"):
        model.compile()
    elif how == "inside":
        model[0].compile()
    given = torch.compile(model) if how == "wrapped" else model
    told = {"told": {"compiled": True}, "told not": {"compiled": False}}.get(how, {})
    torch.compiler.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    autotune(given, tokens(), backends=["reference"], **told)
    compiled = "not" not in how
    assert ((DENSE, True) in asked) == compiled
    assert not any(flag for form, flag in asked if form != DENSE)
    found = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert found == compiled, "the block alone, once; the model's own forward ran eagerly"
    autotune(given, tokens(), backends=["reference"], **told)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == found
    assert ("dense products of 2 of 2 blocks are timed compiled" in caplog.text) == compiled


@pytest.mark.parametrize("compiled", [False, True])
def test_of_blocks_that_run_compiled_the_hosts_time_does_not_count(times, monkeypatch, compiled):
    monkeypatch.setattr(training, "quick_times" if compiled else "queued_times", None)
    (choice,) = autotune(Layers(1), tokens(), backends=["reference"], compiled=compiled)
    assert choice.milliseconds == {DENSE: 3.0, SPARSE: 2.0}


def waiting_call(gpu, host):
    """Forward and backward take 1 and 2 ms, and the host `host` for each; the backward begins by waiting for what its
    forward counted, as sparse ones do."""

    def forward():
        gpu.issue("forward", host, 1)
        counted = torch.cuda.Event(enable_timing=True)
        counted.record()

        def backward():
            counted.synchronize()
            gpu.issue("backward", host, 2)

        return backward

    return forward


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


@pytest.mark.parametrize(("host", "most"), [(0, 1), (3, 2), (30, 16)])
def test_the_time_of_a_full_queue_is_that_of_the_gpu(gpu, host, most):
    """Of calls whose halves the host issues before the GPU has run enough others of 2.5 ms."""
    calls = {"first": waiting_call(gpu, host), "second": waiting_call(gpu, 0)}
    found = timing.queued_times(calls, lambda: gpu.issue("other", 0.5, 2.5), torch.device("cuda"))
    assert found == pytest.approx({"first": 3, "second": 3})
    runs = "".join(name[0] for name in gpu.issued).split("f")
    assert max(run.count("o") for run in runs[2:]) <= 2 * most, "before a forward and, with the last one's, a backward"


def test_where_the_host_never_gets_ahead_its_time_counts(gpu):
    (found,) = timing.queued_times(
        {"slow": waiting_call(gpu, 10)}, lambda: gpu.issue("other", 0.5, 0.1), torch.device("cuda")
    ).values()
    assert found > 3


def test_dense_products_that_cannot_be_compiled_are_timed_as_they_are(times, monkeypatch, caplog):
    def fails(*arguments, **settings):
        raise torch._dynamo.exc.InternalTorchDynamoError("no compiler")

    monkeypatch.setattr(training, "_compiled_output_and_l1", fails)
    (choice,) = autotune(Layers(1), tokens(), backends=["reference"], compiled=True)
    assert choice.milliseconds == {DENSE: 3.0, SPARSE: 2.0}
    assert "torch.compile fails for a block alone: no compiler" in caplog.text


def test_the_present_form_is_always_timed(times, monkeypatch):
    """Also where hot neurons would save most of the non-zeros: it stays if they do not make the block faster."""
    monkeypatch.setattr(training, "MOST_SAVED", 0.5)
    model = Layers(1, hot=128, backend="reference")
    times |= {DENSE: 1.0, SPARSE: 0.9, HOT: 1.2}
    (choice,) = autotune(model, tokens(), backends=["reference"])
    assert choice.plan == Plan("reference")
    assert choice.milliseconds == {DENSE: 1.0, SPARSE: 0.9, HOT: 1.2}


def test_of_two_sets_of_hot_neurons_the_table_shows_the_faster_one(times):
    model = Layers(1, hot=200)
    autotune(model, tokens(), backends=["reference"])
    model.blocks[0].gate_proj.weight.data[100:, 0] = -100.0
    times |= {DENSE: 0.1, HOT: 3.0, AS_NOW: (model.blocks[0].plan.hot, 1.02)}
    (choice,) = autotune(model, tokens(), backends=["reference"])
    assert (choice.plan.backend, choice.milliseconds[HOT]) == ("dense", 1.02)


def test_what_is_passed_on_is_what_the_block_is_set_to(monkeypatch):
    calls = []

    real = training.compute

    def recorded(inputs, call):
        calls.append(call)
        return real(inputs, call)

    monkeypatch.setattr(training, "compute", recorded)
    monkeypatch.setattr(training, "MOST_SAVED", 1.0)
    monkeypatch.setattr(timing, "_SECONDS", 1e-6)
    model = Layers(1, hot=128, activation="relu2", backup=0.125, keep_stats=False, backend="reference")
    autotune(model, tokens(), backends=["reference"])
    seen = {(call.plan.backend, call.hot is not None, call.plan.backup, call.capacity) for call in calls}
    assert seen == {("dense", False, 0.0, CAPACITY), ("reference", False, 0.125, 256), ("reference", True, 0.125, 64)}
    assert {(call.activation, call.stats) for call in calls} == {("relu2", False)}


def test_without_hot_neurons_a_busy_block_is_not_even_timed(monkeypatch):
    """At the start of a training half of the neurons fire: that would take minutes."""
    monkeypatch.setattr(timing, "_SECONDS", 1e-6)
    (busy,), (quiet,) = (autotune(Layers(1, hot=n), tokens(), backends=["reference"]) for n in (256, 0))
    assert set(busy.milliseconds) == {DENSE, HOT}
    assert set(quiet.milliseconds) == {DENSE, SPARSE}


def test_nothing_changes_if_it_fails(times, monkeypatch):
    model = Layers(3, hot=128)
    for block in model.blocks:
        change(block, hot=128, up_to=((4, "reference"),))
    before = [(block.plan, block._capacity) for block in model.blocks]
    real, random = training.quick_times, torch.get_rng_state()

    seen = []

    def fails_in_the_last(calls, device):
        seen.append(device)
        if len(seen) == 3:
            raise torch.OutOfMemoryError("no memory")
        return real(calls, device)

    monkeypatch.setattr(training, "quick_times", fails_in_the_last)
    with pytest.raises(torch.OutOfMemoryError):
        autotune(model, tokens(), backends=["reference"])
    assert [(block.plan, block._capacity) for block in model.blocks] == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(block._forward_pre_hooks for block in model.blocks)


def test_a_backend_of_inference_does_not_train_in_place_of_the_one_reported(times):
    model = Layers(1)
    block = model.blocks[0]
    change(block, up_to=((4, "reference"), (1024, "reference")))
    times[DENSE] = 0.1
    (choice,) = autotune(model, tokens(200), backends=["reference"])
    block(tokens(200))
    assert choice.plan.backend == block.stats.backend == "dense"
    assert block.plan.up_to == ((4, "reference"),)
    change(block, up_to=((1024, "reference"),))
    times[DENSE], times[SPARSE] = 1.0, 1.04  # what runs now stays unless another is clearly faster
    (choice,) = autotune(model, tokens(200), backends=["reference"])
    assert choice.plan.backend == block.plan.backend == "reference"


def test_the_first_run_of_a_block_counts(times, monkeypatch):
    model, real, measured = Layers(1, hot=128), training.quick_times, []
    model.blocks.append(model.blocks[0])

    def counted(calls, device):
        measured.append(len(calls))
        return real(calls, device)

    monkeypatch.setattr(training, "quick_times", counted)
    (choice,) = autotune(model, tokens(), backends=["reference"])
    assert (measured, choice.plan.hot_count) == ([3], 128), "once"


def test_under_autocast(times):
    model = Layers(1, hot=128)
    with torch.autocast("cpu", torch.bfloat16):
        (choice,) = autotune(model, tokens(), backends=["reference"])
    assert choice.plan.backend == "reference"


def test_a_compiled_model_changes_with_its_blocks(times):
    model = Layers(hot=128)
    model.dropout.p = 0.0
    compiled = torch.compile(model, backend="aot_eager")
    torch.compiler.reset()
    wanted = compiled(tokens())
    autotune(compiled, tokens(), backends=["reference"])
    assert [block.plan.backend for block in model.blocks] == ["reference"] * 2
    torch.testing.assert_close(compiled(tokens()), wanted)
    assert [block.stats.backend for block in model.blocks] == ["reference"] * 2


def test_plans_for_inference_are_forgotten(times):
    model = Layers(1)
    model.config = PretrainedConfig()
    change(model.blocks[0], hot=128)
    save_plans(model)
    autotune(model, tokens(), backends=["reference"])
    assert model.blocks[0].plan == Plan("reference")
    with pytest.raises(ValueError, match="no configuration that holds plans"):
        load_plans(model)


def test_dense_where_nothing_else_can_and_with_real_times(monkeypatch):
    monkeypatch.setattr(training, "_compiled_output_and_l1", None)  # there is nothing to compare with
    for compiled in (False, True):
        (choice,) = autotune(Layers(1), tokens(20), compiled=compiled)
        assert set(choice.milliseconds) == {DENSE}
        assert choice.milliseconds[DENSE] > 0


def test_blocks_that_are_not_asked_for_keep_their_plans(times):
    model = Layers(3, hot=128)
    (choice,) = autotune(model, tokens(), blocks=[model.blocks[1]], backends=["reference"])
    assert [block.plan for block in model.blocks] == [Plan(), choice.plan, Plan()]
    assert choice.plan.backend == "reference"
    with pytest.raises(ValueError, match="1 of 1 blocks are not in Layers"):
        autotune(model, tokens(), blocks=[make_block(HIDDEN, NEURONS)])


def test_what_cannot_be_measured_is_reported():
    with pytest.raises(BackendUnavailable, match="hopper"):
        autotune(Layers(), tokens(), backends=["hopper"])
    with pytest.raises(ValueError, match="autotune needs inputs with at least one token"):
        autotune(Layers(), tokens()[:0])
    model = Layers()
    model.forward = lambda x: model.blocks[0](x)
    with pytest.raises(ValueError, match="ran 1 of its 2 blocks"):
        autotune(model, tokens())
    assert not any(block._forward_pre_hooks for block in feed_forward_blocks(model))
