"""Counts which neurons fire on real text: per layer, by position, by token, and in groups of consecutive tokens.

    python -m experiments.gather_nonzeros checkpoint=runs/demo/relu_l1_1e-4 run.study=demo

Figures 6, 7, 10 and 11 of the paper and the notebooks on neurons and tokens are drawn from what this writes into its
folder: `rows.csv` and, one table each, `nonzeros_by_layer`, `nonzeros_by_neuron`, `nonzeros_histogram`,
`nonzeros_by_position`, `nonzeros_by_token`, `nonzeros_unions` and, the first tokens of the text with the neurons that
fire for each, `nonzeros_masks` (parquet).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from experiments.run.config import entry, option, section
from experiments.run.output import OutputConfig
from experiments.run.train_config import A_TEXT_SOURCE, LARGEST_SIZE, TEXT_SOURCE
from experiments.run.values import A_DEVICE, DEVICE
from twell.names import check_name

FIGURE_7 = "the paper, figure 7"


@dataclass
class GatherConfig:
    """Count active neurons on real text."""

    checkpoint: str = option(
        "", "run folder, checkpoint, or Hugging Face folder or hub name of the model", required=True
    )
    data: str = option(
        "",
        "text: stdlib, path:... (all of it, or its validation split by the names of files) or hf:...; empty: what the "
        "model was trained on. Of hf: as much is read as it takes to have `tokens` of the split",
        pattern=TEXT_SOURCE,
        wanted=A_TEXT_SOURCE,
    )
    split: Literal["validation", "train"] = option("validation", "which part of the text is read")
    tokens: int = option(2**20, "tokens to read, at most what the text has", unit="tokens", source=FIGURE_7, minimum=1)
    sequence: int = option(
        0, "tokens of one sequence; 0: as the model was trained", unit="tokens", minimum=0, maximum=LARGEST_SIZE
    )
    batch: int = option(16, "sequences in one forward", minimum=1, maximum=LARGEST_SIZE)
    groups: list[int] = option(
        [16, 32, 64, 128, 256],
        "sizes of the groups of consecutive tokens; those that are longer than a sequence are left out",
        unit="tokens",
        required=True,
        distinct=True,
        minimum=1,
    )
    dead_windows: list[int] = option(
        [2**15, 2**17, 2**20],
        "numbers of tokens over which a neuron that never fires counts as dead; windows that "
        "the text does not fill are left out",
        unit="tokens",
        source="2^20 is one optimizer step of the paper, its definition of dead",
        distinct=True,
        minimum=1,
    )
    mask_tokens: int = option(
        2**11,
        "tokens at the beginning of the text whose neurons are kept one by one (N/8 bytes a layer); 0: none",
        unit="tokens",
        minimum=0,
    )
    backend: str = option("dense", "backend of the feed-forward blocks", required=True, check=check_name)
    device: str = option(
        "auto", "cpu, cuda, cuda:1, ...; auto: CUDA if there is one", required=True, pattern=DEVICE, wanted=A_DEVICE
    )
    run: OutputConfig = section(OutputConfig, "where results go")


def main(config: GatherConfig, report: Callable[..., None] | None = None) -> None:
    """Gather, and write rows and tables into the folder of the run."""
    from experiments.implementation import gather_nonzeros

    gather_nonzeros.main(config, report)


if __name__ == "__main__":
    entry(main, GatherConfig)
