"""Makes batches of tokens from a data configuration, in an order that depends only on the seed.

The text of a source is packed into token files once and cached by content. Training reads contiguous windows of
`sequence_length + 1` tokens (inputs and targets) in a new random order each epoch. Sample i of a run is always the same
window, for any number of devices, any micro-batch, and across restarts.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from experiments.data.held_out import hold_out
from experiments.data.sources import Source, open_texts
from experiments.data.token_files import FORMAT, SPLITS, open_token_folder, write_token_folder
from experiments.data.tokenizer import load_tokenizer, tokenizer_key
from experiments.run.errors import ConfigError, DataError
from experiments.run.files import sha256_json
from experiments.run.train_config import DataConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

# As `data.validation_share`: nothing is trained on, and all is held-out text.
WHOLE = 1.0
log = logging.getLogger(__name__)


def open_sources(config: DataConfig, *, ask_hub: bool = True) -> tuple[Source, Source | None]:
    """(training source, validation source); the second is None if a share of the documents is held out instead.

    Files of `data.validation` are never used for training. `ask_hub`: as in `open_texts`. Raises `DataError` for
    missing text.
    """
    options: dict[str, Any] = {"text_field": config.text_field, "cache_dir": config.cache_dir, "ask_hub": ask_hub}
    if not config.validation:
        return open_texts(config.source, **options)
    whole, held_out = open_texts(config.validation, **options)
    validation = held_out or whole
    return open_texts(config.source, exclude=validation.files, **options)[0], validation


class Tokens(NamedTuple):
    """Open token files: 1-D memory maps of uint16 or uint32. `key` identifies their content, `source` the text that
    they were made from."""

    train: numpy.ndarray
    validation: numpy.ndarray
    key: str
    source: str


def token_folder(config: DataConfig, key: str) -> Path:
    """Where the token files with this key are, if they are in the cache."""
    return Path(config.cache_dir) / "tokens" / key


def source_key(config: DataConfig, sources: tuple[Source, Source | None]) -> str:
    """Identifies the text of a configuration, and which of it is held out: tokens depend on it and on the tokenizer."""
    train, validation = sources
    held_out = config.validation_share if validation is None else None
    return sha256_json([train.key, validation and validation.key, held_out, config.max_tokens])


def present_source_key(config: DataConfig) -> str:
    """The `source_key` of the text as it is now: of a data set of the hub, of the commit that the cache notes. Reads
    only files that have changed, and asks no hub.

    Raises:
        DataError: there is no text, or no note of the commit.
    """
    return source_key(config, open_sources(config, ask_hub=False))


def changed_source(config: DataConfig, before: str | None) -> str | None:
    """The `present_source_key` of a configuration, if the text is another than that with the key `before`; None if it
    is the same, or cannot be compared: nothing says what it was, or it is gone."""
    if before is None:
        return None
    try:
        now = present_source_key(config)
    except DataError as error:
        log.info("the text cannot be compared with what was trained on: %s", error)
        return None
    return now if now != before else None


def prepare_text(
    config: DataConfig, vocab_size: int, checked: Collection[str] = SPLITS
) -> tuple[PreTrainedTokenizerFast, Tokens]:
    """The tokenizer and token files of a configuration, made if they are not in the cache.

    `checked`: the splits whose content is compared with its checksum.

    Raises `DataError` for missing, empty or damaged data, or a tokenizer with more than `vocab_size` entries.
    """
    sources = open_sources(config)
    tokenizer = load_tokenizer(config, vocab_size, *sources)
    return tokenizer, prepare_tokens(config, tokenizer, sources, checked)


def prepare_tokens(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    sources: tuple[Source, Source | None] | None = None,
    checked: Collection[str] = SPLITS,
) -> Tokens:
    """The token files of a configuration, made if they are not in the cache; `checked`: as in `prepare_text`.

    Raises `DataError` for missing, empty or damaged data.
    """
    if config.source.startswith("hf:") and config.max_tokens is None:
        raise ConfigError("a data set of the hub is read up to data.max_tokens: set it")
    train, validation = sources = sources or open_sources(config)
    source = source_key(config, sources)
    key = sha256_json([FORMAT, source, tokenizer_key(tokenizer)])[:32]
    path = token_folder(config, key)
    if not path.is_dir():
        log.info("tokenizing %s into %s", train.name, path)
        enough: dict[str, float] = {}
        if config.max_tokens is not None:
            enough["train"] = config.max_tokens
            if validation is None:
                enough["validation"] = config.validation_share * config.max_tokens
        write_token_folder(
            path,
            _documents(train, validation, config),
            tokenizer,
            source_key=source,
            tokenizer_key=tokenizer_key(tokenizer),
            enough=enough,
        )
    splits = open_token_folder(path, checked)
    return Tokens(splits["train"][: config.max_tokens], splits["validation"], key, source)


def _documents(train: Source, validation: Source | None, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Pairs of (split, text). A separate validation text comes first, so that reading may stop in the training text."""
    if validation is None and config.validation_share < WHOLE:
        held_out = hold_out(train, config.validation_share)
        return itertools.chain.from_iterable(map(held_out.split, train.documents()))
    texts = {"validation": train} if validation is None else {"validation": validation, "train": train}
    for source in texts.values():
        if next(source.documents(), None) is None:
            raise DataError(f"{source.name} has no text")
    return ((split, text) for split, source in texts.items() for text in source.documents())


class TokenStream:
    """The training order: sample i is one window of `sequence_length + 1` tokens.

    Windows start every `sequence_length` tokens, so each token is a target once per epoch; each epoch has its own
    permutation, drawn from (seed, epoch). Raises `DataError` if there is not even one window, and when a window is read
    with an id that has no row in the model's embedding (`vocab_size`).
    """

    def __init__(self, tokens: numpy.ndarray, sequence_length: int, seed: int, vocab_size: int | None = None) -> None:
        self.windows = (len(tokens) - 1) // sequence_length
        if self.windows < 1:
            raise DataError(
                f"the training text has {len(tokens)} tokens: too few for one sequence of {sequence_length}"
            )
        self._tokens, self._length, self._seed, self._vocab_size = tokens, sequence_length, seed, vocab_size
        self._epoch, self._order = -1, numpy.empty(0, dtype=numpy.int64)

    def samples(self, first: int, count: int) -> Tensor:
        """Samples first .. first + count - 1: int64 [count, sequence_length + 1], on the CPU."""
        chosen = []
        for sample in range(first, first + count):
            epoch, place = divmod(sample, self.windows)
            if epoch != self._epoch:
                generator = numpy.random.default_rng([self._seed, epoch])
                self._epoch, self._order = epoch, generator.permutation(self.windows)
            chosen.append(int(self._order[place]))
        return windows(self._tokens, chosen, self._length, self._vocab_size)


def windows(tokens: numpy.ndarray, indices: list[int] | range, length: int, vocab_size: int | None = None) -> Tensor:
    """Windows `indices` of `length + 1` tokens, one every `length` tokens: int64 [len(indices), length + 1].

    Raises `DataError` for an id that is not below `vocab_size`, for which an embedding on a GPU fails obscurely.
    """
    rows = numpy.stack([tokens[index * length : (index + 1) * length + 1] for index in indices])
    if vocab_size is not None and (largest := int(rows.max(initial=0))) >= vocab_size:
        where = f" in {tokens.filename}" if isinstance(tokens, numpy.memmap) else ""
        raise DataError(
            f"there is a token {largest}{where}, but the model has {vocab_size} rows: the file is damaged, or of "
            "another tokenizer"
        )
    import torch

    return torch.from_numpy(rows.astype(numpy.int64))


def count_windows(
    tokens: numpy.ndarray,
    sequence_length: int,
    max_tokens: int | None,
    advice: str = "raise data.validation_share, lower training.sequence_length, or name a text with data.validation",
) -> int:
    """The number of windows in a text, with at most `max_tokens` targets. Raises `DataError` if there is none."""
    count = (len(tokens) - 1) // sequence_length
    if count < 1:
        text = f"the held-out text has {len(tokens)} tokens"
        raise DataError(f"{text}: too few for one sequence of {sequence_length}; {advice}")
    return count if max_tokens is None else min(count, max(1, max_tokens // sequence_length))


def text_batches(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    batch: int,
    max_tokens: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[Tensor]:
    """The held-out text in order: int64 [<= batch, sequence_length + 1], on the CPU (inputs and targets together).

    At most `max_tokens` targets. Raises `DataError` for missing, empty or damaged data, text that is too short, or an
    id that is not below `vocab_size`.
    """
    tokens = prepare_tokens(config, tokenizer, checked=("validation",)).validation
    count = count_windows(tokens, sequence_length, max_tokens, "name a longer text: data=...")
    for first in range(0, count, batch):
        yield windows(tokens, range(first, min(first + batch, count)), sequence_length, vocab_size)
