"""The forward of one feed-forward block after `twell.autotune`: with all the tokens that it was tuned on, and with
fewer of them, for which it may have another backend. Shapes: M tokens, K hidden, N intermediate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.bench.feedforward import Form, problem_of
from experiments.timing.plans import BY_LAYER
from twell import Plan, SparseFeedForward, autotune, sparse_ffn
from twell.testing import Problem
from twell.tuning import Tuning
from twell.tuning.forward import evenly_by_nonzeros

log = logging.getLogger(__name__)


class TunedBlock:
    """A block with a copy of the problem's weights, tuned on its tokens.

    Args:
        backends: to choose from besides dense products; None: those that `autotune` takes by itself.

    Raises:
        BackendUnavailable: for a backend that was requested by name but cannot run.
    """

    def __init__(self, problem: Problem, backends: Sequence[str] | None) -> None:
        self._problem = problem
        gate, up, down = (None if weight is None else _linear(weight) for weight in problem[1:])
        assert up is not None
        assert down is not None
        self._block = SparseFeedForward.from_linears(gate, up, down, keep_stats=True).eval()
        with torch.no_grad():
            self._block(problem.x)
            stats = self._block.stats
            assert stats is not None
            self._nonzeros = stats.nonzeros
            self._block.keep_stats = False
            self.tuning: Tuning = autotune(self._block, problem.x, backends=backends)
        log.info("tuned on %d tokens:\n%s", len(problem.x), self.tuning)

    def problem(self, tokens: int) -> Problem:
        """The problem with so many of its tokens, taken evenly from the range of their non-zeros."""
        x_MK = self._problem.x
        return self._problem._replace(
            x=x_MK[evenly_by_nonzeros(self._nonzeros, tokens)] if tokens < len(x_MK) else x_MK
        )

    @torch.no_grad()
    def form(self, problem: Problem, *, in_graph: bool) -> Form:
        """The block's forward of a problem that `problem` made. In a graph, it is called with copies of the weights,
        and therefore as a function, with the settings that the block has for this number of tokens."""
        block = self._block
        backend = block.plan.backend_for(len(problem.x))
        if not in_graph:
            return Form(backend, BY_LAYER, lambda x, *_: (block(x), None))
        plan = Plan(backend, block.plan.hot)

        def run(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> tuple[Tensor, None]:
            return sparse_ffn(x, gate, up, down, plan=plan), None

        return Form(backend, BY_LAYER, run, prepare=lambda p: problem_of(block, p.x))


def _linear(weight: Tensor) -> nn.Linear:
    neurons, inputs = weight.shape
    linear = nn.Linear(inputs, neurons, bias=False, device="meta")
    # Without gradients: a block whose weights could get one runs the plan of a training, whoever calls it.
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear
