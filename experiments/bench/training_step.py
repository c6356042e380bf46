"""The alternatives for a training step of a whole model, checked block by block and gradient by gradient.

The step is that of `experiments.train`: forward, backward, clipping, optimizer. It runs at learning rate 0, so that the
weights, and with them the sparsity, stay those of the checkpoint however long it is timed. B sequences, S positions.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaForCausalLM

from experiments.bench.decoder import exact_copy, no_tf32
from experiments.bench.feedforward import problem_of, unavailable
from experiments.models.llama import SiluFeedForward, compute_as_transformers, feed_forward_blocks, nonzeros_of
from experiments.run.errors import RunError
from experiments.run.torch_internals import CompilationFailed, raise_recompile_limit
from experiments.run.train_config import OptimizerConfig
from experiments.run.values import in_one_line
from experiments.timing.compare import REASON_LENGTH, Absent, Candidate, check
from experiments.timing.measure import GIGA, peak_memory
from experiments.timing.plans import AUTO, BY_LAYER, TRANSFORMERS, Name, named, plan_of
from experiments.training.block_plans import sparse_backend
from experiments.training.loss import LossModel, total_loss
from experiments.training.optimizer import build_optimizer, set_learning_rate
from twell import Plan, SparseFeedForward, autotune
from twell.capacity import capacity_for
from twell.plan import CAPACITY
from twell.registry import BackendUnavailable
from twell.testing import compare, relative_error, tolerance

Gradients = dict[str, Tensor]

# The dense forms of a model, the fastest of which is the baseline: the blocks' backend, and what is compiled.
DENSE_FORMS: dict[str, tuple[str, Literal["", "whole", "layers"]]] = {
    "dense_transformers": (TRANSFORMERS, ""),
    "dense_eager": ("dense", ""),
    "dense_compiled": ("dense", "whole"),
    "dense_compiled_layers": ("dense", "layers"),
}
# Of the memory that there is, what one step can have allocated: the rest is lost between the pieces.
USABLE_MEMORY = 0.97
# A search keeps a choice for fewer tokens, and for less than so many times as many: the memory is about the same.
ROUGHLY = 4


class Form(NamedTuple):
    """An alternative: the blocks' backend (also with WITH_BACKUP behind it, or AUTO), the L1 term's coefficient, and
    what torch.compile makes: nothing, the whole model, or layer by layer, as a training does.

    Dense forms have no L1 term and no statistics: a dense model's training has neither.
    """

    name: str
    backend: str
    l1: float
    compiled: Literal["", "whole", "layers"] = ""

    @property
    def plan(self) -> str:
        return BY_LAYER if self.backend == AUTO else plan_of(self.backend, training=True)

    @property
    def backup(self) -> float | None:
        """The share of the tokens that are a dense backup."""
        return Name.of(self.backend).share


class TrainingStep:
    """One optimizer step of a model, in any form.

    Args:
        model: a causal language model with our blocks, in float32.
        dtype: of the products: bfloat16 (by autocast) or float32.
    """

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype):
        self.model, self.blocks = model.train(), feed_forward_blocks(model)
        self.optimizer, self._max_norm = build_optimizer(model, OptimizerConfig()), OptimizerConfig().max_grad_norm
        set_learning_rate(self.optimizer, 0.0)
        self._dtype, self._precision = dtype, str(dtype).removeprefix("torch.")
        self._loss, self._loss_in_parts = (LossModel(model, precision=self._precision) for _ in range(2))
        self._loss_in_parts.compile_parts()  # from now on the layers run as they are only where that is forced
        self._exact_loss = LossModel(model, precision="float32")
        self._by_layer: list[Plan] = []  # what AUTO chose
        self._chosen_for = 0  # so many tokens
        self._capacities = [CAPACITY] * len(self.blocks)

    @cached_property
    def _compiled_loss(self) -> Callable:
        torch.compiler.reset()  # torch counts compilations over all models (see experiments.bench.feedforward)
        raise_recompile_limit()  # each micro-batch that is tried is one
        return torch.compile(self._loss, dynamic=False)

    def _loss_of(self, form: Form) -> Callable:
        if not form.compiled:
            return self._loss
        return self._compiled_loss if form.compiled == "whole" else self._loss_in_parts

    @property
    def sparse(self) -> bool:
        """Whether the blocks have a choice of backends: SiLU blocks are always dense."""
        return not isinstance(self.blocks[0], SiluFeedForward)

    def run(self, form: Form, tokens_BS: Tensor) -> None:
        """One step; `tokens_BS` is int64 [B, S + 1]. One that runs out of memory leaves nothing of its own behind."""
        try:
            self._backward(self._loss_of(form), form, tokens_BS)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def check(self, form: Form, tokens_BS: Tensor) -> float:
        """Largest relative error of any block against float64 (`check_blocks`); of SiLU blocks, which have one backend
        only, of any parameter's gradient against float32 with dense products (float64, if the step is in float32).

        The loss and the gradients of the whole model are compared with those, too. A gradient may be off by what
        rounding explains, which dense products in this precision show. In a whole model that depends on which neurons
        rounding happens to switch, so it is the largest of the layers that counts; in a deep one it may be as large as
        the gradient (0.8 in one of 28 layers), so that this comparison tells gross errors only.

        Raises:
            CheckFailed: when one is off by more.
        """
        self.prepare(form, tokens_BS)
        dense = Form("dense products", "dense", form.l1)
        exact_loss, exact = self._exact_gradients(dense, tokens_BS)
        plain_loss, plain = self._gradients(self._loss, dense, tokens_BS)
        loss, ours = self._gradients(self._loss_of(form), form, tokens_BS)
        allowed = tolerance(relative_error(plain_loss, exact_loss), self._dtype, scalar=True)
        check(f"{form.name}, loss", relative_error(loss, exact_loss), allowed)
        rounding: dict[str, float] = defaultdict(float)
        for name, wanted in exact.items():
            rounding[_in_any_layer(name)] = max(rounding[_in_any_layer(name)], relative_error(plain[name], wanted))
        errors = []
        for name, wanted in exact.items():
            allowed = tolerance(rounding[_in_any_layer(name)], self._dtype)
            errors.append(check(f"{form.name}, gradient of {name}", relative_error(ours[name], wanted), allowed))
        return self.check_blocks(form, tokens_BS) if self.sparse else max(errors)

    def check_blocks(self, form: Form, tokens_BS: Tensor) -> float:
        """Largest relative error of any block as this form runs it, against float64: of its output, its L1 term, and
        the gradients of its input and weights. Inputs and output gradients are those of a dense step on these tokens,
        for which `prepare` must have been called; AUTO is what it chose last.

        Raises:
            CheckFailed: when one is off by more than twice the rounding error of dense products.
        """
        l1 = form.l1 / len(self.blocks)
        calls = self._calls(form.l1, tokens_BS)
        self._set(form.backend, keep_stats=bool(form.l1))
        errors = []
        for layer, (block, (x_MK, dy_MK)) in enumerate(zip(self.blocks, calls, strict=True)):
            assert isinstance(block, SparseFeedForward)
            for name, found in compare(_function(block), problem_of(block, x_MK), dy_MK, l1, block.activation).items():
                if name != "l1" or form.l1:
                    errors.append(check(f"{form.name}, layer {layer}, {name}", found.error, found.allowed))
        return max(errors)

    def _calls(self, l1: float, tokens_BS: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each block's input and output gradient in a dense step, [M, K] in the precision of the products."""
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []

        def note(block: nn.Module, arguments: tuple[Tensor, ...], y_BSK: Tensor) -> None:
            inputs.append(arguments[0].detach().flatten(0, -2).to(self._dtype))
            y_BSK.register_hook(lambda dy_BSK: gradients.append(dy_BSK.flatten(0, -2).to(self._dtype)))

        with ExitStack() as stack:
            stack.callback(self.optimizer.zero_grad, set_to_none=True)
            for block in self.blocks:
                stack.enter_context(block.register_forward_hook(note))
            self._backward(self._loss, Form("dense products", "dense", l1), tokens_BS)
        return list(zip(inputs, reversed(gradients), strict=True))

    def mean_nonzeros(self, tokens_BS: Tensor) -> float:
        """Mean non-zeros per token, over all layers."""
        nonzeros = self._nonzeros(tokens_BS)
        return sum(nonzeros) / len(nonzeros)

    def prepare(self, form: Form, tokens_BS: Tensor, *, roughly: bool = False) -> None:
        """Give the blocks enough capacity for these tokens, and let AUTO choose, as a training does that meets the
        model at this step, unless its last choice was for as many tokens (roughly: for more than 1 / ROUGHLY of them).
        Call this before `run` on them: with too little capacity, gradients and then weights may be NaN."""
        if not self.sparse:
            return
        nonzeros = self._nonzeros(tokens_BS)
        if form.backend == AUTO:
            backend, reason = self.sparse_backend()
            if backend is None:
                raise BackendUnavailable(reason)
            count = tokens_BS.numel()
            serves = count < ROUGHLY * self._chosen_for if roughly else count == self._chosen_for
            if not serves:
                self._set("dense", keep_stats=bool(form.l1))
                self._by_layer = [choice.plan for choice in autotune(self._loss, tokens_BS, compiled=True)]
                self._chosen_for = count
        needed = [capacity_for(n, len(block.up_proj.weight)) for block, n in zip(self.blocks, nonzeros, strict=True)]
        self._capacities = [max(pair) for pair in zip(self._capacities, needed, strict=True)]
        self._by_layer = [
            replace(plan, capacity=capacity) for plan, capacity in zip(self._by_layer, self._capacities, strict=False)
        ]

    def unavailable(self, form: Form) -> str:
        """Why this form cannot run here; empty if it can."""
        if form.backend == AUTO:
            return self.sparse_backend()[1]
        return "" if form.backend == TRANSFORMERS else unavailable(form.backend, self.model.device)

    def sparse_backend(self) -> tuple[str | None, str]:
        """The backend that AUTO gives sparse layers here; where there is none to choose, None and why."""
        block = self.blocks[0]
        intermediate, hidden = block.up_proj.weight.shape
        return sparse_backend(self.model.device, self._dtype, hidden, intermediate, block.gated)

    @torch.no_grad()
    def _nonzeros(self, tokens_BS: Tensor) -> list[float]:
        """Mean per token, by layer."""
        self._set("dense", keep_stats=True)
        with torch.compiler.set_stance("force_eager"):
            self._loss(tokens_BS)
        return [nonzeros_of(block).double().mean().item() for block in self.blocks]

    def _exact_gradients(self, form: Form, tokens_BS: Tensor) -> tuple[Tensor, Gradients]:
        """In float32; in float64, by a copy of the model, where float32 is to be checked."""
        if self._dtype == torch.float32:
            exact = TrainingStep(exact_copy(self.model), torch.float32)
            return exact._gradients(exact._loss, form, tokens_BS)
        with no_tf32():
            return self._gradients(self._exact_loss, form, tokens_BS)

    def _gradients(self, loss: Callable, form: Form, tokens_BS: Tensor) -> tuple[Tensor, Gradients]:
        """The loss, and its gradients of every parameter, before clipping."""
        try:
            total = self._backward(loss, form, tokens_BS)
            parameters = self.model.named_parameters()
            return total, {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, loss: Callable, form: Form, tokens_BS: Tensor) -> Tensor:
        """The loss, after its backward."""
        self._set(form.backend, keep_stats=bool(form.l1))
        try:
            with nullcontext() if form.compiled else torch.compiler.set_stance("force_eager"):
                cross_entropy, l1 = loss(tokens_BS)
                total = total_loss(cross_entropy, l1, form.l1)
                total.backward()
        except torch.OutOfMemoryError:
            for block in self.blocks:
                block.stats = None  # its L1 term holds the graph, and with it all activations
            raise
        return total.detach()

    def _set(self, backend: str, *, keep_stats: bool) -> None:
        plain, asked = backend == TRANSFORMERS, Name.of(backend)
        name = "dense" if plain else asked.backend
        plans = [Plan(name, capacity=capacity, backup=asked.share or 0.0) for capacity in self._capacities]
        for block, plan in zip(self.blocks, self._by_layer if backend == AUTO else plans, strict=True):
            compute_as_transformers(block, plain)
            block.keep_stats = keep_stats
            if self.sparse and block.plan != plan:
                block.plan = plan


def _function(block: SparseFeedForward) -> Callable[..., tuple[Tensor, Tensor]]:
    """The block's own forward as (x, w_gate, w_up, w_down) -> (y, l1); l1 is 0 without statistics."""

    def run(x_MK: Tensor, *weights: Tensor | None) -> tuple[Tensor, Tensor]:
        names = ("gate_proj", "up_proj", "down_proj")
        own = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True) if weight is not None}
        y_MK = functional_call(block, own, (x_MK,))
        return y_MK, y_MK.new_zeros(()) if block.stats is None else block.stats.l1

    return run


def _in_any_layer(name: str) -> str:
    """A parameter's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def forms(step: TrainingStep, dense: Sequence[str], backends: Sequence[str], l1: float) -> list[Form]:
    """The dense forms (of DENSE_FORMS), and forms for each backend where the model has a choice: eager, and with the
    layers around it compiled if a dense form is compiled."""
    found = [Form(name, DENSE_FORMS[name][0], 0.0, DENSE_FORMS[name][1]) for name in dense]
    compiled = any(form.compiled for form in found)
    for backend in backends if step.sparse else []:
        name = (step.sparse_backend()[0] or AUTO) if backend == AUTO else Name.of(backend).backend
        found.append(Form(name, backend, l1))
        if compiled:
            found.append(Form(named(name, compiled=True), backend, l1, "layers"))
    return found


def checked(
    step: TrainingStep, form: Form, check_tokens_BS: Tensor
) -> Absent | Callable[[Tensor, int | None], Candidate]:
    """The form, checked: a function that makes its candidate for a batch; or why it cannot run here. AUTO may choose
    anew for the batch: the blocks are then checked again, as they are chosen.

    Raises:
        CheckFailed: when a result or a gradient is off by more than rounding; the function raises it, too.
    """
    if reason := step.unavailable(form):
        return Absent(form.name, form.plan, reason, form.backup)
    try:
        error = step.check(form, check_tokens_BS)
    except (BackendUnavailable, CompilationFailed) as failure:
        return Absent(form.name, form.plan, in_one_line(failure, REASON_LENGTH), form.backup)

    def candidate(tokens_BS: Tensor, own_tokens: int | None = None) -> Candidate:
        step.prepare(form, tokens_BS)
        again = step.check_blocks(form, check_tokens_BS) if form.backend == AUTO else error
        worst = max(error, again)
        return Candidate(
            form.name, form.plan, lambda: step.run(form, tokens_BS), worst, tokens=own_tokens, backup=form.backup
        )

    return candidate


def largest_batch(peak_of: Callable[[int], float | None], memory: float, first: int = 2, limit: int = 4096) -> int:
    """The largest batch that fits, to within a sixteenth.

    A batch that is tried may be a compilation of the model, so few are: memory grows linearly with the batch, and two
    batches that fit tell where it ends.

    Args:
        peak_of: runs a batch; its peak memory, or None if it does not fit.
        memory: all that there is, in the same unit.
        first: batch to try after 1, a guess.
        limit: largest batch to try.

    Raises:
        RunError: when not even one sequence fits.
    """
    peak = peak_of(1)
    if peak is None:
        raise RunError("not even one sequence fits into the device's memory")
    peaks = {1: peak}
    low, high, batch = 1, limit + 1, max(2, min(first, limit))
    while batch < high:
        peak = peak_of(batch)
        if peak is None:
            high = batch
        else:
            low, peaks[batch] = batch, peak
        batch = _next_batch(peaks, low, high, memory, limit)
    return low


def _next_batch(peaks: Mapping[int, float], low: int, high: int, memory: float, limit: int) -> int:
    """What to try next, above `low` and below `high`: where memory ends by the two largest batches that fit, at least
    far enough above `low` to end the search, and below a batch that did not fit although it should have. `high` if the
    search has ended: the two say that a sixteenth more than `low` needs more memory than there is, or was tried."""
    step = max(1, low // 16)
    if high - low <= step or low == limit:
        return high
    if len(peaks) == 1:
        return (low + min(high, 4 * low)) // 2
    before = sorted(peaks)[-2]
    each = (peaks[low] - peaks[before]) / (low - before)
    if each > 0 and low + step <= limit and peaks[low] + step * each > memory:
        return high
    fitting = low + int((USABLE_MEMORY * memory - peaks[low]) / each) if each > 0 else 2 * low
    below = high - max(1, high // 16) if high <= limit else limit
    return max(low + 1, min(max(fitting, low + step), below))


def peak_memory_of(run: Callable[[], None], device: torch.device) -> float | None:
    """Peak of the allocated CUDA memory in the call, in GB (1e9 bytes); None if it ran out of memory. What it had
    allocated is freed either way."""
    try:
        peak = peak_memory(run, device).value
    except torch.cuda.OutOfMemoryError:
        peak = None
    free_cached_memory()  # outside of the handler, whose traceback would keep the activations alive
    return peak


def allocation_retries(device: torch.device) -> int:
    """How often CUDA's allocator has given its cache back to find memory; 0 on a CPU."""
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


def without_retries(run: Callable[[], None], device: torch.device) -> None:
    """Run a step that fits.

    Raises:
        torch.OutOfMemoryError: the CUDA allocator found memory only after it had given its cache back, which waits for
            the device. At 99% of a GPU's memory, a step was 15% slower, probably for this reason.
    """
    before = allocation_retries(device)
    run()
    if more := allocation_retries(device) - before:
        raise torch.OutOfMemoryError(f"the step fits only after the allocator gave its cache back {more} times")


def free_cached_memory() -> None:
    """Give back the CUDA memory of everything that nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def usable_memory(device: torch.device) -> float:
    """CUDA memory that this process has or could have, in GB (1e9 bytes)."""
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / GIGA
