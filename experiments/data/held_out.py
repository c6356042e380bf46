"""Which documents of a text without a validation split are held out: a share of them, by their content."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from experiments.data.sources import Source
from experiments.run.errors import DataError

# Where the end of a document is held out, it has at least as many characters (some 4,000 tokens), or a third of the
# document: enough for a sequence of a training.
_LEAST_CHARACTERS = 1 << 14
log = logging.getLogger(__name__)


def document_share(text: str) -> float:
    """A number in [0, 1) from a document's content alone, so that the held-out set does not depend on their order."""
    digest = hashlib.blake2b(text.encode("utf8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


@dataclass(frozen=True)
class HeldOut:
    """Held out are documents whose `document_share` is below `share`, and the last `characters` of the document whose
    `document_share` is `cut`."""

    share: float
    cut: float | None = None
    characters: int = 0

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """Pairs of (split, text): of a document, or of its two parts."""
        share = document_share(text)
        if share != self.cut:
            yield "validation" if share < self.share else "train", text
            return
        latest = len(text) - self.characters
        earliest = latest - self.characters
        # After the end of a line, or else of a word.
        place = text.rfind("\n", earliest, latest) + 1 or text.rfind(" ", earliest, latest) + 1 or latest
        yield "train", text[:place]
        yield "validation", text[place:]


def hold_out(source: Source, share: float) -> HeldOut:
    """A share of the documents; where that is none of them, or all, the end of the longest.

    Raises:
        DataError: there is no text, or too little to cut.
    """
    characters, longest, held_out = 0, "", set()
    for text in source.documents():
        characters += len(text)
        longest = max(longest, text, key=len)
        held_out.add(document_share(text) < share)
        if len(held_out) == 2:  # some are, some are not
            return HeldOut(share)
    if not longest:
        raise DataError(f"{source.name} has no text")
    if len(longest) < 3:
        raise DataError(f"{source.name} has {characters} characters of text: too few to hold any out")
    size = min(max(int(share * characters), _LEAST_CHARACTERS), len(longest) // 3)
    log.info(
        "%s has too few documents to hold out a share of %s: of the longest, the last %d characters are held out",
        source.name,
        share,
        size,
    )
    return HeldOut(0.0, document_share(longest), size)
