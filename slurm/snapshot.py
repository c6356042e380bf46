"""Copies the working tree at submission: the code that jobs run.

A copy is named by its revision and its content, so that all submissions of the same code share one.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.run.environment import REPOSITORY, git_output, git_revision
from experiments.run.errors import RunError
from experiments.run.files import atomic_folder, sha256_file, write_json

CODE = ("kernels", "experiments", "slurm", "analysis", "notebooks")
ABOUT = "snapshot.json"
CHANGES = "changes.diff"
_LEFT_OUT = {"__pycache__", ".ipynb_checkpoints"}


@dataclass(frozen=True)
class Snapshot:
    """A copy of the code. `revision` ends in "+dirty" when the copy differs from that revision."""

    path: Path
    revision: str

    def environment(self) -> dict[str, str]:
        """Environment variables that let Python find this code, and the code its revision."""
        others = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([*self._folders(), *([others] if others else [])]), **self._about()}

    def exports(self) -> list[str]:
        """The same as lines of shell."""
        folders = shlex.quote(os.pathsep.join(self._folders()))
        path = f'export PYTHONPATH={folders}"${{PYTHONPATH:+:$PYTHONPATH}}"'
        return [path, *(f"export {name}={shlex.quote(value)}" for name, value in self._about().items())]

    def _folders(self) -> list[str]:
        return [str(self.path), str(self.path / "kernels")]

    def _about(self) -> dict[str, str]:
        return {
            "PYTHONSAFEPATH": "1",  # else the folder where the job was submitted comes first
            "TWELL_REVISION": self.revision,
            "GIT_CEILING_DIRECTORIES": str(self.path.parent),  # the repository around it is at another revision by then
        }


def take_snapshot(folder: Path, repository: Path = REPOSITORY) -> Snapshot:
    """Copy the code into `folder`, unless this very code is there already.

    Tracked files come as they stand in the working tree, with new ones that git does not ignore; outside git, all. The
    copy also holds the difference to its revision.

    Raises:
        RunError: there is no code.
    """
    files = _files(repository)
    if not files:
        raise RunError(f"{repository} has none of the code that jobs run: wanted files in {', '.join(CODE)}")
    revision, _ = git_revision(repository)
    dirty = bool(git_output(repository, "status", "--porcelain", "--untracked-files=all", "--", *CODE))
    path = folder / f"{revision[:10]}-{_digest(repository, files)[:10]}"
    label = revision + ("+dirty" if dirty else "")
    if not path.is_dir():
        with atomic_folder(path, "snapshot of the code") as new:
            for name in files:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(repository / name, new / name)
            about = {"revision": revision, "dirty": dirty, "taken": datetime.now(UTC).isoformat(timespec="seconds")}
            write_json(new / ABOUT, about, "snapshot of the code")
            (new / CHANGES).write_text(git_output(repository, "diff", "HEAD", "--", *CODE) or "", encoding="utf8")
        path.chmod(0o700)
    return Snapshot(path, label)


def _files(repository: Path) -> list[str]:
    listed = git_output(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CODE)
    if listed is None:
        found = (path for name in CODE for path in (repository / name).rglob("*") if path.is_file())
        return sorted(str(p.relative_to(repository)) for p in found if not _LEFT_OUT & set(p.parts))
    return sorted(name for name in set(listed.split("\0")) if name and (repository / name).is_file())


def _digest(repository: Path, files: list[str]) -> str:
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name}\0{sha256_file(repository / name)}\0".encode())
    return digest.hexdigest()
