"""The Triton backend without a GPU: its numbers in the interpreter, and its refusal of a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twell import available_backends

pytest.importorskip("triton", reason="Triton is not installed on this system")
HERE = Path(__file__).resolve().parent


def test_in_the_interpreter():
    """In a process of its own: the interpreter is chosen by an environment variable when the kernels are imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(HERE / "interpreted_triton.py")]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_interpreter_a_cpu_is_refused_with_a_reason():
    availability = available_backends("cpu")["triton"]
    assert not availability.ok
    assert "needs a CUDA device" in availability.reason
