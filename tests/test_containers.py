"""The container recipes are on the CUDA version of the pins, and the citation is of this version."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import twell

ROOT = Path(__file__).parents[1]
CONTAINERS = ROOT / "slurm" / "containers"
RECIPES = ("Dockerfile", "apptainer.def")
BASE = re.compile(r"^F(?:ROM|rom:) nvidia/cuda:(\d+\.\d+)\.\d+-base-ubuntu(\d+\.\d+)$", re.MULTILINE)


def pins():
    """Name -> version of every exact pin."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.match(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if re.match(r"[\w.-]+==", line))


@pytest.fixture(params=RECIPES)
def recipe(request):
    return (CONTAINERS / request.param).read_text(encoding="utf-8")


def test_the_base_image_is_one_exact_tag_with_the_cuda_of_the_pins(recipe):
    ((cuda, _),) = BASE.findall(recipe)
    assert {name: pins()[name].startswith(f"{cuda}.") for name in ("cuda-bindings", "nvidia-cuda-nvrtc")} == {
        "cuda-bindings": True, "nvidia-cuda-nvrtc": True,
    }  # fmt: skip


def test_a_job_finds_its_own_code_before_that_of_the_folder():
    (line,) = re.findall(r"%environment\n +(.*)\n", (CONTAINERS / "apptainer.def").read_text(encoding="utf-8"))
    for given, found in {"/code:/code/kernels": "/code:/code/kernels:kernels", "": "kernels"}.items():
        command = ["sh", "-c", f'{line}; echo "$PYTHONPATH"']
        done = subprocess.run(command, env={"PYTHONPATH": given}, capture_output=True, text=True, check=True)
        assert done.stdout == f"{found}\n"


def test_both_recipes_have_the_same_base_and_the_same_system_packages():
    texts = [(CONTAINERS / name).read_text(encoding="utf-8") for name in RECIPES]
    packages = [
        re.search(r"apt-get install --yes --no-install-recommends ([^\\\n]+)", text)[1].split() for text in texts
    ]
    assert packages[0] == packages[1]
    assert BASE.findall(texts[0]) == BASE.findall(texts[1])
    assert "gcc" in packages[0], "Triton compiles its launchers"


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == twell.__version__
