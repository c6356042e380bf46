"""Records firing rates at some steps of a training: which neurons die, when, and which recover.

`nonzeros_in_training.parquet` in the run's folder has one row for each of these steps, layer and neuron. All rates are
measured on the same held-out tokens, so steps differ only in the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
from pyarrow import ArrowInvalid
from torch import Tensor

from experiments.run.errors import DataError
from experiments.run.files import storage_errors, write_atomic

FILE = "nonzeros_in_training.parquet"
# The maximum number of held-out tokens; a neuron that fires for none of them counts as dead at that step.
TOKENS = 2**14


def is_due(step: int, steps: int) -> bool:
    """Whether to record the rates after this step: powers of two and the last step. Neurons die early, and even the
    longest training has only about twenty such steps."""
    return step == steps or step & (step - 1) == 0


def append(run_dir: Path, step: int, tokens: int, rates_LN: Tensor, columns: dict[str, Any]) -> None:
    """Add the rates of one step, measured on `tokens` tokens; `columns` say which run it is.

    Raises `StorageError` when the disk is full, `DataError` when the file is damaged.
    """
    layers, neurons = rates_LN.shape
    new = pandas.DataFrame(
        {
            **columns,
            "step": step,
            "tokens": tokens,
            "layer": [layer for layer in range(layers) for _ in range(neurons)],
            "neuron": list(range(neurons)) * layers,
            "rate": rates_LN.flatten().float().cpu().numpy(),
        }
    )
    path, parts = run_dir / FILE, [new]
    if path.is_file():
        try:
            with storage_errors(path, "firing rates"):
                parts.insert(0, pandas.read_parquet(path))
        except (ArrowInvalid, ValueError) as error:
            restored = "the same command restores it from the last checkpoint"
            raise DataError(f"{path} is damaged: {error}; {restored}") from error
    content = pandas.concat(parts, ignore_index=True).to_parquet(index=False, compression="zstd")
    write_atomic(path, content, "firing rates")
