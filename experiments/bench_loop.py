"""Measures what our training loop costs compared with a bare torch loop of the same model.

    python -m experiments.bench_loop model=demo sparsity.l1=1e-4 out=runs/local/bench_loop

Both loops train transformers' Llama from the same weights on the same tokens with the same optimizer. The bare one has
plain torch modules for the feed-forward blocks, its tokens in memory, writes no file, and computes the L1 term only if
it has a coefficient. Ours is the one of `experiments.train`: activity of every neuron, non-zeros, logging, the check
for NaN, the order of the data. The two loops alternate step by step, so that whatever slows the machine slows both, and
they must reach the same losses. The result is the ratio of their times over rounds of `run.log_every` steps.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run.config import entry, option, section
from experiments.run.errors import ConfigError, RunError
from experiments.run.files import made_folder
from experiments.run.results import make_row, write_rows
from experiments.run.train_config import (
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SparsityConfig,
    TrainConfig,
    TrainingConfig,
    micro_batch_size,
    model_columns,
    sequences_per_step,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from experiments.data.batches import Tokens
    from experiments.run.distributed import Processes
    from experiments.training.bare_loop import BareLoop
    from experiments.training.metrics import Record
    from experiments.training.trainer import Trainer

# The losses are compared over the first steps in float32: in bfloat16, rounding in another order soon changes the
# course of a training at a high learning rate.
CHECK_STEPS = 10
LOSS_TOLERANCE = 1e-4
log = logging.getLogger(__name__)


@dataclass
class BenchLoopConfig:
    """Measure what our training loop costs over a bare torch loop of the same model."""

    model: ModelConfig = section(ModelConfig, "what is trained", presets="model")
    data: DataConfig = section(DataConfig, "what it is trained on", short="source")
    training: TrainingConfig = section(TrainingConfig, "steps are those of each loop, after one that is not counted")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW, schedule, clipping")
    sparsity: SparsityConfig = section(SparsityConfig, "L1 term, dead neurons")
    execution: ExecutionConfig = section(ExecutionConfig, "as in training")
    run: RunConfig = section(
        RunConfig,
        "study: of the rows; log_every: steps of one round, in which ours logs once; the rest has no effect",
    )
    out: str = option("runs/local/bench_loop", "folder of the result rows", required=True)


def main(config: BenchLoopConfig) -> None:
    """Measure, print, and write rows.csv in `config.out`. Raises `RunError` when the losses of the loops differ."""
    if config.sparsity.dead_neuron_reinit or config.model.activation != "relu":
        raise ConfigError("the bare loop supports model.activation=relu only, and no dead_neuron_reinit")
    from experiments.data.batches import prepare_text
    from experiments.run.distributed import processes

    folder = made_folder(Path(config.out), "results")
    with processes(config.execution.device) as group, tempfile.TemporaryDirectory() as scratch, folder:
        if group.count > 1:
            raise ConfigError(f"the bare loop is one process, got {group.count}: start it without torchrun")
        _, tokens = prepare_text(config.data, config.model.vocab_size)
        exact = replace(config.training, precision="float32", steps=CHECK_STEPS)
        check = _train_config(replace(config, training=exact, run=replace(config.run, log_every=1)), Path(scratch))
        _race(check, group, tokens, check=True)
        times, columns = _race(_train_config(config, Path(scratch)), group, tokens)
        _write(config, times, columns, group)


def _race(
    config: TrainConfig, group: Processes, tokens: Tokens, check: bool = False
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(milliseconds of the steps of each loop, plan and backend of ours)."""
    from experiments.timing.plans import layers_columns
    from experiments.training.bare_loop import BareLoop
    from experiments.training.metrics import read_metrics
    from experiments.training.trainer import Trainer

    micro_batch = micro_batch_size(config, group.count)
    bare = BareLoop(config, _batches(config, tokens, micro_batch, group.device), group.device)
    config.run.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Trainer(config, group, tokens, micro_batch)) as ours:
        times = _alternate(ours, bare, config.training.steps, group)
    if check:
        _check(read_metrics(config.run.folder), bare.losses)
    return times, layers_columns(ours.plans.backends)


def _train_config(config: BenchLoopConfig, scratch: Path) -> TrainConfig:
    """The run of our loop, with neither validation nor checkpoints in between."""
    # One step more that is not counted, and one that is never made: the last one of a run is always validated.
    training = replace(config.training, steps=config.training.steps + 2)
    never = 10 * training.steps
    folder = scratch / config.training.precision / str(config.training.steps)
    run = replace(config.run, dir=str(folder), evaluate_every=never, checkpoint_every=never)
    sections = (config.model, config.data, training, config.optimizer, config.sparsity, config.execution, run)
    return TrainConfig(*sections)


def _batches(config: TrainConfig, tokens: Tokens, micro_batch: int, device: torch.device) -> list[list[Tensor]]:
    from experiments.data.batches import TokenStream

    stream = TokenStream(tokens.train, config.training.sequence_length, config.training.seed)
    per_step = sequences_per_step(config)
    return [
        [stream.samples(step * per_step + first, micro_batch).to(device) for first in range(0, per_step, micro_batch)]
        for step in range(config.training.steps)
    ]


def _alternate(ours: Trainer, bare: BareLoop, steps: int, group: Processes) -> dict[str, list[float]]:
    """Milliseconds of each step of each loop; who goes first changes from step to step."""
    import torch

    calls: dict[str, Callable[[int], object]] = {"ours": lambda index: ours.advance(), "bare": bare.step}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(steps - 1):
        for name in sorted(calls, reverse=index % 2 == 0):
            begin = time.perf_counter()
            calls[name](index)
            if group.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e3)
    return {name: samples[1:] for name, samples in times.items()}


def _check(records: list[Record], losses: list[Tensor]) -> None:
    for record in records:
        ours, bare = record["cross_entropy"], losses[record["step"] - 1].item()
        if abs(ours - bare) > LOSS_TOLERANCE * bare:
            raise RunError(f"the loops do not train alike: at step {record['step']} cross-entropy {ours} and {bare}")
    log.info("in float32 the losses of both loops agree within %g over %d steps", LOSS_TOLERANCE, len(records))


def _write(config: BenchLoopConfig, times: dict[str, list[float]], columns: dict[str, Any], group: Processes) -> None:
    from experiments.timing.measure import spread

    rounds = range(0, len(times["ours"]), config.run.log_every)
    sums = {name: [sum(samples[i : i + config.run.log_every]) for i in rounds] for name, samples in times.items()}
    ratio = spread([bare / ours for bare, ours in zip(sums["bare"], sums["ours"], strict=True)])
    known = model_columns(config.model) | {
        "study": config.run.study,
        "item": "bench_loop",
        "op": "model_training",
        "l1": config.sparsity.l1_of_sum(config.model.intermediate_size),
        "modification": config.sparsity.modification,
        "tokens": config.training.tokens_per_step,
        "metric": "time",
        "device": group.device,
        "seed": config.training.seed,
    }
    rows = [
        make_row(**known, plan="dense", backend="bare_loop", **spread(times["bare"]).columns()),
        make_row(**known, **columns, baseline="bare_loop", ratio=ratio.value, **spread(times["ours"]).columns()),
    ]
    write_rows(Path(config.out) / "rows.csv", rows)
    extra, least, most = (100 * (1 / (value or ratio.known) - 1) for value in (ratio.value, ratio.high, ratio.low))
    log.info("a step takes %.1f ms in our loop, %.1f ms in the bare one", rows[1]["value"], rows[0]["value"])
    log.info("ours: %+.1f%% (20th to 80th percentile of %d rounds: %+.1f%%, %+.1f%%)", extra, ratio.n, least, most)


if __name__ == "__main__":
    entry(main, BenchLoopConfig)
