"""The Triton backend's numbers in Triton's interpreter, against plain torch in float64.

About 15 ms a program: the shapes are small.
"""

import copy
import functools

import pytest
import torch
from calls import Operators, exact_pattern, leaves, make_block, run_ffn, upstream, y_and_l1
from packed_formats import as_twell
from pairwise import slow
from torch.utils.checkpoint import checkpoint

from twell import Plan, memory, ops, registry
from twell.gpu import saved_csr
from twell.interface import Options, Weights
from twell.memory import neuron_major
from twell.registry import BackendUnavailable
from twell.testing import (
    Problem,
    check,
    evaluate,
    evaluate_exactly,
    make_problem,
    plain_ffn,
    relative_error,
    tolerance,
)

# Skips where Triton is not installed.
backward, few, hot_steps, inference, transpose = (
    pytest.importorskip(f"twell.triton.{name}") for name in ("backward", "few", "hot_steps", "inference", "transpose")
)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


backend = functools.partial(y_and_l1, backend="triton", capacity=1000)


def use(monkeypatch, **config):
    """Assigns tokens to programs in this way."""
    config = inference.TokenConfig(**{"across": 1, "chunk": 0, **config})
    for module in (inference, backward):
        monkeypatch.setattr(module, "token_config", lambda *args, **options: config)


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    """One program per token: the real configurations would split tokens into several programs. And the kernels for any
    number of tokens, although the problems here have few."""
    torch.manual_seed(0)  # whatever ran before: what plain bfloat16 loses, and so what is allowed, is a matter of luck
    if "by_tokens" not in request.fixturenames:
        use(monkeypatch)
    if not request.node.name.startswith("test_few_tokens"):
        monkeypatch.setattr("twell.backends.triton._MOST_FEW", 0)


@pytest.fixture(params=[{"chunk": 3, "programs": 2}, {"across": 2}, {"parts": 3, "share": 2}], ids=str)
def by_tokens(request, monkeypatch):
    """Every way to assign tokens to programs; the queue counters hand out fewer at a time than on a GPU."""
    use(monkeypatch, **request.param)


@pytest.fixture
def gate(monkeypatch):
    """Sets the configuration of `gate_pack`."""

    def choose(tile, slots, rows=16, step=16, descriptors=True, persistent=False):
        config = inference.GateConfig(tile, slots, rows, step, 4, 1, descriptors, persistent)
        monkeypatch.setattr(inference, "gate_config", lambda *args: config)

    return choose


def check_statistics(problem, **options):
    """They are those of plain torch, and y is the same where none are wanted; returns them."""
    y, stats = run_ffn(*problem, backend="triton", **options)
    pattern = problem.w_up if problem.w_gate is None else problem.w_gate
    active = problem.x.double() @ pattern.double().t() > 0
    assert torch.equal(stats.nonzeros, active.sum(1, dtype=torch.int32))
    assert torch.equal(stats.fired, active.any(0))
    assert torch.equal(run_ffn(*problem, backend="triton", stats=False, **options)[0], y)
    return stats


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "gated"),
    [
        *((3, *sizes, True) for sizes in ((16, 8), (80, 250), (336, 64), (2112, 70), (8192, 40))),
        (1, 128, 150, True),
        (18, 128, 150, False),
    ],
)
def test_any_size(tokens, hidden, intermediate, gated):
    problem = make_problem(tokens, hidden, intermediate, intermediate / 8, gated=gated)
    check(backend, problem)
    check_statistics(problem)


@pytest.mark.slow
def test_the_widest_intermediate_size(gate):
    gate(2048, 64)
    check(backend, make_problem(1, 16, 65536, 30.0))


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("persistent", [True, False])
def test_every_way_to_multiply(gate, descriptors, persistent):
    gate(32, 8, descriptors=descriptors, persistent=persistent)
    check(backend, make_problem(17, 48, 70, 4.0))


def test_every_way_that_tokens_come_to_programs(by_tokens):
    check(backend, make_problem(7, 272, 60, 8.0))
    check(backend, make_problem(3, 272, 60, 8.0, gated=False))


@pytest.mark.parametrize(("gated", "columns"), [(True, 8), (False, 1024)])
def test_hot_neurons(gated, columns, monkeypatch):
    monkeypatch.setattr(hot_steps, "_COLUMNS", columns)
    problem, neurons = make_problem(5, 48, 50, 8.0, gated=gated), torch.randperm(50)[:13].sort().values
    check(lambda *operands: backend(*operands, hot=neurons), problem, upstream(problem), 0.5)
    check_statistics(problem, hot=neurons)
    check_nan(problem, hot=neurons)


def check_nan(problem, activation="relu", **options):
    """In a token with a NaN every neuron is active, and y is NaN where that of plain torch is."""
    problem.x[2, 3] = float("nan")
    y, stats = run_ffn(*problem, backend="triton", activation=activation, **options)
    assert stats.nonzeros[2] == len(problem.w_up)
    assert torch.equal(y.isnan(), plain_ffn(*problem, activation)[0].isnan())


@torch.no_grad()
@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (False, "relu2")])
def test_a_prefix_of_hot_neurons(gated, activation):
    problem = make_problem(5, 48, 50, 8.0, gated=gated)
    problem = problem._replace(w_down=neuron_major(problem.w_down))
    weight = torch.rand(50)
    run = functools.partial(backend, hot=13, activation=activation, l1_weight=weight)
    check(run, problem, None, 0.5, activation, weight)
    check_statistics(problem, hot=13, activation=activation)
    check_nan(problem, hot=13, activation=activation)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [None, torch.tensor([3, 4, 17, 40]), 13], ids=["none", "index", "prefix"])
def test_pieces_of_y_alone(hot, gated, monkeypatch):
    packed, empty = [], inference.PackedGate.empty
    monkeypatch.setattr(inference.PackedGate, "empty", lambda x, *others: packed.append(len(x)) or empty(x, *others))
    problem = make_problem(8, 48, 50, 8.0, gated=gated)
    problem = problem._replace(w_down=neuron_major(problem.w_down))
    run = functools.partial(run_ffn, backend="triton", **({} if hot is None else {"hot": hot}))
    alone = [run(x, *problem[1:], stats=False)[0] for x in problem.x.split(3)]
    packed.clear()
    monkeypatch.setattr(memory, "PIECE", 3)
    y, _ = run(*problem, stats=False)
    assert packed == [3, 3, 2]
    assert torch.equal(y, torch.cat(alone))
    run(*problem)
    assert packed == [3, 3, 2, 8]
    problem.x[4, 3] = float("nan")
    assert torch.equal(run(*problem, stats=False)[0].isnan(), plain_ffn(*problem)[0].isnan())


HOT = [1, 4, 17]


@pytest.mark.parametrize(
    ("options", "gated", "activation", "weighted"),
    [
        ({}, True, "relu2", True),
        ({"hot": HOT}, False, "relu", True),
        ({"hot": HOT, "backup": 0.3}, True, "relu", True),
        ({"capacity": 1}, False, "relu2", True),
        ({"hot": HOT, "capacity": 1}, False, "relu", False),
        ({"backup": 0.3, "capacity": 1}, True, "relu", False),
        ({"hot": HOT, "backup": 0.3, "capacity": 1}, True, "relu", False),
        pytest.param({}, False, "relu2", False, marks=pytest.mark.slow),
        pytest.param({"hot": HOT, "backup": 0.3}, True, "relu2", False, marks=pytest.mark.slow),
        pytest.param({"hot": HOT, "backup": 0.3}, False, "relu", False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_beside_each_other(options, gated, activation, weighted):
    problem = make_problem(6, 32, 40, 12.0, gated=gated)
    weight = torch.rand(40).mul(2).round() if weighted else None
    run = functools.partial(backend, activation=activation, l1_weight=weight, **options)
    check(run, problem, upstream(problem), 0.5, activation, weight)
    check_statistics(problem, activation=activation, **options)
    stats = check_statistics(leaves(problem), activation=activation, **options)
    assert int(stats.overflow) > 0 or "capacity" not in options


def test_ugly_rows_and_statistics(by_tokens, gate):
    tile, slots, tiles = 32, 8, 2
    gate(tile, slots)
    counts = [0, 1, slots - 1, slots, slots + 1, tile]
    problem = exact_pattern(counts, 32, tile, tiles)
    check(backend, problem)
    stats = check_statistics(problem)
    assert stats.nonzeros.tolist() == [tiles * count for count in counts]
    assert int(stats.overflow) == tiles * 2


def test_more_tiles_than_a_window(gate):
    gate(32, 8)
    check(backend, make_problem(1, 16, 32 * 37, 40.0))


@pytest.mark.parametrize("table", ["_GATE_HOPPER", "_GATE_BLACKWELL", "_GATE_OTHER"])
def test_packing_is_exact(table):
    problem = make_problem(40, 64, 300, 3.0)
    weights = Weights(problem.w_gate, problem.w_up, neuron_major(problem.w_down).t())
    plain = torch.relu(problem.x.float() @ problem.w_gate.float().t())
    for config in getattr(inference, table):
        format_ = as_twell(inference.gate_pack(problem.x, weights, config), 300, config.tile)
        assert relative_error(format_.to_dense(), plain) < 2**-8
        assert torch.equal(format_.counts.sum(1), (format_.to_dense() != 0).sum(1))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nonfinite_inputs_show_as_in_plain_torch(bad):
    for gated in (True, False):
        problem = make_problem(3, 32, 60, 3.0, gated=gated)
        problem.x[2, 5] = bad
        check(backend, problem)
        assert run_ffn(*problem, backend="triton")[0][2].isnan().all()


def test_a_weight_that_is_not_finite_shows_where_its_neuron_fires(gate):
    gate(64, 8)
    problem = make_problem(6, 32, 130, 20.0)
    problem.w_gate[3, 5], problem.w_gate[20, 25] = float("nan"), float("-inf")
    check(backend, problem)
    problem = make_problem(6, 32, 130, 20.0)
    fires = problem.x.float() @ problem.w_gate.float().t() > 0
    neuron = int(((fires.sum(0) - 3).abs()).argmin())
    problem.w_up[neuron, 5] = float("nan")
    y = run_ffn(*problem, backend="triton")[0]
    assert 0 < fires[:, neuron].sum() < 6
    assert y[fires[:, neuron]].isnan().all()
    assert y[~fires[:, neuron]].isfinite().all()


def test_strided_inputs():
    problem = make_problem(4, 64, 100, 6.0)
    expected = run_ffn(*problem, backend="triton")[0]
    padded = torch.zeros(4, 64 + 3, dtype=torch.bfloat16)
    padded[:, 1:65] = problem.x
    for x in (padded[:, 1:65], problem.x.t().contiguous().t()):
        assert torch.equal(run_ffn(x, *problem[1:], backend="triton")[0], expected)
    transposed = [w.t().contiguous().t() for w in problem[1:]]
    assert torch.equal(run_ffn(problem.x.view(2, 2, 64), *transposed, backend="triton")[0].view(4, 64), expected)


def test_zero_tokens():
    problem = make_problem(4, 32, 64, 3.0)
    y, stats = run_ffn(problem.x[:0], *problem[1:], backend="triton")
    assert y.shape == (0, 32)
    assert stats.nonzeros.shape == (0,)
    assert float(stats.l1) == 0


def test_what_it_cannot_do_is_reported():
    problem = make_problem(4, 32, 64, 3.0)
    with pytest.raises(BackendUnavailable, match="bfloat16"):
        run_ffn(*(t.half() for t in problem), backend="triton")
    with pytest.raises(BackendUnavailable, match="multiple of 16"):
        run_ffn(problem.x[:, :20], *(w[:, :20] for w in problem[1:3]), problem.w_down[:20], backend="triton")


# Squared ReLU.


squared = functools.partial(backend, activation="relu2")


@pytest.mark.slow
def test_squared_ugly_rows_and_exceeded_capacity(gate):
    gate(32, 8)
    problem = exact_pattern([0, 1, 9, 32], 32, 32, 1)
    check(squared, problem, upstream(problem), 0.5, "relu2")
    check(lambda *p: squared(*p, capacity=1), problem, upstream(problem), 0.5, "relu2")
    bare = problem._replace(w_gate=None, w_up=problem.w_gate)
    check(squared, bare, upstream(bare), 0.5, "relu2")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("hot", [0, [7]])
def test_a_square_that_overflows(gated, hot):
    problem = make_problem(5, 16, 12, 3.0, gated=gated)
    (problem.w_up if problem.w_gate is None else problem.w_gate)[7, 0] = 1e25  # x[:, 0] is 1
    ours, _ = squared(*problem, hot=hot)
    plain, _ = plain_ffn(*problem, "relu2")
    assert not plain.isfinite().any()
    assert torch.equal(ours.isnan(), plain.isnan())
    assert torch.equal(ours.sign()[~ours.isnan()], plain.sign()[~plain.isnan()])


# Training.


@pytest.mark.parametrize(
    ("tokens", "hidden", "gated"),
    [(66, 16, True), (66, 16, False), (2, 16, True), (2, 80, False), (2, 2112, False), (2, 8192, True)],
)
def test_gradients_of_any_size(tokens, hidden, gated):
    problem = make_problem(tokens, hidden, 6, 2.0, gated=gated, dead=0.0)
    check(backend, problem, upstream(problem), 0.5)


def test_gradients_however_tokens_come_to_programs(by_tokens):
    problem = make_problem(5, 272, 12, 4.0)
    check(backend, problem, upstream(problem), 0.5)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_ugly_rows(by_tokens, gate, weighted):
    gate(32, 8)
    problem, weight = exact_pattern([0, 1, 8, 9, 32], 32, 32, 1), torch.rand(32) if weighted else None
    check(functools.partial(backend, l1_weight=weight), problem, upstream(problem), 0.5, l1_weight=weight)


@pytest.mark.parametrize("frequent", [5, 1000])
def test_the_order_of_the_entries(frequent, monkeypatch):
    """By neuron, then by token, wherever the rows lie; over more blocks of tokens than are summed at once."""
    monkeypatch.setattr(backward, "_FREQUENT", frequent)
    generator = torch.Generator().manual_seed(0)
    tokens, neurons = 64 * 8 + 30, 70
    active = torch.rand(tokens, neurons, generator=generator) < 0.02
    active[:, 3] = True
    lost = torch.arange(tokens) % 50 == 7
    counts = active.sum(1, dtype=torch.int32)
    starts = torch.empty(tokens, dtype=torch.int32)
    words, at = torch.zeros(int(counts.sum()), dtype=torch.int32), 0
    for row in torch.randperm(tokens, generator=generator).tolist():
        starts[row], count = at, int(counts[row])
        words[at : at + count] = active[row].nonzero().squeeze(1)
        at += count
    starts[lost] = -1
    saved = backward.SavedCSR(words, torch.empty(0), torch.stack([starts, counts]), torch.zeros(4, dtype=torch.int32))
    order = backward.transpose(saved, tokens, neurons)
    active[lost] = False
    totals = active.sum(0, dtype=torch.int32)
    assert torch.equal(order.totals, totals)
    assert torch.equal(order.firsts, totals.cumsum(0, dtype=torch.int32) - totals)
    assert torch.equal(
        order.order, torch.cat([(totals > frequent).nonzero(), (totals <= frequent).nonzero()]).squeeze(1)
    )
    block = torch.arange(tokens) // transpose.BLOCK.value
    for b in (0, 3, 8):
        assert torch.equal(order.before[b], active[block < b].sum(0, dtype=torch.int32))
        bits = (order.masks[b][None, :] >> torch.arange(64)[:, None]) & 1
        assert torch.equal(bits[: int((block == b).sum())] > 0, active[block == b])


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"capacity": 1}, {"backup": 0.3}))], ids=str
)
def test_only_what_is_needed_and_always_the_same(options):
    problem = make_problem(4, 32, 20, 5.0)
    problem = problem._replace(w_down=neuron_major(problem.w_down))
    expected = evaluate(lambda *p: backend(*p, **options), problem, upstream(problem))
    for needed in ("x", "w_gate", "w_up", "w_down"):
        given = Problem(*(t.detach().requires_grad_(name == needed) for name, t in problem._asdict().items()))
        backend(*given, **options)[0].backward(upstream(problem))
        assert [name for name, leaf in given._asdict().items() if leaf.grad is not None] == [needed]
        assert torch.equal(getattr(given, needed).grad, expected[f"d{needed}"])
    assert given.w_down.grad.stride() == (1, 32)


def test_no_result_depends_on_the_capacity():
    problem = make_problem(4, 32, 20, 5.0)
    y, stats = run_ffn(*problem, backend="triton")
    needed = -(-int(stats.nonzeros.sum()) // 4)
    got, small = run_ffn(*leaves(problem), backend="triton", capacity=needed - 1)
    assert torch.equal(got, y)
    assert int(small.overflow) > int(stats.overflow)
    for capacity in (1, needed - 1, needed):
        check(functools.partial(backend, capacity=capacity), problem, upstream(problem), 0.5)
    bare = make_problem(4, 32, 20, 5.0, gated=False)
    check(lambda *p: backend(*p, capacity=1), bare, upstream(bare), 0.5)


@pytest.mark.slow
def test_exceeded_capacity_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(ops, "_logged_backends", set())
    problem = make_problem(3, 32, 20, 5.0)
    for capacity in (20, 1, 1):
        evaluate(functools.partial(backend, capacity=capacity), problem, upstream(problem))
    (record,) = [r for r in caplog.records if r.name == "twell.ops"]
    assert "backend triton: a call had more non-zeros than its capacity, which would have to be" in record.message


def _checkpointed(function):
    return lambda *p: checkpoint(function, *p, use_reentrant=False)


def _compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _through_the_operator(function):
    def run(*p):
        with Operators():
            return function(*p)

    return run


@pytest.mark.parametrize("way", [_checkpointed, _compiled, _through_the_operator])
def test_exceeded_capacity_under(way):
    problem = make_problem(6, 32, 20, 5.0)
    check(way(lambda *p: backend(*p, capacity=1)), problem, upstream(problem), 0.5)


def test_while_a_graph_is_captured_exceeded_capacity_is_loud(monkeypatch):
    """The count cannot be read then. The graph's replays would give NaN, never a wrong number."""
    monkeypatch.setattr(saved_csr, "is_capturing", lambda tensor: True)
    problem = make_problem(6, 32, 20, 5.0)
    gradients = evaluate(lambda *p: backend(*p, capacity=1), problem, upstream(problem))
    assert gradients["dx"].isnan().any()
    assert all(gradients[f"dw_{name}"].isnan().all() for name in ("gate", "up", "down"))


def a_block(problem, **options):
    block = make_block(problem.x.shape[1], len(problem.w_up), backend="triton", dtype=torch.bfloat16, **options)
    block.load_state_dict({f"{n}_proj.weight": getattr(problem, f"w_{n}") for n in ("gate", "up", "down")})
    block.current_capacity = 3
    return block


@pytest.mark.slow
def test_a_module_raises_its_capacity_for_the_next_call():
    problem = make_problem(3, 32, 64, 20.0)
    block, count = a_block(problem), run_ffn(*problem, backend="dense")[1].nonzeros.sum().item()
    assert 16 <= count / 3 <= 25
    first, second = block(problem.x), block(problem.x)
    (first.sum() + second.sum()).backward()
    assert block._capacity == 3, "not before the next call"
    with torch.no_grad():
        block(problem.x)
    assert block._capacity == 32
    block(problem.x).sum().backward()
    assert block.stats.overflow == run_ffn(*problem, backend="triton")[1].overflow, "of tiles only"
    block(problem.x)
    assert block._capacity == 32
    block.plan = Plan("triton", capacity=3)
    for _ in range(2):
        block(problem.x).sum().backward()
    assert block._capacity == 3


@pytest.mark.slow
def test_a_capacity_does_not_change_while_a_call_waits_for_its_backward():
    """Activation checkpointing repeats a call in the backward, and compares the shapes of its saved tensors."""
    problem = make_problem(3, 32, 40, 8.0)
    block = a_block(problem)
    first = checkpoint(block, problem.x, use_reentrant=False)
    second = checkpoint(block, first, use_reentrant=False)
    third = block(problem.x)
    second.sum().backward()
    block(problem.x)
    assert block._capacity == 3, "the third call waits"
    third.sum().backward()
    block.stats = None
    block(problem.x)
    assert block._capacity > 3


@pytest.mark.slow
def test_a_copy_of_a_module_has_a_capacity_of_its_own():
    problem = make_problem(3, 32, 40, 8.0)
    block = a_block(problem)
    block(problem.x).sum().backward()
    other = copy.deepcopy(block)
    block(problem.x)
    other(problem.x)
    assert (block._capacity > 3, other._capacity) == (True, 3)


def check_infinity(problem, where, token, activation="relu", **options):
    """Results and gradients with an infinity in x or dy of a token: nowhere finite where plain torch's are not, and
    finite in dx of the other tokens."""
    dy = upstream(problem)
    {"x": problem.x, "dy": dy}[where][token, 5] = float("inf")
    ours = evaluate(lambda *p: backend(*p, activation=activation, **options), problem, dy)
    for name, value in evaluate(lambda *p: plain_ffn(*p, activation), problem, dy).items():
        assert not (~value.isfinite() & ours[name].isfinite()).any(), name
    assert ours["dx"][torch.arange(5) != token].isfinite().all()


@pytest.mark.parametrize(
    ("where", "gated", "activation", "hot"),
    [
        ("x", True, "relu", 0),
        ("dy", True, "relu", 0),
        ("x", True, "relu2", 0),
        ("dy", True, "relu2", [2, 4]),
        ("x", False, "relu2", 0),
        pytest.param("x", False, "relu", 0, marks=pytest.mark.slow),
        pytest.param("dy", False, "relu", 0, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_nonfinite_wherever_they_are_in_plain_torch(where, gated, activation, hot):
    check_infinity(make_problem(5, 16, 8, 2.0, gated=gated), where, 4, activation, hot=hot)


def test_a_nonfinite_gradient_of_l1():
    problem = make_problem(5, 16, 12, 3.0)
    given = leaves(problem)
    (backend(*given)[1] * float("nan")).backward()
    assert all(leaf.grad.isnan().all() for leaf in given)


@pytest.mark.parametrize("backup", [0.0, 0.125])
def test_training_with_zero_tokens(backup):
    problem = make_problem(4, 32, 20, 3.0)
    given = leaves(problem._replace(x=problem.x[:0]))
    y, l1 = backend(*given, backup=backup)
    (y.sum() + l1).backward()
    assert given.x.grad.shape == (0, 32)
    assert not any(leaf.grad.any() for leaf in given[1:])


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_what_is_saved_has_the_promised_shapes(gated):
    problem = make_problem(5, 32, 20, 3.0, gated=gated)
    triton = registry.get("triton")
    for tokens, capacity, backup in ((5, 3, 0.0), (5, 1000, 0.0), (5, 3, 0.3), (5, 3, 1.0), (0, 3, 0.3)):
        x = problem.x[:tokens]
        weights = Weights(problem.w_gate, problem.w_up, problem.w_down.t())
        options = Options(stats=False, training=True, capacity=capacity, backup=backup)
        saved, promised = triton.forward(x, weights, options).saved, triton.saved_like(x, weights, options)
        assert [(t.shape, t.dtype) for t in saved] == [(t.shape, t.dtype) for t in promised]


# With a dense backup.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "share", "gated"),
    [(21, 0.125, True), (6, 1.0, False), (5, 1.0, True), (5, 1e-6, True), (1, 0.125, False), (6, 0.0, False)],
)
def test_gradients_with_a_backup(tokens, share, gated):
    problem = make_problem(tokens, 32, 40, 8.0, gated=gated)
    check(lambda *p: backend(*p, backup=share), problem, upstream(problem), 0.5)


@pytest.mark.slow
def test_a_backup_however_tokens_come_to_programs(by_tokens, gate):
    """Some of its tokens have tiles that overflow."""
    gate(32, 8)
    problem = exact_pattern([32, 1, 9, 8, 0, 32, 10], 48, 32, 1)
    check(lambda *p: backend(*p, backup=0.3), problem, upstream(problem), 0.5)


@pytest.mark.slow
def test_the_tokens_with_the_most_nonzeros_are_taken(gate):
    """They need no capacity, and all counts are the same as without a backup."""
    gate(32, 8)
    counts = [3, 32, 0, 5, 9, 2, 4, 7]
    problem = exact_pattern(counts, 32, 32, 1)
    given = leaves(problem)
    _, whole = run_ffn(*given, backend="triton")
    assert int(whole.overflow) == 2  # tiles
    for share, left in ((0.125, 30), (0.25, 21)):
        enough = -(-left // 8)
        y, stats = run_ffn(*given, backend="triton", capacity=enough, backup=share)
        assert stats.nonzeros.tolist() == counts
        assert torch.equal(stats.fired, whole.fired)
        assert relative_error(stats.l1, whole.l1) < 0.01
        assert int(stats.overflow) == (1 if share == 0.125 else 0)
        *_, state, tokens, activated = y.grad_fn.saved_tensors
        assert int(state[:2].view(torch.int64)) == left
        assert tokens.tolist() == ([1] if share == 0.125 else [1, 4])
        assert activated.shape == (len(tokens), 64)
        check(functools.partial(backend, capacity=enough, backup=share), problem, upstream(problem), 0.5)
        _, short = run_ffn(*given, backend="triton", capacity=enough - 1, backup=share)
        assert int(short.overflow) > int(stats.overflow)
    check(lambda *p: backend(*p, capacity=2), problem, upstream(problem), 0.5)


@pytest.mark.parametrize("where", ["x", "dy"])
@pytest.mark.parametrize("token", [*slow(0), 3])
def test_nonfinite_values_beside_a_backup(where, token):
    """In a token of the backup and in another one; results are nonfinite wherever they are in plain torch."""
    check_infinity(exact_pattern([1, 2, 3, 20, 4], 16, 32, 1), where, token, backup=0.2)


@pytest.mark.parametrize("gated", [True, False])
def test_opcheck_with_a_backup(gated):
    problem = make_problem(4, 16, 12, 3.0, gated=gated)
    given = leaves(problem)
    forward = torch.ops.twell.sparse_ffn.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        forward, (*given, None, torch.ones(12), "triton", True, True, 12, 0.3, "relu2", 0, 0), test_utils=checks
    )


# Few tokens.


@torch.no_grad()
def few_tokens(problem, **options):
    problem = problem._replace(w_down=neuron_major(problem.w_down))
    return run_ffn(*problem, backend="triton", stats=False, **options)[0]


def check_few(problem, activation="relu", **options):
    """Right within rounding, and not finite where plain torch is not."""
    y = few_tokens(problem, activation=activation, **options)
    # With AMX, oneDNN's product lets a NaN into another token if the inner size is no multiple of 32.
    with torch.backends.mkldnn.flags(enabled=False):
        plain = plain_ffn(*problem, activation)[0]
    exact = evaluate_exactly(problem, None, 0.0, activation)["y"]
    if plain.isfinite().all():
        assert relative_error(y, exact) <= tolerance(relative_error(plain, exact), torch.bfloat16)
    assert torch.equal(y.isnan(), plain.isnan())
    assert torch.equal(y.isinf(), plain.isinf())


@pytest.fixture(params=[None, (64, 16, 16, 16, 1), (64, 32, 16, 16, 3)], ids=str)
def few_config(request, monkeypatch):
    """The configurations in use, and small tiles, with more and fewer parts of the sum."""
    if request.param:
        monkeypatch.setattr(few, "config_for", lambda tokens, hidden: few.Config(*request.param))


@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (False, "relu2")])
def test_few_tokens(few_config, gated, activation):
    for tokens, hidden, intermediate in ((1, 16, 40), (21, 48, 90), (64, 64, 70)):
        check_few(make_problem(tokens, hidden, intermediate, 8.0, gated=gated), activation)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("squared", [True, False])
def test_activation_of_dense_products(gated, squared):
    from twell.triton import activation

    z, u = torch.randn(2, 50, 90, dtype=torch.float32).bfloat16()
    z[3, 4], z[5, 6], u[7, 8], z[7, 8] = float("nan"), float("inf"), float("inf"), -1
    wanted = z.relu().square() if squared else z.relu()
    wanted = wanted * u if gated else wanted
    activation.launch(z, u if gated else None, squared=squared)()
    assert torch.equal(z.nan_to_num(1e9), wanted.nan_to_num(1e9))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [80, 2112])
def test_few_tokens_of_any_hidden_size(hidden):
    check_few(make_problem(3, hidden, 70, 8.0))


@pytest.mark.parametrize(
    "bad", [float("nan"), *(pytest.param(float(sign + "inf"), marks=pytest.mark.slow) for sign in ("", "-"))]
)
@pytest.mark.parametrize(
    ("gated", "which"),
    [(True, "w_gate"), (True, "x"), (False, "x"), (False, "w_up")],
)
def test_few_tokens_not_finite_as_in_plain_torch(bad, gated, which):
    problem = make_problem(18, 32, 70, 4.0, gated=gated)
    getattr(problem, which)[5, 3] = bad
    check_few(problem)


def test_few_tokens_where_nobody_and_everybody_fires():
    problem = make_problem(18, 32, 70, 4.0)
    problem.w_gate[:, 0] = -100  # x[:, 0] is 1
    assert (few_tokens(problem) == 0).all()
    problem.w_gate[:, 0] = 100
    check_few(problem)


def test_few_tokens_read_only_the_rows_that_some_token_needs():
    problem = make_problem(18, 32, 200, 3.0)
    y = few_tokens(problem)
    idle = ~(problem.x.float() @ problem.w_gate.float().t() > 0).any(0)
    assert idle.sum() > 50
    problem.w_up[idle] = float("nan")
    problem.w_down[:, idle] = float("inf")
    assert torch.equal(few_tokens(problem), y)


def test_few_tokens_in_strides():
    problem = make_problem(8, 64, 100, 6.0)
    expected = few_tokens(problem)
    padded = torch.zeros(8, 64 + 8, dtype=torch.bfloat16)
    padded[:, 8:] = problem.x
    for x in (padded[:, 8:], problem.x.t().contiguous().t(), problem.x.view(2, 4, 64)):
        assert torch.equal(few_tokens(problem._replace(x=x)).view(8, 64), expected)


def test_few_tokens_ignore_hot_neurons():
    problem = make_problem(8, 64, 100, 6.0)
    assert torch.equal(few_tokens(problem, hot=20), few_tokens(problem))
    assert torch.equal(few_tokens(problem, hot=torch.tensor([1, 4])), few_tokens(problem))
