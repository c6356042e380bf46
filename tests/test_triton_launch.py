"""Calls of the Triton backend that are made again with compiled kernels and addresses. Nothing is launched or compiled:
a kernel here notes what it is started with."""

import gc
import itertools
import weakref

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this system")

from kernels.backends.triton import BACKEND  # noqa: E402
from kernels.memory import neuron_major  # noqa: E402
from kernels.testing import make_problem  # noqa: E402
from kernels.triton import launch, twell  # noqa: E402

pytestmark = pytest.mark.skipif(twell.INTERPRET, reason="the interpreter compiles nothing")
STREAM = 12


class Noted:
    """Stands in for a kernel: `starts` gets (its name, grid, arguments as addresses or numbers, options, stream)."""

    def __init__(self, kernel, starts):
        self.arg_names, self._name, self._starts = kernel.arg_names, kernel.__name__, starts

    def __getitem__(self, grid):
        def start(*arguments, **options):
            constants = [options.pop(name) for name in self.arg_names[len(arguments) :]]
            self._note(grid, [*arguments, *constants], options, STREAM)

        return start

    def warmup(self, *arguments, grid, **options):
        given = {name: options.pop(name) for name in self.arg_names[len(arguments) :]}
        types = [_type(a) for a in arguments]

        class Compiled:
            def __getitem__(_, grid):
                def start(*arguments, stream):
                    assert len(grid) == 3
                    assert list(arguments[len(types) :]) == list(given.values())
                    assert all(type(a) is t or t is int for a, t in zip(arguments, types, strict=False))
                    self._note(tuple(n for n in grid if n > 1) or (1,), arguments, options, stream)

                return start

        return Compiled()

    def _note(self, grid, arguments, options, stream):
        self._starts.append((self._name, tuple(n for n in grid if n > 1) or (1,), _seen(arguments), options, stream))


def _type(argument):
    return int if isinstance(argument, torch.Tensor) else type(argument)


def _seen(arguments):
    """What a kernel sees: addresses; of descriptors, all they say."""
    seen = []
    for argument in arguments:
        if isinstance(argument, triton.tools.tensor_descriptor.TensorDescriptor):
            base = argument.base
            shape = tuple(argument.shape), tuple(argument.strides), tuple(argument.block_shape)
            seen.append((base.data_ptr(), base.dtype, *shape))
        else:
            seen.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
    return seen


@pytest.fixture
def starts(monkeypatch):
    noted = []
    for name in ("gate_pack_kernel", "gated_down_kernel", "suspects_kernel"):
        monkeypatch.setattr(twell, name, Noted(getattr(twell, name), noted))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    launch._bound.cache_clear()
    yield noted
    launch._bound.cache_clear()


def problem(tokens, gated=True):
    p = make_problem(tokens, 64, 776, 8, gated=gated, dtype=torch.bfloat16)
    return p._replace(w_down=neuron_major(p.w_down))


@pytest.fixture
def allocated(monkeypatch):
    """The tensors that plain and prepared calls allocate, alive to the end."""
    kept = []

    def keep(make):
        def made(*arguments, **options):
            kept.append(make(*arguments, **options))
            return kept[-1]

        return made

    monkeypatch.setattr(torch, "empty", keep(torch.empty))
    monkeypatch.setattr(torch, "empty_like", keep(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", keep(torch.Tensor.new_empty))
    return kept


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_a_repeated_call_starts_the_same(starts, allocated, tokens, gated):
    x, w_gate, w_up, w_down = p = problem(tokens, gated)
    packed = twell.gate_pack(x, w_gate, w_up, w_down.t())
    twell.gated_down(packed, x, w_gate, w_up, w_down.t())
    plain, workspaces = list(starts), list(allocated)
    call = BACKEND.repeat(*p)
    assert starts == plain
    allocated.clear()
    y = call(x.view(1, tokens, 64))
    assert y.shape == (1, tokens, 64)
    again, own = starts[len(plain) :], {t.data_ptr() for t in (x, w_gate, w_up, w_down) if t is not None}
    # What was one address in all plain launches is one in the repeated ones, within the memory of this call.
    moved = {}
    for (name, grid, arguments, _, stream), (*how, others, _, other_stream) in zip(plain, again, strict=True):
        assert [name, grid] == how
        assert stream == other_stream
        for one, other in zip(arguments, others, strict=True):
            if one in own or one == 0 or not isinstance(one, int) or one < 2**20:
                assert one == other
            else:
                assert moved.setdefault(one, other) == other
    assert len(set(moved.values())) == len(moved)
    sizes = {t.data_ptr(): t.nbytes for t in workspaces}
    ranges = sorted((other, other + sizes[one]) for one, other in moved.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    inside = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in allocated]
    assert all(any(low <= start and end <= high for low, high in inside) for start, end in ranges)
    assert all(start % 16 == 0 for start, _ in ranges)


def test_no_tensor_is_kept(starts):
    p = problem(3)
    call = BACKEND.repeat(*p)
    call(p.x)
    kept = [weakref.ref(t) for t in p]
    del p
    gc.collect()
    assert [one() for one in kept] == [None] * 4
    assert call is not None


def test_operands_that_would_be_copied_are_not_for_it(starts):
    p = problem(3)
    assert BACKEND.repeat(*p._replace(w_down=p.w_down.contiguous())) is None
    moved = torch.empty(p.x.numel() + 1, dtype=torch.bfloat16)[1:].view_as(p.x)
    assert BACKEND.repeat(*p._replace(x=moved)) is None
