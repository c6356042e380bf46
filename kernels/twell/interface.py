"""The interface of backends. Shapes: M tokens, K hidden, N intermediate.

Below `sparse_ffn` every weight is [N, K], including the down weights: row n belongs to neuron n.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .capacity import EntryCount

RELU, RELU2 = "relu", "relu2"
ACTIVATIONS = (RELU, RELU2)
SILU = "silu"  # of dense rivals: no neuron of theirs is inactive


def check_activation(activation: str) -> None:
    """Raises ValueError for an activation that is not supported."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


class Weights(NamedTuple):
    """The block's weights, each [N, K]; gate is None for a non-gated block. l1: the weight of each neuron in the L1
    term, [N] in the accumulation dtype; None: 1 for all."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    l1: Tensor | None = None

    @property
    def pattern(self) -> Tensor:
        """The weights whose product with x decides which neurons fire."""
        return self.up if self.gate is None else self.gate


class Cold(NamedTuple):
    """The neurons that a sparse forward is to compute, C of N. rows: [C, K], theirs of the pattern's weights; neurons:
    uint16, their numbers, padded as the backend needs it."""

    rows: Tensor
    neurons: Tensor


class Options(NamedTuple):
    """How a forward is to be computed; see `Plan` for capacity, backup (both in training only) and screened, and
    `sparse_ffn` for the activation. leading: so many neurons in front are hot (in inference only)."""

    stats: bool
    training: bool  # a backward may follow
    capacity: int = 0
    backup: float = 0.0
    activation: str = RELU
    screened: int = 0
    leading: int = 0


class Gradients(NamedTuple):
    """dx [M, K] and the gradients of the weights, [N, K]; None if not needed."""

    x: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None

    @classmethod
    def empty(cls, x: Tensor, weights: Weights, needs: "Needs") -> "Gradients":
        """Memory for those that are needed, contiguous."""
        wanted = zip((x, *weights[:3]), needs, strict=True)
        return cls(*(t.new_empty(t.shape) if t is not None and needed else None for t, needed in wanted))


class Needs(NamedTuple):
    """The gradients that are requested."""

    x: bool
    gate: bool
    up: bool
    down: bool

    @property
    def weights(self) -> bool:
        return self.gate or self.up or self.down


class Availability(NamedTuple):
    """Whether a backend can run on a device, and the reason; lasting: whether that holds as long as the process."""

    ok: bool
    reason: str
    lasting: bool = True


@dataclass(frozen=True)
class Request:
    """The properties that decide whether a backend supports a call. It must support any number of tokens."""

    device: torch.device
    dtype: torch.dtype
    hidden: int
    intermediate: int
    gated: bool
    training: bool  # a gradient will be requested
    activation: str = RELU

    def __str__(self) -> str:
        block, use = "gated" if self.gated else "non-gated", "training" if self.training else "inference"
        use += "" if self.activation == RELU else f" with {self.activation}"
        return f"{block} {use}, hidden {self.hidden}, intermediate {self.intermediate}, {self.dtype} on {self.device}"


class Forward(NamedTuple):
    """The result of a forward: y [M, K] in x's dtype; the statistics, or None if not requested; and the tensors saved
    for its backward (empty when not training)."""

    y: Tensor
    nonzeros: Tensor | None = None  # int32 [M]
    # float32 (float64 for float64 input), no dimensions; from a forward that left neurons out, and until
    # `HotSteps.activate`, [M], of which it is the mean
    l1: Tensor | None = None
    fired: Tensor | None = None  # bool [N]
    overflow: Tensor | None = None  # int64, no dimensions; None if not requested, or if there is no capacity to exceed
    saved: Sequence[Tensor] = ()
    saved_entries: EntryCount | None = None  # for `Backend.needed_capacity`


class HotRows(NamedTuple):
    """The rows of the weights [N, K] of H hot neurons. inner: [2H, K], of the gate and then of up, or without a gate
    [H, K]; down: [H, K]. cold: the other neurons, if the backend can leave the hot ones out."""

    inner: Tensor
    down: Tensor
    cold: Cold | None = None


class HotSteps(NamedTuple):
    """The steps between dense products, for hot neurons and (the first two) for the tokens of a dense backup: those of
    `hot_split.py`, or a backend's own.

    activate, derive: the last argument is the weight of each of these neurons in the L1 term, as in `Weights`.
    gather(hot, weights, cold) -> HotRows, with the neurons that are not hot if `cold`.
    scatter(hot, inner, down, gradients): the hot neurons' rows of the weights' gradients, laid out as in HotRows, take
        their place in `gradients`, where these are wanted; inner or down is None where none of its are.
    hidden(x, gate, up, activation) -> h [M, H] of gated hot neurons, gate and up [H, K], or None: to be computed by
        products and `activate`. For calls that need neither statistics nor a backward.
    """

    activate: Callable[[Tensor, Tensor, bool, Forward, str, Tensor | None], tuple[Tensor, Forward]]
    derive: Callable[[Tensor, Tensor, Tensor | None, bool, str, Tensor | None], tuple[Tensor, Tensor]]
    gather: Callable[[Tensor, Weights, bool], HotRows]
    scatter: Callable[[Tensor, Tensor | None, Tensor | None, Gradients], None]
    hidden: Callable[[Tensor, Tensor, Tensor, str], Tensor | None] = lambda *_: None


@dataclass(frozen=True)
class Backend:
    """One way to compute the block. Shapes: x and dy [M, K], weights [N, K], dl1 scalar.

    probe(device) -> Availability: proven by a tiny checked launch, not by an import that worked.
    supports(request) -> None, or the reason why not.
    forward(x, weights, options) -> Forward. Where `hot.gather` finds the neurons that are not hot, also with these as a
        fourth argument: the others are left out. Without, the hot rows of the weights that it is given are zero.
    backward(dy, dl1, x, weights, saved, needs, activation) -> Gradients. dl1 is None when l1 has no gradient.
    saved_like(x, weights, options) -> empty tensors with the shapes, dtypes and device of what a training forward
        saves. They may depend on options and shapes, never on values, so that torch.compile can plan for them.
    prepare(x, weights, activation) -> None, or a function x -> y that repeats this forward, without statistics,
        on tensors with the same addresses, shapes and strides. It must not hold references to the tensors. x is
        contiguous, with M from 1 to `memory.PIECE`. It is called for every such forward until it returns a function, so
        returning None must be cheap. For backends whose launches take longer on the host than on the device.
    reads_saved_only(saved) -> whether the backward reads the weights of saved entries only, so that hot rows need not
        be zero for it. Omitted if it never does.
    screens: whether it has a faster way for `Options.screened` neurons.
    few_tokens(tokens, hidden) -> whether inference without statistics has so few tokens that hot neurons do not pay. It
        is then called without them. Absent where hot neurons do not depend on the number of tokens.
    kernels(request, screened) -> the kernels of forwards without statistics, of any number of tokens, and of screened
        neurons: by a key, a call that compiles and loads it, in any thread. Omitted where calls do not wait for a
        compiler of their own.
    needed_capacity(saved, count) -> None, or the capacity that this training forward would have needed. Its gradients
        are then computed by dense products, without calling `backward`. Omitted if the backward is exact at any
        capacity.
    """

    probe: Callable[[torch.device], Availability]
    supports: Callable[[Request], str | None]
    forward: Callable[..., Forward]
    backward: Callable[[Tensor, Tensor | None, Tensor, Weights, Sequence[Tensor], Needs, str], Gradients]
    saved_like: Callable[[Tensor, Weights, Options], Sequence[Tensor]]
    sparse: bool = True  # the cost is per non-zero, so dense products are cheaper for hot neurons
    screens: bool = False
    hot: HotSteps | None = None
    prepare: Callable[[Tensor, Weights, str], Callable[[Tensor], Tensor] | None] | None = None
    needed_capacity: Callable[[Sequence[Tensor], EntryCount | None], int | None] | None = None
    few_tokens: Callable[[int, int], bool] | None = None
    reads_saved_only: Callable[[Sequence[Tensor]], bool] | None = None
    kernels: Callable[[Request, bool], dict[Hashable, Callable[[], object]]] | None = None
