"""The state of a training in one process, and the loop over its steps."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from experiments.data.batches import Tokens, TokenStream, count_windows, windows
from experiments.models.checkpoint import (
    Checkpoint,
    checkpoint_path,
    load_parameters,
    newest_checkpoint,
    read_newest,
    remove_leftovers,
    write_checkpoint,
)
from experiments.models.llama import build_model, feed_forward_blocks, recompute_activations
from experiments.run.distributed import Processes
from experiments.run.environment import peak_memory_gb
from experiments.run.errors import CheckpointError, DivergenceError, Stopped
from experiments.run.files import storage_errors
from experiments.run.results import write_rows
from experiments.run.signals import StopRequest
from experiments.run.train_config import TrainConfig, science, science_differences, sequences_per_step
from experiments.timing.clock import Stopwatch, limit_reached
from experiments.training import firing, hot_exempt, metrics, random_state
from experiments.training.block_plans import build_plans
from experiments.training.dead_neurons import Activity, Reinitialiser
from experiments.training.loss import LossModel, firing_rates, total_loss
from experiments.training.optimizer import (
    build_optimizer,
    l1_coefficient,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from experiments.training.progress import Progress
from experiments.training.trackers import trackers

ROWS = "rows.csv"
RATE_TOKENS = 4096  # in one forward that measures firing rates
log = logging.getLogger(__name__)


def trained_on_other_text(config: TrainConfig, before: object, now: str) -> CheckpointError:
    """`before`, `now`: keys of the texts, or of their tokens."""
    return CheckpointError(
        f"{config.run.folder} was trained on other text ({str(before)[:12]}): that of {config.data.source} has changed "
        f"({now[:12]}). Restore that text, or train on this one from the beginning: delete the folder, or choose "
        "another run.item or run.dir"
    )


class Trainer:
    """The state of a run in one process, and the loop over its steps."""

    def __init__(self, config: TrainConfig, group: Processes, tokens: Tokens, micro_batch: int) -> None:
        self.config, self.group, self.folder = config, group, config.run.folder
        self.steps, self.micro_batch = config.training.steps, micro_batch
        self.record_files = [metrics.METRICS] + [firing.FILE] * (config.model.activation != "silu")
        self.accumulation = sequences_per_step(config) // group.count // micro_batch
        self.stream = TokenStream(
            tokens.train, config.training.sequence_length, config.training.seed, config.model.vocab_size
        )
        self.tokens = tokens
        random_state.seed_all(config.training.seed)
        self._build_model()
        self.plans = build_plans(config, self.blocks, group)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.activity = Activity(len(self.blocks), config.model.intermediate_size, group.device)
        exempt, strength, std = config.sparsity.exempt, config.sparsity.reinit_strength, config.sparsity.reinit_std
        self.reinitialiser: Reinitialiser | None = None
        if config.sparsity.dead_neuron_reinit:
            seed = config.training.seed + 1  # not the draws of the initial weights again
            self.reinitialiser = Reinitialiser(self.blocks, strength=strength, std=std, seed=seed)
        self.exemption = hot_exempt.HotExemption(self.blocks, exempt) if exempt else None
        self.diverged = torch.zeros((), dtype=torch.bool, device=group.device)
        self.step = 0  # optimizer steps done
        self.logged_step, self.logged_seconds = 0, 0.0
        self.clock = Stopwatch()

    def _build_model(self) -> None:
        config, device = self.config, self.group.device
        self.model = build_model(config.model, seed=config.training.seed, device=device)
        self.blocks = feed_forward_blocks(self.model)
        self.parameters = list(self.model.parameters())
        self.loss_model = LossModel(self.model, precision=config.training.precision)
        if config.execution.compile:
            self.loss_model.compile_parts()
        if config.execution.activation_checkpointing:
            recompute_activations(self.model)
        self.parallel: LossModel | DistributedDataParallel | None = self.loss_model
        if self.group.count > 1:
            devices = [device] if device.type == "cuda" else None
            self.parallel = DistributedDataParallel(
                self.loss_model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def close(self) -> None:
        """Release DDP while its process group still exists: freeing the group in DDP's destructor can deadlock."""
        self.parallel = None
        gc.collect()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self, request: StopRequest) -> None:
        """Train to the end, then write the result rows."""
        options, first = self.config.run, self.group.first
        progress = Progress(options.item, self.step, self.steps, options.progress if first else "none")
        first_step, began = self.step, time.monotonic()
        request.graceful = True
        self.clock.start()
        sending = trackers(self.config, self.step) if first else nullcontext(lambda record: None)
        with contextlib.closing(progress), sending as send:
            for step in range(self.step + 1, self.steps + 1):
                record = self.advance()
                progress.step()
                if record is not None:
                    self._show(record, progress)
                    with self.clock.paused():
                        send(record)
                limit = limit_reached(options, step - first_step, time.monotonic() - began)
                stop = self.group.agree(bool(limit or request.signal)) and step < self.steps
                if stop:
                    # A limit or a signal may have come to another process alone; why they stop is the same for all.
                    reasons = self.group.all_gather((limit, request.signal))
                    limit, signal = (next(filter(None, each), None) for each in zip(*reasons, strict=True))
                if stop or self._due(step, options.checkpoint_every):
                    self._check_finite()  # waits for what is queued on the device, which is time of training
                    with self.clock.paused():
                        self.save()
                if stop:
                    where = f"stopped after step {step} of {self.steps}; the same command continues"
                    raise Stopped(f"{limit or signal}: {where}", "" if limit else signal or "", together=True)
        if first:
            records = metrics.read_metrics(self.folder)
            gpus = self.group.count if self.group.device.type == "cuda" else 0
            rows, loss = self.folder / ROWS, records[-1]["validation_cross_entropy"]
            write_rows(rows, metrics.training_rows(self.config, records, self.group.device, gpus))
            log.info("%s: held-out cross-entropy %.3f, rows in %s", options.item, loss, rows)

    def advance(self) -> metrics.Record | None:
        """Make the next step. At logged steps, return its record, which is then in metrics.jsonl as well."""
        options, step = self.config.run, self.step + 1
        evaluate = self._due(step, options.evaluate_every)
        logged = evaluate or step == 1 or self._due(step, options.log_every)
        values = self._train_step(self.step, logged)
        self.step = step
        if firing.is_due(step, self.steps) and firing.FILE in self.record_files:
            self._check_finite()  # waits for what is queued on the device, which is time of training
            with self.clock.paused():
                self._keep_firing_rates()
        if self.exemption is not None and step % hot_exempt.EVERY == 0:
            self.exemption.update(self._rates_of_step())
        if not logged:
            return None
        begins = self.logged_step == 0
        record = self._record(values)
        self.plans.choose(record["nonzeros"], self.loss_model, self._micro_batch(step - 1, 0), self._firing_rates)
        if evaluate:
            with self.clock.paused():
                record["validation_cross_entropy"] = loss = self.validate()
            if not math.isfinite(loss):
                raise DivergenceError(
                    f"the validation cross-entropy after step {self.step} is {loss}; {self._last_good_checkpoint()}"
                )
        if self.group.first:
            metrics.append(self.folder, record, begins=begins)
        return record

    def _show(self, record: metrics.Record, progress: Progress) -> None:
        mean_nonzeros = sum(record["nonzeros"]) / len(record["nonzeros"])
        shown = {key: record[key] for key in ("cross_entropy", "tokens_per_s")}
        progress.show(self.step, **shown, nonzeros=mean_nonzeros)

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps

    def _train_step(self, index: int, logged: bool) -> dict[str, Any]:
        """Make the `index`-th optimizer step, counted from 0. The tensors that it returns stay on the device."""
        config = self.config
        coefficient = l1_coefficient(config.sparsity, index)
        rate = learning_rate(config.optimizer, index, self.steps)
        count_neurons = logged or self.reinitialiser is not None
        self._keep_stats(bool(count_neurons or coefficient))
        sums = self._accumulate(index, coefficient, count_neurons)
        grad_norm = clip_grad_norm_(self.parameters, config.optimizer.max_grad_norm)
        self.diverged |= ~torch.isfinite(grad_norm)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if count_neurons:
            self.activity.share(self.group)
        if self.reinitialiser is not None:
            self.reinitialiser.apply(self.activity.fired_LN)
        means = sums / self.accumulation
        return {"means": means, "grad_norm": grad_norm, "l1_coefficient": coefficient, "learning_rate": rate}

    def _accumulate(self, index: int, coefficient: float, count_neurons: bool) -> Tensor:
        """Compute the gradients of a step. Returns the sums of cross-entropy and L1 term over its micro-batches,
        float32 [2]."""
        parallel = self.parallel
        assert parallel is not None  # until `close`
        self.activity.clear()
        sums = torch.zeros(2, device=self.group.device)
        for micro in range(self.accumulation):
            last = micro == self.accumulation - 1
            with parallel.no_sync() if isinstance(parallel, DistributedDataParallel) and not last else nullcontext():
                cross_entropy, l1 = parallel(self._micro_batch(index, micro))
                sums += torch.stack([cross_entropy.detach(), l1.detach()])
                if count_neurons:
                    self.activity.add([block.stats for block in self.blocks if block.stats is not None])
                (total_loss(cross_entropy, l1, coefficient) / self.accumulation).backward()
        return sums

    def _firing_rates(self) -> list[Tensor]:
        """How often each neuron of each layer fires, on some of the step's tokens of all processes."""
        self._keep_stats(False)
        sequences = max(1, RATE_TOKENS // self.config.training.sequence_length)
        rates = firing_rates(self.loss_model, self._micro_batch(self.step - 1, 0)[:sequences])
        return [self.group.sum(rates_N) / self.group.count for rates_N in rates]

    def _rates_of_step(self) -> Tensor:
        """How often each neuron fires on the first tokens of the step just made, [L, N]: the same tokens and rates in
        every process, however many there are."""
        per_step = sequences_per_step(self.config)
        count = max(1, min(hot_exempt.TOKENS // self.config.training.sequence_length, per_step))
        tokens = self.stream.samples((self.step - 1) * per_step, count)
        return self._mean_rates(count, lambda chosen: tokens[list(chosen)])

    def _mean_rates(self, count: int, sequences: Callable[[range], Tensor]) -> Tensor:
        """How often each neuron fires on `count` sequences, which the processes share: float64 [L, N]. `sequences`
        returns the tokens of some of them."""
        own = range(self.group.rank, count, self.group.count)
        at_once = max(1, RATE_TOKENS // self.config.training.sequence_length)
        self._keep_stats(False)
        shape = (len(self.blocks), self.config.model.intermediate_size)
        sum_LN = torch.zeros(shape, dtype=torch.float64, device=self.group.device)
        for first in range(0, len(own), at_once):
            tokens = sequences(own[first : first + at_once]).to(self.group.device)
            sum_LN += torch.stack(firing_rates(self.loss_model, tokens)) * len(tokens)
        return self.group.sum(sum_LN) / count

    def _keep_stats(self, keep: bool) -> None:
        for block in self.blocks:
            block.keep_stats = keep

    def _micro_batch(self, index: int, micro: int) -> Tensor:
        """Tokens, int64 [micro-batch, sequence length + 1]. A step has the same samples however they are
        distributed."""
        per_step = sequences_per_step(self.config)
        first = index * per_step + self.group.rank * (per_step // self.group.count) + micro * self.micro_batch
        tokens = self.stream.samples(first, self.micro_batch)
        if self.group.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.group.device, non_blocking=True)

    @torch.no_grad()
    def validate(self) -> float:
        """Cross-entropy on held-out documents, nats per token."""
        length = self.config.training.sequence_length
        count = count_windows(self.tokens.validation, length, self.config.run.evaluation_tokens)
        own = range(self.group.rank, count, self.group.count)
        self._keep_stats(False)
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        for first in range(0, len(own), self.micro_batch):
            chosen = own[first : first + self.micro_batch]
            batch = windows(self.tokens.validation, chosen, length, self.config.model.vocab_size)
            total += self.loss_model(batch.to(self.group.device))[0] * len(batch)
        return self.group.sum(total).item() / count

    @torch.no_grad()
    def _keep_firing_rates(self) -> None:
        """Add to the run's file how often each neuron fires on held-out tokens."""
        length = self.config.training.sequence_length
        wanted = min(firing.TOKENS, self.config.run.evaluation_tokens)
        count = count_windows(self.tokens.validation, length, wanted)
        rates_LN = self._mean_rates(count, lambda chosen: windows(self.tokens.validation, chosen, length))
        if self.group.first:
            names = {"study": self.config.run.study, "item": self.config.run.item}
            shown = {"model": self.config.model.name, "l1": self.config.sparsity.l1}
            firing.append(self.folder, self.step, count * length, rates_LN, names | shown)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _record(self, values: dict[str, Any]) -> metrics.Record:
        """The record of the step just made. Waits for the device."""
        cross_entropy, l1 = (self.group.sum(values["means"]) / self.group.count).tolist()
        self._check_finite(cross_entropy)
        training, seconds = self.config.training, self.clock.seconds()
        tokens_per_s = (self.step - self.logged_step) * training.tokens_per_step / (seconds - self.logged_seconds)
        self.logged_step, self.logged_seconds = self.step, seconds
        return {
            "step": self.step,
            "tokens": self.step * training.tokens_per_step,
            "cross_entropy": cross_entropy,
            "l1": l1,
            "l1_coefficient": values["l1_coefficient"],
            "nonzeros": self.activity.nonzeros(),
            "dead_fraction": self.activity.dead_fraction(),
            "backend": self.plans.backends,
            "capacity": self.plans.capacities,
            "hot_neurons": self.plans.hot_neurons,
            "grad_norm": values["grad_norm"].item(),
            "learning_rate": values["learning_rate"],
            "tokens_per_s": tokens_per_s,
            "memory_gb": peak_memory_gb(self.group.device),
            "seconds": seconds,
        }

    def _check_finite(self, cross_entropy: float | None = None) -> None:
        """Raise `DivergenceError` if any gradient so far was not finite. Waits for the device."""
        if not self.diverged.item():
            return
        seen = "" if cross_entropy is None else f" (cross-entropy {cross_entropy})"
        raise DivergenceError(
            f"the gradient is not a finite number at step {self.step} or since step {self.logged_step}{seen}; "
            f"{self._last_good_checkpoint()}. A smaller optimizer.learning_rate may help"
        )

    def _last_good_checkpoint(self) -> str:
        kept = newest_checkpoint(self.folder)
        return f"the last good checkpoint is {kept}" if kept else "there is no checkpoint yet"

    def save(self) -> None:
        """Write a checkpoint. Raises `DivergenceError` rather than write one that is not finite."""
        self._check_finite()
        states = self.group.all_gather(random_state.capture())
        capacities = self.group.all_gather(self.plans.capacities)
        if not self.group.first:
            return
        state = {
            "tokens": self.step * self.config.training.tokens_per_step,
            "sample": self.step * sequences_per_step(self.config),
            "text": self.tokens.key,
            "source": self.tokens.source,
            "seconds": self.clock.seconds(),
            "logged": [self.logged_step, self.logged_seconds],
            "random": states,
            "reinitialiser": self.reinitialiser and random_state.encode(self.reinitialiser.generator.get_state()),
            "exemption": self.exemption and self.exemption.state(),
            "plans": self.plans.state(capacities),
            "science": science(self.config),
        }
        model = dict(self.model.named_parameters())
        optimizer = optimizer_tensors(self.model, self.optimizer)
        records = {name: (self.folder / name).read_bytes() for name in self.record_files}
        checkpoint = Checkpoint(self.step, model, optimizer, state, records)
        write_checkpoint(self.folder, checkpoint, keep=self.config.run.keep_checkpoints)

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if there is one, with the records that belong to it.

        Raises `CheckpointError` when it is of other options or another text, or not the same for all processes.
        """
        checkpoint, records = read_newest(self.folder), dict[str, bytes]()
        if checkpoint is not None:
            where = checkpoint_path(self.folder, checkpoint.step)
            if differences := science_differences(checkpoint.state.get("science"), science(self.config)):
                raise CheckpointError(f"{where} is of a run with other options ({differences})")
            if checkpoint.state.get("text") != self.tokens.key:
                raise trained_on_other_text(self.config, checkpoint.state.get("text"), self.tokens.key)
            try:
                self._restore_state(checkpoint.state)
                records = {name: checkpoint.records[name] for name in self.record_files}
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{where} is of another version, or damaged: {error!r}") from error
            load_parameters(self.model, checkpoint.model)
            load_optimizer_tensors(self.model, self.optimizer, checkpoint.optimizer)
            self.step = checkpoint.step
            log.info("continuing %s from step %d", self.folder, self.step)
        steps = self.group.all_gather(self.step)
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"the processes would continue from different steps ({', '.join(map(str, steps))}): {self.folder} must "
                "be the same folder for all of them"
            )
        if self.group.first:
            remove_leftovers(self.folder)
            for path in (self.folder / name for name in self.record_files):
                with storage_errors(path, "records"):
                    path.unlink(missing_ok=True)
                    if path.name in records:
                        path.write_bytes(records[path.name])

    def _restore_state(self, state: dict[str, Any]) -> None:
        self.clock = Stopwatch(state["seconds"])
        self.logged_step, self.logged_seconds = state["logged"]
        self.plans.restore(state["plans"], self.group.rank)
        if self.group.rank < len(state["random"]):
            random_state.restore(state["random"][self.group.rank])
        if self.reinitialiser is not None:
            self.reinitialiser.restore(random_state.decode(state["reinitialiser"]), state["step"])
        if self.exemption is not None:
            self.exemption.restore(state["exemption"])
