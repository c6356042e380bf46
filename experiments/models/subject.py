"""The model of a measurement, trained or random, with the columns that describe it and text to run it on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.data.batches import WHOLE, changed_source, text_batches
from experiments.models.checkpoint import load_trained
from experiments.models.llama import build_model
from experiments.models.pretrained import LoadedModel
from experiments.run.errors import ConfigError, DataError
from experiments.run.train_config import DataConfig, ModelConfig, model_columns, training_columns

LONGEST = 2048  # tokens per sequence of models that were not trained here


@dataclass(frozen=True)
class Subject:
    """A model, and its name in the results: the name of its training run, its folder, or its configuration.

    `random_seed` is the one that random weights were drawn with; None for others.
    """

    name: str
    loaded: LoadedModel
    random_seed: int | None = None

    @property
    def model(self) -> PreTrainedModel:
        return self.loaded.model

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a result row that identify the model."""
        training, columns = self.loaded.training, model_columns(self.loaded.config)
        return columns | (training_columns(training, self.loaded.step or 0) if training else {"seed": self.random_seed})

    @property
    def autocast(self) -> bool:
        """Whether its products ran in bfloat16 when it was trained."""
        training = self.loaded.training
        return training is not None and training.training.precision == "bfloat16"

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence: as in its training, else the most that it supports, up to LONGEST."""
        if self.loaded.training:
            return self.loaded.training.training.sequence_length
        return min(self.loaded.config.max_positions or LONGEST, LONGEST)

    def check_length(self, tokens: int, what: str = "sequence") -> None:
        """Raises `ConfigError` for a sequence of more tokens than the model has positions."""
        longest = self.loaded.config.max_positions
        if longest is not None and tokens > longest:
            raise ConfigError(f"{self.name} takes at most {longest} tokens; {what}={tokens}")

    def batches(self, batch: int, sequence: int = 0, max_tokens: int | None = None, data: str = "") -> Iterator[Tensor]:
        """Held-out text in order: int64 [<= batch, sequence + 1]; inputs and targets overlap by one. Files that `data`
        names are all read, unless their names are splits or they are those of the training.

        Args:
            sequence: tokens of a sequence; 0: `sequence_length`.
            max_tokens: how many at most (targets). Needed for a data set of the hub that `data` names, of which no more
                is read.
            data: another text than that of the model's training: stdlib, path:... or hf:...

        Raises:
            ConfigError: when the model has fewer positions.
            DataError: without a text or a tokenizer, when the text is too short, or when that of the training has
                changed since: another part of it may be held out now.
        """
        self.check_length(sequence)
        if self.loaded.tokenizer is None:
            raise DataError(f"{self.name} has no tokenizer, so it cannot read any text")
        sequence = sequence or self.sequence_length
        needed = None if max_tokens is None else max(max_tokens, sequence) + 1
        return text_batches(
            self._data(data, needed), self.loaded.tokenizer, sequence, batch, max_tokens, self.loaded.config.vocab_size
        )

    def _data(self, source: str, needed: int | None) -> DataConfig:
        """The text that `source` names, or that of the training; of the hub's, what has `needed` tokens held out."""
        training = self.loaded.training
        if training is None and not source:
            raise DataError(f"{self.name} was not trained here: name the text to read, data=stdlib|path:...|hf:...")
        own = training.data if training else DataConfig()
        if not source:
            if changed_source(own, self.loaded.source):
                raise DataError(
                    f"{self.name} was trained on other text: that of {own.source} has changed since, and what is held "
                    "out now may have been trained on. Restore that text, or name another: data=stdlib|path:...|hf:..."
                )
            return own
        if source.startswith("path:"):
            if own.source.startswith("path:") and _place(source) == _place(own.source):
                return own
            return replace(own, source=source, validation="", validation_share=WHOLE, max_tokens=None)
        other = replace(own, source=source, validation="")
        if source == "stdlib":
            return other
        return replace(other, max_tokens=None if needed is None else math.ceil(needed / other.validation_share))

    def text(self, batch: int, sequence: int, seed: int = 0, data: str = "") -> Tensor:
        """One batch of token ids, int64 [batch, sequence + 1] (inputs and targets overlap by one): validation text from
        its beginning, repeated if it is too short; for a random model `random_ids`. data, errors: see `batches`."""
        if self.random_seed is not None:
            return self.random_ids(batch, sequence, seed)
        self.check_length(sequence)
        ids_BS = next(self.batches(batch, sequence, batch * (sequence or self.sequence_length), data))
        return ids_BS.repeat(-(-batch // len(ids_BS)), 1)[:batch]

    def random_ids(self, batch: int, sequence: int, seed: int) -> Tensor:
        """Uniformly random token ids, int64 [batch, sequence + 1]."""
        self.check_length(sequence)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.loaded.config.vocab_size, (batch, sequence + 1), generator=generator)


def _place(source: str) -> Path:
    return Path(source.removeprefix("path:")).expanduser().resolve()


def load_subject(
    which: str | ModelConfig, device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> Subject:
    """A trained model by its run folder, checkpoint or Hugging Face name, or a random model of a shape.

    Raises:
        CheckpointError: when there is none, or it is damaged.
    """
    if isinstance(which, ModelConfig):
        model = build_model(which, seed=seed, device=device, dtype=dtype or torch.float32)
        return Subject(which.name, LoadedModel(model.eval(), None, which), random_seed=seed)
    loaded = load_trained(which, device=device, dtype=dtype)
    return Subject(loaded.training.run.item if loaded.training else Path(which).name, loaded)
