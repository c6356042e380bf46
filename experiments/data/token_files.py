"""Token files: packed documents, each followed by the end token, read through a memory map.

A folder holds `train.bin` and `validation.bin` (little-endian uint16, or uint32 for vocabularies beyond 65536) and
`header.json`, with the number of tokens and what they were made from. The folder is written atomically. `SHA256SUMS`
has the checksums of these files, for us and for `sha256sum --check`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy
from tokenizers import Tokenizer
from tqdm import tqdm

from experiments.run.errors import DataError
from experiments.run.files import atomic_folder, check_checksums, sha256_file, write_checksums, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLITS = ("train", "validation")
FORMAT = 1
HEADER = "header.json"
CHECKSUMS = "SHA256SUMS"
DTYPES = ("uint16", "uint32")
# One batch is tokenized while the next is read.
_BATCH_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class Header:
    """The content of `header.json`. `tokenizer` and `source` are the keys of what the tokens were made from."""

    format: int
    dtype: str
    tokenizer: str
    source: str
    end_token: int
    tokens: dict[str, int]
    documents: dict[str, int]
    text_bytes: dict[str, int]


def open_token_folder(path: Path, checked: Collection[str]) -> dict[str, numpy.ndarray]:
    """The splits "train" and "validation" of a folder, read-only memory maps, 1-D; the content of the `checked` ones is
    compared with its checksum (0.4 s for 350M tokens of 2 bytes).

    Raises `DataError` if it has another format, is truncated, lacks a file, or its content has changed.
    """
    advice = f"delete the folder {path} and start again: it is made anew"
    try:
        header = Header(**json.loads((path / HEADER).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path / HEADER} cannot be read ({error}); {advice}") from error
    if header.format != FORMAT:
        raise DataError(f"{path} has token files of format {header.format}, wanted {FORMAT}; {advice}")
    counts: list[object] = list(header.tokens.values()) if isinstance(header.tokens, dict) else []
    are_counts = all(isinstance(count, int) and count >= 0 for count in counts) and any(counts)
    if header.dtype not in DTYPES or not are_counts or header.tokens.keys() != set(SPLITS):
        raise DataError(f"{path / HEADER} is damaged: it lacks fields or has wrong values; {advice}")
    dtype, splits = numpy.dtype(header.dtype).newbyteorder("<"), {}
    for split in SPLITS:
        file, count = path / f"{split}.bin", header.tokens[split]
        wanted, size = count * dtype.itemsize, file.stat().st_size if file.is_file() else None
        if size != wanted:
            state = "is missing" if size is None else f"has {size} bytes, wanted {wanted} ({count} tokens)"
            raise DataError(f"{file} {state}; {advice}")
        splits[split] = numpy.memmap(file, dtype=dtype, mode="r") if size else numpy.empty(0, dtype)
    if checked:
        try:
            check_checksums(path / CHECKSUMS, [HEADER, *(f"{split}.bin" for split in checked)])
        except (FileNotFoundError, ValueError) as error:
            raise DataError(f"{error}; {advice}") from error
    return splits


def source_of_tokens(path: Path) -> str | None:
    """The key of the text that the token files of a folder were made from; None if there is no such folder."""
    try:
        return str(json.loads((path / HEADER).read_text())["source"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_token_folder(
    path: Path,
    documents: Iterable[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    source_key: str,
    tokenizer_key: str,
    enough: Mapping[str, float],
) -> None:
    """Tokenize documents, pairs of (split, text), into the token files of a new folder at `path`.

    `enough`: the numbers of tokens, by split, at which to stop once all are reached; empty: at the end of the text.

    Raises `DataError` if a file is damaged, `StorageError` if the disk is full; in both cases nothing is left on disk.
    """
    dtype = DTYPES[len(tokenizer) > 1 << 16]
    with atomic_folder(path, "token files") as folder, contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        counts = _write(documents, tokenizer, numpy.dtype(dtype).newbyteorder("<"), files, enough)
        for file in files.values():
            file.flush()
        header = Header(FORMAT, dtype, tokenizer_key, source_key, tokenizer.eos_token_id, **counts)
        write_json(folder / HEADER, asdict(header), "token files")
        names = [HEADER, *(f"{split}.bin" for split in SPLITS)]
        write_checksums(folder / CHECKSUMS, {name: sha256_file(folder / name) for name in names})


def _write(
    documents: Iterable[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    dtype: numpy.dtype,
    files: Mapping[str, BinaryIO],
    enough: Mapping[str, float],
) -> dict[str, dict[str, int]]:
    """Append the documents to the files of their splits; returns the counts of `Header`."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True  # those that are spelled out are text
    counts = {name: dict.fromkeys(SPLITS, 0) for name in ("tokens", "documents", "text_bytes")}
    batches = _batches(documents)
    with ThreadPoolExecutor(1) as pool, tqdm(desc="tokenize", unit="B", unit_scale=True, disable=None) as bar:
        following = pool.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, batches, None)
            encodings = backend.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            for (split, text), encoding in zip(batch, encodings, strict=True):
                ids = numpy.array([*encoding.ids, tokenizer.eos_token_id], dtype)
                files[split].write(ids.tobytes())
                size = len(text.encode())
                for name, number in (("tokens", len(ids)), ("documents", 1), ("text_bytes", size)):
                    counts[name][split] += number
                bar.update(size)
                if enough and all(counts["tokens"][split] >= number for split, number in enough.items()):
                    return counts
    return counts


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch
