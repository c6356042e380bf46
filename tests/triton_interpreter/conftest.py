"""Triton is told of its interpreter when it is imported: these tests need a process of their own (make test)."""

import importlib.util
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed on this system")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("in Triton's interpreter only: TRITON_INTERPRET=1 pytest tests/triton_interpreter")
