"""The launch cache: which calls use it, what it keeps alive, and what Hopper's prepared calls launch."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from calls import run_ffn

from twell import hot_split, launch_cache, memory, ops, registry
from twell.backends import hopper
from twell.hopper import driver, few, hot_steps, inference, params, screen
from twell.hopper.screen import TILE
from twell.interface import Forward, Options, Request, Weights
from twell.launch_cache import LAUNCHES
from twell.memory import SCREENS_FROM
from twell.testing import make_problem

REPEATED = {"backend": "reference", "stats": False}


@pytest.fixture
def repeats(monkeypatch):
    """The reference with a `prepare`: how often it prepared a call, and how often that was run."""
    counts = {"prepared": 0, "called": 0}
    get = registry.get

    def prepare(x, weights, activation):
        counts["prepared"] += 1
        address = x.data_ptr()

        def call(x):
            assert x.data_ptr() == address
            counts["called"] += 1
            return torch.full_like(x, 7)

        return call

    monkeypatch.setattr(
        registry, "get", lambda name: replace(get(name), prepare=prepare) if name == "reference" else get(name)
    )
    LAUNCHES.clear()
    yield counts
    LAUNCHES.clear()


@pytest.fixture
def problem():
    return make_problem(6, 16, 40, 8, dtype=torch.float32)


def call(problem, **options):
    with torch.no_grad():
        return run_ffn(*problem, **{**REPEATED, **options})


def test_the_second_call_comes_from_the_cache(repeats, problem):
    first, stats = call(problem)
    again, same = call(problem)
    assert stats == same
    assert (first != 7).any()
    assert (again == 7).all()
    assert repeats == {"prepared": 1, "called": 1}


def test_another_activation_has_another_call_key(repeats, problem):
    call(problem)
    assert (call(problem, activation="relu2")[0] != 7).any()
    call(problem, activation="relu2")
    call(problem)
    assert repeats == {"prepared": 2, "called": 2}


def test_without_no_grad_too_where_nothing_requires_gradients(repeats, problem):
    for _ in range(2):
        run_ffn(*problem, **REPEATED)
    assert repeats == {"prepared": 1, "called": 1}


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down"])
@pytest.mark.parametrize("change", ["moved", "strides", "dtype", "shape"])
def test_other_operands_have_another_call_key(repeats, problem, name, change):
    call(problem)
    own = getattr(problem, name)
    other = {
        "moved": lambda: own.clone(),
        "strides": lambda: torch.as_strided(own, own.shape, (1, own.shape[0])),
        "dtype": lambda: own.view(torch.int32),
        "shape": lambda: own[: len(own) // 2],
    }[change]()
    changed = problem._replace(**{name: other})
    if change == "dtype" or (change == "shape" and name != "x"):
        with pytest.raises((TypeError, ValueError)):
            call(changed)
    else:
        call(changed)
    assert repeats["called"] == 0


@pytest.mark.parametrize(
    "options", [{"stats": True}, {"hot": torch.arange(4)}, {"backend": "dense"}], ids=["stats", "hot", "backend"]
)
def test_other_options_have_another_call_key(repeats, problem, options):
    call(problem)
    call(problem, **options)
    assert repeats["called"] == 0


@pytest.mark.parametrize("shape", [(6, 16), (2, 3, 16)])
@pytest.mark.parametrize("gated", [True, False])
def test_leading_hot_neurons_are_added_to_what_comes_from_the_cache(repeats, problem, monkeypatch, shape, gated):
    x, gate, up, down = problem._replace(x=problem.x.view(shape), w_gate=problem.w_gate if gated else None)
    first, _ = call((x, gate, up, down), hot=8)
    every = run_ffn(x, gate, up, down, backend="dense", stats=False)[0]
    torch.testing.assert_close(first, every)
    monkeypatch.setattr(registry, "resolve", lambda *_: pytest.fail("nothing is left to decide"))
    again, _ = call((x, gate, up, down), hot=8)
    leading = run_ffn(x, gate[:8] if gated else None, up[:8], down[:, :8], backend="dense", stats=False)[0]
    torch.testing.assert_close(again, leading + 7)
    assert repeats == {"prepared": 1, "called": 1}


@pytest.mark.parametrize(
    "given",
    [{"hot": 40}, {"hot": 8, "backend": "auto"}, {"hot": torch.arange(8)}, {"hot": 8, "up_to": ((6, "dense"),)}],
)
def test_other_hot_neurons_are_split_in_each_call(repeats, problem, given):
    wanted = call(problem, backend="dense")[0]
    call(problem, hot=8)
    for _ in range(2):
        torch.testing.assert_close(call(problem, **given)[0], wanted)
    assert repeats["called"] == 0


@pytest.mark.parametrize("given", [{"hot": 8, "screened": 33}, {"hot": 41}, {"screened": 41}])
def test_a_plan_that_does_not_fit_is_refused_although_its_call_was_prepared(repeats, problem, given):
    for hot in (0, 8):
        call(problem, hot=hot)
    with pytest.raises(ValueError, match="must"):
        call(problem, **given)


def test_screened_neurons_are_not_prepared(repeats, problem, monkeypatch):
    monkeypatch.setattr(ops, "SCREENS_FROM", 6)
    for _ in range(3):
        call(problem, hot=8, screened=4)
    assert repeats["called"] == 0
    few = problem._replace(x=problem.x[:5])
    for _ in range(2):
        call(few, hot=8, screened=4)
    assert repeats["called"] == 1


def test_an_observed_call_does_not_bypass_the_dispatcher(repeats, problem):
    call(problem)
    wanted = problem._replace(
        w_down=problem.w_down.detach().requires_grad_()
    )  # at the same address, but with gradients
    assert run_ffn(*wanted, **REPEATED)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        call(problem)
    compiled = torch.compile(lambda *operands: run_ffn(*operands, **REPEATED)[0], fullgraph=True)
    with torch.no_grad():
        compiled(*problem)
    assert repeats["called"] == 0


def test_what_is_no_strided_tensor_is_refused(repeats, problem):
    for x in (problem.x.to_sparse(), problem.x.tolist()):
        with pytest.raises((TypeError, ValueError)):
            call(problem._replace(x=x))


def test_nothing_is_prepared_for_a_copy_of_x(repeats, problem):
    call(problem._replace(x=problem.x.repeat_interleave(2, 1)[:, ::2]))
    call(problem._replace(x=problem.x[:0]))
    assert repeats["prepared"] == 0


def test_a_call_in_pieces_is_not_prepared(repeats, problem, monkeypatch):
    for piece, prepared in ((5, 0), (6, 1)):
        monkeypatch.setattr(launch_cache, "PIECE", piece)
        for _ in range(2):
            call(problem)
        assert repeats == {"prepared": prepared, "called": prepared}


def test_no_tensor_is_held(repeats):
    problem = make_problem(6, 16, 40, 8, dtype=torch.float32)
    call(problem)
    held = [weakref.ref(t) for t in problem]
    del problem
    gc.collect()
    assert [one() for one in held] == [None] * 4


def test_addresses_long_gone_are_forgotten(repeats, problem, monkeypatch):
    monkeypatch.setattr(LAUNCHES, "most", 3)
    for end in range(1, 6):
        call(problem._replace(x=problem.x[:end]))
    assert len(LAUNCHES._entries) == 2
    call(problem._replace(x=problem.x[:5]))
    assert repeats == {"prepared": 5, "called": 1}
    LAUNCHES.put("another", 0)
    LAUNCHES.put("another", 1)
    assert len(LAUNCHES._entries) == 3, "a full cache forgets nothing for what it has"
    LAUNCHES.clear()
    call(problem._replace(x=problem.x[:5]))
    assert repeats == {"prepared": 6, "called": 1}


# What the Hopper backend launches, with the driver and the device away.


class Recorded:
    """A kernel whose launches are lists of what they were prepared with."""

    def __init__(self, name, macros, device_index, **how):
        self.name, self.macros = name, macros
        self.made.append((name, *sorted(macros.items())))

    def prepare(self, grid, stream, parameters):
        assert type(parameters) is params.PARAMS[self.name]
        return lambda: self.launched.append((self.name, self.macros, grid, stream, *parameters))


def forget():
    """Every kernel that was made, and every plan and launch with it."""
    LAUNCHES.clear()
    plans = (inference._gate_plan, inference._down_plan, inference.gate_pack_kernel, inference.gated_down_kernel)
    plans += (few.plan, few._gate_kernel, few._down_kernel, screen.quantise_kernel)
    for plan in (*plans, hot_steps.kernel, hot_steps.hidden_kernel):
        plan.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    forget()
    for name in ("launched", "made"):
        monkeypatch.setattr(Recorded, name, [], raising=False)
    monkeypatch.setattr(driver, "Kernel", Recorded)
    monkeypatch.setattr(driver, "stream", lambda index: 12)
    monkeypatch.setattr(driver, "tensor_map", lambda *parameters: parameters)
    monkeypatch.setattr(inference, "sm_count", lambda index: 132)
    yield Recorded.launched
    forget()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("tokens", [1, 300, 3000])
def test_a_prepared_call_launches_the_same(launched, monkeypatch, tokens, squared, gated):
    p = make_problem(tokens, 64, 776, 8, gated=gated, dtype=torch.bfloat16)
    weights = Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())
    workspaces = []
    empty = torch.empty

    def record(*shape, **how):
        workspaces.append(empty(*shape, **how))
        return workspaces[-1]

    monkeypatch.setattr(torch, "empty", record)
    packed = inference.gate_pack(p.x, weights, stats=False)
    y, _ = inference.gated_down(packed, p.x, weights, squared=squared)
    again = inference.PreparedForward(p.x, weights, squared=squared)(p.x.view(1, tokens, 64))
    assert again.shape == (1, tokens, 64)
    first, second = launched[:2], launched[2:]
    assert second[1][1]["SQUARED"] == squared
    for one, other in zip(first, second, strict=True):
        assert _relative(one, workspaces[0], y) == _relative(other, workspaces[-1], again)


@pytest.mark.parametrize("tokens", [256, 300])
def test_pieces_write_their_rows_of_y(launched, monkeypatch, tokens):
    monkeypatch.setattr(memory, "PIECE", 128)
    p = make_problem(tokens, 64, 776, 8, dtype=torch.bfloat16)
    given = p.x, Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())
    y = hopper.BACKEND.forward(*given, Options(stats=False, training=False)).y
    downs = [params.GatedDownParams(*one[4:]) for one in launched if one[0] == "gated_down"]
    starts = range(0, tokens, 128)
    assert [down.M for down in downs] == [min(128, tokens - start) for start in starts]
    for matrix, name in ((p.x, "x"), (y, "y")):
        assert [getattr(down, name) for down in downs] == [matrix[start].data_ptr() for start in starts]
    launched.clear()
    hopper.BACKEND.forward(*given, Options(stats=True, training=False))
    assert [params.GatedDownParams(*one[4:]).M for one in launched if one[0] == "gated_down"] == [tokens]


@pytest.mark.parametrize(("count", "first"), [(300, 512), (776, 0), (7, None)])
def test_both_products_write_their_tiles_of_one_result(launched, count, first):
    p = make_problem(SCREENS_FROM, 192, 776, 8, dtype=torch.bfloat16)
    weights = Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())
    hopper.BACKEND.forward(p.x, weights, Options(stats=False, training=False, screened=count))
    names = [one[0] for one in launched]
    packs = [params.GatePackParams(*one[4:]) for one in launched if one[0] == "gate_pack"]
    screens = [dict(one[1])["SCREEN"] for one in launched if one[0] == "gate_pack"]
    assert dict(launched[-1][1])["SCREENED"] == (first is not None)
    assert {(pack.words, pack.counts, pack.spilled, pack.tiles, pack.M) for pack in packs} == {
        (packs[0].words, packs[0].counts, packs[0].spilled, 4, SCREENS_FROM)
    }
    if first is None:
        assert names == ["gate_pack", "gated_down"]
        return
    assert names == ["quantise", *["gate_pack"] * (first > 0), "quantise", "gate_pack", "gated_down"]
    assert screens == [0, 1][first == 0 :]
    last = packs[-1]
    assert (last.first_tile, last.N, last.K) == (first // TILE, 776 - first, 96)
    assert [pack.N for pack in packs[:-1]] == [first] * (first > 0)
    assert params.GatedDownParams(*launched[-1][4:]).gate == p.w_gate.data_ptr()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 4, 5, 16])
def test_few_tokens_launch_the_gate_and_what_reads_its_result(launched, tokens, gated):
    p = make_problem(tokens, 64, 776, 8, gated=gated, dtype=torch.bfloat16)
    weights = Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())
    y = few.forward(p.x, weights, squared=True)
    assert y.shape == p.x.shape
    (gate, gate_macros, gate_grid, *gate_given), (down, down_macros, down_grid, *down_given) = launched
    assert (gate, gate_grid, down, down_grid) == ("few_gate", 130, "few_down", 4)  # 6 of 776 neurons in a thread block
    assert (gate_macros["GATED"], gate_macros["SQUARED"]) == (int(gated), 1)
    assert gate_macros["TOKENS"] >= tokens
    given = params.FewGateParams(*gate_given[1:])
    assert given[:4] == tuple(t.data_ptr() for t in (p.x, weights.pattern, weights.up, weights.down))
    assert given.found % 16 == 0
    assert given.found - given.counts >= tokens * 130 * 4
    assert (gate_macros["ROWS"], gate_macros["PAIRS"], down_macros["PAIRS"], down_macros["GROUPS"]) == (6, 3, 3, 5)
    read = params.FewDownParams(*down_given[1:])
    assert (read.found, read.counts, read.down) == (given.found, given.counts, weights.down.data_ptr())
    assert read.blocks == 130
    again = few.PreparedFew(p.x, weights, squared=True)(p.x.view(1, tokens, 64))
    assert again.shape == (1, tokens, 64)
    assert [one[0] for one in launched[2:]] == ["few_gate", "few_down"]
    assert params.FewDownParams(*launched[3][4:]).y == again.data_ptr()


@pytest.mark.parametrize("hidden", [64, 4096])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(("gated", "screened"), [(False, False), (True, False), (True, True)])
def test_kernels_loaded_ahead_are_those_that_calls_need(launched, monkeypatch, hidden, squared, gated, screened):
    activation = "relu2" if squared else "relu"
    request = Request(torch.device("cuda", 0), torch.bfloat16, hidden, 776, gated, False, activation)
    for load in hopper.BACKEND.kernels(request, screened).values():
        load()
    ahead = set(Recorded.made)
    Recorded.made.clear()
    forget()
    switches = inference.Switches(gated=gated, squared=squared)
    for tokens in (*range(1, 40), 127, 500, 1000, 2**13 + 1, 10**5, 10**6):
        if few.takes(tokens, hidden):
            few.plan(0, tokens, hidden, 776, gated, squared)
        else:
            _, layout, _ = inference._gate_plan(tokens, 776, 0, None)
            inference._down_plan(tokens, hidden, 0, layout.tiling, switches)
    p = make_problem(300, hidden, 776, 8, gated=gated, dtype=torch.bfloat16)
    weights = Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())
    hot_split.add_prefix(hopper.BACKEND, p.x, weights, Forward(torch.zeros_like(p.x)), activation)
    monkeypatch.setattr(screen, "SCREENS_FROM", 1)
    for tokens in (100, 300, 600, 2200, 9000) if screened else ():  # the last piece of a call may have any number
        x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        hopper.BACKEND.forward(x, weights, Options(False, False, activation=activation, screened=776))
    assert set(Recorded.made) == ahead


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
def test_hidden_of_hot_neurons_is_one_launch(launched, activation):
    x, inner = torch.ones(9000, 64).bfloat16(), torch.ones(2 * 136, 64).bfloat16()
    h = hot_steps.hidden(x, inner[:136], inner[136:], activation)
    ((name, macros, grid, _, *given),) = launched
    assert (name, grid) == ("hot_hidden", 132)
    assert [macros["SQUARED"], macros["SILU"]] == [activation == "relu2", activation == "silu"]
    assert tuple(given) == (
        (x.data_ptr(), 9000, 64, 128, 128),
        (inner.data_ptr(), 136, 64, 128, 128),
        (inner.data_ptr() + 136 * 128, 136, 64, 128, 128),
        (h.data_ptr(), 9000, 136, 272, 64),
        *(9000, 136, 64),
    )
    copy = inner.clone()  # at another address
    for gate, up, launches in ((inner[:136], inner[136:], 1), (copy[:136], copy[136:], 2)):
        again = hot_steps.hidden(x, gate, up, activation)
        assert len(launched) == launches + 1
        given = params.HotHiddenParams(*launched[-1][4:])
        assert [given.map_gate[0], given.map_up[0], given.map_h[0]] == [t.data_ptr() for t in (gate, up, again)]
    assert hot_steps.hidden(x[:0], inner[:136], inner[136:], activation) is None
    assert hot_steps.hidden(x, inner[:135], inner[135:270], activation) is None
    assert len(launched) == 3


def _relative(parameters, workspace, y):
    """Addresses by what they belong to, and where in it."""

    def locate(value):
        for name, tensor in (("workspace", workspace), ("y", y)):
            start = tensor.data_ptr()
            if isinstance(value, int) and start <= value < start + tensor.nbytes:
                return name, value - start
        return value

    return [locate(value) for value in parameters]
