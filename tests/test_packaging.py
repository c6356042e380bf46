"""The package works next to transformers, and installed under its other name."""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kernels

ROOT = Path(kernels.__file__).resolve().parents[1]
SUFFIXES = (".py", ".cu", ".cuh")
RUN = """
from {name} import SparseFeedForward, available_backends, sparse_ffn
import torch
torch.manual_seed(0)
block = SparseFeedForward(8, 16)
x = torch.arange(24.).view(3, 8)
(block(x).sum() + block.stats.l1).backward()
assert block.up_proj.weight.grad.isfinite().all()
weights = block.gate_proj.weight, block.up_proj.weight, block.down_proj.weight
for backend in ("dense", "reference"):
    y, stats = sparse_ffn(x, *weights, backend=backend)
    torch.testing.assert_close(y, block(x), rtol=1e-5, atol=1e-5)  # sums in another order
"""


def python(code: str, folder: Path, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sources() -> list[Path]:
    """What is installed; the examples are only read, and import transformers."""
    folder = ROOT / "kernels"
    found = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.suffix in SUFFIXES)
    return [path for path in found if path.parts[0] != "examples"]


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's content, built from a copy so that no build folders appear in the repository."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built without network, by this setuptools")
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    shutil.copytree(ROOT / "kernels", source / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run([*command, "-w", str(wheels), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob(f"twell-{kernels.__version__}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_transformers_works_beside_our_folder():
    code = """
import sys, transformers
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                                     num_key_value_heads=1, vocab_size=9))
import torch
assert model(torch.tensor([[1, 2]])).logits.isfinite().all()
import kernels
print(kernels.__file__)
"""
    assert Path(python(code, ROOT)) == ROOT / "kernels" / "__init__.py"


def test_importing_the_package_imports_nothing_else():
    code = "import kernels, sys; print(*sorted(m for m in sys.modules if m.partition('.')[0] in ('torch', 'kernels')))"
    assert python(code, ROOT) == "kernels"


def test_public_names():
    for name in kernels.__all__:
        assert getattr(kernels, name).__module__.startswith("kernels.")
        assert name in dir(kernels)
    with pytest.raises(AttributeError, match=r"no attribute 'sparse'; it has ELL, .*sparse_ffn"):
        _ = kernels.sparse


def test_the_readme_has_every_public_name():
    lines = (ROOT / "kernels" / "README.md").read_text(encoding="utf8").splitlines()
    table = "\n".join(line for line in lines if line.startswith("| "))
    assert [name for name in kernels.__all__ if not re.search(rf"`{name}\b", table)] == []


def test_the_package_depends_on_torch_alone():
    allowed = sys.stdlib_module_names | {"torch", "triton", "cuda"}
    for path in sources():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse((ROOT / "kernels" / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:  # its own modules are imported relatively, or `twell` would need `kernels`
                assert name.partition(".")[0] in allowed, f"{path} imports {name}"


def test_the_wheel_holds_every_source(installed):
    found = sorted(p.relative_to(installed / "twell") for p in installed.rglob("*") if p.suffix in SUFFIXES)
    assert found == sources()


def test_installed_as_twell_it_runs_elsewhere(installed, tmp_path):
    code = RUN.format(name="twell") + "import sys; print('kernels' in sys.modules, torch.ops.twell.sparse_ffn.default)"
    assert python(code, tmp_path, installed) == "False twell.sparse_ffn.default"


def test_both_names_in_one_process(installed):
    code = RUN.format(name="kernels") + RUN.format(name="twell") + "import kernels, twell; print(twell.sparse_ffn)"
    code += "\nassert kernels.sparse_ffn is not twell.sparse_ffn"
    assert "sparse_ffn" in python(code, ROOT, installed)
