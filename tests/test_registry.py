"""twell.registry: the modes of torch under which a process makes its first call say nothing about a backend."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell import registry
from twell.backends import dense, probe
from twell.interface import Availability, Backend

ROOT = Path(__file__).parents[1]
EXPORT = """
import torch
from twell import SparseFeedForward, available_backends
block = SparseFeedForward(8, 24, plan="{backend}").eval().requires_grad_(False)
x = torch.randn(4, 8)
program = torch.export.export(block, (x,), strict=False)
assert torch.allclose(program.module()(x), block(x), atol=1e-6)
assert available_backends("cpu")["{backend}"] is None, available_backends("cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_a_process_may_begin_with_an_export(backend):
    code = EXPORT.format(backend=backend)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def raising(error):
    def forward(*_):
        raise error

    return forward


def wrong(*arguments):
    result = dense.BACKEND.forward(*arguments)
    return result._replace(y=result.y + 1)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (dense.BACKEND.forward, "a tiny launch on cpu gave the right result"),
        (wrong, "a tiny launch gave a wrong result"),
        (raising(RuntimeError("no kernel image")), "a tiny launch failed: RuntimeError: no kernel image"),
        (raising(subprocess.CalledProcessError(1, ["cc"])), "CalledProcessError"),  # the C compiler that Triton calls
    ],
)
def test_a_backend_must_prove_itself(forward, reason):
    found = probe.launch(forward, torch.device("cpu"), torch.bfloat16)
    assert found.ok == (forward is dense.BACKEND.forward)
    assert reason in found.reason


@pytest.mark.parametrize(("lasting", "probes"), [(True, 1), (False, 2)])
def test_what_may_change_is_tried_again_when_asked_again(lasting, probes, monkeypatch):
    """For instance a full disk, where Triton's compiler writes; not another compute capability."""
    answers = [Availability(False, "today not", lasting), Availability(True, "it ran")]
    asked = []

    def answer(device):
        asked.append(device)
        return answers[len(asked) - 1]

    def can_run():
        return registry.can_run("reference", torch.device("cpu"), torch.float32, 8, 24)

    monkeypatch.setattr(registry, "_probed", {})
    monkeypatch.setattr(registry, "_can_run", functools.cache(registry._can_run.__wrapped__))
    monkeypatch.setattr(registry, "get", lambda name: Backend(answer, lambda request: None, *[None] * 3))
    assert not can_run()
    assert not can_run()
    assert len(asked) == 1, "a call of dense products asks each time"
    assert registry.why_not("reference", device="cpu") == (None if probes == 2 else "today not")
    registry.why_not("reference", device="cpu")
    assert can_run() == (probes == 2)
    assert len(asked) == probes


def test_running_out_of_memory_says_nothing_about_a_backend():
    with pytest.raises(torch.OutOfMemoryError):
        probe.launch(raising(torch.OutOfMemoryError("a test")), torch.device("cpu"), torch.float32)
