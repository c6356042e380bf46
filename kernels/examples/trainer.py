"""The same training with Hugging Face's Trainer: a subclass adds the L1 term, and logs what to watch.

python kernels/examples/trainer.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hugging_face import CONFIG, mean_nonzeros
from text import batches
from twell import feed_forward_blocks, l1_penalty, sparsify


class SparseTrainer(Trainer):
    """Adds `l1` times the L1 term to the loss in training. The model needs blocks with keep_stats=True."""

    def __init__(self, *arguments: Any, l1: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.l1 = l1

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:
            penalty = self.l1 * l1_penalty(model)
            # The Trainer sums losses that are already scaled to all accumulated batches, and averages others.
            if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
                penalty = penalty / self.current_gradient_accumulation_steps
            loss = loss + penalty
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        model: Any = self.model
        nonzeros = [mean_nonzeros(block) for block in feed_forward_blocks(model)]
        with torch.no_grad():  # also called after an evaluation, whose L1 term has no gradient
            logs |= {"nonzeros": sum(nonzeros) / len(nonzeros), "l1": l1_penalty(model).item()}
        super().log(logs, *arguments, **named)


class Windows(Dataset):
    """The text of the examples, one window per item."""

    def __init__(self, steps: int, batch: int) -> None:
        self.rows = torch.cat(list(batches(steps, batch)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


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
    trainer = SparseTrainer(model=model, args=arguments, train_dataset=Windows(steps, 16), l1=l1)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer.state.log_history


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(folder)
