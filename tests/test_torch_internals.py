"""torch's private names work as we use them."""

import re
from pathlib import Path

import pytest
import torch

from experiments.run import torch_internals
from experiments.run.torch_internals import CompilationFailed, do_not_split_graphs_for_ddp, raise_recompile_limit

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _config():
    """Every test leaves torch as it found it."""
    with torch._dynamo.config.patch({}):
        yield
    torch.compiler.reset()


def compilations(count):
    """How often torch compiles a function that is given `count` shapes."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    for size in range(2, count + 2):
        function(torch.zeros(size))
    return len(compiled)


def test_a_function_is_compiled_more_often_than_torch_allows_by_default():
    with torch._dynamo.config.patch(recompile_limit=3):
        assert compilations(6) == 3, "or there is nothing to raise"
        torch.compiler.reset()
        raise_recompile_limit()
        assert compilations(6) == 6
        assert torch._dynamo.config.recompile_limit == torch_internals.RECOMPILE_LIMIT


def test_a_limit_that_is_higher_stays():
    with torch._dynamo.config.patch(recompile_limit=1000):
        raise_recompile_limit()
        assert torch._dynamo.config.recompile_limit == 1000


def test_graphs_are_not_split_for_ddp():
    with torch._dynamo.config.patch(optimize_ddp=True):
        assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
        do_not_split_graphs_for_ddp()
        assert torch._dynamo.utils.get_optimize_ddp_mode() == "no_optimization"


def test_a_compiler_that_fails_is_recognised():
    def backend(graph, inputs):
        raise OSError("no compiler")

    with pytest.raises(CompilationFailed, match="no compiler"):
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))


def test_a_product_in_fp8_with_a_scale_for_each_row():
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    scales = torch.rand(32, 1) + 0.5, torch.rand(48, 1) + 0.5
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    y = torch_internals.fp8_product(x8, scales[0], w8, scales[1])
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), (x8.float() * scales[0]) @ (w8.float() * scales[1]).t(), rtol=0.02, atol=0.1)


def test_private_names_are_in_one_file():
    private = re.compile(r"\btorch(\.\w+)*\._[a-z]")
    found = [path for folder in ("experiments", "slurm") for path in (ROOT / folder).rglob("*.py")]
    users = {path.name for path in found if private.search(path.read_text(encoding="utf8"))}
    assert users == {"torch_internals.py"}
