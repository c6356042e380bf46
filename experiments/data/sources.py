"""Sources of text: the standard library, local files, or the Hugging Face hub. Documents are streamed.

    stdlib                      the sources of the running Python's standard library
    path:FILE|FOLDER|GLOB       data files (.jsonl .jsonl.gz .jsonl.xz .jsonl.zst .parquet), or text (.txt .md)
    hf:NAME[:CONFIG][@SPLIT]    a data set of the hub (split: train)
    hf:NAME@REVISION:[CONFIG][@SPLIT]    the same at a commit, branch or tag of its repository

A file that is named is read. Of the files in a folder and its subfolders, also linked ones, or that a glob matches:

1. Hidden files and folders (.git) and files of other kinds (.json) are left out. A suffix may be in upper case.
2. Each file is read once, however many links lead to it.
3. Data files are read alone: text beside them (README.md, LICENSE.txt) is left out.
4. Files whose name, or whose subfolder's, begins with train, val (valid, validation, dev) or test, as in train-00.jsonl
   or test/0.parquet, are splits. Beside val or test files, only train files are trained on, or, where there are none,
   data files without a split. val files are held out, and test files left out.

The log lists what is read, and what is left out and why. A byte-order mark is no text. Records without a text are
skipped and counted, up to a tenth of each file's.

A source always yields the same documents in the same order, and has a key that identifies its content. For a data set
of the hub, the key names its commit. The newest one is asked for once and noted in the cache folder. From then on the
note counts, so that a text that was tokenized needs no network and does not change when its authors add to it.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import logging
import lzma
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from experiments.data.selection import TEXT_SUFFIXES, is_kind, select_files
from experiments.run.errors import DataError
from experiments.run.files import sha256_files, sha256_json, write_json
from experiments.run.values import in_one_line

# A long text file is cut at line ends into documents of about this many characters (some 16,000 tokens). This bounds
# memory, and of a single file of some megabytes there are documents to hold out.
TEXT_DOCUMENT_CHARACTERS = 1 << 16
BYTE_ORDER_MARK = "\ufeff"
# Share of a file's records that may lack a text.
_MOST_SKIPPED = 0.1
# A file with fewer records may have as many without text as one of this many.
_FEW_RECORDS = 100
# Excluded: test data, code tables, and packages that pip installed beside the standard library.
STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_HUB_NAME = re.compile(
    r"(?P<name>[^@:]+)(@(?P<revision>[^@:\[\]]+)(?=:))?(:(?P<config>[^@]*))?(@(?P<split>.*))?", re.DOTALL
)
A_HUB_NAME = "hf:NAME[:CONFIG][@SPLIT] or hf:NAME@REVISION:[CONFIG][@SPLIT]"
_COMMIT = re.compile(r"[0-9a-f]{40}")
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, pyarrow.ArrowException)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Documents that can be read repeatedly: `key` identifies their content, `streams` yields them file by file."""

    name: str
    key: str
    streams: list[Callable[[], Iterator[str]]]
    files: tuple[Path, ...] = ()

    def documents(self) -> Iterator[str]:
        """All non-empty documents, in order. Raises `DataError` for damaged files."""
        for stream in self.streams:
            yield from filter(None, stream())


def open_texts(
    specification: str, *, text_field: str, cache_dir: str, exclude: Iterable[Path] = (), ask_hub: bool = True
) -> tuple[Source, Source | None]:
    """(the source that a specification names, the validation text beside it or None): see the module.

    Args:
        specification: stdlib, path:... or hf:...
        text_field: JSON key or parquet column that holds the text.
        cache_dir: where the checksums of files and the commits of data sets of the hub are kept.
        exclude: files to skip in a folder.
        ask_hub: whether the hub may be asked for a commit that is not noted in `cache_dir`. If so, the log lists files.

    Raises:
        DataError: there are no files, a file is of an unknown kind, or the commit of a data set cannot be found.
    """
    kind, _, rest = specification.partition(":")
    if specification == "stdlib":
        return _stdlib(cache_dir), None
    if kind == "hf" and rest:
        return _hub(rest, text_field, cache_dir, ask_hub), None
    if kind != "path" or not rest:
        raise DataError(f"a source is stdlib, path:... or hf:..., got {specification!r}")
    selection = select_files(rest)
    if ask_hub:
        log.info("%s: %s", specification, selection)
    excluded = {file.resolve() for file in exclude}
    files = [file for file in selection.train if file.resolve() not in excluded]
    if not selection.validation:
        return _source_of_files(specification, files, text_field, cache_dir), None
    train = _source_of_files(f"{specification} (train)", files, text_field, cache_dir)
    return train, _source_of_files(f"{specification} (validation)", selection.validation, text_field, cache_dir)


# --- files ------------------------------------------------------------------------------------------------------------


def _source_of_files(name: str, files: list[Path], text_field: str, cache_dir: str) -> Source:
    """The documents of these files, in this order. Raises `DataError` for no files."""
    if not files:
        raise DataError(f"{name}: no text files are left")
    reading: list[Any] = []
    for file in (file for file in files if is_kind(file, *TEXT_SUFFIXES)):
        reading = reading or [TEXT_DOCUMENT_CHARACTERS]
        with file.open("rb") as opened:
            if opened.read(3) == BYTE_ORDER_MARK.encode():
                reading = [TEXT_DOCUMENT_CHARACTERS, "without byte-order marks"]
    digests = _checksums(files, cache_dir)
    named = [[file.resolve().name, digest] for file, digest in zip(files, digests, strict=True)]
    key = sha256_json([text_field, named, *reading])
    streams: list[Callable[[], Iterator[str]]] = [functools.partial(read_file, file, text_field) for file in files]
    return Source(name, key, streams, tuple(files))


def _checksums(files: list[Path], cache_dir: str) -> list[str]:
    name = f"{sha256_json([str(file) for file in files])[:32]}.json"
    return sha256_files(files, Path(cache_dir) / "checksums" / name)


def read_file(path: Path, text_field: str) -> Iterator[str]:
    """The documents of one file, streamed. Raises `DataError` that names the file for damage, and for too many records
    without text, or no others."""
    try:
        if is_kind(path, *TEXT_SUFFIXES):
            with open_text(path) as file:
                while lines := file.readlines(TEXT_DOCUMENT_CHARACTERS):
                    yield "".join(lines)
        elif is_kind(path, ".parquet"):
            yield from _texts(_read_parquet(path, text_field), text_field, f"{path}, row")
        else:
            yield from _texts(_read_json_lines(path), text_field, f"{path}, line")
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing") from error
    except (*DAMAGE, OSError) as error:
        raise DataError(f"{path} is damaged or not UTF-8 text: {type(error).__name__}: {error}") from error


def _read_parquet(path: Path, text_field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with pyarrow.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        if text_field not in schema.names:
            raise DataError(f"{path} has no column {text_field!r}, only {schema.names} (data.text_field)")
        kind = schema.field(text_field).type
        stored = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if stored not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise DataError(f"{path}: the column {text_field!r} holds {kind}, not text (data.text_field)")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for value in batch.column(0):
                row += 1
                yield row, {text_field: value.as_py()}


def _read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line := line.removeprefix(BYTE_ORDER_MARK).strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: not JSON: {error}") from error


def _texts(records: Iterable[tuple[int, Any]], text_field: str, place: str) -> Iterator[str]:
    """The texts of numbered records. Up to the share _MOST_SKIPPED may have none: they are counted in the log."""
    skipped, count, first = 0, 0, ""
    for count, (number, record) in enumerate(records, 1):
        if not (problem := _problem(record, text_field)):
            yield record[text_field]
            continue
        skipped += 1
        first = first or f"{place} {number}: {problem}"
        if skipped > _MOST_SKIPPED * max(count, _FEW_RECORDS):
            most = f"at most {_MOST_SKIPPED:.0%} of a file's may be"
            raise DataError(f"{first}; {skipped} of the first {count} records are without text, and {most}")
    if skipped and skipped == count:
        raise DataError(f"{first}; no record has a text")
    if skipped:
        _warn(f"{skipped} of {count} records without text are skipped, the first: {first}")


@functools.lru_cache
def _warn(message: str) -> None:
    """Log a warning once, though a file may be read several times."""
    log.warning("%s", message)


def _problem(record: Any, text_field: str) -> str:
    """Why a record has no text; empty if it has one."""
    if not isinstance(record, dict) or text_field not in record:
        has = sorted(record) if isinstance(record, dict) else type(record).__name__
        return f"no text under {text_field!r}; the record has {has} (data.text_field names the field)"
    text = record[text_field]
    if not isinstance(text, str):
        return f"no text under {text_field!r}, but {'null' if text is None else type(text).__name__}"
    if (lone := _SURROGATE.search(text)) is not None:
        return f"the text under {text_field!r} is not valid Unicode: it has a lone surrogate, U+{ord(lone[0]):04X}"
    return ""


def open_text(path: Path) -> io.TextIOBase:
    """UTF-8 text, by its suffix compressed, without a byte-order mark at its beginning."""
    suffix = path.suffix.lower()
    if suffix == ".zst":  # the standard library reads zstd from Python 3.14 on only
        return io.TextIOWrapper(pyarrow.input_stream(str(path), compression="zstd"), encoding="utf-8-sig")
    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(suffix, open)
    return opener(path, "rt", encoding="utf-8-sig")


# --- the standard library ---------------------------------------------------------------------------------------------


def _stdlib(cache_dir: str) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if STDLIB_LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    if not files:
        raise DataError(f"this Python has no standard library sources in {root}: use data=path:...")
    digests = _checksums(files, cache_dir)
    named = [[str(file.relative_to(root)), digest] for file, digest in zip(files, digests, strict=True)]
    key = sha256_json(["stdlib", named])
    return Source("stdlib", key, [functools.partial(_read_python, file) for file in files], tuple(files))


def _read_python(path: Path) -> Iterator[str]:
    with tokenize.open(path) as file:  # reads the file's own encoding declaration
        yield file.read()


# --- the hub ----------------------------------------------------------------------------------------------------------


def _hub(rest: str, text_field: str, cache_dir: str, ask: bool) -> Source:
    parts = _HUB_NAME.fullmatch(rest)
    if parts is None:
        raise DataError(f"a data set of the hub is {A_HUB_NAME}, got hf:{rest}")
    name, revision, config, split = (parts[group] or "" for group in ("name", "revision", "config", "split"))
    commit = revision if _COMMIT.fullmatch(revision) else _noted_commit(name, revision, cache_dir, ask)
    key = sha256_json(["hf", name, config, split, commit, text_field])
    read = functools.partial(_read_hub, name, config or None, split or "train", commit, text_field)
    return Source(f"hf:{rest} at commit {commit}", key, [read])


def _noted_commit(name: str, revision: str, cache_dir: str, ask: bool) -> str:
    """The commit that the cache notes for a data set, or, where it has none, what the hub says, which it then notes."""
    readable = re.sub(r"[^\w.-]+", "--", name)[-80:]
    note = Path(cache_dir) / "commits" / f"{readable}-{sha256_json([name, revision])[:12]}.json"
    if note.is_file():
        anew = "delete it: the hub is asked anew"
        try:
            commit = json.loads(note.read_text(encoding="utf8"))["commit"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{note} cannot be read ({in_one_line(error)}); {anew}") from error
        if not isinstance(commit, str) or not commit:
            raise DataError(f"{note} is damaged: its commit is {commit!r}; {anew}")
        if ask:
            log.info("hf:%s: commit %s, noted in %s; for the newest, delete that file", name, commit, note)
        return commit
    if not ask:
        raise DataError(f"hf:{name}: no commit of it is noted in {note}")
    commit = _ask_hub(name, revision)
    write_json(note, {"name": name, "revision": revision, "commit": commit}, "commit of a data set")
    advice = f"another can be named: hf:{name}@REVISION:[CONFIG]"
    log.info("hf:%s: commit %s, from now on, by %s; %s", name, commit, note, advice)
    return commit


def _ask_hub(name: str, revision: str) -> str:
    """The commit of a branch or tag, by default the newest. Raises `DataError` if there is none."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # the base of what its client raises, whichever package that is

    try:
        commit = huggingface_hub.HfApi().dataset_info(name, revision=revision or None).sha
    except (HTTPError, OSError, ValueError) as error:
        advice = "without a network, run experiments.prepare_data where there is one, with the same data.cache_dir"
        what = f"{type(error).__name__}: {in_one_line(error)}"
        raise DataError(f"hf:{name}: cannot get this data set from the hub ({what}); {advice}") from error
    if commit is None:
        raise DataError(f"hf:{name}: the hub gives no commit for this data set")
    return commit


def _read_hub(name: str, config: str | None, split: str, commit: str, text_field: str) -> Iterator[str]:
    import datasets
    from huggingface_hub.errors import HTTPError

    try:
        stream = datasets.load_dataset(name, config, split=split, revision=commit, streaming=True)
        yield from _texts(enumerate(stream), text_field, f"hf:{name}, record")
    except (HTTPError, OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hf:{name}, split {split}: cannot be read: {in_one_line(error)}") from error
