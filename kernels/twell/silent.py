"""Leaving out neurons that fired for no token of a text: how likely they fire elsewhere, and what changes then."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .modules import SparseFeedForward, pattern_layer


class Silent(NamedTuple):
    """The neurons that `drop_silent` left out, and the effect on other inputs."""

    neurons: int  # number left out, over all blocks
    of: int
    tokens: int  # number of tokens for which none of them fired
    held_out: "HeldOut | None" = None

    @property
    def bound(self) -> float:
        """The rule of three: at 95% confidence, a neuron that fired for none of n tokens fires for less than 3/n of
        all, if these n are independent."""
        return 3 / max(self.tokens, 1)

    def __str__(self) -> str:
        return (
            f"silent neurons: {self.neurons} of {self.of} are left out; none of them fired for {self.tokens} tokens, "
            f"so each fires for less than {self.bound:.2g} of all tokens (rule of three, 95%)\n"
            + ("not measured on other inputs: give held_out" if self.held_out is None else str(self.held_out))
        )


class HeldOut(NamedTuple):
    """Compares a model's outputs on other inputs with and without its silent neurons."""

    tokens: int
    firings: int  # of the neurons left out, over all tokens and blocks
    neurons: int  # left out that fired at least once
    logits_error: float  # relative, in the 2-norm
    same_top: float  # share of positions with the same largest logit
    loss: float | None  # of the whole model; None if it returns no loss
    loss_without: float | None

    def __str__(self) -> str:
        text = (
            f"on {self.tokens} held-out tokens: {self.neurons} of them fired, {self.firings} times in total; logits "
            f"differ by {self.logits_error:.2g} (2-norm, relative); the largest is the same at {self.same_top:.2%} of "
            "positions"
        )
        if self.loss is None or self.loss_without is None:
            return text
        return f"{text}; loss {self.loss:.5f} with them, {self.loss_without:.5f} without"


@contextmanager
def hooked(blocks: Sequence[nn.Module], hook: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """Calls `hook` with the block and its input x, given by position or by name, before each forward of these
    blocks."""

    def with_input(block: nn.Module, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        hook(block, arguments[0] if arguments else named["x"])

    handles = [block.register_forward_pre_hook(with_input, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure_held_out(model: nn.Module, blocks: Sequence[SparseFeedForward], held_out: Any) -> HeldOut:
    """Compare the model's outputs on `held_out` with and without the neurons that its blocks leave out, and count how
    often these neurons fire. Raises ValueError for outputs without logits, and for inputs without tokens."""
    silent = {block: block.silent_suffix for block in blocks if block.silent_suffix}
    without = _outputs(model, held_out)
    firings = dict.fromkeys(silent, torch.zeros(()))
    tokens = 0

    def count(block: nn.Module, x: Tensor) -> None:
        nonlocal tokens
        assert isinstance(block, SparseFeedForward)
        x = x.flatten(0, -2)
        tokens = max(tokens, len(x))
        if block in silent:
            pre = F.linear(x, pattern_layer(block).weight[-silent[block] :].to(x.dtype))
            firings[block] = firings[block].to(x.device) + (~(pre <= 0)).sum(0)  # NaN fires

    for block in silent:
        block.silent_suffix = 0
    try:
        with hooked(blocks, count):
            whole = _outputs(model, held_out)
    finally:
        for block, neurons in silent.items():
            block.silent_suffix = neurons
    if tokens == 0:
        raise ValueError("held_out has no tokens to measure on")
    exact = whole.logits.double()
    error = (without.logits.double() - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
    same = (without.logits.argmax(-1) == whole.logits.argmax(-1)).double().mean()
    return HeldOut(
        tokens,
        int(sum(found.sum() for found in firings.values())),
        int(sum((found > 0).sum() for found in firings.values())),
        float(error),
        float(same),
        whole.loss,
        without.loss,
    )


class _Outputs(NamedTuple):
    logits: Tensor
    loss: float | None


def _outputs(model: nn.Module, inputs: Any) -> _Outputs:
    with torch.compiler.set_stance("force_eager"):
        if isinstance(inputs, Mapping):
            found = model(**inputs)
        else:
            found = model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    if isinstance(found, Tensor):
        return _Outputs(found, None)
    logits, loss = getattr(found, "logits", None), getattr(found, "loss", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"held_out needs a model that returns logits or one tensor, got {type(found).__name__}")
    return _Outputs(logits, None if loss is None else float(loss))
