"""Time one feed-forward block: dense against the sparse backends, forward, forward and backward, and single operations;
and the machine's ceilings beside them, from which `analysis.floors` estimates the time of each.

    python -m experiments.bench_kernels tokens=[131072] mean_nnz=[10,29,60,120] backends=[reference]
    python -m experiments.bench_kernels masks=runs/demo/nonzeros_relu/nonzeros_masks.parquet layers=[0,3] tokens=[2048]

Behind the name of a backend, +hot computes hot neurons, found by index, by dense products. +ordered, of a forward only,
does so with the neurons sorted by firing rate: the hot ones are then a slice of the weights instead of copies. +live
also leaves out the neurons that fire for none of the tokens, and dense+live does so with dense products. +backup, of a
training only, computes an eighth of the tokens densely. Figure E has the layers of a trained model with each of them:

    python -m experiments.bench_kernels masks=paper_figures/h200/nonzeros_masks.parquet \
        masks_item=nonzeros_0.5b_l1_2e-5 tokens=[131072] \
        backends=[hopper,hopper+hot,hopper+ordered,hopper+live,dense+live]

ffn_forward_graph is the forward with few tokens as in a model that generates: in a CUDA graph, with weights that are in
device memory and not in the L2 cache. It leaves out +hot, +ordered and +live, which choose neurons on the tokens timed:

    python -m experiments.bench_kernels ops=[ffn_forward_graph] tokens=[1,4,16,64,256,1024] mean_nnz=[29]

ffn_tuned and ffn_tuned_graph are the forward of a block after `twell.autotune` with the largest of `tokens`: beside
the dense forms, with all of these tokens and with fewer, for which it may have another backend. autotune itself finds
the hot neurons and their order: what follows a + in `backends` makes no difference there.

    python -m experiments.bench_kernels ops=[ffn_tuned,ffn_tuned_graph] tokens=[1,16,128,1024,16384] mean_nnz=[29]

ffn_training is the forward and backward of a block alone, which runs its backward right behind its forward.
ffn_training_stack is the same as in a model: the forwards of several blocks first, then their backwards, so that the
host is ahead of the device when a backward asks for what its forward counted. Its rows give the time of one block.

Every result is compared with float64 on the problem that is timed; a result that is off stops the benchmark. The result
of +live is exact there too, since the neurons left out are silent on these tokens; on others they need not be. Problems
made of masks repeat at most `hidden` different tokens, on which more neurons are silent than on longer text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from experiments.bench.options import DENSE_FORMS, FP8, SINGLE_OPS, check_form, exists_for
from experiments.run.config import entry, option, section
from experiments.run.errors import ConfigError
from experiments.run.output import (
    OutputConfig,
    Rows,
    device_of,
    device_option,
    dtype_of,
    results_folder,
    write_as_measured,
)
from experiments.run.train_config import LARGEST_SIZE
from experiments.run.values import LARGEST_SEED
from experiments.timing.options import ALL_METRICS, CEILINGS, TimingConfig
from experiments.timing.plans import BY_LAYER, SUFFIXES, Name

if TYPE_CHECKING:
    import torch

    from experiments.bench.patterns import Masks
    from experiments.timing.compare import Absent, Candidate
    from twell.testing import Problem

    Comparison = tuple[Problem, list[Candidate | Absent], str]  # alternatives, the baseline (empty: the fastest dense)

PROGRAM = "bench_kernels"

TUNED_OPS = ("ffn_tuned", "ffn_tuned_graph")
TRAINING_OPS = {"ffn_training": 1, "ffn_training_stack": 4}  # blocks whose forwards run before their backwards
BLOCK_OPS = ("ffn_forward", "ffn_forward_stats", "ffn_forward_graph", *TUNED_OPS, *TRAINING_OPS)
KNOWN_OPS = (*CEILINGS, *BLOCK_OPS, *SINGLE_OPS)
# Only training holds memory. Of a CUDA graph or a stack, host time and memory are those of many calls at once.
NOT_OF_A_FORWARD = ("held_memory",)
NOT_OF_MANY = (*NOT_OF_A_FORWARD, "peak_memory", "host_time")
MANY = ("ffn_training_stack", "ffn_forward_graph", "ffn_tuned_graph")
NOT_OF: dict[str, tuple[str, ...]] = {"ffn_training": (), **dict.fromkeys(MANY, NOT_OF_MANY)}
H200_LIST = "ours: what the published kernels were measured with on an H200"
log = logging.getLogger(__name__)


@dataclass
class BenchKernelsConfig:
    """Time feed-forward blocks on synthetic patterns, or on real ones saved by gather_nonzeros."""

    tokens: list[int] = option(
        [2048, 16384, 131072],
        "M, tokens in one call",
        source=H200_LIST,
        required=True,
        distinct=True,
        minimum=1,
        maximum=2**30,
    )
    hidden: int = option(2048, "K, hidden size", source="the paper, table 2", minimum=8, maximum=LARGEST_SIZE)
    intermediate: int = option(
        5632, "N, intermediate size", source="the paper, table 2", minimum=1, maximum=LARGEST_SIZE
    )
    gated: bool = option(True, "gated or non-gated block")
    mean_nnz: list[float] = option(
        [10.0, 29.0, 60.0, 120.0],
        "mean non-zeros of the synthetic patterns",
        source=H200_LIST,
        required=True,
        distinct=True,
        above=0,
    )
    masks: str | None = option(
        None, "nonzeros_masks.parquet: real patterns instead of synthetic ones; it gives N", required=True
    )
    masks_item: str | None = option(
        None, "of a file with the masks of several runs, as in paper_figures/h200: the item to take", required=True
    )
    layers: list[int] = option([], "layers of the masks to use; empty: all", distinct=True, minimum=0)
    ops: list[str] = option(
        [*CEILINGS, "ffn_forward", "ffn_training", "gate_pack", "gated_down", "down"],
        f"what to time: the machine ({', '.join(CEILINGS)}), blocks ({', '.join(BLOCK_OPS)}), "
        f"single operations ({', '.join(SINGLE_OPS)})",
        required=True,
        distinct=True,
        choices=KNOWN_OPS,
    )
    dense: list[str] = option(
        list(DENSE_FORMS),
        f"dense forms; the fastest is the baseline, {FP8} (a forward's, not exact) never",
        distinct=True,
        choices=(*DENSE_FORMS, FP8),
    )
    backends: list[str] = option(
        [],
        f"backends of kernels, also with {', '.join(SUFFIXES)} behind; empty: every one but dense",
        distinct=True,
        check=check_form,
    )
    metrics: list[str] = option(list(ALL_METRICS), "what to measure", required=True, distinct=True, choices=ALL_METRICS)
    l1: float = option(
        2e-5, "coefficient of the L1 term in the backends' training", source="the paper's recommended one", minimum=0
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "of inputs and weights; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    device: str = device_option()
    seed: int = option(0, "of the synthetic problems", minimum=0, maximum=LARGEST_SEED)
    timing: TimingConfig = section(TimingConfig, "how long to time")
    run: OutputConfig = section(OutputConfig, "where results go")

    def __post_init__(self) -> None:
        if not any(self.runs(op) for op in self.ops):
            raise ConfigError(f"nothing to time: {', '.join(self.ops)} of a block without a gate, or these metrics")
        if self.masks is None and max(self.mean_nnz) > self.intermediate:
            raise ConfigError(f"mean_nnz must be at most intermediate = {self.intermediate}, got {max(self.mean_nnz)}")
        if self.masks is None and (self.layers or self.masks_item is not None):
            raise ConfigError("layers and masks_item are those of masks: give masks=FILE too")

    def runs(self, op: str) -> bool:
        """Whether the operation exists for such a block, and has one of the metrics."""
        return op in CEILINGS or (exists_for(op, gated=self.gated) and bool(self.metrics_of(op)))

    def metrics_of(self, op: str) -> list[str]:
        return [metric for metric in self.metrics if metric not in NOT_OF.get(op, NOT_OF_A_FORWARD)]


class Pattern(NamedTuple):
    """A problem to be made, and where its sparsity comes from."""

    source: str
    tokens: int
    make: Callable[[], Problem]


def patterns(config: BenchKernelsConfig, device: torch.device) -> Iterator[Pattern]:
    from experiments.bench.patterns import problem_from_mask
    from twell.testing import make_problem

    dtype = dtype_of(config.dtype, device)
    common: dict[str, Any] = {"gated": config.gated, "seed": config.seed, "dtype": dtype, "device": device}
    for tokens in config.tokens:
        for mean in config.mean_nnz if config.masks is None else []:
            sizes = (tokens, config.hidden, config.intermediate, mean)
            yield Pattern("synthetic", tokens, partial(make_problem, *sizes, **common))
        if masks := _masks(config):
            for layer in config.layers or masks.layers():
                yield Pattern(
                    f"{masks.item}/layer{layer}",
                    tokens,
                    lambda layer=layer, tokens=tokens: problem_from_mask(  # type: ignore[misc]
                        masks.load(layer), tokens, config.hidden, **common
                    ),
                )


def _masks(config: BenchKernelsConfig) -> Masks | None:
    from experiments.bench.patterns import Masks

    return None if config.masks is None else Masks.of(Path(config.masks), config.masks_item)


def measure(pattern: Pattern, op: str, config: BenchKernelsConfig, device: torch.device) -> Rows:
    """Rows of one operation on one problem; of a tuned block, also with fewer tokens.

    Raises:
        CheckFailed: when a result is wrong.
    """
    from experiments.bench.feedforward import mean_nonzeros
    from experiments.timing.compare import compare

    rows = []
    for problem, alternatives, baseline in _comparisons(op, pattern.make(), config, device):
        mean_nnz = mean_nonzeros(problem)
        columns: dict[str, Any] = {
            "op": op,
            "tokens": len(problem.x),
            "hidden": problem.w_up.shape[1],
            "intermediate": problem.w_up.shape[0],
            "gated": config.gated,
            "activation": "relu",
            "mean_nnz": mean_nnz,
            "pattern": pattern.source,
            "seed": config.seed,
            **config.run.columns(PROGRAM),
        }
        count, tokens = len(alternatives), len(problem.x)
        log.info("%s, %s, %d tokens, %.1f non-zeros: %d alternatives", op, pattern.source, tokens, mean_nnz, count)
        rows += compare(alternatives, device, config.timing, config.metrics_of(op), baseline=baseline, **columns)
    return rows


def _comparisons(op: str, problem: Problem, config: BenchKernelsConfig, device: torch.device) -> Iterator[Comparison]:
    from experiments.bench import feedforward, graph_forward, single_ops

    backends = feedforward.chosen(config.backends, device)
    if op == "ffn_forward_stats":
        for backend in backends:
            alternatives = feedforward.with_and_without_stats(problem, backend)
            yield problem, alternatives, feedforward.without_stats(backend)
    elif op in TUNED_OPS:
        yield from _tuned(op, problem, config)
    elif op == "ffn_forward_graph":
        yield problem, graph_forward.alternatives(problem, config.dense, backends), ""
    elif op in BLOCK_OPS:
        blocks = TRAINING_OPS.get(op, 0)
        yield problem, feedforward.alternatives(problem, config.dense, backends, blocks=blocks, l1=config.l1), ""
    else:
        yield problem, single_ops.alternatives(op, problem, backends), ""


def _tuned(op: str, problem: Problem, config: BenchKernelsConfig) -> Iterator[Comparison]:
    from experiments.bench import feedforward, graph_forward
    from experiments.bench.tuned_block import TunedBlock
    from experiments.timing.compare import Absent

    device, in_graph = problem.x.device, op == "ffn_tuned_graph"
    names = list(dict.fromkeys(Name.of(name).backend for name in config.backends if Name.of(name).backend != "dense"))
    usable = [name for name in names if not feedforward.unavailable(name, device)]
    if names and not usable:
        yield problem, [Absent(names[0], BY_LAYER, feedforward.unavailable(names[0], device))], ""
        return
    block = TunedBlock(problem, usable or None)
    for tokens in config.tokens:
        part = block.problem(tokens)
        form = block.form(part, in_graph=in_graph)
        if in_graph:
            alternatives = graph_forward.alternatives(part, config.dense, [], [form])
        else:
            alternatives = feedforward.alternatives(part, config.dense, [], others=[form])
        yield part, alternatives, ""


def main(config: BenchKernelsConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`.

    Raises:
        ConfigError: of the backends named, none can run on the CPU that is all there is.
    """
    from experiments.bench.feedforward import unavailable
    from experiments.timing import ceilings

    device = device_of(config.device)
    reasons = [unavailable(name, device) for name in config.backends]
    if device.type == "cpu" and reasons and all(reasons):
        raise ConfigError(f"of backends=[{','.join(config.backends)}] none can run on a CPU: {reasons[0]}")
    ops = [op for op in config.ops if op not in CEILINGS and config.runs(op)]
    folder = results_folder(config, PROGRAM)
    work = [
        (pattern, op)
        for pattern in patterns(config, device)
        for op in ops
        if op not in TUNED_OPS or pattern.tokens == max(config.tokens)
    ]

    def parts() -> Iterator[Rows]:
        masks, names = _masks(config), config.run.columns(PROGRAM)
        intermediate = config.intermediate if masks is None else masks.load(masks.layers()[0]).shape[1]
        shape = ceilings.Shape(config.hidden, intermediate, config.gated, dtype_of(config.dtype, device), device)
        for op in [op for op in CEILINGS if op in config.ops]:
            for tokens in config.tokens if op == "ceiling_matmul" else [None]:
                yield [ceilings.ceiling_row(op, shape, tokens, config.timing, **names)]
        for done, (pattern, op) in enumerate(work):
            if report:
                report(done, len(work), tokens=pattern.tokens)
            yield measure(pattern, op, config, device)

    write_as_measured(folder, parts(), config)


if __name__ == "__main__":
    entry(main, BenchKernelsConfig)
