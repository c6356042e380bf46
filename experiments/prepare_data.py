"""Tokenize a training text without a GPU, so that the trainings that read it start at once.

    python -m experiments.prepare_data model=1.5b data=path:/data/corpus
    python -m experiments.prepare_data config=runs/local/train/config.yaml

Takes the options of `experiments.train` and fills `data.cache_dir` with the tokenizer and the token files that this
training will look for. A second call finds them and ends. `text.json` in the run's folder says what is there.
Exit codes: 0 done, 1 failed, 2 wrong configuration.
"""

from __future__ import annotations

import logging
import time

from experiments.data.batches import prepare_text
from experiments.run.config import entry
from experiments.run.files import write_json
from experiments.run.train_config import TEXT, TrainConfig

log = logging.getLogger(__name__)


def main(config: TrainConfig) -> None:
    """Make, or find, the tokenizer and the token files of `config`; write text.json, which only depends on the tokens.

    Raises:
        DataError: missing, empty or damaged text, or a tokenizer that does not fit the model.
        StorageError: the disk is full.
    """
    start = time.perf_counter()
    tokenizer, tokens = prepare_text(config.data, config.model.vocab_size)
    log.info(
        "%s: %d training and %d validation tokens (vocabulary of %d) in %s, %.0f s",
        config.data.source,
        len(tokens.train),
        len(tokens.validation),
        len(tokenizer),
        config.data.cache_dir,
        time.perf_counter() - start,
    )
    sizes = {"training_tokens": len(tokens.train), "validation_tokens": len(tokens.validation)}
    write_json(config.run.folder / TEXT, {"key": tokens.key, "vocabulary": len(tokenizer), **sizes}, "note of the text")


if __name__ == "__main__":
    entry(main, TrainConfig)
