"""Writes files that are either complete or absent: under a temporary name first, then synced and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.run.errors import FULL_DISK, StorageError, is_storage_error
from experiments.run.values import shown

# A file whose content changed so recently may change again without its times showing it.
_SETTLED_SECONDS = 2.0
_CHECKSUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


@contextlib.contextmanager
def storage_errors(path: Path, what: str) -> Iterator[None]:
    """Inside the block, turn the errors of a place that cannot be written (a full, broken or read-only disk, a file
    where a folder should be, a name that is too long) into a `StorageError` that names the path."""
    try:
        yield
    except Exception as error:  # tokenizers raises just this
        if not is_storage_error(error):
            raise
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        free = ""
        if not isinstance(error, OSError) or error.errno in FULL_DISK:
            existing = next(parent for parent in [path, *path.absolute().parents] if parent.exists())
            free = f" ({shutil.disk_usage(existing).free / 1e9:.3f} GB free)"
        place = str(path) if len(str(path)) < 300 else shown(str(path))
        raise StorageError(f"cannot write {what} at {place}: {said}{free}") from error


def make_folder(path: Path, what: str) -> None:
    """Make the folder, so that what a long run ends with can be written there.

    Raises:
        StorageError: there can be no such folder, or no file in it.
    """
    with storage_errors(path, what):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # of /proc, which takes no folders
            raise StorageError(f"cannot make the folder {path}") from error
        with tempfile.TemporaryFile(dir=path):
            pass


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk, so that a later rename never exposes incomplete content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes, what: str = "file") -> None:
    """Write `content` to `path` so that a reader sees the old file or the new one, never a part.

    Raises `StorageError` when the disk cannot take it; the old file then stays, and no temporary file.
    """
    data = content.encode() if isinstance(content, str) else content
    with storage_errors(path, what):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(0o644)  # mkstemp makes it private
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        fsync(path.parent)


def write_json(path: Path, content: Any, what: str = "file") -> None:
    """Write `content` as JSON, atomically. NaN and infinities raise: they are no JSON."""
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n", what)


@contextlib.contextmanager
def atomic_folder(path: Path, what: str = "folder", *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill. It becomes `path` when the block ends, and is deleted when the block raises.

    If there is something at `path` by then, it is deleted when `replace` is true; otherwise it stays, since another
    process has written the same content. Raises `StorageError` when the disk cannot take the content.
    """
    with storage_errors(path, what):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".tmp-{path.name}-"))
        temporary.chmod(0o755)
        try:
            yield temporary
            for file in temporary.iterdir():
                fsync(file)
            fsync(temporary)
            if replace and path.exists():
                delete_folder(path)
            try:
                temporary.rename(path)
            except OSError:
                if not path.is_dir():
                    raise
            fsync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def delete_folder(path: Path) -> None:
    """Delete a folder. It is renamed first, so that an interrupted deletion leaves nothing at `path` that looks
    damaged."""
    doomed = path.with_name(f".tmp-old-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Sequence[Path], kept: Path) -> list[str]:
    """Hexadecimal SHA-256 of each file. Those in the file `kept` are taken from there while a file's size, inode and
    times are as they were then: what has been read once, however large, is not read again. It is brought up to date
    where it can be written."""
    before: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        before = json.loads(kept.read_text(encoding="utf8"))
    if not isinstance(before, dict):
        before = {}
    now: dict[str, list[Any]] = {}
    digests = []
    for path in paths:
        began, status = time.time(), path.stat()
        stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        found = before.get(str(path))
        if isinstance(found, list) and len(found) == 5 and found[:4] == stamp:
            digest = str(found[4])
        else:
            digest = sha256_file(path)
        if began - max(status.st_mtime, status.st_ctime) > _SETTLED_SECONDS:
            now[str(path)] = [*stamp, digest]
        digests.append(digest)
    if now != before:
        with contextlib.suppress(StorageError):
            write_json(kept, now, "checksums")
    return digests


def write_checksums(path: Path, digests: Mapping[str, str]) -> None:
    """Write the SHA-256 of files that lie beside `path`, by name, in the form that `sha256sum --check` reads."""
    write_atomic(path, "".join(f"{digest}  {name}\n" for name, digest in digests.items()), "checksums")


def check_checksums(path: Path, names: Iterable[str]) -> None:
    """Compare these files, which lie beside `path`, with the checksums in it.

    Raises:
        FileNotFoundError: there are no checksums.
        ValueError: a file, or that of the checksums, is damaged or cannot be read; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not text") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    digests = {match[2]: match[1] for line in lines if (match := _CHECKSUM.fullmatch(line))}
    for name in names:
        file = path.with_name(name)
        if name not in digests:
            raise ValueError(f"{path} is damaged: it has no checksum of {name}")
        try:
            digest = sha256_file(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error
        if digest != digests[name]:
            raise ValueError(f"{file} is damaged: its SHA-256 is not the one in {path.name}")


def sha256_json(content: Any) -> str:
    """Hexadecimal SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
