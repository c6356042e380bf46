"""Tokenize a training text without a GPU, so that the trainings that read it start at once.

    python -m experiments.prepare_data model=1.5b data=path:/data/corpus
    python -m experiments.prepare_data config=runs/local/train/config.yaml

Takes the options of `experiments.train` and fills `data.cache_dir` with the tokenizer and the token files that this
training will look for. A second call finds them and ends. `text.json` in the run's folder says what is there. In a
study this counts as done while those files are in the cache and the text is still the one that they were made from; a
text that has changed since is refused.
Exit codes: 0 done, 1 failed, 2 wrong configuration.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from experiments.run.config import entry, to_dict
from experiments.run.errors import DataError
from experiments.run.files import write_json
from experiments.run.train_config import TEXT, WITHOUT_EFFECT, TrainConfig

log = logging.getLogger(__name__)


def main(config: TrainConfig) -> None:
    """Make, or find, the tokenizer and the token files of `config`; write text.json, which only depends on the tokens
    and on what was asked for.

    Raises:
        DataError: missing, empty, too short or damaged text, a tokenizer that does not fit the model, or other text
            than text.json says that the same options gave before.
        StorageError: the disk is full.
    """
    from experiments.data.batches import TokenStream, count_windows, open_sources, prepare_text, source_key

    start = time.perf_counter()
    note = _read_note(config)
    sources = open_sources(config.data)
    text = " and ".join(source.name for source in sources if source is not None)
    # What was asked for: all that the tokens depend on, but for the text itself.
    options = {key: value for key, value in to_dict(config.data).items() if f"data.{key}" not in WITHOUT_EFFECT}
    options["vocab_size"] = config.model.vocab_size
    made_before = note if note.get("options") == options else {}
    _check_same(config, made_before, "source", source_key(config.data, sources), text)
    tokenizer, tokens = prepare_text(config.data, config.model.vocab_size)
    _check_same(config, made_before, "key", tokens.key, text)
    log.info(
        "%s: %d training and %d validation tokens (vocabulary of %d) in %s, %.0f s",
        config.data.source,
        len(tokens.train),
        len(tokens.validation),
        len(tokenizer),
        config.data.cache_dir,
        time.perf_counter() - start,
    )
    # These raise what a training would, after it has waited for GPUs.
    TokenStream(tokens.train, config.training.sequence_length, config.training.seed)
    count_windows(tokens.validation, config.training.sequence_length, None)
    if note.get("key") == tokens.key:
        return  # what was made from these tokens is known by this very file
    sizes = {"training_tokens": len(tokens.train), "validation_tokens": len(tokens.validation)}
    origin = {"source": tokens.source, "text": text, "options": options}
    content = {"key": tokens.key, "vocabulary": len(tokenizer), **sizes, **origin}
    write_json(config.run.folder / TEXT, content, "note of the text")


def _read_note(config: TrainConfig) -> dict[str, Any]:
    """The content of text.json; empty if there is none, or it is damaged."""
    try:
        note = json.loads((config.run.folder / TEXT).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _check_same(config: TrainConfig, before: dict[str, Any], what: str, now: str, text: str) -> None:
    """Raises `DataError` if the same options gave other text or tokens before: what was trained on these would stand
    beside what is trained on the new ones."""
    if before.get(what, now) != now:
        raise DataError(
            f"{config.run.folder / TEXT} was made from other text ({before.get('text')}, {what} {before[what]!s:.12}) "
            f"than there is now ({text}, {now:.12}). Restore that text, or train on the new one in another folder "
            "(runs=..., run.dir=...), so that the two do not mix"
        )


def problem(config: TrainConfig) -> str | None:
    """Why the tokens that text.json names are not those of `config` and of its text as it is now, None if they are.

    It is quick, and asks no hub.
    """
    from experiments.data.batches import present_source_key, token_folder
    from experiments.data.token_files import source_of_tokens

    key = (note := _read_note(config)).get("key")
    if not isinstance(key, str):
        return f"no {config.run.folder / TEXT}, or it is damaged"
    path = token_folder(config.data, key)
    made_from = source_of_tokens(path)
    if made_from is None:
        return f"no token files in {path}"
    try:
        changed = present_source_key(config.data) != made_from
    except DataError as error:
        return str(error)
    return f"the text has changed: it was {note.get('text', config.data.source)}" if changed else None


if __name__ == "__main__":
    entry(main, TrainConfig)
