"""Encodes text to packed token ids, several times faster than a tokenizer alone and with exactly the same result.

A byte-level BPE splits text into words (GPT-2's pattern) and merges inside each word, so equal words have equal ids.
Here text is cut into chunks only where GPT-2's pattern always has a boundary, whatever the Unicode tables: between runs
of ASCII letters, digits, punctuation and white space. Text around other characters stays in one chunk. Most chunks are
then single words that have occurred before, whose ids are in a dictionary; the tokenizer encodes the others.

Tokenizers that split in another way are used directly. So is any tokenizer on a machine with many cores: the dictionary
is single-threaded, while `tokenizers` encodes the texts of a batch on all cores.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import numpy
from tokenizers import Tokenizer

# Enough for the words of a language; longer chunks hardly ever repeat.
_CACHE_ENTRIES = 1 << 20
_CACHED_CHARACTERS = 64
# One thread with the dictionary is about as fast as this many without it.
_MANY_CORES = 16
_LETTERS, _DIGITS, _SPACE = "A-Za-z", "0-9", r" \t\n\r"
_PUNCTUATION = r"!-&(-/:-@\[-`{-~"  # without the apostrophe, which begins the contractions ('s, 'll) of the pattern


class Encoder:
    """Encodes texts to bytes: little-endian ids of `dtype`. Special tokens that are spelled out are treated as text.

    `cores`: those that it has; by default, all of this process.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: str, cores: int | None = None) -> None:
        serialized = tokenizer.to_str()
        self._backend = Tokenizer.from_str(serialized)
        self._backend.encode_special_tokens = True
        self._dtype = numpy.dtype(dtype).newbyteorder("<")
        many_cores = (cores or len(os.sched_getaffinity(0))) >= _MANY_CORES
        self._chunks = None if many_cores else chunk_pattern(json.loads(serialized))
        self._cache: dict[str, bytes] = {}

    def encode(self, texts: list[str]) -> list[bytes]:
        if self._chunks is None:
            return self._encode_directly(texts)
        chunked = [self._chunks.findall(text) for text in texts]
        new = sorted({chunk for chunks in chunked for chunk in chunks}.difference(self._cache))
        self._cache.update(zip(new, self._encode_directly(new), strict=True))
        encoded = [b"".join(map(self._cache.__getitem__, chunks)) for chunks in chunked]
        # Bound the memory: drop long chunks at once, and everything if there is too much.
        for chunk in new:
            if len(chunk) > _CACHED_CHARACTERS:
                del self._cache[chunk]
        if len(self._cache) > _CACHE_ENTRIES:
            self._cache.clear()
        return encoded

    def _encode_directly(self, texts: list[str]) -> list[bytes]:
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [numpy.array(encoding.ids, dtype=self._dtype).tobytes() for encoding in encodings]


def chunk_pattern(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """The pattern of chunks for a serialized tokenizer; None if its boundaries are unknown.

    It must be a BPE that splits by GPT-2's pattern (possibly after isolating digits) and changes no text before that.
    """
    steps = tokenizer["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    known = (
        tokenizer["model"]["type"] == "BPE"
        and tokenizer["normalizer"] is None
        and all(token["special"] for token in tokenizer["added_tokens"])
        and kinds in (["ByteLevel"], ["Digits", "ByteLevel"])
        and last.get("use_regex", True)
        and not last["add_prefix_space"]
    )
    return _pattern(digits_split=kinds[0] == "Digits") if known else None


def _pattern(digits_split: bool) -> re.Pattern[str]:
    """Each alternative starts and ends at a boundary of GPT-2's pattern.

    A run of one class, with the space before it, ends where another known class begins. The last character of white
    space belongs to the text after it or is separate. If digits are isolated first, white space before them is divided
    differently, so digits count as unknown. Unknown text extends to the next known non-space before a space.
    """
    runs = [_LETTERS, _PUNCTUATION] if digits_split else [_LETTERS, _DIGITS, _PUNCTUATION]
    visible = "".join(runs)
    words = [f" ?[{run}]+(?=[{''.join(set(runs) - {run})}{_SPACE}]|\\Z)" for run in runs]
    spaces = [f"[{_SPACE}]+(?=[{_SPACE}][{visible}]|\\Z)", rf"[\t\n\r](?=[{visible}])"]
    unknown = [f"(?s:.+?)(?:(?<=[{visible}])(?=[{_SPACE}])|\\Z)"]
    return re.compile("|".join(words + spaces + unknown))
