"""The implementation of `experiments.bench_loop`."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.bench_loop import BenchLoopConfig
from experiments.data.batches import Tokens, TokenStream, prepare_text
from experiments.implementation.train import Trainer
from experiments.models.llama import FeedForward, build_model
from experiments.run.distributed import Processes, processes
from experiments.run.errors import ConfigError, RunError
from experiments.run.files import made_folder
from experiments.run.results import make_row, write_rows
from experiments.run.train_config import SparsityConfig, TrainConfig, micro_batch_size, sequences_per_step
from experiments.timing.measure import spread
from experiments.timing.plans import layers_columns
from experiments.training import metrics
from experiments.training.optimizer import build_optimizer, l1_coefficient, learning_rate, set_learning_rate

# The losses are compared over the first steps in float32: in bfloat16, rounding in another order soon changes the
# course of a training at a high learning rate.
CHECK_STEPS = 10
LOSS_TOLERANCE = 1e-4
log = logging.getLogger(__name__)


class BareFeedForward(nn.Module):
    """The block as one would write it in torch, with the L1 term and nothing else."""

    def __init__(self, block: FeedForward, config: SparsityConfig) -> None:
        super().__init__()
        self.with_l1, self.l1_reduction = config.l1 > 0, config.l1_reduction
        self.gate_proj, self.up_proj, self.down_proj = block.gate_proj, block.up_proj, block.down_proj
        self.l1: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up_proj(x)) if self.gate_proj is None else F.relu(self.gate_proj(x)) * self.up_proj(x)
        if self.with_l1:
            magnitude = h.abs()
            over_neurons = magnitude.mean if self.l1_reduction == "mean" else magnitude.sum
            self.l1 = over_neurons(-1, dtype=torch.float32).mean()
        return self.down_proj(h)


class BareLoop:
    """A training loop without anything that is not needed to train."""

    def __init__(self, config: TrainConfig, batches: list[list[Tensor]], device: torch.device) -> None:
        self._config, self._batches, self._device = config, batches, device
        self._model = build_model(config.model, seed=config.training.seed, device=device)
        for layer in self._model.model.layers:
            layer.mlp = BareFeedForward(layer.mlp, config.sparsity)
        self._optimizer = build_optimizer(self._model, config.optimizer)
        self.losses: list[Tensor] = []

    def step(self, index: int) -> None:
        """The `index`-th optimizer step, from 0."""
        config = self._config
        coefficient = l1_coefficient(config.sparsity, index)
        total = torch.zeros((), device=self._device)
        for tokens in self._batches[index]:
            cross_entropy = self._cross_entropy(tokens)
            loss = cross_entropy
            if coefficient:
                loss = loss + coefficient * torch.stack([layer.mlp.l1 for layer in self._model.model.layers]).mean()
            (loss / len(self._batches[index])).backward()
            total += cross_entropy.detach()
        nn.utils.clip_grad_norm_(self._model.parameters(), config.optimizer.max_grad_norm)
        set_learning_rate(self._optimizer, learning_rate(config.optimizer, index, config.training.steps))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(total / len(self._batches[index]))

    def _cross_entropy(self, tokens: Tensor) -> Tensor:
        enabled = self._config.training.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=enabled):
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def main(config: BenchLoopConfig) -> None:
    """Measure, print, and write rows.csv in `config.out`. Raises `RunError` when the losses of the loops differ."""
    if config.sparsity.dead_neuron_reinit or config.model.activation != "relu":
        raise ConfigError("the bare loop supports model.activation=relu only, and no dead_neuron_reinit")
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
    micro_batch = micro_batch_size(config, group.count)
    bare = BareLoop(config, _batches(config, tokens, micro_batch, group.device), group.device)
    config.run.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(Trainer(config, group, tokens, micro_batch)) as ours:
        times = _alternate(ours, bare, config.training.steps, group)
    if check:
        _check(metrics.read_metrics(config.run.folder), bare.losses)
    return times, layers_columns(ours.scheduler.backends)


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
    stream = TokenStream(tokens.train, config.training.sequence_length, config.training.seed)
    per_step = sequences_per_step(config)
    return [
        [stream.samples(step * per_step + first, micro_batch).to(device) for first in range(0, per_step, micro_batch)]
        for step in range(config.training.steps)
    ]


def _alternate(ours: Trainer, bare: BareLoop, steps: int, group: Processes) -> dict[str, list[float]]:
    """Milliseconds of each step of each loop; who goes first changes from step to step."""
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


def _check(records: list[metrics.Record], losses: list[Tensor]) -> None:
    for record in records:
        ours, bare = record["cross_entropy"], losses[record["step"] - 1].item()
        if abs(ours - bare) > LOSS_TOLERANCE * bare:
            raise RunError(f"the loops do not train alike: at step {record['step']} cross-entropy {ours} and {bare}")
    log.info("in float32 the losses of both loops agree within %g over %d steps", LOSS_TOLERANCE, len(records))


def _write(config: BenchLoopConfig, times: dict[str, list[float]], columns: dict[str, Any], group: Processes) -> None:
    rounds = range(0, len(times["ours"]), config.run.log_every)
    sums = {name: [sum(samples[i : i + config.run.log_every]) for i in rounds] for name, samples in times.items()}
    ratio = spread([bare / own for bare, own in zip(sums["bare"], sums["ours"], strict=True)])
    known = {
        "study": config.run.study,
        "item": "bench_loop",
        "op": "model_training",
        "model": config.model.name,
        "layers": config.model.layers,
        "activation": config.model.activation,
        "gated": config.model.gated,
        "l1": config.sparsity.l1_of_sum(config.model.intermediate_size),
        "modification": config.sparsity.modification,
        "tokens": config.training.tokens_per_step,
        "hidden": config.model.hidden_size,
        "intermediate": config.model.intermediate_size,
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
