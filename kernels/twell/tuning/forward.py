"""The fastest plan for a block's forward, for calls of fewer tokens too.

What is fastest depends on the number of tokens: an H200 computes a block of 16 tokens faster from the rows of the
weights that they need, one of 100 tokens with dense products, and one of some thousand tokens from the non-zeros.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import registry
from ..hot import hot_neurons
from ..memory import SCREENS_FROM
from ..modules import SparseFeedForward, pattern_layer, weights_of
from ..ops import Call, compute, sparse_ffn
from ..plan import Plan
from ..registry import DENSE
from .common import Choice, Decision, fastest_by_form, load_kernels, usable_backends
from .order import firing_order
from .timing import cold_costs, quick_times, sustained_times

LONG_CALL = 0.25  # ms: between shorter calls a GPU waits for the host, and stays cool
CLEARLY = 1.6  # a factor between times that short measurements can be trusted with
LEAST_SCREENED = 512  # neurons: fewer do not pay for a pass over x
MOST_CONTENDERS = 3  # sparse plans that are measured under sustained load
# Numbers of tokens that are measured, below those of the inputs.
COUNTS = (1, 4, 16, 64, 128, 1024, 2048, 4096, 8192, 16384, 32768)

Ranges = tuple[tuple[int, str], ...]


def choose(
    block: SparseFeedForward, x: Tensor, backends: Sequence[str] | None, *, hot: bool, sortable: bool
) -> Decision:
    """What is fastest on x [..., K] without gradients. hot: whether to try hot neurons; sortable: sorted ones too."""
    weights, pattern = weights_of(block), pattern_layer(block).weight
    _, stats = sparse_ffn(x, *weights, block.activation, DENSE, return_stats=True)
    by_index = tuple(hot_neurons(x, pattern).tolist()) if hot else ()
    order = firing_order(x, pattern, stats.fired) if sortable else None
    in_order = weights if order is None else order.reordered(weights)
    usable, plans = usable_backends(block, x, backends), [Plan(DENSE)]
    for name in usable if backends is not None else usable[:1]:
        plans += [Plan(name), *([Plan(name, by_index)] if by_index else [])]
        plans += [Plan(name, count) for count in (() if order is None else order.prefixes)]

    def call(plan: Plan, x: Tensor = x) -> Callable[[], object]:
        indices = torch.tensor(plan.indices, device=x.device) if plan.indices else None  # as a block keeps them
        given = Call(plan, block.activation, block.keep_stats, hot=indices)
        inputs = x, *(in_order if plan.of_sorted else weights)
        return lambda: compute(inputs, given)

    rare = order.rare if order is not None and block.gated and not block.keep_stats else 0
    load_kernels((block, name, rare > 0) for name in usable)
    times, best = measured(plans, call, x, rare)
    fewer: Ranges = ()
    if usable:
        x_MK = x.reshape(-1, x.shape[-1])
        fastest = {}
        sparse = usable[0] if best.backend == DENSE else best.backend
        for count in (count for count in COUNTS if count < len(x_MK)):
            some = x_MK[evenly_by_nonzeros(stats.nonzeros, count)]
            if times[best] * count >= LONG_CALL * len(x_MK):
                tried = Plan(DENSE), replace(best, backend=sparse)
                fastest[count] = measured(tried, functools.partial(call, x=some), some, 0)[1].backend
                if fastest[count] == best.backend:
                    break  # longer ones have it, too
                continue
            calls = {name: call(replace(best, backend=name), some) for name in (DENSE, *usable)}
            costs = cold_costs(calls, x.device)
            # A sparse backend must be faster than dense products both eagerly and in a CUDA graph.
            faster = [name for name in usable if costs[name].beats(costs[DENSE])]
            fastest[count] = min(faster, key=lambda name: costs[name].device, default=DENSE)
        fewer = ranges({**fastest, len(x_MK): best.backend})
    plan = replace(block.plan, backend=best.backend, hot=best.hot, up_to=fewer, screened=best.screened)
    choice = Choice(plan, stats.nonzeros.double().mean().item(), fastest_by_form(times))
    return Decision(choice, order.neurons if order is not None and best.of_sorted else None)


def measured(
    plans: Sequence[Plan], call: Callable[[Plan], Callable[[], object]], x: Tensor, rare: int
) -> tuple[dict[Plan, float], Plan]:
    """(the time of each of these plans in ms, and of some that screen the `rare` last of a gated block's sorted
    neurons; the fastest of them). call: the forward of a plan on x [..., K]."""
    times = quick_times({plan: call(plan) for plan in plans}, x.device)
    screening = screening_plans(times, rare, x.shape[:-1].numel())
    times |= quick_times({plan: call(plan) for plan in screening}, x.device)
    under_load = contenders(times) if x.is_cuda else []
    times |= sustained_times({plan: call(plan) for plan in under_load}, x.device)
    return times, min(under_load or times, key=times.__getitem__)


def screening_plans(milliseconds: dict[Plan, float], rare: int, tokens: int) -> list[Plan]:
    """The plans to try that screen the `rare` last sorted neurons: of each backend that can, the fastest of those
    measured without hot neurons by index, and the one without hot neurons."""
    if rare < LEAST_SCREENED or tokens < SCREENS_FROM:
        return []
    found = []
    for name in {plan.backend for plan in milliseconds if registry.get(plan.backend).screens}:
        plans = [plan for plan in milliseconds if plan.backend == name and not plan.indices]
        found += [min(plans, key=milliseconds.__getitem__), Plan(name)]
    return [replace(plan, screened=rare) for plan in dict.fromkeys(found)]


def contenders(milliseconds: dict[Plan, float]) -> list[Plan]:
    """The calls of which one is the fastest under a GPU's sustained load, where short measurements cannot tell whether
    dense products are: the dense ones, if any are measured, and the fastest others. None where that is clear or where
    calls are short."""
    dense = [plan for plan in milliseconds if plan.backend == DENSE]
    sparse = sorted(milliseconds.keys() - set(dense), key=milliseconds.__getitem__)[:MOST_CONTENDERS]
    if not sparse or milliseconds[sparse[0]] < LONG_CALL:
        return []
    close = [plan for plan in dense if 1 / CLEARLY < milliseconds[sparse[0]] / milliseconds[plan] < CLEARLY]
    return [*dense, *sparse] if close or not dense else []


def evenly_by_nonzeros(nonzeros: Tensor, count: int) -> Tensor:
    """Indices, int64 [count], of tokens from the whole range of non-zeros: of `count` equal parts of the tokens in
    ascending order of their non-zeros, the middle one of each. nonzeros: [...], of at least so many tokens."""
    order = nonzeros.flatten().argsort(stable=True)
    return order[(torch.arange(count, device=order.device) * 2 + 1) * len(order) // (2 * count)]


def ranges(fastest: dict[int, str]) -> Ranges:
    """`Plan.up_to` by the fastest backend at some counts of tokens, ascending; beyond the last it is that of the last.

    Between two counts with different backends the calls are dense if one of the two is, else they have that of the
    larger count.
    """
    pairs = itertools.pairwise(fastest.items())
    return tuple(
        (larger - 1 if name == DENSE else count, name) for (count, name), (larger, beyond) in pairs if name != beyond
    )
