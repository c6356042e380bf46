"""The forward of one feed-forward block as it runs while a model generates: with few tokens, in a CUDA graph, and with
weights that are in device memory and not in the L2 cache, which the other layers have used since.

The graph holds one call for each of several copies of the weights, so that a copy has been evicted by the others when
its turn comes again. Each call has the same x. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from experiments.bench.feedforward import Checker, Form, forms, pattern_weight
from experiments.run.torch_internals import CompilationFailed
from experiments.run.values import in_one_line
from experiments.timing.compare import REASON_LENGTH, Absent, Candidate, check
from experiments.timing.graphs import CannotCapture, CapturedCalls, l2_cache_bytes, why_no_graph
from experiments.timing.measure import Repeated
from experiments.timing.plans import Name, plan_of
from twell.registry import BackendUnavailable
from twell.testing import Problem, relative_error

log = logging.getLogger(__name__)

TIMES_L2 = 4  # what one replay reads of the weights, at least, over the size of the L2 cache
MOST_COPIES = 1024
CHOSEN_ON_FEW = "its neurons would be chosen on the few tokens that are timed, and no model knows these beforehand"


@torch.no_grad()
def alternatives(
    problem: Problem, dense: Sequence[str], backends: Sequence[str], others: Sequence[Form] = ()
) -> list[Candidate | Absent]:
    """Checked candidates for a block's forward in a CUDA graph, eagerly and again as replayed.

    Backends have no statistics. A backend with hot neurons or with neurons in order of firing is absent: the choice is
    made on the tokens that are timed, which says nothing about others if they are few.

    Args:
        dense: which of DENSE_FORMS; dense_fused is left out of a non-gated problem, which has nothing to fuse.
        backends: names of `kernels` backends.
        others: further forms.

    Raises:
        CheckFailed: when a result is off by more than rounding.
        ValueError: for an unknown dense form or backend.
    """
    refused = [name for name in backends if Name.of(name).neurons]
    found = forms(problem, dense, [name for name in backends if name not in refused], training=False)
    for name in refused:
        asked, plan = Name.of(name), plan_of(name, training=False)
        found.append(Absent(asked.backend, plan, CHOSEN_ON_FEW, asked.share))
    found += others
    device = problem.x.device
    if reason := why_no_graph(device):
        return [_absent(form, reason) for form in found]
    copies = copies_of(problem, l2_cache_bytes(device))
    if copies > MOST_COPIES:
        reason = f"it would take {copies} copies of the weights to evict them from the L2 cache, at most {MOST_COPIES}"
        return [_absent(form, reason) for form in found]
    log.info("%d copies of the weights in each CUDA graph", copies)
    checker = Checker(problem, None)
    return [form if isinstance(form, Absent) else _candidate(form, problem, copies, checker) for form in found]


def copies_of(problem: Problem, l2_bytes: int) -> int:
    """How many copies of the weights together exceed the L2 cache TIMES_L2 times, counting only what every form reads
    in full: the weights whose product with x decides which neurons fire. Of the others, sparse forms read few rows."""
    return -(-TIMES_L2 * l2_bytes // pattern_weight(problem).nbytes)


def _absent(form: Form | Absent, reason: str) -> Absent:
    return Absent(form.backend, form.plan, reason, form.backup)


def _candidate(form: Form, problem: Problem, copies: int, checker: Checker) -> Candidate | Absent:
    try:
        error = checker.error(form, 0.0)
        x, *weights = form.prepare(problem)
        copied = [weights, *([None if w is None else w.clone() for w in weights] for _ in range(copies - 1))]
        graph = CapturedCalls([partial(form.run, x, *of_a_copy) for of_a_copy in copied], problem.x.device)
    except (BackendUnavailable, CannotCapture, CompilationFailed, torch.OutOfMemoryError) as failure:
        return _absent(form, in_one_line(failure, REASON_LENGTH))
    for y_MK, _ in graph.outputs:
        y_MK.fill_(torch.nan)
    graph()
    exact, allowed = checker.wanted(0.0)
    replayed = max(relative_error(y_MK, exact["y"]) for y_MK, _ in graph.outputs)
    error = max(error, check(f"{form.backend} y in a CUDA graph", replayed, form.tolerance or allowed["y"]))
    return Candidate(form.backend, form.plan, Repeated(graph, copies), error)
