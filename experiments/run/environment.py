"""Describes what a result was made with: code revision, package versions, device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # where it is used, it is imported: the commands that only read options do without it
    import torch

REPOSITORY = Path(__file__).resolve().parents[2]
_GIT_SECONDS = 60
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "omegaconf", "datasets", "lm_eval")


def git_revision(repository: Path = REPOSITORY) -> tuple[str, bool | None]:
    """(revision, dirty) of the code: ("unknown", None) without git, and where `repository` is not the root of a git
    repository, also if it lies inside another one, whose revision says nothing about it.

    For a copy of the code outside its repository (in a container, on a cluster's node), TWELL_REVISION holds the
    revision, followed by "+dirty" if the copy differs from it. Untracked files do not count as dirty, since runs and
    figures lie beside the code.
    """
    told, _, dirty = os.environ.get("TWELL_REVISION", "").partition("+")
    if told:
        return told, bool(dirty)
    revision = git_output(repository, "rev-parse", "HEAD")
    if revision is None:
        return "unknown", None
    changes = git_output(repository, "status", "--porcelain", "--untracked-files=no")
    return revision.strip(), None if changes is None else bool(changes)


def git_output(repository: Path, *arguments: str) -> str | None:
    """What git says of the repository with this root; None if there is none, and where git is not there or fails."""
    try:
        root = _git(repository, "rev-parse", "--show-toplevel").removesuffix("\n")
        return _git(repository, *arguments) if Path(root).samefile(repository) else None
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS).stdout


def device_name(device: torch.device | str) -> str:
    """Name of a GPU, or of the CPU with the number of cores that this process may use. Virtual machines may give many
    CPUs one name, without a number: then with model and stepping, which tell them apart."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.is_file() else ""
    about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = about.get("model name") or platform.processor() or platform.machine()
    if not re.search(r"\d", name) and {"model", "stepping"} <= set(about):
        name = f"{name} (model {about['model']}, stepping {about['stepping']})"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def package_versions() -> dict[str, str]:
    """Versions of the packages that results depend on; those not installed are left out."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def _process_environment() -> tuple[str, bool | None, dict[str, str]]:
    """Determined once, since a process keeps running the code that was there when it started."""
    return *git_revision(), package_versions()


def row_environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The columns of a result row that say where it was measured (`analysis.schema`)."""
    import torch

    revision, dirty, packages = _process_environment()
    return {
        "device": device_name(device),
        "gpus": 1 if torch.device(device).type == "cuda" else None,
        "torch": packages["torch"],
        "triton": packages.get("triton"),
        "cuda": torch.version.cuda,
        "revision": revision,
        "dirty": dirty,
    }


def describe_environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Everything saved beside a run (`environment.json`)."""
    import torch

    revision, dirty, packages = _process_environment()
    return {
        "command": sys.argv,
        "revision": revision,
        "dirty": dirty,
        "packages": packages,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "device": device_name(device),
        "devices": torch.cuda.device_count() if torch.device(device).type == "cuda" else 1,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def peak_memory_gb(device: torch.device | str) -> float:
    """Peak of the memory allocated on a GPU; on a CPU the peak resident memory of this process. In 1e9 bytes."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # of KiB
