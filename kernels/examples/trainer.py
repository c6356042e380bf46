"""A training with Hugging Face's Trainer.

python kernels/examples/trainer.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainingArguments

from hugging_face import CONFIG
from text import batches
from twell import sparsify
from twell.trainer import AutotuneCallback, L1Schedule, SparseTrainer


def windows(steps: int, batch: int) -> list[dict[str, Tensor]]:
    """The text of the examples, one window per item."""
    return [{"input_ids": row, "labels": row} for ids in batches(steps, batch) for row in ids]


def main(folder: str | Path, steps: int = 300, l1: float = 3e-3) -> list[dict[str, float]]:
    """Train into the folder, and return what was logged."""
    torch.manual_seed(0)
    model = sparsify(AutoModelForCausalLM.from_config(CONFIG), activation="relu", keep_stats=True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        logging_steps=max(1, steps // 6),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SparseTrainer(
        model=model,
        args=arguments,
        train_dataset=windows(steps, 16),
        l1=L1Schedule(l1, ramp=steps // 10),
        callbacks=[AutotuneCallback(every=100)],
    )
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.state.log_history


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
