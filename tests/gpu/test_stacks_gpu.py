"""Large and unusual uses: more entries than 31 bits count, many processes and broken caches, changes of plan."""

import os
import subprocess
import sys

import pytest
import torch
from calls import make_block, run_ffn
from torch.utils.checkpoint import CheckpointError, checkpoint

from twell import Plan, autotune, load_plans
from twell.hopper import compiler
from twell.testing import check, make_problem, plain_ffn, relative_error

pytestmark = [pytest.mark.gpu]
CUDA = "cuda"
PIECE = 50_000
# A process that computes a block by the backend that it is given and prints why it could not, or how far off it was.
PROCESS = """
import sys, torch
from twell import sparse_ffn
from twell.registry import why_not
from twell.testing import make_problem, plain_ffn, relative_error
name = sys.argv[1]
reason = why_not(name)
if reason is None:
    p = make_problem(300, 64, 512, 12.0, device="cuda")
    print(relative_error(sparse_ffn(*p, plan=name), plain_ffn(*p)[0]) < 0.02)
else:
    print(reason)
"""


CAPTURE_FIRST = """
import sys, torch
from twell import sparse_ffn
from twell.testing import make_problem, plain_ffn, relative_error
p = make_problem(300, 64, 512, 12.0, device="cuda")

def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = sparse_ffn(*p, plan=sys.argv[1])
    graph.replay()
    return y

try:
    captured()
except RuntimeError as error:
    print("once before the capture" in str(error))
with torch.no_grad():
    sparse_ffn(*p, plan=sys.argv[1])
print(relative_error(captured(), plain_ffn(*p)[0]) < 0.02)
"""


def test_a_process_whose_first_call_is_captured_is_told_what_to_do(backend):
    (output,) = processes(1, backend, code=CAPTURE_FIRST)
    assert output.split() == ["True", "True"]


def test_no_call_compiles_after_plans_are_loaded(needs_hopper, monkeypatch):
    block = make_block(192, 1536, keep_stats=False).to(CUDA, torch.bfloat16).eval()
    load_plans(block, [{"backend": "hopper"}])
    monkeypatch.setattr(compiler, "cubin", lambda name, macros: pytest.fail(f"{name} with {macros} was not loaded"))
    with torch.no_grad():
        for tokens in (*range(1, 20), 64, 300, 1000, 5000, 70_000):
            assert block(torch.randn(tokens, 192, device=CUDA, dtype=torch.bfloat16)).isfinite().all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_one_call_of_more_entries_than_31_bits_count(backend, name, gated):
    p = make_problem(400_000, 64, 5632, 12.0, gated=gated, device=CUDA)
    assert p.x.shape[0] * p.w_up.shape[0] > 2**31
    name = backend if name == "sparse" else name
    y, stats = run_ffn(*p, backend=name)
    for start in range(0, len(p.x), PIECE):
        rows = slice(start, start + PIECE)
        piece, its_stats = run_ffn(p.x[rows], *p[1:], backend=name)
        assert relative_error(y[rows], piece) < 2**-8
        assert (stats.nonzeros[rows] - its_stats.nonzeros).abs().sum() <= 1e-3 * its_stats.nonzeros.sum()


def test_gradients_of_one_call_of_more_entries_than_31_bits_count(backend):
    p = make_problem(400_000, 64, 5632, 12.0, device=CUDA)

    def gradients(rows):
        leaves = [tensor.detach().requires_grad_() for tensor in (p.x[rows], *p[1:])]
        run_ffn(*leaves, backend=backend)[0].float().square().sum().backward()
        return [leaf.grad for leaf in leaves]

    whole, sums = gradients(slice(None)), None
    for start in range(0, len(p.x), PIECE):
        dx, *weights = gradients(slice(start, start + PIECE))
        assert relative_error(whole[0][start : start + PIECE], dx) < 0.02
        weights = [weight.double() for weight in weights]
        sums = weights if sums is None else [total + weight for total, weight in zip(sums, weights, strict=True)]
    assert all(relative_error(gradient, total) < 0.02 for gradient, total in zip(whole[1:], sums, strict=True))


def processes(count, backend, *, code=PROCESS, **environment):
    """Starts them, and returns what each of them printed. environment: None removes a variable."""
    command = [sys.executable, "-c", code, backend]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    environment = {name: value for name, value in variables.items() if value is not None}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    ended = [process.communicate(timeout=500) for process in running]
    assert all(process.returncode == 0 for process in running), [errors for _, errors in ended]
    return [output.strip() for output, _ in ended]


def test_sixteen_processes_share_an_empty_cache_and_survive_a_damaged_one(backend, tmp_path):
    places = {"TWELL_CACHE": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "tritons")}
    assert processes(16, backend, **places) == ["True"] * 16
    for path in (tmp_path / "ours").glob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1000])
    assert processes(1, backend, **places) == ["True"]


def test_a_cache_that_cannot_be_written(needs_hopper, tmp_path):
    (tmp_path / "file").touch()  # also for root, whom permissions do not stop
    assert processes(1, "hopper", TWELL_CACHE=str(tmp_path / "file" / "cache")) == ["True"]


def test_without_a_c_compiler_the_reason_is_told(needs_triton, tmp_path):
    (output,) = processes(1, "triton", PATH=str(tmp_path), CC=None, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert "compiler" in output.lower() or output == "True", output  # Triton may come to need none
    false = tmp_path / "false"  # as a compiler fails that does not find Python.h
    false.write_text("#!/bin/sh\nexit 1\n")
    false.chmod(0o755)
    (output,) = processes(1, "triton", CC=str(false), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert "a tiny launch failed" in output or output == "True", output


def test_a_block_tuned_on_one_token_takes_any_number(backend):
    p = make_problem(4096, 1024, 4096, 20.0, device=CUDA)
    block = make_block(1024, 4096, device=CUDA, dtype=torch.bfloat16, keep_stats=False).eval()
    block.load_state_dict({f"{n}_proj.weight": getattr(p, f"w_{n}") for n in ("gate", "up", "down")})
    with torch.no_grad():
        autotune(block, p.x[:1], backends=[backend])
        for plan in (block.plan, Plan(backend)):
            block.plan = plan
            for tokens in (2, 7, 64, 1000, 4096):
                expected = plain_ffn(p.x[:tokens], *p[1:])[0]
                for _ in range(2):  # the second call launches what the first prepared
                    assert relative_error(block(p.x[:tokens]), expected) < 0.02
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = block(p.x[:tokens])
                graph.replay()
                assert relative_error(y, expected) < 0.02


def gradients_of(block, p, call=None):
    block.zero_grad()
    x = p.x.detach().requires_grad_()
    y = (call or block)(x)
    y.float().square().sum().backward()
    return [x.grad, *(weight.grad for weight in block.parameters())]


@pytest.fixture
def block_and_problem(backend):
    p = make_problem(300, 256, 1024, 20.0, device=CUDA)
    block = make_block(256, 1024, backend=backend, device=CUDA, dtype=torch.bfloat16)
    block.load_state_dict({f"{n}_proj.weight": getattr(p, f"w_{n}") for n in ("gate", "up", "down")})
    return block, p


def test_a_training_after_a_thousand_forwards_without_gradients(block_and_problem):
    block, p = block_and_problem
    expected = gradients_of(block, p)
    with torch.no_grad():
        block(p.x)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        for _ in range(1000):
            block(p.x)
    assert torch.cuda.memory_allocated() <= held + 2**20
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(block, p), expected, strict=True))


def test_a_plan_that_changes_between_forward_and_recomputation_is_refused(block_and_problem):
    block, p = block_and_problem
    for before, after in ((block.plan, Plan("dense")), (Plan("dense"), block.plan)):
        block.plan = before
        y = checkpoint(block, p.x.detach().requires_grad_(), use_reentrant=False)
        block.plan = after
        with pytest.raises(CheckpointError):
            y.float().square().sum().backward()


def test_the_smallest_capacity_with_dense_tokens(block_and_problem):
    block, p = block_and_problem
    dense = p._replace(w_gate=p.w_gate.clone())
    dense.w_gate[:, 0] += 100  # x[:, 0] is 1: most neurons fire for every token

    def run(*operands):
        y, stats = run_ffn(*operands, backend=block.plan.backend, capacity=1)
        assert (stats.nonzeros > 512).all()
        return y, stats.l1

    check(run, dense, torch.randn_like(p.x), 0.5)
