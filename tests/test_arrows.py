"""Imports go one way, between the top-level folders and between the folders of `experiments`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each top-level folder may import besides itself.
FOLDERS = {
    "twell": set(),
    "analysis": set(),
    "experiments": {"twell", "analysis"},
    "slurm": {"experiments", "analysis"},
}
# The folders of `experiments` in the order of their arrows: each imports from itself and from those before it.
ROOMS = ("run", "data", "timing", "models", "training", "nonzeros", "bench", "study")

PROGRAMS = {path.stem for path in (ROOT / "experiments").glob("*.py")} - {"__init__"}


def imported(path: Path) -> list[str]:
    """The modules that a file imports by their full names, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / ("kernels/twell" if folder == "twell" else folder)).rglob("*.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_top_level_folders_import_what_lies_below_them(folder):
    for path in sources(folder):
        found = {name.partition(".")[0] for name in imported(path)} & FOLDERS.keys()
        assert found <= FOLDERS[folder] | {folder}, path


def test_every_folder_of_experiments_has_a_place_in_the_order():
    assert {path.parent.name for path in (ROOT / "experiments").glob("*/__init__.py")} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_from_rooms_before_them(room):
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    for path in sources(f"experiments/{room}"):
        found = {name.split(".")[1] for name in imported(path) if name.startswith("experiments.")}
        assert found <= allowed, f"{path} imports from {sorted(found - allowed)}"


def test_the_launcher_and_the_rooms_import_no_program():
    """A file with a `main` is a program: nothing that is shared depends on one."""
    programs = {f"experiments.{name}" for name in PROGRAMS}
    shared = [*sources("slurm"), *(path for room in ROOMS for path in sources(f"experiments/{room}"))]
    for path in shared:
        found = {".".join(name.split(".")[:2]) for name in imported(path)} & programs
        assert not found, f"{path} imports {sorted(found)}"
