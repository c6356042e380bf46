"""The checks of `sparse_ffn` before anything runs: its inputs, and the context of the call."""

import torch
from torch import Tensor

from . import torch_internals

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def under_autocast(device_type: str) -> bool:
    """Whether torch.autocast is enabled for this device type. (The meta device has none; asking torch would raise.)"""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def computed_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of products with this tensor: its own, or that of an enabled autocast."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if under_autocast(kind) else tensor.dtype


def in_process_group() -> bool:
    """Whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def wants_gradients(inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether a call with these inputs records gradients."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)


def is_inference(inputs: tuple[Tensor | None, ...], device_type: str) -> bool:
    """Whether a call with these inputs has no gradients, no derivatives in forward mode and no casts."""
    return not (wants_gradients(inputs) or torch_internals.in_forward_mode() or under_autocast(device_type))


def is_fixed(size: int) -> bool:
    """Whether a trace may depend on this size: it is no symbol, and the trace is not for any size."""
    return type(size) is int and not torch_internals.is_exporting()


def is_static(size: int) -> bool:
    """Whether it is no symbol. Dynamo calls a symbol an int, so that `is_fixed` traces a program for each of its
    ranges; a function that is not traced can take no symbol at all."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy, as compiling does

    return has_static_value(size)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, the type of parameters under tensor parallelism and FSDP2."""
    return type(tensor).__name__ == "DTensor"  # importing the class takes a second


def check_problem(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> None:
    """Raises TypeError for anything but a floating tensor, ValueError for mismatched shapes, dtypes or devices."""
    if _fits(x, w_gate, w_up, w_down):
        return
    gate = {} if w_gate is None else {"w_gate": w_gate}
    named: dict[str, Tensor] = {"x": x, **gate, "w_up": w_up, "w_down": w_down}
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    if x.ndim == 0:
        raise ValueError("x must have shape [..., hidden], got a scalar")
    if w_up.ndim != 2 or 0 in w_up.shape:
        raise ValueError(f"w_up must have shape [intermediate, hidden], neither of them 0, got {list(w_up.shape)}")
    intermediate, hidden = w_up.shape
    if x.shape[-1] != hidden:
        raise ValueError(f"x must have shape [..., {hidden}] to fit w_up {list(w_up.shape)}, got {list(x.shape)}")
    if w_down.shape != (hidden, intermediate):
        wanted = f"[{hidden}, {intermediate}]"
        raise ValueError(f"w_down must have shape {wanted} to fit w_up {list(w_up.shape)}, got {list(w_down.shape)}")
    if w_gate is not None and w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate must have the shape of w_up, {list(w_up.shape)}, got {list(w_gate.shape)}")
    _check_same("device", {name: tensor.device for name, tensor in named.items()})
    if not under_autocast(x.device.type):
        _check_same("dtype", {name: tensor.dtype for name, tensor in named.items()})
    elif torch.float64 in (dtypes := {tensor.dtype for tensor in named.values()}) and len(dtypes) > 1:
        raise ValueError(f"autocast does not cast float64, so all inputs must be float64 or none; got {dtypes}")


def _fits(x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor) -> bool:
    """A fast test for the usual case, in which nothing is wrong. It takes a tenth of the time of the thorough checks,
    which matters because small calls on a GPU are bound by the host."""
    try:
        shape, dtype, device = w_up.shape, x.dtype, x.device
        intermediate, hidden = shape
        return (
            type(x) in PLAIN_TYPES
            and type(w_up) in PLAIN_TYPES
            and type(w_down) in PLAIN_TYPES
            and dtype is w_up.dtype is w_down.dtype
            and dtype in DTYPES
            and device == w_up.device == w_down.device
            and x.shape[-1] == hidden
            and w_down.shape == (hidden, intermediate)
            and hidden > 0
            and intermediate > 0
            and x.layout is w_up.layout is w_down.layout is torch.strided
            and (
                w_gate is None
                or (
                    type(w_gate) in PLAIN_TYPES
                    and w_gate.shape == shape
                    and w_gate.dtype is dtype
                    and w_gate.device == device
                    and w_gate.layout is torch.strided
                )
            )
        )
    except (AttributeError, ValueError, IndexError):  # not tensors, or of other ranks
        return False


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if is_sharded(tensor):
        raise TypeError(
            f"{name} is a DTensor, and sparse_ffn takes plain tensors: tensor parallelism is not supported, nor "
            "fully_shard of a single layer; use data parallelism, or fully_shard on whole blocks or decoder layers"
        )
    if tensor.dtype not in DTYPES:
        wanted = ", ".join(map(str, DTYPES))
        raise TypeError(f"{name} must have one of the dtypes {wanted}, got {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a plain (strided) tensor, got layout {tensor.layout}")


def _check_same(what: str, values: dict[str, object]) -> None:
    if len(set(values.values())) > 1:
        got = ", ".join(f"{name}: {value}" for name, value in values.items())
        advice = ": cast them, or call under torch.autocast" if what == "dtype" else ""
        raise ValueError(f"x and the weights must have the same {what}, got {got}{advice}")


def check_l1_weight(weight: Tensor, w_up: Tensor) -> None:
    """Raises TypeError or ValueError unless this can be the weight of each neuron in the L1 term: floating [N], with
    values."""
    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        kind = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"l1_weight must be a floating tensor with a weight for each neuron, got {kind}")
    elsewhere = weight.is_meta or (weight.device != w_up.device and not w_up.is_meta)
    if weight.shape != w_up.shape[:1] or elsewhere:
        wanted = f"must have the shape {list(w_up.shape[:1])} and be on {w_up.device}"
        raise ValueError(f"l1_weight {wanted}, got {list(weight.shape)} on {weight.device}")
