"""kernels.registry: the modes of torch under which a process makes its first call say nothing about a backend."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXPORT = """
import torch
from kernels import SparseFeedForward, available_backends
block = SparseFeedForward(8, 24, backend="{backend}", stats="none").eval().requires_grad_(False)
x = torch.randn(4, 8)
program = torch.export.export(block, (x,), strict=False)
assert torch.allclose(program.module()(x), block(x), atol=1e-6)
assert available_backends("cpu")["{backend}"].ok, available_backends("cpu")
"""


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_a_process_may_begin_with_an_export(backend):
    code = EXPORT.format(backend=backend)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
