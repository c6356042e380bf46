"""The forward and backward of a backend of GPU kernels, made of their calls (`Kernels`); in training, if asked for,
with a dense backup beside them.

Shapes: M tokens, K hidden, N intermediate.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import torch_internals
from ..interface import RELU2, Cold, Forward, Gradients, HotSteps, Needs, Options, Request, Weights
from ..memory import aligned, in_pieces, is_aligned
from . import dense_backup
from .dense_backup import DenseBackup
from .saved_csr import SavedCSR

MAX_HIDDEN = 8192
MAX_INTERMEDIATE = 65536  # a column has 16 bits


class Kernels(NamedTuple):
    """The calls. x: bfloat16 [M, K], M >= 1; weights: bfloat16 [N, K], contiguous and aligned;
    K and N as the backend's `misfit` allows.

    gate_pack(x, weights, stats=) -> the packed gate g = relu(x gate^T); without a gate relu(x up^T). Its `counts`,
        int32 [M, tiles]: a row that is zeroed before `gated_down` is an empty one. Its `overflow`, int64 scalar, if
        `stats`. Also with cold=, if the backend can leave neurons out, and with screen=, what `screen` returned.
    gated_down(packed, x, weights, stats=, save=, squared=, out=) -> (y, (nonzeros int32 [M], sums of |h| float32 [M],
        fired bool [N]) if `stats`). y = (g * (x up^T)) down [M, K]; without a gate g down. To be called once for each
        packed g, with the weights it was made with. save: filled with what the backward needs. out: contiguous, becomes
        y; None: a new one.
    backward(dy, dl1, x, weights, saved, needs, squared=) -> Gradients, from y's, bfloat16 [M, K], and from that of the
        mean over tokens of sum |h|, scalar or None. Where entries are missing (more than the capacity, or of a token
        whose x or dy is not finite), all that they could have reached becomes NaN.
    takes_few(tokens, hidden) -> whether `few` is made for these sizes.
    few(x, weights, squared=) -> y, of inference without statistics.
    screen(x, weights, count) -> what `gate_pack` needs to screen the last `count` neurons of a gated block; None if
        that does not pay. Omitted if the backend screens none.

    squared: g^2 in place of g: the activation is relu(z)^2. What is packed and saved is relu(z) all the same.
    """

    gate_pack: Callable[..., Any]
    gated_down: Callable[..., tuple[Tensor, Any]]
    backward: Callable[..., Gradients]
    takes_few: Callable[[int, int], bool]
    few: Callable[..., Tensor]
    screen: Callable[[Tensor, Weights, int], Any] | None = None


def forward_and_backward(
    load: Callable[[], Kernels], steps: HotSteps
) -> tuple[Callable[..., Forward], Callable[..., Gradients]]:
    """Those of a backend of these kernels. load: gives them when they are used; steps: the backend's own."""

    def forward(x: Tensor, weights: Weights, options: Options, cold: Cold | None = None) -> Forward:
        stats, training, squared = options.stats, options.training, options.activation == RELU2
        saved = saved_like(x, weights, options) if training else ()
        if x.shape[0] == 0:
            return _nothing(x, weights, saved)
        kernels = load()
        with on_device_of(x):
            weights = _in_memory(weights)
            alone = not (stats or training)
            if alone and cold is None and kernels.takes_few(*x.shape):
                return Forward(kernels.few(x, weights, squared=squared))
            left = {} if cold is None else {"cold": cold}
            if alone:
                y_MK = x.new_empty(x.shape)
                if cold is None and kernels.screen is not None and options.screened:
                    left = {"screen": kernels.screen(x, weights, options.screened)}
                for piece, out in in_pieces(x, y_MK):  # no name for a packed gate, which would outlive its piece
                    kernels.gated_down(
                        kernels.gate_pack(piece, weights, stats=False, **left), piece, weights, squared=squared, out=out
                    )
                return Forward(y_MK)
            packed = kernels.gate_pack(x, weights, stats=stats, **left)
            csr, backup = _parts(saved) if training else (None, None)
            backup_nonzeros = None if backup is None else dense_backup.take_out(packed.counts, backup)
            y_MK, counts = kernels.gated_down(packed, x, weights, stats=True, save=csr, squared=squared)
            nonzeros_M, l1_M, fired_N = counts
            if backup is not None and backup_nonzeros is not None:
                fired_N = dense_backup.forward(
                    backup, backup_nonzeros, x, weights, y_MK, counts, steps, options.activation
                )
            count = None if csr is None else csr.entry_count()
            l1 = l1_M.mean() if cold is None else l1_M
            return Forward(y_MK, nonzeros_M, l1, fired_N, packed.overflow, saved, count)

    def backward(
        dy: Tensor,
        dl1: Tensor | None,
        x: Tensor,
        weights: Weights,
        saved: Sequence[Tensor],
        needs: Needs,
        activation: str,
    ) -> Gradients:
        if x.shape[0] == 0:
            return Gradients(*(None if t is None else t.zero_() for t in Gradients.empty(x, weights, needs)))
        with on_device_of(x):
            weights = _in_memory(weights)
            csr, backup = _parts(saved)
            gradients = load().backward(dy, dl1, x, weights, csr, needs, squared=activation == RELU2)
            if backup is not None:
                dense_backup.add_gradients(gradients, backup, dy, dl1, x, weights, steps, activation)
            return gradients

    return forward, backward


def saved_like(x: Tensor, weights: Weights, options: Options) -> tuple[Tensor, ...]:
    """`Backend.saved_like`."""
    csr = SavedCSR.empty(x, weights, options)
    return (*csr, *DenseBackup.empty(x, weights, options.backup)) if options.backup else csr


def reads_saved_only(saved: Sequence[Tensor]) -> bool:
    """`Backend.reads_saved_only`."""
    return _parts(saved)[1] is None


def _parts(saved: Sequence[Tensor]) -> tuple[SavedCSR, DenseBackup | None]:
    """What a training forward saves: the CSR matrix and, if there is one, the dense backup."""
    count = len(SavedCSR._fields)
    return SavedCSR(*saved[:count]), DenseBackup(*saved[count:]) if len(saved) > count else None


def misfit(request: Request, hidden_step: int) -> str | None:
    """`Backend.supports`. hidden_step: what the hidden size must be a multiple of."""
    if request.dtype != torch.bfloat16:
        return f"it computes in bfloat16 only, not in {request.dtype}: cast the model, or use torch.autocast"
    if request.hidden % hidden_step or request.hidden > MAX_HIDDEN:
        return f"the hidden size must be a multiple of {hidden_step} up to {MAX_HIDDEN}, this is {request.hidden}"
    if request.intermediate > MAX_INTERMEDIATE:
        return f"the intermediate size must be at most {MAX_INTERMEDIATE}, this is {request.intermediate}"
    return None


Result = TypeVar("Result")


def on_own_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function with the device of its first argument, a tensor, as the current one."""

    def call(first: Tensor, *others: Any) -> Result:
        with on_device_of(first):
            return function(first, *others)

    return call


_HERE = nullcontext()


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's device the current one."""
    here = not x.is_cuda or x.device.index == torch_internals.current_cuda_device()
    return _HERE if here else torch.cuda.device(x.device)


def _in_memory(weights: Weights) -> Weights:
    """The weights neuron by neuron, as the kernels read them; themselves where they are so."""
    gate = None if weights.gate is None else aligned(weights.gate.contiguous())
    return Weights(gate, aligned(weights.up.contiguous()), aligned(weights.down.contiguous()), weights.l1)


def are_read_in_place(x: Tensor, weights: Weights) -> bool:
    """Whether the kernels read these very tensors, not copies. Makes none itself."""
    own = [t for t in weights[:3] if t is not None]
    # A matrix of one row is contiguous whatever its stride is.
    return all(t.is_contiguous() and is_aligned(t) for t in (x, *own)) and all(t.stride(0) == t.shape[1] for t in own)


def _nothing(x: Tensor, weights: Weights, saved: Sequence[Tensor]) -> Forward:
    return Forward(
        torch.empty_like(x),
        x.new_zeros(0, dtype=torch.int32),
        x.new_zeros((), dtype=torch.float32),
        x.new_zeros(weights.up.shape[0], dtype=torch.bool),
        saved=saved,
    )
