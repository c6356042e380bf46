"""How `--help` of every program begins, and how quick the answers are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("analysis", "experiments", "slurm")
    for path in (ROOT / folder).glob("*.py")
    if '\nif __name__ == "__main__":\n' in path.read_text() and not path.stem.startswith("fork_")
)


def test_the_programs_are_found():
    assert {"analysis.build", "experiments.train", "slurm.submit", "slurm.status"} <= {*PROGRAMS}


# --- how quick the answer is ------------------------------------------------------------------------------------------

# Packages that take a second and more to import, some of them: a program imports them once its options are read.
HEAVY = {"torch", "transformers", "tokenizers", "lm_eval", "datasets", "pandas", "pyarrow", "matplotlib", "nbformat"}


def imported(*command):
    """The packages that a command has imported by its end, its exit code and output."""
    command = [sys.executable, "-X", "importtime", "-m", *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}, done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_with_examples_and_a_misspelt_option_need_no_heavy_package(name):
    packages, code, output = imported(name, "--help")
    assert (packages & HEAVY, code) == (set(), 0)
    summary, examples, _ = output.split("\n\n", 2)
    assert not summary.startswith("usage")
    assert re.search(rf"^ *(python|torchrun) .*-m {re.escape(name)}", examples, re.MULTILINE)
    packages, code, output = imported(name, "sutdy=none")
    assert (packages & HEAVY, code) == (set(), 2), output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["slurm.submit", "experiments.train", "modle=demo"], "did you mean 'model'?"),
        (["slurm.submit", "experiments.bench_forward", "backends=[hoper]"], "backend must be one of"),
        (["slurm.submit", "study=l1_sweep", "cluster.gpu=1"], "unknown option 'gpu'"),
        (["experiments.train", "execution.sparse.backend=hoper"], "backend must be one of"),
        (["experiments.bench_kernels", "backends=[hoper+hot]"], "backend must be one of"),
        (["slurm.status", "study=none_of_this_name"], "nothing was submitted"),
    ],
)
def test_what_is_wrong_is_said_without_a_heavy_package(command, message):
    packages, code, output = imported(*command)
    assert (packages & HEAVY, code) == (set(), 2)
    assert message in output


def test_a_reader_that_needs_no_more_is_no_error():
    process = programs.start("experiments.train", "--help", fork=False)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code", "policy"),
    [
        ({}, "import slurm.job, torch", "PASSIVE"),  # what every job imports
        ({"OMP_WAIT_POLICY": "active"}, "import experiments, torch", "ACTIVE"),
    ],
)
def test_threads_that_wait_do_not_spin_unless_asked_to(given, code, policy):
    """In every program, whoever starts it; OpenMP itself says what it understood."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true", **given}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr
