"""Write a trained model as a Hugging Face folder, to be used without this repository.

    python -m experiments.export checkpoint=runs/local/train out=models/mine

`AutoModelForCausalLM.from_pretrained("models/mine")` then loads it as a Llama whose gate is a ReLU, with its tokenizer
beside it; `twell.sparsify` makes it sparse. Models without a gate cannot be written: no Llama of transformers is one.
Exit codes: 0 done, 1 failed, 2 wrong configuration.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.run.config import entry, option
from experiments.run.errors import CheckpointError, StorageError
from experiments.run.files import atomic_folder

log = logging.getLogger(__name__)


@dataclass
class ExportConfig:
    """Write a model that was trained here as a Hugging Face folder."""

    checkpoint: str = option("", "run folder (its newest whole checkpoint), or one checkpoint", required=True)
    out: str = option("", "the folder to make; it must not exist", required=True)
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "of the weights; float32: as trained")


def main(config: ExportConfig) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files to `config.out`.

    Raises:
        CheckpointError: when there is no checkpoint, it is damaged, or transformers has no such model.
        StorageError: when `out` exists or cannot be written.
    """
    import torch

    from experiments.models.checkpoint import load_trained
    from twell.huggingface import OTHER_ENGINES

    out = Path(config.out)
    if out.exists():
        raise StorageError(f"out={out} exists: choose another folder, or delete it")
    loaded = load_trained(config.checkpoint, dtype=getattr(torch, config.dtype))
    if loaded.training is None or loaded.tokenizer is None:
        raise CheckpointError(
            f"{config.checkpoint} is no run of experiments.train: it is a Hugging Face folder already"
        )
    if not loaded.config.gated:
        raise CheckpointError(
            f"{config.checkpoint} has no gate, and transformers has no such Llama: use experiments.models.checkpoint."
            "load_trained"
        )
    with atomic_folder(out, "exported model") as folder:
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors lets its owner alone read it
    log.info("%s, step %d: a Hugging Face model in %s", loaded.training.run.item, loaded.step, out)
    if loaded.config.activation != "silu":
        log.warning(OTHER_ENGINES)


if __name__ == "__main__":
    entry(main, ExportConfig)
