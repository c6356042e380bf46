"""The sparse backends that a GPU test runs with."""

import pytest
import torch

from kernels.registry import probe

RUNS_ON = {"hopper": lambda capability: capability == (9, 0), "triton": lambda capability: capability >= (8, 0)}


@pytest.fixture(params=RUNS_ON, scope="module")
def backend(request):
    """The name of a backend. On a GPU that it is made for it has to run; elsewhere it is skipped."""
    availability = probe(request.param, torch.device("cuda", 0))
    if not availability.ok:
        assert not RUNS_ON[request.param](torch.cuda.get_device_capability()), availability.reason
        pytest.skip(f"no {request.param} backend here: {availability.reason}")
    return request.param
