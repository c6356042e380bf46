"""The implementation of `experiments.gather_nonzeros`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from experiments.gather_nonzeros import GatherConfig
from experiments.models.llama import FeedForward, SiluFeedForward, feed_forward_blocks, nonzeros_of
from experiments.models.subject import Subject, load_subject
from experiments.nonzeros.counters import LayerActivity, MaskRecorder
from experiments.nonzeros.tables import tables
from experiments.run.errors import ConfigError, RunError
from experiments.run.files import storage_errors
from experiments.run.output import device_of, results_folder, write_results
from experiments.run.results import make_row
from twell.registry import why_not

log = logging.getLogger(__name__)

PROGRAM = "gather_nonzeros"
# The hooks and the block compute the same gate; where a backend sums in another order, a value next to zero may fall
# on the other side.
COUNT_TOLERANCE = 1e-3


class Gatherer:
    """Counts what every feed-forward block of a model does, through hooks that change no result."""

    def __init__(
        self,
        model: nn.Module,
        vocabulary: int,
        sequence: int,
        groups: list[int],
        mask_tokens: int = 0,
        dead_windows: Sequence[int] = (),
    ):
        self.blocks = feed_forward_blocks(model)
        self.masks = MaskRecorder(mask_tokens)
        self.token_count_V = torch.zeros(vocabulary, dtype=torch.int64)
        device = self.blocks[0].up_proj.weight.device
        sizes = (vocabulary, sequence, groups, device, dead_windows)
        self.layers = [LayerActivity(block.up_proj.out_features, *sizes) for block in self.blocks]
        self._differing = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, model: PreTrainedModel, ids_BS: Tensor) -> None:
        """Run the model's decoder on one batch of tokens (on its device) and count."""
        self.masks.add_tokens(ids_BS)
        self.token_count_V += torch.bincount(ids_BS.flatten(), minlength=len(self.token_count_V)).cpu()
        with contextlib.ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.callback(block.register_forward_hook(self._hook(index, ids_BS)).remove)
            model.base_model(ids_BS, use_cache=False)

    def _hook(self, index: int, ids_BS: Tensor) -> Callable[[FeedForward, tuple[Tensor, ...], Tensor], None]:
        def count(block: FeedForward, arguments: tuple[Tensor, ...], _: Tensor) -> None:
            active_BSN = block_activity(block, arguments[0])
            count_BS = self.layers[index].add(active_BSN, ids_BS)
            self.masks.add(index, active_BSN)
            self._differing.add_((count_BS - nonzeros_of(block)).abs().sum())

        return count

    def check(self) -> float:
        """Sum of |difference| between these counts and `FFNStats.nonzeros` of the same forwards, over all non-zeros.

        Raises:
            RunError: if it is more than values next to zero explain.
        """
        total = sum(int(layer.fired_N.sum()) for layer in self.layers)
        error = int(self._differing) / max(total, 1)
        if error > COUNT_TOLERANCE:
            raise RunError(f"the counts differ from the blocks' own statistics by {error:.2%} of {total} non-zeros")
        return error


def block_activity(block: FeedForward, x_BSK: Tensor) -> Tensor:
    """Which neurons of a feed-forward block fire for x: bool [B, S, N]; gate (or up, if non-gated) not zero after its
    activation."""
    projection = block.up_proj if block.gate_proj is None else block.gate_proj
    activation = F.silu if isinstance(block, SiluFeedForward) else F.relu
    return activation(projection(x_BSK)) != 0


def gather(
    subject: Subject, batches: Iterator[Tensor], config: GatherConfig, report: Callable[..., None] | None = None
) -> Gatherer:
    """Count over all batches ([B, S + 1] token ids, of which the last of each sequence is only a target)."""
    device, sequence = subject.model.device, config.sequence or subject.sequence_length
    vocabulary = subject.loaded.config.vocab_size
    gatherer = Gatherer(subject.model, vocabulary, sequence, config.groups, config.mask_tokens, config.dead_windows)
    # In training the products run in bfloat16 by autocast: what fires there is what is counted.
    training = subject.loaded.training
    autocast = training is not None and training.training.precision == "bfloat16"
    for ids_BS in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            gatherer.add(subject.model, ids_BS[:, :-1].to(device))
        if report:
            done = gatherer.layers[0].tokens
            report(done, max(config.tokens, done), nonzeros=gatherer.layers[-1].mean())
    return gatherer


def rows_of(gatherer: Gatherer, columns: dict[str, Any], error: float) -> list[dict[str, Any]]:
    """Rows of every layer, and their mean over layers (layer empty)."""
    rows = []
    for index, layer in enumerate(gatherer.layers):
        hot_share = layer.hot_share()
        p50, p99 = layer.quantiles((0.5, 0.99))
        values = {
            "nonzeros": layer.mean(),
            "nonzeros_p50": p50,
            "nonzeros_p99": p99,
            "nonzeros_max": layer.maximum(),
            "silent_fraction": layer.silent_fraction(),
            "hot_share": hot_share,
        }
        for metric, value in values.items():
            missing = {"missing": "no neuron fired"} if value is None else {"value": value}
            rows.append(
                make_row(layer=index, metric=metric, mean_nnz=layer.mean(), check_error=error, **missing, **columns)
            )
    rows += _dead_rows(gatherer, columns)
    mean = sum(layer.mean() for layer in gatherer.layers) / len(gatherer.layers)
    return [*rows, make_row(metric="nonzeros", value=mean, mean_nnz=mean, check_error=error, **columns)]


def _dead_rows(gatherer: Gatherer, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every window size that the text fills at least once (column `tokens`): each layer, and their mean."""
    rows = []
    for counters in zip(*(layer.dead for layer in gatherer.layers), strict=True):
        if not counters[0].windows:
            continue
        fractions = [counter.fraction() for counter in counters]
        shared = {**columns, "metric": "dead_fraction", "tokens": counters[0].window, "n": counters[0].windows}
        rows += [make_row(**shared, layer=layer, value=value) for layer, value in enumerate(fractions)]
        rows.append(make_row(**shared, value=sum(fractions) / len(fractions)))
    return rows


def main(config: GatherConfig, report: Callable[..., None] | None = None) -> None:
    """Gather, and write rows and tables into the folder of the run."""
    device = device_of(config.device)
    with results_folder(config, PROGRAM) as folder:
        subject = load_subject(config.checkpoint, None, device)
        _choose_backend(subject, config.backend)
        if too_long := [group for group in config.groups if group > (config.sequence or subject.sequence_length)]:
            log.warning("groups of %s tokens are longer than a sequence, and left out", ", ".join(map(str, too_long)))
        batches = subject.batches(config.batch, config.sequence, config.tokens, config.data, config.split)
        gatherer = gather(subject, batches, config, report)
        error, tokens = gatherer.check(), gatherer.layers[0].tokens
        names = {"study": config.run.study, "item": config.run.name(PROGRAM)}
        columns = {**names, **subject.columns, "op": "nonzeros", "pattern": subject.name, "tokens": tokens}
        _write_tables(gatherer, subject, names, folder)
        write_results(folder, rows_of(gatherer, {**columns, "device": device}, error), config)
    log.info("%d tokens of %s: %s", tokens, subject.name, [round(layer.mean(), 1) for layer in gatherer.layers])


def _choose_backend(subject: Subject, backend: str) -> None:
    """Raises `ConfigError` for one that cannot run the model's blocks."""
    shape = subject.loaded.config
    reason = why_not(
        backend,
        device=subject.model.device,
        dtype=subject.model.dtype,
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        gated=shape.gated,
    )
    if reason is not None:
        raise ConfigError(f"backend={backend}: it cannot run {subject.name} here: {reason}")
    for block in feed_forward_blocks(subject.model):
        if not isinstance(block, SiluFeedForward):
            block.plan = backend


def _write_tables(gatherer: Gatherer, subject: Subject, names: dict[str, str], folder: Path) -> None:
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
