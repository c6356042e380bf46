"""The sparse backends that a GPU test runs with, and tests without torch's caching allocator."""

import os

import pytest
import torch

from twell.registry import probe

RUNS_ON = {"hopper": lambda capability: capability == (9, 0), "triton": lambda capability: capability >= (8, 0)}
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ


@pytest.fixture(autouse=True)
def graphs_need_the_caching_allocator(monkeypatch):
    """Without it, nothing can be allocated while a CUDA graph is captured, so tests skip when they begin to."""
    if not UNCACHED:
        yield
        return

    def refused(*_, **__):
        pytest.skip("a CUDA graph needs torch's caching allocator")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refused)
    yield
    torch.cuda.set_stream(torch.cuda.default_stream())  # `torch.cuda.graph` changes the stream before it captures


def needs(name: str) -> None:
    """Skips where this backend cannot run; on a GPU that it is made for it has to."""
    availability = probe(name, torch.device("cuda", 0))
    if not availability.ok:
        assert not RUNS_ON[name](torch.cuda.get_device_capability()), availability.reason
        pytest.skip(f"no {name} backend here: {availability.reason}")


@pytest.fixture(params=RUNS_ON, scope="module")
def backend(request):
    """The name of a backend that runs here."""
    needs(request.param)
    return request.param


@pytest.fixture(scope="module")
def needs_hopper():
    needs("hopper")


@pytest.fixture(scope="module")
def needs_triton():
    needs("triton")
