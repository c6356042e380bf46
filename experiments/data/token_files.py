"""Token files: packed documents, each followed by the end token, read through a memory map.

A folder holds `train.bin` and `validation.bin` (little-endian uint16, or uint32 for vocabularies beyond 65536) and
`header.json`, with the number of tokens and what they were made from. The folder is written atomically.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from experiments.data.encode import Encoder
from experiments.run.errors import DataError
from experiments.run.files import atomic_folder, write_json

SPLITS = ("train", "validation")
FORMAT = 1
HEADER = "header.json"
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


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder: `splits["train"]` and `splits["validation"]` are read-only memory maps, 1-D."""

    path: Path
    header: Header
    splits: dict[str, numpy.memmap]


def open_token_folder(path: Path) -> TokenFolder:
    """Open a folder of token files. Raises `DataError` if it has another format, is truncated, or lacks a file."""
    advice = f"delete the folder {path} and start again: it is made again"
    try:
        header = Header(**json.loads((path / HEADER).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path / HEADER} cannot be read ({error}); {advice}") from error
    if header.format != FORMAT:
        raise DataError(f"{path} has token files of format {header.format}, wanted {FORMAT}; {advice}")
    if header.dtype not in DTYPES or not _are_counts(header.tokens):
        raise DataError(f"{path / HEADER} is damaged: it lacks fields or has wrong values; {advice}")
    return TokenFolder(path, header, {split: _map(path, split, header, advice) for split in SPLITS})


def _are_counts(tokens: object) -> bool:
    """Whether they are valid numbers of tokens for every split."""
    if not isinstance(tokens, dict) or tokens.keys() != set(SPLITS):
        return False
    return all(isinstance(count, int) and count > 0 for count in tokens.values())


def _map(path: Path, split: str, header: Header, advice: str) -> numpy.memmap:
    file = path / f"{split}.bin"
    dtype = numpy.dtype(header.dtype).newbyteorder("<")
    wanted = header.tokens[split] * dtype.itemsize
    size = file.stat().st_size if file.is_file() else None
    if size != wanted:
        state = "is missing" if size is None else f"has {size} bytes, wanted {wanted} ({header.tokens[split]} tokens)"
        raise DataError(f"{file} {state}; {advice}")
    return numpy.memmap(file, dtype=dtype, mode="r")


def write_token_folder(
    path: Path,
    documents: Iterator[tuple[str, str]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    source_key: str,
    tokenizer_key: str,
    enough: Callable[[dict[str, int]], bool] = lambda tokens: False,
) -> None:
    """Tokenize `documents`, pairs of (split, text), into the token files of a new folder at `path`.

    Reading stops once `enough(tokens by split)` returns True. Raises `DataError` if a split stays empty and
    `StorageError` if the disk is full; in both cases nothing is left on disk.
    """
    dtype = DTYPES[len(tokenizer) > 1 << 16]
    with atomic_folder(path, "token files") as folder, contextlib.ExitStack() as stack:
        files = {split: stack.enter_context((folder / f"{split}.bin").open("wb")) for split in SPLITS}
        writers = {split: _SplitWriter(file, tokenizer.eos_token_id, dtype) for split, file in files.items()}
        _tokenize(documents, Encoder(tokenizer.backend_tokenizer, dtype), writers, enough)
        for split, writer in writers.items():
            if writer.tokens == 0:
                raise DataError(
                    f"no document was found for the {split} split: "
                    "see data.source, data.validation and data.validation_share"
                )
            files[split].flush()
        counts = {
            name: {split: getattr(writer, name) for split, writer in writers.items()}
            for name in ("tokens", "documents", "text_bytes")
        }
        header = Header(FORMAT, dtype, tokenizer_key, source_key, tokenizer.eos_token_id, **counts)
        write_json(folder / HEADER, asdict(header), "token files")


class _SplitWriter:
    """Appends documents to one token file and counts them."""

    def __init__(self, file: BinaryIO, end_token: int, dtype: str) -> None:
        self._file = file
        self._end = numpy.array([end_token], dtype=numpy.dtype(dtype).newbyteorder("<")).tobytes()
        self.tokens = self.documents = self.text_bytes = 0

    def add(self, ids: bytes, text: str) -> None:
        self._file.write(ids + self._end)
        self.tokens += len(ids) // len(self._end) + 1
        self.documents += 1
        self.text_bytes += len(text.encode("utf8", "surrogatepass"))


def _tokenize(
    documents: Iterator[tuple[str, str]],
    encoder: Encoder,
    writers: dict[str, _SplitWriter],
    enough: Callable[[dict[str, int]], bool],
) -> None:
    with tqdm(desc="tokenize", unit="B", unit_scale=True, disable=None) as bar:
        for batch in _read_ahead(_batches(documents)):
            encoded = encoder.encode([text for _, text in batch])
            for (split, text), ids in zip(batch, encoded, strict=True):
                writers[split].add(ids, text)
                if enough({name: writer.tokens for name, writer in writers.items()}):
                    return
            bar.update(sum(len(text) for _, text in batch))


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for split, text in documents:
        batch.append((split, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read_ahead(batches: Iterator[list[tuple[str, str]]]) -> Iterator[list[tuple[str, str]]]:
    """Read and decompress the next batch in a thread while this one is tokenized."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield batch
