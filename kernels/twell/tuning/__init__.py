"""`autotune`: chooses each block's plan by measuring some on given inputs."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..capacity import fitted
from ..modules import SparseFeedForward, check_whole, feed_forward_blocks
from ..plan import CAPACITY
from ..registry import is_sparse
from . import forward, training
from .common import Choice, Decision, Form, Tuning, check_all_ran, check_inputs, check_names, checked_tokens, hooked
from .order import can_be_ordered, order_neurons
from .saved import forget_plans, save_plans

__all__ = ["Choice", "Form", "Tuning", "autotune"]

logger = logging.getLogger(__name__)


@torch.no_grad()
def autotune(
    model: nn.Module,
    *inputs: Any,
    blocks: Sequence[SparseFeedForward] | None = None,
    backends: Sequence[str] | None = None,
    hot: bool = True,
    compiled: bool | None = None,
    group: training.Group = None,
    **named: Any,
) -> Tuning:
    """Choose the fastest plan for each SparseFeedForward of the model, and set it: for the forward if the model is in
    eval mode, for forward and backward if it is in training mode.

    Runs `model(*inputs, **named)` once, without gradients, and measures each block alone on the input that it gets.
    Results, and gradients in training, stay the same up to rounding. If it raises, no block has changed.

    In eval mode give real text with as many tokens as the largest of later calls will have. Smaller calls, down to a
    single token, are measured on some of these tokens and may get another backend (`Plan.up_to`). The neurons of a
    block may be sorted by firing rate, in place: the function stays the same, and the checkpoint an ordinary one
    (`twell.tuning.order.restore_order` undoes it). A transformers configuration stores the plans: after
    save_pretrained, from_pretrained and `sparsify`, `load_plans` restores them. A block takes seconds, most of them
    under sustained load where dense products are about as fast.

    In training mode give a micro-batch, between two steps, now and then: at first dense products are faster, later each
    block is sparse as soon as that saves time. A block takes some 0.1 s for each form: dense products, and a sparse
    backend without hot neurons, with those of these inputs by index, and with the present ones. The present plan stays
    unless another is at least 5% faster. What was chosen for inference is reset, but for calls of fewer tokens.
    Weights, gradients and random generators stay as they are; buffers that the model's forward updates do not.

    blocks: those to choose for; None: all of the model.
    backends: sparse backends to try besides dense products; None: the first that can run the block here (the reference
        never), and in eval mode, for small calls, all that can.
    hot: whether to try hot neurons.

    In training mode only:
    compiled: whether the blocks run compiled; None: those do that are inside of a module whose `compile()` was called,
        or of what `torch.compile(module)` returned, if it is in `model`. Where a compiled function calls the model, it
        cannot be seen: say True. Of such blocks, dense products are timed as torch.compile with its default options
        runs them; that compiles one block for each shape. The time in which the host issues a form's kernels does not
        count, since the host of a compiled model is ahead of the GPU, unless the model or the micro-batch is small. A
        block that changes makes torch.compile compile the compiled module that holds it anew. Beyond
        torch._dynamo.config.recompile_limit (8 by default) it gives up: raise it.
    group: where torch.distributed is initialized, the processes whose blocks are alike; None: all. They must all call
        this. They choose alike, by the means of their firing rates and times, and if one of them raises, all do
        (under FSDP: if it raises in a block, since other processes wait for its weights elsewhere).

    Raises TypeError for a misspelled setting and for inputs in a dict that is not unpacked, ValueError for an unknown
    backend, for inputs of a block without tokens or with NaN or Inf, for a model without blocks or one that does not
    run all that it should choose for, and in eval mode for sharded weights and DistributedDataParallel (processes would
    choose differently); BackendUnavailable for a backend that was requested by name but cannot run a block, and
    RuntimeError for what failed in another process.
    """
    check_names(backends)
    check_inputs(autotune, model, inputs, named)
    known = feed_forward_blocks(model)
    if not known:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to tune; `sparsify` puts them there")
    chosen = known if blocks is None else list(blocks)
    if foreign := set(chosen).difference(known):
        raise ValueError(f"{len(foreign)} of {len(chosen)} blocks are not in {type(model).__name__}")
    decisions: dict[SparseFeedForward, Decision] = {}
    places: dict[SparseFeedForward, torch.device] = {}  # where weights are in a forward, if offloaded between them
    processes = training.Processes(group) if model.training else None
    if processes is None:
        check_whole("autotune in eval mode", model, chosen)
    run_compiled = training.compiled_blocks(model, chosen, compiled) if model.training else set()
    sortable = {block for block in chosen if hot and not model.training and can_be_ordered(model, block)}
    if hot and not model.training and len(sortable) < len(chosen):
        logger.info(
            "the neurons of %d of %d blocks are not sorted: these are in training mode, have gradients or an "
            "l1_weight (set them to None), or weights that are parametrized or belong to other modules too",
            *(len(chosen) - len(sortable), len(chosen)),
        )

    def measure(block: SparseFeedForward, x: Tensor) -> None:
        if block in decisions:
            return
        places[block] = x.device
        if processes is None:
            checked_tokens(x, "autotune")
            decisions[block] = forward.choose(block, x, backends, hot=hot, sortable=block in sortable)
        else:
            settings = {"hot": hot, "compiled": block in run_compiled}
            decisions[block] = training.choose(block, x, backends, processes, **settings)
        logger.info("block %d of %d is measured", len(decisions), len(chosen))

    def run() -> None:
        model(*inputs, **named)
        check_all_ran(model, decisions, chosen)

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    random = torch.random.fork_rng(devices=devices) if model.training else nullcontext()
    with random, hooked(chosen, measure), torch.compiler.set_stance("force_eager"):
        processes.all_of(run) if processes is not None else run()
    for layer, block in enumerate(known):
        if block in decisions:
            _apply(layer, block, decisions[block])
            block._by_neuron("_hot", places[block])  # a compiled call would copy it each time
    forget_plans(model) if model.training else save_plans(model)
    return Tuning(decisions[block].choice for block in chosen)


def _apply(layer: int, block: SparseFeedForward, decision: Decision) -> None:
    plan, before, present = decision.choice.plan, block.plan, block._capacity
    if decision.order is not None:
        order_neurons(block, decision.order)
        logger.info("layer %d: its neurons are sorted; the state of an earlier optimizer is in the old order", layer)
    if plan.backend != before.backend:
        logger.info(
            "layer %d runs %s instead of %s from now on, at %.1f non-zeros per token",
            *(layer, plan, before.backend, decision.choice.mean_nonzeros),
        )
    if plan != block.plan:
        block.plan = plan
    if decision.capacity is None or plan.capacity is not None:
        return
    if is_sparse(plan.backend):
        block._capacity = fitted(present, decision.capacity)
    else:
        block._capacity = CAPACITY  # the same for all dense blocks, because torch.compile guards on it even for them
