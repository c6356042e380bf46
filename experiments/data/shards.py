"""Tokenizes text, in one process or, where there is much of it in several files, in one for each core.

A process reads, decompresses and encodes whole shards (files that follow each other) into files of its own. The first
process appends these in the order of the text, so that the tokens are the same however many processes there are. None
of them holds more than two batches of text in memory.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy
from tokenizers import Tokenizer
from tqdm import tqdm

from experiments.data.encode import Encoder
from experiments.data.held_out import HeldOut
from experiments.data.sources import Source
from experiments.run.errors import RunError

SPLITS = ("train", "validation")
# One batch is tokenized while the next is read.
_BATCH_CHARACTERS = 4 << 20
# Of files, as they are on the disk: what is worth a task of its own, and what is worth starting processes, which takes
# four seconds.
_SHARD_BYTES = 8 << 20
_PARALLEL_BYTES = 32 << 20
# One line of `Part.documents`.
_DOCUMENT = numpy.dtype([("split", "u1"), ("tokens", "i8"), ("text_bytes", "i8")])
# What imports slowly and main programs import: children, which import the main program, find it there.
_PRELOADED = ("experiments.data.batches",)


@dataclass(frozen=True)
class Shard:
    """Documents of files that follow each other, of one split or with some held out. `size`: bytes of the files, 0 if
    there are none."""

    streams: tuple[Callable[[], Iterator[str]], ...]
    split: str | HeldOut
    size: int = 0

    def documents(self) -> Iterator[tuple[str, str]]:
        """Pairs of (split, text)."""
        for text in filter(None, itertools.chain.from_iterable(stream() for stream in self.streams)):
            if isinstance(self.split, HeldOut):
                yield from self.split.split(text)
            else:
                yield self.split, text


def shards_of(source: Source, split: str | HeldOut) -> list[Shard]:
    """The documents of a source in order, small files together."""
    found: list[Shard] = []
    streams: list[Callable[[], Iterator[str]]] = []
    size = 0
    for stream, file in itertools.zip_longest(source.streams, source.files):
        streams.append(stream)
        size += file.stat().st_size if file is not None else 0
        if size >= _SHARD_BYTES:
            found.append(Shard(tuple(streams), split, size))
            streams, size = [], 0
    return [*found, Shard(tuple(streams), split, size)] if streams else found


@dataclass(frozen=True)
class Budget:
    """How many tokens to make at least: `max_tokens` of training and, where documents are held out, their share of as
    many. Without `max_tokens`: all."""

    max_tokens: int | None = None
    held_out: float | None = None

    def reached(self, tokens: Mapping[str, int]) -> bool:
        """Whether these are enough, by split."""
        if self.max_tokens is None or tokens["train"] < self.max_tokens:
            return False
        return self.held_out is None or tokens["validation"] >= self.held_out * self.max_tokens


@dataclass
class Counts:
    """What was written, by split. `tokens` include an end token for each document."""

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))

    def add(self, split: str, tokens: int, text_bytes: int) -> None:
        self.tokens[split] += tokens
        self.documents[split] += 1
        self.text_bytes[split] += text_bytes


@dataclass(frozen=True)
class Encoding:
    """How documents become bytes: a serialized tokenizer, the type of an id, and the id that ends a document."""

    tokenizer: str
    dtype: str
    end_token: int

    @property
    def end(self) -> bytes:
        return numpy.array([self.end_token], dtype=numpy.dtype(self.dtype).newbyteorder("<")).tobytes()

    def encoder(self, cores: int | None = None) -> Encoder:
        """An encoder that uses this many cores; None: all."""
        return Encoder(Tokenizer.from_str(self.tokenizer), self.dtype, cores)


def tokenize(
    shards: Sequence[Shard], encoding: Encoding, files: Mapping[str, BinaryIO], budget: Budget, scratch: Path
) -> Counts:
    """Append the documents of the shards to the files of their splits until the budget is reached.

    `scratch` is a folder on a disk with room for the tokens of some shards.

    Raises:
        DataError: a damaged file.
        RunError: a process was killed.
    """
    cores = len(os.sched_getaffinity(0))
    processes = min(cores, len(shards))
    with tqdm(desc="tokenize", unit="B", unit_scale=True, disable=None) as bar:
        if processes < 2 or sum(shard.size for shard in shards) < _PARALLEL_BYTES:
            counts = Counts()
            documents = itertools.chain.from_iterable(shard.documents() for shard in shards)
            for split, tokens, text_bytes in _write(documents, encoding, encoding.encoder(), files, budget):
                counts.add(split, tokens, text_bytes)
                bar.update(text_bytes)
            return counts
        with tempfile.TemporaryDirectory(dir=scratch, prefix="parts-") as folder:
            run = functools.partial(_tokenize_shard, encoding=encoding, cores=cores // processes, budget=budget)
            with contextlib.closing(_in_processes(run, shards, Path(folder), processes, cores // processes)) as parts:
                return _join(parts, files, len(encoding.end), budget, bar)


def _write(
    documents: Iterator[tuple[str, str]],
    encoding: Encoding,
    encoder: Encoder,
    files: Mapping[str, BinaryIO],
    budget: Budget,
) -> Iterator[tuple[str, int, int]]:
    """Write documents until they reach the budget: (split, tokens, bytes of the text) of each."""
    end, written = encoding.end, Counts()
    for batch in _read_ahead(_batches(documents)):
        encoded = encoder.encode([text for _, text in batch])
        for (split, text), ids in zip(batch, encoded, strict=True):
            files[split].write(ids + end)
            tokens, text_bytes = len(ids) // len(end) + 1, len(text.encode("utf8", "surrogatepass"))
            written.add(split, tokens, text_bytes)
            yield split, tokens, text_bytes
            if budget.reached(written.tokens):
                return


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


# --- several processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The tokens of one shard: a file for each split, and what is in them, document by document."""

    files: Mapping[str, Path]
    documents: numpy.ndarray


def _tokenize_shard(shard: Shard, target: Path, *, encoding: Encoding, cores: int, budget: Budget) -> Part:
    """Runs in a process of its own; stops where the shard alone would reach the budget."""
    paths = {split: target.with_name(f"{target.name}-{split}.bin") for split in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(path.open("wb")) for split, path in paths.items()}
        found = [
            (SPLITS.index(split), tokens, text_bytes)
            for split, tokens, text_bytes in _write(
                shard.documents(), encoding, _encoder(encoding, cores), files, budget
            )
        ]
    return Part(paths, numpy.array(found, dtype=_DOCUMENT))


@functools.lru_cache(1)
def _encoder(encoding: Encoding, cores: int) -> Encoder:
    """Kept from shard to shard, with the words that it has met."""
    return encoding.encoder(cores)


def _join(parts: Iterator[Part], files: Mapping[str, BinaryIO], width: int, budget: Budget, bar: tqdm) -> Counts:
    """Append the parts; of the last one only as many documents as the budget needs. `width`: bytes of an id."""
    counts = Counts()
    for part in parts:
        own = Counts()
        for number, tokens, text_bytes in part.documents.tolist():
            for one in (counts, own):
                one.add(SPLITS[number], tokens, text_bytes)
            if budget.reached(counts.tokens):
                break
        for split, path in part.files.items():
            with path.open("rb") as file:
                _copy(file, files[split], own.tokens[split] * width)
            path.unlink()
        bar.update(sum(own.text_bytes.values()))
        if budget.reached(counts.tokens):
            break
    return counts


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size and (block := source.read(min(size, 1 << 20))):
        target.write(block)
        size -= len(block)


def _in_processes(
    run: Callable[[Shard, Path], Part], shards: Sequence[Shard], folder: Path, processes: int, cores: int
) -> Generator[Part, None, None]:
    """The parts of the shards, in order. Only so many shards are begun before they are asked for."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit locks of its threads
    context.set_forkserver_preload(list(_PRELOADED))
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(cores,))
    waiting = iter(enumerate(shards))
    pending: collections.deque[Future[Part]] = collections.deque()
    try:
        while True:
            for number, shard in itertools.islice(waiting, 2 * processes - len(pending)):
                pending.append(pool.submit(run, shard, folder / f"{number:06}"))
            if not pending:
                break
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        because = "a process that tokenized was killed, perhaps for lack of memory"
        raise RunError(f"{because}: give more memory, or fewer cores (taskset, cluster.cpus)") from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(cores: int) -> None:
    """Prepare a new process: leave Ctrl-C and the signals of SLURM to the first process, and end with it."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(cores)  # of `tokenizers`
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
