"""Which files of `path:FILE|FOLDER|GLOB` are read, by the rule in `experiments.data.sources`."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from experiments.run.errors import DataError
from experiments.run.values import name_shown

TEXT_SUFFIXES = (".txt", ".md")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")
_SPLITS = {
    "train": re.compile(r"(train|training)([-_.]|$)", re.IGNORECASE),
    "validation": re.compile(r"(val|valid|validation|dev)([-_.]|$)", re.IGNORECASE),
    "test": re.compile(r"(test|testing)([-_.]|$)", re.IGNORECASE),
}
_NAMES_SHOWN = 4


@dataclass(frozen=True)
class Selection:
    """The files of each split in order, and the names of those that are left out, by the reason."""

    train: list[Path]
    validation: list[Path] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """What is read and what is not, in one line."""
        parts = [f"reads {_listed([file.name for file in self.train])}"]
        if self.validation:
            parts.append(f"holds out {_listed([file.name for file in self.validation])}")
        return "; ".join([*parts, f"leaves out {reasons(self.left_out) or 'nothing'}"])


def reasons(left_out: dict[str, list[str]]) -> str:
    """Names of files that are left out, and why."""
    return ", ".join(f"{_listed(sorted(names))} ({reason})" for reason, names in left_out.items())


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(name_shown, names[:_NAMES_SHOWN]))
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def is_kind(path: Path, *suffixes: str) -> bool:
    """Whether a file's name ends with one of these, in upper or lower case."""
    return path.name.lower().endswith(suffixes)


def select_files(pattern: str) -> Selection:
    """The text files of a file, folder or glob. Raises `DataError` if there are none."""
    path = Path(pattern).expanduser()
    if path.is_file():
        if not is_kind(path, *SUFFIXES):
            advice = "; with one JSON record a line, call it .jsonl" if is_kind(path, ".json") else ""
            raise DataError(f"{path} is none of {', '.join(SUFFIXES)}{advice}")
        return Selection([path.absolute()])
    left_out: dict[str, list[str]] = {}
    if path.is_dir():
        literal = path.parts
        candidates = _walk(path, left_out)
    else:
        literal = tuple(itertools.takewhile(lambda part: not re.search(r"[*?\[]", part), path.parts))
        candidates = _glob(Path(*literal), path.parts[len(literal) :])
    root = Path(*literal)
    chosen = _readable(root, path.parts[len(literal) :], candidates, left_out)
    if data := {place: file for place, file in chosen.items() if not is_kind(file, *TEXT_SUFFIXES)}:
        texts = [file for place, file in chosen.items() if place not in data]
        _leave_out(left_out, "text beside data files", texts, root)
        chosen = data
    if not chosen:
        state = "has no" if path.is_dir() else "is missing, or a glob without"
        others = f"; it has {reasons(left_out)}" if left_out else ""
        raise DataError(f"path:{pattern} {state} text files ({', '.join(SUFFIXES)}){others}")
    files = [chosen[place] for place in sorted(chosen)]
    splits: dict[str | None, list[Path]] = defaultdict(list)
    for file in files:
        splits[split_of(file.relative_to(root))].append(file)
    training = "train" if splits["train"] or not data else None
    if not splits[training] or not (splits["validation"] or splits["test"]):
        return Selection([file.absolute() for file in files], left_out=left_out)
    _leave_out(left_out, "test split", splits["test"], root)
    if training:
        _leave_out(left_out, "neither training nor validation split", splits[None], root)
    train, validation = ([file.absolute() for file in splits[split]] for split in (training, "validation"))
    return Selection(train, validation, left_out)


def split_of(path: Path) -> str | None:
    """ "train", "validation" or "test" for names like train-00.jsonl.xz, val.jsonl and test/0.jsonl, as the hub's data
    sets are named."""
    for part in reversed(path.parts):
        for split, names in _SPLITS.items():
            if names.match(part):
                return split
    return None


def _readable(
    root: Path, wildcards: tuple[str, ...], candidates: Iterator[Path], left_out: dict[str, list[str]]
) -> dict[Path, Path]:
    """Files by their true places: of several ways to a file, the one without a link."""
    places = {file: Path(os.path.realpath(file)) for file in candidates}
    chosen: dict[Path, Path] = {}
    for file in sorted(places, key=lambda file: (file.is_symlink(), places[file] != file.absolute(), file)):
        if any(part.startswith(".") and part not in wildcards for part in file.relative_to(root).parts):
            reason = "hidden"
        elif not is_kind(file, *SUFFIXES):
            reason = "of another kind"
        elif not file.is_file():
            reason = "no file, or a link to nothing"
        elif places[file] in chosen:
            reason = "another link to a file that is read"
        else:
            chosen[places[file]] = file
            continue
        _leave_out(left_out, reason, [file], root)
    return chosen


def _leave_out(left_out: dict[str, list[str]], reason: str, files: list[Path], root: Path) -> None:
    for file in files:
        left_out.setdefault(reason, []).append(str(file.relative_to(root)))


def _walk(root: Path, left_out: dict[str, list[str]]) -> Iterator[Path]:
    """All files below a folder. Linked folders come last, and each folder once: links may form a circle."""

    def unreadable(error: OSError) -> None:
        _leave_out(left_out, f"{error.strerror}", [Path(error.filename)], root)

    roots, visited = [root], set()
    for start in roots:
        for folder, names_of_folders, names in os.walk(start, onerror=unreadable):
            if (place := os.path.realpath(folder)) in visited:
                names_of_folders.clear()
                continue
            visited.add(place)
            yield from (Path(folder, name) for name in names)
            _leave_out(left_out, "hidden", [Path(folder, name) for name in names_of_folders if name[0] == "."], root)
            names_of_folders[:] = [name for name in names_of_folders if name[0] != "."]
            roots += [link for name in names_of_folders if (link := Path(folder, name)).is_symlink()]


def _glob(root: Path, wildcards: tuple[str, ...]) -> Iterator[Path]:
    try:
        yield from (match for match in (root.glob(str(Path(*wildcards))) if wildcards else ()) if not match.is_dir())
    except ValueError as error:
        raise DataError(f"path:{root / Path(*wildcards)} is no valid glob: {error}") from error
