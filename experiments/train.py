"""Train a model of the paper.

    python -m experiments.train model=0.5b sparsity.l1=2e-5 data=stdlib
    torchrun --nproc-per-node 8 -m experiments.train model=1.5b data=hf:HuggingFaceTB/smollm-corpus:fineweb-edu-dedup

The run's folder gets config.yaml, environment.json, metrics.jsonl, nonzeros_in_training.parquet, checkpoints/,
tokenizer/ and, at the end, rows.csv.
When it is started again, a run continues from its newest complete checkpoint, and a finished run returns at once.
`--help` lists every option. Exit codes: 0 done, 1 failed, 2 wrong configuration, 85 stopped after writing a checkpoint,
or before the first step (torchrun itself always turns them into 1). In the first second, before the options are read, a
signal ends the program as any other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING

from experiments.run.config import entry, load_config, save_config
from experiments.run.errors import ConfigError, DataError
from experiments.run.files import storage_errors, write_json
from experiments.run.locks import exclusive
from experiments.run.results import read_rows
from experiments.run.signals import stop_requests
from experiments.run.train_config import TrainConfig, micro_batch_size, science, science_differences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from experiments.data.batches import Tokens
    from experiments.run.distributed import Processes

ROWS = "rows.csv"
log = logging.getLogger(__name__)


def main(config: TrainConfig) -> None:
    """Train, or continue, the run of `config`; returns when it is finished.

    Raises:
        Stopped: after a signal or a limit of `config.run`; a checkpoint is written first.
        RunError: wrong options, missing or damaged data, a full disk, or a loss that is not finite; the last good
            checkpoint stays.
    """
    import torch

    from experiments.models.checkpoint import CONFIG, TOKENIZER
    from experiments.models.llama import check_backend
    from experiments.run.distributed import processes
    from experiments.run.environment import describe_environment
    from experiments.training.trackers import check_trackers
    from experiments.training.trainer import Trainer

    with processes(config.execution.device) as group, stop_requests() as request:
        if _is_finished(config):
            log.info("%s is finished", config.run.folder)
            return
        precision = getattr(torch, config.training.precision)
        check_backend(config.execution.sparse.backend, config.model, precision, group.device)
        micro_batch = micro_batch_size(config, group.count)
        if (config.execution.micro_batch or 0) > micro_batch and group.first:
            log.info("micro-batches have %d sequences: what a process has in a step is shared evenly", micro_batch)
        check_trackers(config.run.log)
        if group.device.type == "cpu" and precision is torch.bfloat16:
            log.info("a CPU without AVX-512 is over ten times as fast with training.precision=float32")
        tokenizer, tokens = _prepare_text(config, group)
        with contextlib.closing(Trainer(config, group, tokens, micro_batch)) as trainer:
            trainer.restore()
            if group.first:
                folder = config.run.folder
                with storage_errors(folder, "run"):
                    tokenizer.save_pretrained(folder / TOKENIZER)
                save_config(config, folder / CONFIG)
                write_json(folder / "environment.json", describe_environment(group.device), "environment")
            trainer.run(request)


def _is_finished(config: TrainConfig) -> bool:
    """Whether the run's rows are there.

    Raises:
        CheckpointError: it is finished, and its text has changed since.
        ConfigError: the folder has progress of a run with other options, by its config.yaml or its newest checkpoint,
            or results of which nothing says with what options they were made.
    """
    from experiments.models.checkpoint import CONFIG, has_checkpoints, newest_state

    folder = config.run.folder
    try:
        rows = read_rows(folder / ROWS) if (folder / ROWS).is_file() else []
    except ValueError as error:
        raise DataError(f"{error}; delete the file, and the same command makes it again") from error
    if not (rows or has_checkpoints(folder)):
        return False
    state = newest_state(folder) or {}
    saved = science(load_config(TrainConfig, folder / CONFIG)) if (folder / CONFIG).is_file() else None
    for there in (saved, state.get("science")):
        if differences := science_differences(there, science(config)):
            advice = "choose another run.item or run.dir"
            raise ConfigError(f"{folder} holds a run with other options ({differences}): {advice}")
    if rows and saved is None and "science" not in state:
        raise ConfigError(
            f"{folder} has results, but no {CONFIG} that says of what: choose another run.item or run.dir"
        )
    if not rows:
        return False
    from experiments.data.batches import changed_source
    from experiments.training.trainer import trained_on_other_text

    # This is quick and asks no hub; where the text is gone, or nothing says which it was, there is nothing to compare.
    if now := changed_source(config.data, before := state.get("source")):
        raise trained_on_other_text(config, before, now)
    return True


def _prepare_text(config: TrainConfig, group: Processes) -> tuple[PreTrainedTokenizerFast, Tokens]:
    """Tokenizer and token files. The first process makes them, the others find them; one a machine checks them."""
    from experiments.data.batches import prepare_text
    from experiments.data.token_files import SPLITS

    with group.first_goes_first():
        return prepare_text(config.data, config.model.vocab_size, SPLITS if group.first_of_machine else ())


def by_hand(config: TrainConfig) -> None:
    """Run `main` while holding the lock of the run's folder: a second run there would overwrite the first.

    Raises:
        RunError: when another process is running there.
    """
    with stop_requests():  # from here on, packages are imported for seconds
        if _is_finished(config):  # which needs no lock: the disk may be read-only by now
            log.info("%s is finished", config.run.folder)
            return
        # The launcher does not come here: its jobs have locked the folders of their items already.
        first = int(os.environ.get("RANK", 0)) == 0
        with exclusive(config.run.folder, "training") if first else contextlib.nullcontext():
            main(config)


if __name__ == "__main__":
    entry(by_hand, TrainConfig)
