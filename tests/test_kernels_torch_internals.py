"""torch's private names still mean what we take them for."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import torch_internals


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("mode", [_DispatchMode, _FunctionMode])
def test_modes_observe(mode):
    assert not torch_internals.is_observed()
    with mode():
        assert torch_internals.is_observed()
    assert not torch_internals.is_observed()


def test_transformations_and_traces_observe():
    seen = []

    def function(x):
        seen.append(torch_internals.is_observed())
        return x * 2

    torch.func.vmap(function)(torch.ones(2))
    torch.func.grad(lambda x: function(x).sum())(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    function(torch.ones(2))
    assert seen == [True, True, True, False]


def test_forward_mode():
    x = torch.ones(2)
    assert not torch_internals.in_forward_mode()
    with forward_ad.dual_level():
        assert torch_internals.in_forward_mode()
        assert not torch_internals.has_tangent(x)
        assert torch_internals.has_tangent(forward_ad.make_dual(x, x))
    assert not torch_internals.in_forward_mode()


@pytest.mark.gpu
def test_the_current_device_and_stream():
    assert torch_internals.current_cuda_device() == torch.cuda.current_device()
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            assert torch_internals.current_cuda_stream(0) == stream.cuda_stream
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        assert torch_internals.current_cuda_device() == last
