"""Calls of the Triton backend that are made again with compiled kernels and addresses. Nothing is launched or compiled:
a kernel here notes what it is started with."""

import gc
import itertools
import weakref

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed on this system")

from twell import available_backends, torch_internals  # noqa: E402
from twell.backends.triton import BACKEND  # noqa: E402
from twell.interface import Weights  # noqa: E402
from twell.launch_cache import LAUNCHES  # noqa: E402
from twell.testing import make_problem  # noqa: E402
from twell.triton import activation, few, inference  # noqa: E402
from twell.triton.launch import _flat  # noqa: E402

pytestmark = pytest.mark.skipif(inference.INTERPRET, reason="the interpreter compiles nothing")
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
        types = [int if isinstance(a, torch.Tensor) else type(a) for a in _flat(arguments)]

        class Compiled:
            def __getitem__(_, grid):
                def start(*arguments, stream):
                    assert len(grid) == 3
                    operands, constants = arguments[: -len(given)], arguments[-len(given) :]
                    assert list(constants) == list(given.values())
                    assert [int if type(a) is int else t for a, t in zip(_flat(operands), types, strict=True)] == types
                    self._note(tuple(n for n in grid if n > 1) or (1,), arguments, options, stream)

                return start

        return Compiled()

    def _note(self, grid, arguments, options, stream):
        self._starts.append((self._name, tuple(n for n in grid if n > 1) or (1,), _seen(arguments), options, stream))


def _seen(arguments):
    """What a kernel sees: addresses; of descriptors, all they say."""
    seen = []
    for argument in _flat(tuple(arguments)):
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
    names = {
        inference: ("gate_pack_kernel", "gated_down_kernel"),
        few: ("few_gate_kernel", "few_down_kernel", "add_parts_kernel"),
    }
    for module, name in ((module, name) for module, own in names.items() for name in own):
        monkeypatch.setattr(module, name, Noted(getattr(module, name), noted))
    monkeypatch.setattr(torch_internals, "current_cuda_stream", lambda index: STREAM)
    LAUNCHES.clear()
    yield noted
    LAUNCHES.clear()


def problem(tokens, gated=True):
    p = make_problem(tokens, 64, 776, 8, gated=gated, dtype=torch.bfloat16)
    return p.x, Weights(p.w_gate, p.w_up, p.w_down.t().contiguous())


@pytest.fixture
def allocated(monkeypatch):
    """The tensors that plain and prepared calls allocate, alive to the end."""
    tensors = []

    def recorded(make):
        def made(*arguments, **options):
            tensors.append(make(*arguments, **options))
            return tensors[-1]

        return made

    monkeypatch.setattr(torch, "empty", recorded(torch.empty))
    monkeypatch.setattr(torch, "empty_like", recorded(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", recorded(torch.Tensor.new_empty))
    return tensors


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 100, 300, 3000])
def test_a_prepared_call_starts_the_same(starts, allocated, tokens, gated):
    x, weights = problem(tokens, gated)
    if BACKEND.few_tokens(tokens, 64):
        few.forward(x, weights, squared=False)
    else:
        packed = inference.gate_pack(x, weights)
        inference.gated_down(packed, x, weights)
    plain, workspaces = list(starts), list(allocated)
    call = BACKEND.prepare(x, weights, "relu")
    assert starts == plain
    allocated.clear()
    y = call(x.view(1, tokens, 64))
    assert y.shape == (1, tokens, 64)
    again, own = starts[len(plain) :], {t.data_ptr() for t in (x, *weights) if t is not None}
    # What was one address in all plain launches is one in the prepared ones, within the memory of this call.
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


def test_no_tensor_is_held(starts):
    x, weights = problem(3)
    call = BACKEND.prepare(x, weights, "relu")
    call(x)
    held = [weakref.ref(t) for t in (x, *weights[:3])]
    del x, weights
    gc.collect()
    assert [one() for one in held] == [None] * 4
    assert call is not None


def test_operands_that_would_be_copied_are_not_for_it(starts):
    x, weights = problem(3)
    assert BACKEND.prepare(x, weights._replace(down=weights.down.t().contiguous().t()), "relu") is None
    moved = torch.empty(x.numel() + 1, dtype=torch.bfloat16)[1:].view_as(x)
    assert BACKEND.prepare(moved, weights, "relu") is None


def test_dense_products_leave_the_activation_to_torch_where_triton_cannot_compile_it(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("Failed to find C compiler")

    unusable: set = set()
    monkeypatch.setattr(activation, "launch", fails)
    monkeypatch.setattr(activation, "_UNUSABLE", unusable)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    z = torch.zeros(4)
    assert activation._compiled(z, None, True) is None
    assert unusable == {z.device.index}
    unusable.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert activation._compiled(z, None, True) is None, "nothing is compiled during a capture"
    assert not unusable


def test_without_the_interpreter_a_cpu_is_refused_with_a_reason():
    reason = available_backends("cpu")["triton"]
    assert reason is not None
    assert "needs a CUDA device" in reason
