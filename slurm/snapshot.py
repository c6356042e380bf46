"""Copies the working tree at submission: the code that jobs run.

A copy is named by its revision and its content, so that all submissions of the same code share one.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.run.environment import REPOSITORY, git_output, git_revision
from experiments.run.errors import RunError
from experiments.run.files import atomic_folder, sha256_file, sha256_json, write_json

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
        path = [str(self.path), str(self.path / "kernels"), *([others] if others else [])]
        return {
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONSAFEPATH": "1",  # else the folder where the job was submitted comes first
            "TWELL_REVISION": self.revision,
            "GIT_CEILING_DIRECTORIES": str(self.path.parent),  # the repository around it is at another revision by then
        }

    def exports(self) -> list[str]:
        """The same as lines of shell, with the PYTHONPATH of the shell."""
        code = shlex.quote(os.pathsep.join([str(self.path), str(self.path / "kernels")]))
        others = {name: value for name, value in self.environment().items() if name != "PYTHONPATH"}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in others.items()]
        return [f'export PYTHONPATH={code}"${{PYTHONPATH:+:$PYTHONPATH}}"', *lines]


def take_snapshot(folder: Path, repository: Path = REPOSITORY) -> Snapshot:
    """Copy the code into `folder`, unless this very code is there already.

    Tracked files come as they stand in the working tree, with new ones that git does not ignore; outside git, all. The
    copy also holds the difference to its revision.

    Raises:
        RunError: there is no code.
    """
    listed = git_output(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CODE)
    if listed is None:
        paths = [path.relative_to(repository) for name in CODE for path in (repository / name).rglob("*")]
        names = [str(path) for path in paths if not _LEFT_OUT & set(path.parts)]
    else:
        names = [name for name in listed.split("\0") if name]
    files = sorted({name for name in names if (repository / name).is_file()})
    if not files:
        raise RunError(f"{repository} has none of the code that jobs run: wanted files in {', '.join(CODE)}")
    revision, _ = git_revision(repository)
    dirty = bool(git_output(repository, "status", "--porcelain", "--untracked-files=all", "--", *CODE))
    digest = sha256_json([[name, sha256_file(repository / name)] for name in files])
    path = folder / f"{revision[:10]}-{digest[:10]}"
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
