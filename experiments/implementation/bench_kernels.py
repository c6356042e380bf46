"""The implementation of `experiments.bench_kernels`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.bench import feedforward, graph_forward, single_ops
from experiments.bench.patterns import Masks, problem_from_mask
from experiments.bench.tuned_block import TunedBlock
from experiments.bench_kernels import BLOCK_OPS, TRAINING_OPS, TUNED_OPS, BenchKernelsConfig
from experiments.run.errors import ConfigError
from experiments.run.output import Rows, device_of, dtype_of, results_folder, write_as_measured
from experiments.timing import ceilings
from experiments.timing.compare import Absent, Candidate, compare
from experiments.timing.options import CEILINGS
from experiments.timing.plans import BY_LAYER, Name
from twell.testing import Problem, make_problem

log = logging.getLogger(__name__)

PROGRAM = "bench_kernels"


class Pattern(NamedTuple):
    """A problem to be made, and where its sparsity comes from."""

    source: str
    tokens: int
    make: Callable[[], Problem]


def patterns(config: BenchKernelsConfig, device: torch.device) -> Iterator[Pattern]:
    """Every problem of the configuration."""
    dtype = dtype_of(config.dtype, device)
    common: dict[str, Any] = {"gated": config.gated, "seed": config.seed, "dtype": dtype, "device": device}
    for tokens in config.tokens:
        for mean in config.mean_nnz if config.masks is None else []:
            sizes = (tokens, config.hidden, config.intermediate, mean)
            yield Pattern("synthetic", tokens, partial(make_problem, *sizes, **common))
        if masks := _masks(config):
            for layer in config.layers or masks.layers():
                make = partial(_real, masks, layer, tokens, config.hidden, common)
                yield Pattern(f"{masks.run}/layer{layer}", tokens, make)


def _masks(config: BenchKernelsConfig) -> Masks | None:
    return None if config.masks is None else Masks.of(Path(config.masks), config.masks_item)


def _real(masks: Masks, layer: int, tokens: int, hidden: int, common: dict[str, Any]) -> Problem:
    return problem_from_mask(masks.load(layer), tokens, hidden, **common)


def measure(pattern: Pattern, op: str, config: BenchKernelsConfig, device: torch.device) -> Rows:
    """Rows of one operation on one problem; of a tuned block, also with fewer tokens.

    Raises:
        CheckFailed: when a result is wrong.
    """
    whole = pattern.make()
    rows = []
    for problem, found, baseline in _comparisons(op, whole, config, device):
        mean_nnz = feedforward.mean_nonzeros(problem)
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
            **_names(config),
        }
        log.info(
            "%s, %s, %d tokens, %.1f non-zeros: %d alternatives",
            op,
            pattern.source,
            len(problem.x),
            mean_nnz,
            len(found),
        )
        rows += compare(found, device, config.timing, config.metrics_of(op), baseline=baseline, **columns)
    return rows


def _comparisons(
    op: str, problem: Problem, config: BenchKernelsConfig, device: torch.device
) -> Iterator[tuple[Problem, list[Candidate | Absent], str]]:
    """(problem, alternatives, backend of the baseline; empty: the fastest dense form)."""
    backends = feedforward.chosen(config.backends, device)
    if op == "ffn_forward_stats":
        for backend in backends:
            found = feedforward.with_and_without_stats(problem, backend)
            yield problem, found, feedforward.without_stats(backend)
    elif op in TUNED_OPS:
        yield from _tuned(op, problem, config)
    elif op == "ffn_forward_graph":
        yield problem, graph_forward.alternatives(problem, config.dense, backends), ""
    elif op in BLOCK_OPS:
        found = feedforward.alternatives(problem, config.dense, backends, blocks=TRAINING_OPS.get(op, 0), l1=config.l1)
        yield problem, found, ""
    else:
        yield problem, single_ops.alternatives(op, problem, backends), ""


def _tuned(
    op: str, problem: Problem, config: BenchKernelsConfig
) -> Iterator[tuple[Problem, list[Candidate | Absent], str]]:
    device, in_graph = problem.x.device, op == "ffn_tuned_graph"
    names = list(dict.fromkeys(Name.of(name).backend for name in config.backends if Name.of(name).backend != "dense"))
    why = {name: reason for name in names if (reason := feedforward.unavailable(name, device))}
    absent: list[Candidate | Absent] = [Absent(name, BY_LAYER, reason) for name, reason in why.items()]
    if names and len(why) == len(names):
        yield problem, absent, ""
        return
    block = TunedBlock(problem, [name for name in names if name not in why] or None)
    for tokens in config.tokens:
        part = block.problem(tokens)
        form = block.form(part, in_graph=in_graph)
        if in_graph:
            found = graph_forward.alternatives(part, config.dense, [], [form])
        else:
            found = feedforward.alternatives(part, config.dense, [], others=[form])
        yield part, [*found, *absent], ""


def _names(config: BenchKernelsConfig) -> dict[str, str]:
    return {"study": config.run.study, "item": config.run.name(PROGRAM)}


def _ceiling_rows(config: BenchKernelsConfig, device: torch.device) -> Iterator[dict[str, Any]]:
    masks = _masks(config)
    intermediate = config.intermediate if masks is None else masks.load(masks.layers()[0]).shape[1]
    shape = ceilings.Shape(config.hidden, intermediate, config.gated, dtype_of(config.dtype, device), device)
    for op in [op for op in CEILINGS if op in config.ops]:
        for tokens in config.tokens if op == "ceiling_matmul" else [None]:
            yield ceilings.ceiling_row(op, shape, tokens, config.timing, **_names(config))


def _refuse_what_cannot_run(config: BenchKernelsConfig, device: torch.device) -> None:
    reasons = [feedforward.unavailable(name, device) for name in config.backends]
    if reasons and all(reasons):
        raise ConfigError(f"of backends=[{','.join(config.backends)}] none can run on a CPU: {reasons[0]}")


def main(config: BenchKernelsConfig, report: Callable[..., None] | None = None) -> None:
    """Run the benchmark; the rows are in `<folder>/rows.csv`.

    Raises:
        ConfigError: of the backends named, none can run on the CPU that is all there is.
    """
    device = device_of(config.device)
    if device.type == "cpu":
        _refuse_what_cannot_run(config, device)
    ops = [op for op in config.ops if op not in CEILINGS and config.runs(op)]
    with results_folder(config, PROGRAM) as folder:
        work = [
            (pattern, op)
            for pattern in patterns(config, device)
            for op in ops
            if op not in TUNED_OPS or pattern.tokens == max(config.tokens)
        ]

        def parts() -> Iterator[Rows]:
            yield from ([row] for row in _ceiling_rows(config, device))
            for done, (pattern, op) in enumerate(work):
                if report:
                    report(done, len(work), tokens=pattern.tokens)
                yield measure(pattern, op, config, device)

        write_as_measured(folder, parts(), config)
