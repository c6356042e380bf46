"""Tokenizers: a byte-level BPE trained on the text and cached by its content, or any fast Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.data.held_out import HeldOut, hold_out
from experiments.data.sources import Source
from experiments.run.errors import DataError
from experiments.run.files import atomic_folder, check_checksums, sha256_json, write_atomic, write_checksums
from experiments.run.train_config import DataConfig
from experiments.run.values import in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_TOKEN = "<|endoftext|>"
# It has the 49152 entries of table 2, and is the tokenizer of the paper's training corpus.
HUB_DEFAULT = "HuggingFaceTB/cosmo2-tokenizer"
_BPE_FORMAT = 1  # part of the cache key: increase it when `train_bpe` or the choice of its sample changes
log = logging.getLogger(__name__)


def load_tokenizer(
    config: DataConfig, vocab_size: int, source: Source, validation: Source | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer of a configuration; `vocab_size` is the size of a BPE trained here, on `source` without what is
    held out of it where there is no `validation`. One of the hub is kept in the cache folder, and taken from there from
    then on: it then needs no network, and the ids of a text stay the same.

    Raises `DataError` if it cannot be loaded, has no end token, or has more entries than the model has rows.
    """
    name = config.tokenizer
    if name == "auto":
        name = HUB_DEFAULT if config.source.startswith("hf:") else "bpe"
    if name == "bpe":
        tokenizer = _cached_bpe(config, vocab_size, source, validation)
    else:
        tokenizer = named_tokenizer(name) if Path(name).exists() else _kept_tokenizer(name, config.cache_dir)
    if len(tokenizer) > vocab_size:
        raise DataError(
            f"the tokenizer {name} has {len(tokenizer)} entries, but the model only {vocab_size} rows: "
            f"set model.vocab_size={len(tokenizer)} or more"
        )
    if (largest := max(tokenizer.get_vocab().values(), default=-1)) >= vocab_size:  # a vocabulary may have gaps
        raise DataError(f"the tokenizer {name} has the id {largest}, but the model only {vocab_size} rows")
    return tokenizer


def named_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """A tokenizer from the hub (gpt2) or a local folder. Raises `DataError` if there is none, or it is not usable.

    It is read from tokenizer.json where there is one: that is complete. AutoTokenizer of transformers 5 makes some
    kinds anew from their vocabulary, with another splitting of digits and spaces (huggingface/transformers issue
    45812), and next to an unknown model it would need that model's code.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    try:
        if os.path.lexists(file := Path(name) / "tokenizer.json") and not file.is_file():
            raise DataError(f"{file} is {'a folder' if file.is_dir() else 'a link to nothing'}, not a file")
        reader: Any = PreTrainedTokenizerFast
        try:
            cached_file(str(name), "tokenizer.json")
        except OSError:  # as transformers says that there is none
            reader = AutoTokenizer
        tokenizer = reader.from_pretrained(name)
    except Exception as error:
        raise DataError(f"cannot load the tokenizer {name}: {in_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(f"the tokenizer {name} has no fast version (tokenizer.json)")
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer {name} has no end token (eos_token) to separate documents with")
    return tokenizer


def _kept_tokenizer(name: str, cache_dir: str) -> PreTrainedTokenizerFast:
    readable = re.sub(r"[^\w.-]+", "--", name)[-80:]
    path = Path(cache_dir) / "tokenizers" / f"{readable}-{sha256_json(name)[:12]}"
    if path.is_dir():
        log.info("the tokenizer %s is the one kept in %s; for the newest, delete that folder", name, path)
    else:
        tokenizer = named_tokenizer(name)
        with atomic_folder(path, "tokenizer") as folder:
            tokenizer.save_pretrained(folder)
    return named_tokenizer(path)


def tokenizer_key(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of everything that determines the ids of a text."""
    content = tokenizer.backend_tokenizer.to_str() + f"|{tokenizer.eos_token_id}"
    return hashlib.sha256(content.encode()).hexdigest()


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A trained tokenizer in the class that transformers and lm-eval expect."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_TOKEN, bos_token=END_TOKEN)


def _cached_bpe(
    config: DataConfig, vocab_size: int, source: Source, validation: Source | None
) -> PreTrainedTokenizerFast:
    share = 0.0 if config.validation else config.validation_share
    key = sha256_json([_BPE_FORMAT, source.key, vocab_size, config.tokenizer_sample_mb, share])[:32]
    path = Path(config.cache_dir) / "tokenizers" / f"{key}.json"
    checksums = path.with_name(f"{path.name}.sha256")
    if not path.is_file():
        log.info("training a BPE tokenizer of %d entries on %s", vocab_size, source.name)
        held_out = HeldOut(share) if validation is not None or not share else hold_out(source, share)
        sample = _sample(source, config.tokenizer_sample_mb * 1_000_000, held_out)
        content = train_bpe(sample, vocab_size).to_str().encode()
        # First: what is there without its tokenizer is written anew.
        write_checksums(checksums, {path.name: hashlib.sha256(content).hexdigest()})
        write_atomic(path, content, "tokenizer")
    advice = f"delete {path} and start again: it is made anew"
    try:
        check_checksums(checksums, [path.name])
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{error}; {advice}") from error
    try:
        return wrap(Tokenizer.from_file(str(path)))  # transformers copies it, and damage may show only in the copy
    except Exception as error:
        raise DataError(f"the tokenizer {path} cannot be read ({in_one_line(error)}); {advice}") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's splitting) of `vocab_size` entries, the end token and all 256 bytes included.

    It has fewer entries if the text has nothing left to merge. Raises `DataError` if `vocab_size` cannot hold the
    bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(f"a byte-level BPE has more than {len(alphabet)} entries, got vocab_size={vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _sample(source: Source, size: int, held_out: HeldOut) -> Iterator[str]:
    """Equally many characters from the beginning of every file, `size` in total, without held-out documents."""
    quota = -(-size // len(source.streams))
    for stream in source.streams:
        left = quota
        for text in (text for whole in stream() for split, text in held_out.split(whole) if split == "train"):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
