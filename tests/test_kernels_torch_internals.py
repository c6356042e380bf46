"""torch's private names still behave as we assume."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from twell import torch_internals


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


def test_a_default_device_observes_nothing():
    with torch.device("cpu"):
        assert not torch_internals.is_observed()
        with _FunctionMode():
            assert torch_internals.is_observed()


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


@pytest.mark.parametrize("where", ["anywhere", pytest.param("on the machine of the GPU tests", marks=pytest.mark.gpu)])
def test_an_export_is_told_from_a_compilation(where):
    """torch 2.11's own torch.compiler.is_exporting() is True in both."""

    class Told(torch.nn.Module):
        def forward(self, x):
            return x + (2 if torch_internals.is_exporting() else 1)

    x = torch.zeros(3)
    assert not torch_internals.is_exporting()
    assert torch.equal(torch.compile(Told(), backend="eager", fullgraph=True)(x), x + 1)
    for strict in (False, True):
        assert torch.equal(torch.export.export(Told(), (x,), strict=strict).module()(x), x + 2)
    assert torch.equal(torch.compile(Told(), backend="eager", fullgraph=True)(x), x + 1)
