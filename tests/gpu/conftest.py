"""The sparse backends that a GPU test runs with."""

import pytest
import torch

from kernels.registry import probe

RUNS_ON = {"hopper": lambda capability: capability == (9, 0), "triton": lambda capability: capability >= (8, 0)}


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
