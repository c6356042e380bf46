"""The package in the repository, installed elsewhere, and beside Hugging Face's package `kernels`."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers.utils import import_utils

import twell

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kernels" / "twell"
SUFFIXES = (".py", ".cu", ".cuh", ".typed")
RUN = """
from twell import SparseFeedForward, available_backends, sparse_ffn
import torch
torch.manual_seed(0)
block = SparseFeedForward(8, 16, keep_stats=True)
x = torch.arange(24.).view(3, 8)
(block(x).sum() + block.stats.l1).backward()
assert block.up_proj.weight.grad.isfinite().all()
weights = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
for backend in ("dense", "reference"):
    y, stats = sparse_ffn(x, *weights, plan=backend, return_stats=True)
    torch.testing.assert_close(y, block(x), rtol=1e-5, atol=1e-5)  # sums in another order
"""
LLAMA = """
import sys, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                     num_key_value_heads=1, vocab_size=9, hidden_act="relu"))
from twell import sparsify
assert sparsify(model)(torch.tensor([[1, 2]])).logits.isfinite().all()
"""
# Every name is a decorator that leaves things as they are, which is what Hugging Face's does on a CPU.
STAND_IN = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *arguments, **options: lambda wrapped: wrapped
"""


def run(command: list, folder: Path, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python(code: str, folder: Path, *path: Path) -> str:
    return run(["-c", code], folder, *path)


def sources() -> list[Path]:
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, built from a copy so that no build folders appear in the repository."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built without network, by this setuptools")
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", wheels, source], ROOT)
    (wheel,) = wheels.glob(f"twell-{twell.__version__}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture(scope="session")
def hugging_faces(tmp_path_factory) -> Path:
    """A folder with a stand-in for the package `kernels`, in the version that transformers asks for."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "kernels").mkdir()
    (folder / "kernels" / "__init__.py").write_text(STAND_IN)
    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.18.2")
    about = folder / f"kernels-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (about / "RECORD").write_text("kernels/__init__.py,,\n")
    return folder


@pytest.mark.parametrize("found", [True, False])
def test_transformers_and_the_package_with_and_without_the_package_kernels(found, hugging_faces):
    code = LLAMA + "from transformers.utils import is_kernels_available\nprint(is_kernels_available())"
    path = [ROOT / "kernels", *([hugging_faces] if found else [])]
    assert python(code, ROOT, *path) == str(found)


def test_programs_run_beside_the_package_kernels(hugging_faces, tmp_path):
    path = ROOT / "kernels", hugging_faces
    folder = tmp_path / "run"
    options = ["model=smoke", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={folder}", "run.progress=none"]
    run(["-m", "experiments.train", *options], ROOT, *path)
    assert (folder / "rows.csv").is_file()
    assert "right" in run(["kernels/examples/plain_pytorch.py"], ROOT, *path)


def test_importing_the_package_imports_nothing_else():
    code = "import twell, sys; print(*sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'twell')))"
    assert python(code, ROOT, ROOT / "kernels") == "twell"


def test_public_names():
    for name in twell.__all__:
        assert getattr(twell, name).__module__.startswith("twell.")
        assert name in dir(twell)
    with pytest.raises(AttributeError, match=r"no attribute 'sparse'; it has FFNStats, Plan, "):
        _ = twell.sparse


def test_the_readme_has_every_public_name():
    lines = (ROOT / "kernels" / "README.md").read_text(encoding="utf8").splitlines()
    table = "\n".join(line for line in lines if line.startswith("| "))
    assert [name for name in twell.__all__ if not re.search(rf"`{name}\b", table)] == []


# Files that are for users of transformers, and imported by them alone.
OF_TRANSFORMERS = {"released.py", "trainer.py"}


def test_the_package_depends_on_torch_alone():
    for path in sources():
        if path.suffix != ".py":
            continue
        allowed = sys.stdlib_module_names | {"torch", "triton", "cuda"}
        if path.name in OF_TRANSFORMERS:
            allowed |= {"transformers", "huggingface_hub", "safetensors"}
        for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.partition(".")[0] in allowed, f"{path} imports {name}"


def test_the_wheel_holds_every_source(installed):
    found = sorted(p.relative_to(installed / "twell") for p in installed.rglob("*") if p.suffix in SUFFIXES)
    assert found == sources()
    assert not (installed / "kernels").exists()


def test_installed_it_runs_elsewhere(installed, tmp_path):
    code = RUN + "import twell; print(twell.__file__, torch.ops.twell.sparse_ffn.default)"
    assert python(code, tmp_path, installed) == f"{installed / 'twell' / '__init__.py'} twell.sparse_ffn.default"
