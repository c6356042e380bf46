"""The targets of the Makefile that cannot run here."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments):
    """As from a shell: `make test` would tell a make inside of it that it is one."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
    }
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def sanitizer(folder, body):
    script = folder / "compute-sanitizer"
    script.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{body}\n')
    script.chmod(0o755)
    return f"SANITIZER={script}"


def test_sanitize_says_what_it_needs():
    done = make("sanitize", "SANITIZER=/nowhere/compute-sanitizer")
    assert done.returncode != 0
    assert "needs compute-sanitizer" in done.stderr


def test_sanitize_runs_every_tool_on_our_kernels(tmp_path):
    assert make("sanitize", sanitizer(tmp_path, "true")).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[1] for call in calls] == ["memcheck", "synccheck", "racecheck"]
    assert ["--report-api-errors no" in call for call in calls] == [True, False, False]
    assert ["--kernel-name kernel_substring=gated_down" in call for call in calls] == [True, True, False]
    for call in calls:
        assert "--error-exitcode 1" in call
        assert "tests/gpu/test_sanitize.py" in call


def test_sanitize_fails_with_its_tool(tmp_path):
    done = make("sanitize", sanitizer(tmp_path, 'case "$2" in synccheck) exit 1;; esac'))
    assert done.returncode != 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_help_lists_every_target():
    listed = make("help").stdout
    (targets,) = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in targets.split():
        assert f"\n{target} " in f"\n{listed}"


def test_the_newest_versions_are_those_of_every_requirement_without_its_pin():
    (command,) = [line for line in make("--dry-run", "test-newest").stdout.splitlines() if line.startswith("sed")]
    unpinned = subprocess.run(shlex.split(command.partition(" > ")[0]), cwd=ROOT, capture_output=True, text=True).stdout
    pins = re.findall(r"^([\w-]+)==[\w.]+(;[^#\n]*)?", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    wanted = re.findall(r"^([\w-]+)(;[^#\n]*)?", unpinned, re.MULTILINE)
    assert len(pins) > 20
    assert wanted == pins


def test_the_oldest_versions_are_those_that_the_package_allows():
    commands = make("--dry-run", "test-oldest").stdout.splitlines()
    parts = [command.partition(" >")[0] for command in commands if command.startswith(("sed", "grep"))]
    done = [subprocess.run(shlex.split(part), cwd=ROOT, capture_output=True, text=True).stdout for part in parts]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["huggingface"]]
    allowed = dict(bound.replace("[torch]", "").split(">=") for bound in bounds)
    oldest, others = (re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE) for text in done)
    assert oldest == [(name, f"{version}.0") for name, version in allowed.items()]
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    left_out = {"torch", "transformers", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "numpy"}
    assert {name for name, _ in others} == set(pinned) - left_out


def reproduced(*arguments):
    return make("--dry-run", "reproduce", *arguments).stdout.splitlines()[-1]


def test_reproduce_runs_the_demo_here_and_the_gpu_studies_on_gpus():
    assert re.search(
        r"slurm\.submit study=demo cluster=local .*cluster\.parallel=\d+ cluster\.cpus=1", reproduced(), re.S
    )
    gpu = reproduced("SCALE=gpu", "TASKS=/a b", "DATA=path:/c")
    assert re.search(r"slurm\.submit study=gpu cluster=gpu_box +'tasks=/a b' 'data=path:/c'", gpu)
    assert "cluster.parallel" not in gpu
    assert "study=gpu cluster=slurm" in reproduced("SCALE=gpu", "CLUSTER=slurm")
