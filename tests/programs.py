"""Programs of this repository in processes of their own, without the seconds that each would take to import torch.

A server (slurm/fork_server.py), one for each process of tests, has imported everything and forks them. What they are
given, their signals, their output and their exit code are those of `python -m`.
"""

import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurm import fork_server
from slurm.fork_server import ForkServer

ROOT = Path(__file__).parents[1]
PRELOADED = (
    *("torch.distributed.run", "submitit.core.submission", "slurm.submit", "slurm.job", "analysis.build"),
    *("experiments.train", "experiments.evaluate", "experiments.gather_nonzeros", "experiments.run_notebooks"),
    *("experiments.bench_kernels", "experiments.bench_forward", "experiments.bench_training"),
    "experiments.bench_generate",
)
# Programs among the tests are called by their file's name.
PATH = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))


@functools.cache
def _server() -> ForkServer:
    log = Path(tempfile.mkdtemp(prefix="twell-tests-")) / "fork_server.log"
    return ForkServer(PRELOADED, {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}, str(ROOT), log)


def python(fork=True) -> list[str]:
    """What to call in place of Python; `-u -m MODULE ARGUMENT ...` follows. A process with a GPU must not be forked."""
    return shlex.split(_server().python()) if fork and fork_server.is_possible() else [sys.executable]


def start(module, *arguments, fork=True, **options):
    """The process of a program, its output and errors in pipes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if fork else {"PYTHONPATH": PATH})
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([*python(fork), "-u", "-m", module, *arguments], env=environment, **options)


def wait_for(condition, process):
    """Until this holds, which it must while the process is alive."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run(module, *arguments, timeout=1500, fork=True):
    """The same when it has ended."""
    process = start(module, *arguments, fork=fork)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_shards(store, *backend):
    """What each of the two processes of sharded_block.py prints, which find each other by this file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, ROOT / "tests" / "sharded_block.py"]
    processes = [subprocess.Popen([*command, str(rank), store, *backend], **options) for rank in range(2)]
    ended = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [errors for _, errors in ended]
    return [output for output, _ in ended]


def run_two(arguments, code=0, module="experiments.train", fork=True):
    """A training in two processes, as torchrun starts them; returns what it logged. torchrun's exit code is 1 whenever
    theirs is not 0."""
    options = ["--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = ["--no-python", *python(fork), "-u", "-m", module, *arguments]
    done = run("torch.distributed.run", *options, *command, fork=fork)
    assert done.returncode == code, done.stderr
    return done.stderr
