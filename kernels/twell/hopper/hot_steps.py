"""The steps for hot neurons on Hopper between dense products (see `hot_split.py`)."""

import functools

import torch
from torch import Tensor

from .. import hot_split
from ..interface import RELU2, SILU, Cold, Forward, Gradients, HotRows, Weights
from ..launch_cache import LAUNCHES
from ..memory import in_rows, is_aligned
from . import driver, inference
from .inference import CLUSTER, ROWS
from .params import HotBackwardParams, HotForwardParams, HotHiddenParams, HotRowsParams

_WARPS, _VECTOR = 8, 8
_ROW_WARPS, _PADDING = 16, 256
_Matrices = tuple[Tensor | None, Tensor | None, Tensor | None]  # gate, up, down


def gather(neurons: Tensor, weights: Weights, with_cold: bool) -> HotRows:
    """`hot_split.gather` in one launch, and with the other neurons if `with_cold`.

    weights: bfloat16 [N, K], K a multiple of 64; copied row by row where they are in memory as the kernels read them.
    Where neurons are not distinct, the rows of all others are NaN.
    """
    matrices = weights.gate, weights.up, weights.down
    if not _are_in_place(matrices):
        return hot_split.gather(neurons, weights, with_cold)
    up = weights.up
    (intermediate, hidden), count, gates = up.shape, neurons.shape[0], 0 if weights.gate is None else 1
    rows = HotRows(up.new_empty(((gates + 1) * count, hidden)), up.new_empty((count, hidden)))
    if with_cold:
        left = intermediate - count
        table = torch.empty(-(-left // _PADDING) * _PADDING, dtype=torch.uint16, device=up.device)
        rows = rows._replace(cold=Cold(up.new_empty((left, hidden)), table))
    parts = _parts(rows.inner, rows.down, gates * count)
    _launch_rows(False, neurons, matrices, parts, up.shape, rows.cold)
    return rows


def scatter(neurons: Tensor, inner: Tensor | None, down: Tensor | None, gradients: Gradients) -> None:
    """`hot_split.scatter` in one launch, in bfloat16."""
    wanted = gradients[1:]
    shape = next((t.shape for t in wanted if t is not None), None)
    if shape is None:
        return
    if not _are_in_place(wanted) or not all(t is None or t.is_contiguous() for t in (inner, down)):
        return hot_split.scatter(neurons, inner, down, gradients)
    gates = 0 if inner is None or inner.shape[0] == neurons.shape[0] else neurons.shape[0]
    _launch_rows(True, neurons, wanted, _parts(inner, down, gates), shape)


def _are_in_place(matrices: _Matrices) -> bool:
    return all(t is None or (t.is_contiguous() and is_aligned(t)) for t in matrices)


def _parts(inner: Tensor | None, down: Tensor | None, gates: int) -> tuple[int, int, int]:
    """The addresses of the rows of the gate, of which inner has so many, of up, and of down; 0: none."""
    start = driver.address(inner)
    up = 0 if inner is None else start + gates * inner.shape[1] * inner.element_size()
    return start if gates else 0, up, driver.address(down)


def _launch_rows(
    scattered: bool,
    neurons: Tensor,
    matrices: _Matrices,
    parts: tuple[int, int, int],
    shape: torch.Size,
    cold: Cold | None = None,
) -> None:
    index, (intermediate, hidden), (gate, up, down) = neurons.device.index, shape, matrices
    parameters = HotRowsParams(
        hot=neurons.data_ptr(),
        matrices=(driver.address(gate), driver.address(up), driver.address(down)),
        parts=parts,
        cold=0 if cold is None else cold.rows.data_ptr(),
        neurons=0 if cold is None else cold.neurons.data_ptr(),
        H=neurons.shape[0],
        N=intermediate,
        K=hidden,
    )
    listed = 0 if cold is None else -(-intermediate // 1024) * 2048
    _rows_kernel(index, scattered, listed).prepare(inference.sm_count(index), driver.stream(index), parameters)()


def rows_macros(scattered: bool) -> dict[str, int]:
    """How `hot_rows` is compiled."""
    return {"WARPS": _ROW_WARPS, "SCATTER": int(scattered)}


@functools.cache
def _rows_kernel(device_index: int, scattered: bool, list_bytes: int) -> driver.Kernel:
    macros = rows_macros(scattered)
    return driver.Kernel("hot_rows", macros, device_index, threads=_ROW_WARPS * 32, shared_bytes=list_bytes)


def activate(
    pre: Tensor, neurons: Tensor, gated: bool, rest: Forward, activation: str, l1_weight: Tensor | None = None
) -> tuple[Tensor, Forward]:
    """`hot_split.activate` in bfloat16; what `rest` counted is added to in place."""
    tokens, count = pre.shape[0], neurons.shape[0]
    if not tokens or count % _VECTOR:
        return hot_split.activate(pre, neurons, gated, rest, activation, l1_weight)
    squared, stats = activation == RELU2, rest.nonzeros is not None
    h = pre.new_empty((tokens, count)) if gated or squared else pre
    added = rest.l1 is not None and rest.l1.dim() == 1
    l1_M = rest.l1 if added else pre.new_empty(tokens, dtype=torch.float32) if stats else None
    parameters = HotForwardParams(
        pre=pre.data_ptr(),
        h=h.data_ptr(),
        hot=neurons.data_ptr(),
        nonzeros=driver.address(rest.nonzeros),
        l1=driver.address(l1_M),
        l1_weight=driver.address(l1_weight),
        fired=driver.address(rest.fired),
        M=tokens,
        H=count,
        N=0 if rest.fired is None else rest.fired.shape[0],
        added=int(added),
    )
    launched = kernel("hot_forward", pre.device.index, gated, squared, stats, l1_weight is not None)
    launched.prepare(-(-tokens // _WARPS), driver.stream(pre.device.index), parameters)()
    if l1_M is None or rest.l1 is None:
        return h, rest
    return h, rest._replace(l1=l1_M.mean() if added else rest.l1 + l1_M.mean())


def hidden(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    """h [M, H] = a(x gate^T) * (x up^T) in one launch, where a is relu, relu2 (its square) or silu; None without
    tokens or with an H that is no multiple of 8.

    x: bfloat16 [M, K]; gate, up: [H, K], K a multiple of 64.
    """
    tokens, count, index = x.shape[0], gate.shape[0], x.device.index
    if not tokens or count % _VECTOR:
        return None
    x, gate, up, h = in_rows(x), in_rows(gate), in_rows(up), x.new_empty((tokens, count))
    boxes = zip((x, gate, up, h), (ROWS, ROWS, ROWS, ROWS // 2), strict=True)
    maps = tuple((matrix.data_ptr(), *matrix.shape, matrix.stride(0) * 2, rows) for matrix, rows in boxes)
    _launch_hidden((hidden_kernel(index, activation), index, driver.stream(index), maps))()
    return h


@LAUNCHES.kept
def _launch_hidden(arguments: tuple) -> driver.Launch:
    """Prepared launch, kept like that of `gate_pack`."""
    kernel, index, stream, maps = arguments
    (_, tokens, hidden, *_), (_, count, *_), *_ = maps
    of_x, of_gate, of_up, of_h = (driver.tensor_map(*each) for each in maps)
    parameters = HotHiddenParams(of_x, of_gate, of_up, of_h, tokens, count, hidden)
    return kernel.prepare(inference.product_grid(index), stream, parameters)


def hidden_macros(activation: str) -> dict[str, int]:
    """How `hot_hidden` is compiled. A tile has as many columns of the gate as of up."""
    tile, stages = 256, 4
    # The ring of operands, the finished tile, the barriers, and room to align.
    shared_bytes = stages * (ROWS + tile) * 128 + ROWS * tile + 8 * 2 * stages + 1024
    switches = {"SQUARED": int(activation == RELU2), "SILU": int(activation == SILU)}
    return {"TILE": tile, "STAGES": stages, "SMEM_BYTES": shared_bytes, **switches}


@functools.cache
def hidden_kernel(device_index: int, activation: str) -> driver.Kernel:
    macros = hidden_macros(activation)
    return driver.Kernel(
        "hot_hidden", macros, device_index, threads=384, shared_bytes=macros["SMEM_BYTES"], cluster=CLUSTER
    )


def derive(
    dh: Tensor, activated: Tensor, dl1: Tensor | None, gated: bool, activation: str, l1_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`hot_split.derive` in bfloat16."""
    tokens, count = dh.shape
    if not tokens or count % _VECTOR:
        return hot_split.derive(dh, activated, dl1, gated, activation, l1_weight)
    squared = activation == RELU2
    d, h = torch.empty_like(activated), torch.empty_like(dh) if gated or squared else activated
    scalar = None if dl1 is None else dl1.to(torch.float32)
    parameters = HotBackwardParams(
        dh=dh.data_ptr(),
        activated=activated.data_ptr(),
        d=d.data_ptr(),
        h=h.data_ptr(),
        dl1=driver.address(scalar),
        l1_weight=driver.address(l1_weight),
        M=tokens,
        H=count,
    )
    launched = kernel("hot_backward", dh.device.index, gated, squared, False, l1_weight is not None)
    launched.prepare(-(-tokens // _WARPS), driver.stream(dh.device.index), parameters)()
    return d, h


def macros(gated: bool, squared: bool, stats: bool, weighted: bool) -> dict[str, int]:
    """How the kernels are compiled. weighted: neurons have weights in the L1 term."""
    switches = {"GATED": int(gated), "SQUARED": int(squared), "STATS": int(stats), "WEIGHTED": int(weighted)}
    return {"WARPS": _WARPS, **switches}


@functools.cache
def kernel(name: str, device_index: int, *switches: bool) -> driver.Kernel:
    return driver.Kernel(name, macros(*switches), device_index, threads=_WARPS * 32)
