"""Counts which neurons fire on real text: per layer, by position, by token, and in groups of consecutive tokens.

    python -m experiments.gather_nonzeros checkpoint=runs/demo/relu_l1_1e-4 run.study=demo

Figures 6, 7, 10 and 11 of the paper and the notebooks on neurons and tokens are drawn from what this writes into its
folder: `rows.csv` and, one table each, `nonzeros_by_layer`, `nonzeros_by_neuron`, `nonzeros_histogram`,
`nonzeros_by_position`, `nonzeros_by_token`, `nonzeros_unions` and, the first tokens of the text with the neurons that
fire for each, `nonzeros_masks` (parquet).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.run.config import entry, option, section
from experiments.run.files import storage_errors
from experiments.run.output import OutputConfig, Rows, device_of, device_option, results_folder, write_results
from experiments.run.results import make_row
from experiments.run.train_config import LARGEST_SIZE, TEXT_SOURCE

if TYPE_CHECKING:
    from torch import Tensor

    from experiments.models.subject import Subject
    from experiments.nonzeros.gatherer import Gatherer

PROGRAM = "gather_nonzeros"
log = logging.getLogger(__name__)
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
        "model was trained on. Validation split: of hf: as much is read as it takes to hold out `tokens`",
        pattern=TEXT_SOURCE,
    )
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
    mask_tokens: int = option(
        2**11,
        "tokens at the beginning of the text whose neurons are kept one by one (N/8 bytes a layer); 0: none",
        unit="tokens",
        minimum=0,
    )
    device: str = device_option()
    run: OutputConfig = section(OutputConfig, "where results go")


def gather(
    subject: Subject, batches: Iterator[Tensor], config: GatherConfig, report: Callable[..., None] | None = None
) -> Gatherer:
    """Count over all batches ([B, S + 1] token ids, of which the last of each sequence is only a target)."""
    import torch

    from experiments.nonzeros.gatherer import Gatherer

    device, sequence = subject.model.device, config.sequence or subject.sequence_length
    vocabulary = subject.loaded.config.vocab_size
    gatherer = Gatherer(subject.model, vocabulary, sequence, config.groups, config.mask_tokens)
    for ids_BS in batches:
        # What fires in training is what is counted.
        with torch.autocast(device.type, torch.bfloat16, enabled=subject.autocast):
            gatherer.add(subject.model, ids_BS[:, :-1].to(device))
        if report:
            done = gatherer.layers[0].tokens
            report(done, max(config.tokens, done), nonzeros=gatherer.layers[-1].mean())
    return gatherer


def rows_of(gatherer: Gatherer, columns: dict[str, Any], error: float) -> Rows:
    """Rows of every layer, and their mean over layers (layer empty); of dead neurons, for every window size that the
    text fills (column `tokens`)."""
    rows = []
    for index, layer in enumerate(gatherer.layers):
        p50, p99 = layer.quantiles((0.5, 0.99))
        values = {
            "nonzeros": layer.mean(),
            "nonzeros_p50": p50,
            "nonzeros_p99": p99,
            "nonzeros_max": layer.maximum(),
            "silent_fraction": layer.silent_fraction(),
            "hot_share": layer.hot_share(),
        }
        for metric, value in values.items():
            missing = {"missing": "no neuron fired"} if value is None else {"value": value}
            rows.append(
                make_row(layer=index, metric=metric, mean_nnz=layer.mean(), check_error=error, **missing, **columns)
            )
    for counters in zip(*(layer.dead for layer in gatherer.layers), strict=True):
        if counters[0].windows:
            fractions = [counter.fraction() for counter in counters]
            shared = {**columns, "metric": "dead_fraction", "tokens": counters[0].window, "n": counters[0].windows}
            rows += [make_row(**shared, layer=index, value=value) for index, value in enumerate(fractions)]
            rows.append(make_row(**shared, value=sum(fractions) / len(fractions)))
    mean = sum(layer.mean() for layer in gatherer.layers) / len(gatherer.layers)
    return [*rows, make_row(metric="nonzeros", value=mean, mean_nnz=mean, check_error=error, **columns)]


def main(config: GatherConfig, report: Callable[..., None] | None = None) -> None:
    """Gather, and write rows and tables into the folder of the run."""
    from experiments.models.subject import load_subject
    from experiments.nonzeros.tables import tables

    device = device_of(config.device)
    folder = results_folder(config, PROGRAM)
    subject = load_subject(config.checkpoint, device)
    if too_long := [group for group in config.groups if group > (config.sequence or subject.sequence_length)]:
        log.warning("groups of %s tokens are longer than a sequence, and left out", ", ".join(map(str, too_long)))
    batches = subject.batches(config.batch, config.sequence, config.tokens, config.data)
    gatherer = gather(subject, batches, config, report)
    error, tokens = gatherer.check(), gatherer.layers[0].tokens
    names = config.run.columns(PROGRAM)
    columns = {**names, **subject.columns, "op": "nonzeros", "pattern": subject.name, "tokens": tokens}
    tokenizer = subject.loaded.tokenizer
    assert tokenizer is not None  # the text was read with it
    common = {**names, "model": subject.columns["model"], "l1": subject.columns.get("l1")}
    made = tables(gatherer.layers, gatherer.token_count_V, lambda token: str(tokenizer.decode([token])), gatherer.masks)
    with storage_errors(folder, "tables of activity"):
        (folder / "nonzeros_masks.parquet").unlink(missing_ok=True)  # of an earlier call: this one may keep none
        for name, table in made.items():
            for column, value in reversed(common.items()):
                table.insert(0, column, value)
            table.to_parquet(folder / f"nonzeros_{name}.parquet", index=False)
    write_results(folder, rows_of(gatherer, {**columns, "device": device}, error), config)
    log.info("%d tokens of %s: %s", tokens, subject.name, [round(layer.mean(), 1) for layer in gatherer.layers])


if __name__ == "__main__":
    entry(main, GatherConfig)
