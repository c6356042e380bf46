"""Triton is told of its interpreter when it is imported: these tests need a process of their own (make test)."""

import importlib.util
import inspect
import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed on this system")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("in Triton's interpreter only: TRITON_INTERPRET=1 pytest tests/triton_interpreter")
    _patch_once_a_kernel()


def _patch_once_a_kernel():
    """The interpreter patches Triton's language anew for each call of a function within a kernel, which takes nearly
    half of the time of these tests. Within a kernel the first patch of each module serves all."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
        languages = {module.__name__ for module in modules if module in (interpreter.tl, interpreter.tl.core)}
        if languages <= patched:
            return None  # within a kernel, where nobody restores
        outermost = not patched
        patched.update(languages)
        scope = patch(function)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_lang
