"""What every program does before its first import, and how its `--help` begins."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from analysis import program
from experiments.run.config import describe

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("analysis", "experiments", "slurm")
    for path in (ROOT / folder).glob("*.py")
    if '\nif __name__ == "__main__":\n' in path.read_text() and not path.stem.startswith("fork_")
)


def test_the_programs_are_found():
    assert {"analysis.build", "experiments.train", "slurm.submit", "slurm.status"} <= {*PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_begins_with_examples(name, monkeypatch, capsys):
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "__main__", module)  # as `python -m` has it
    config = next(iter(typing.get_type_hints(module.main).values()))
    if isinstance(config, type):
        text = describe(config)
        assert f"\n\nusage: python -m {name} [config=FILE] [key=value ...]\n" in text
    else:
        try:
            module.main(["--help"])
        except SystemExit as end:
            assert end.code == 0  # noqa: PT017
        text = capsys.readouterr().out
    summary, examples, _ = text.split("\n\n", 2)
    assert not summary.startswith("usage")
    assert re.search(rf"^ *(python|torchrun) .*-m {re.escape(name)}", examples, re.MULTILINE)


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
def test_help_and_a_misspelt_option_need_no_heavy_package(name):
    packages, code, output = imported(name, "--help")
    assert (packages & HEAVY, code) == (set(), 0)
    assert f"-m {name}" in output
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


# --- before the first import ------------------------------------------------------------------------------------------


def started(command, **options):
    """A program of this repository without the packages of any environment (`-S`)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-S", "-m", *command]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def tiny(tmp_path):
    """Starts a program with this source, in a copy of the folder that every program shares."""
    (tmp_path / "analysis").mkdir()
    for name in ("__init__.py", "program.py"):
        shutil.copy(ROOT / "analysis" / name, tmp_path / "analysis")

    def start(source, **options):
        (tmp_path / "analysis" / "tiny.py").write_text(source)
        return started(["analysis.tiny"], cwd=tmp_path, stdout=subprocess.PIPE, **options)

    return start


@pytest.mark.parametrize("name", PROGRAMS)
def test_outside_of_the_environment_one_line_says_how_to_get_into_it(name):
    process = started([name], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(
        r"No module named '\w+', which .*python\S* does not have\. "
        r"`make install` in (.*) installs the pinned environment, `source \1/\.venv/bin/activate` activates it\n",
        errors,
    )


def test_a_module_of_our_own_that_is_missing_keeps_its_traceback(tiny):
    _, errors = tiny("import analysis.lost").communicate()
    assert "Traceback" in errors
    assert "ModuleNotFoundError: No module named 'analysis.lost'" in errors


def test_in_the_environment_what_is_missing_is_to_be_installed(monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(program.ROOT / ".venv"))
    assert program._advice() == f"In {program.ROOT}, `make install` installs what requirements.txt names"


def test_an_old_python_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-m", "smoke"])
    monkeypatch.setattr(program, "OLDEST", (99, 1))
    with pytest.raises(SystemExit, match=r"Python 99\.1 or newer is needed; .* is 3\.\d+"):
        program.prepare()


def test_nothing_changes_where_a_folder_is_imported():
    before = sys.excepthook, signal.getsignal(signal.SIGINT)
    program.prepare()
    assert (sys.excepthook, signal.getsignal(signal.SIGINT)) == before


def interrupted(process):
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    return process.returncode, errors


READY = "print('ready', flush=True); time.sleep(60)"


def test_ctrl_c_during_the_imports_ends_silently(tiny):
    assert interrupted(tiny(f"import time; {READY}")) == (-signal.SIGINT, "")


def test_ctrl_c_later_is_one_line(tiny):
    process = tiny(f"import time; from analysis.program import begin; begin(); {READY}")
    assert interrupted(process) == (-signal.SIGINT, "interrupted\n")


def test_ctrl_c_that_is_ignored_stays_ignored(tiny):
    source = "import signal; from analysis.program import begin; begin()\n"
    source += "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    process = tiny(source, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.communicate()[0] == "True\n"


@pytest.mark.parametrize("lines", [1, 100_000])
def test_an_output_without_a_reader_is_not_an_error(tiny, lines):
    process = tiny(f"import sys; sys.stdin.read()\nfor n in range({lines}): print(n)", stdin=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    assert process.communicate()[1] == ""


def test_another_pipe_that_breaks_keeps_its_traceback(tiny):
    assert "Traceback" in tiny("raise BrokenPipeError(32, 'of a socket')").communicate()[1]


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
