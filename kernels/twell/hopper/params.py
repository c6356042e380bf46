"""The parameter struct of every Hopper kernel, as a tuple of the same fields in the same order.

`checks` makes static_asserts of the layout that Python packs. They are compiled with each kernel, so that a struct that
differs in order, offset or size fails to compile instead of reading the wrong bytes.
"""

import functools
import struct
from typing import Annotated, Any, NamedTuple, get_type_hints


class CType(NamedTuple):
    """One field: its format for the struct module, and its alignment in bytes."""

    format: str
    alignment: int

    @property
    def size(self) -> int:
        return struct.calcsize(f"<{self.format}")


Pointer = Annotated[int, CType("Q", 8)]
Pointers3 = Annotated[tuple[int, int, int], CType("3Q", 8)]
Int32 = Annotated[int, CType("i", 4)]
UInt32 = Annotated[int, CType("I", 4)]
Int64 = Annotated[int, CType("q", 8)]
TensorMap = Annotated[bytes, CType("128s", 64)]


class GatePackParams(NamedTuple):
    map_x: TensorMap
    map_w: TensorMap
    words: Pointer
    counts: Pointer
    spilled: Pointer
    overflow: Pointer
    next_chunk: Pointer
    neurons: Pointer
    x_norms: Pointer
    w_norms: Pointer
    M: Int32
    N: Int32
    K: Int32
    tiles: Int32
    first_tile: Int32


class QuantiseParams(NamedTuple):
    x: Pointer
    factors: Pointer
    rows: Pointer
    norms: Pointer
    x_stride: Int64
    M: Int32


class GatedDownParams(NamedTuple):
    x: Pointer
    up: Pointer
    down: Pointer
    gate: Pointer
    words: Pointer
    counts: Pointer
    spilled: Pointer
    y: Pointer
    overflow: Pointer
    nonzeros: Pointer
    l1: Pointer
    l1_weight: Pointer
    fired: Pointer
    link: Pointer
    next_chunk: Pointer
    neurons: Pointer
    saved_words: Pointer
    saved_u: Pointer
    saved_rows: Pointer
    saved_count: Pointer
    nonfinite: Pointer
    x_stride: Int64
    M: Int32
    N: Int32
    chunk: Int32
    capacity: UInt32


class TransposeParams(NamedTuple):
    saved_words: Pointer
    saved_rows: Pointer
    counts: Pointer
    before: Pointer
    ends: Pointer
    record_index: Pointer
    frequent: Pointer
    counters: Pointer
    M: Int32
    N: Int32


class TokenGradientsParams(NamedTuple):
    dy: Pointer
    gate: Pointer
    up: Pointer
    down: Pointer
    dx: Pointer
    saved_words: Pointer
    saved_u: Pointer
    saved_rows: Pointer
    record_index: Pointer
    records: Pointer
    dl1: Pointer
    l1_weight: Pointer
    link: Pointer
    next_chunk: Pointer
    nonfinite: Pointer
    dy_stride: Int64
    M: Int32
    chunk: Int32


class WeightGradientsParams(NamedTuple):
    x: Pointer
    dy: Pointer
    records: Pointer
    ends: Pointer
    frequent: Pointer
    counters: Pointer
    nonfinite: Pointer
    dup: Pointer
    dgate: Pointer
    ddown: Pointer
    x_stride: Int64
    dy_stride: Int64
    N: Int32


class HotForwardParams(NamedTuple):
    pre: Pointer
    h: Pointer
    hot: Pointer
    nonzeros: Pointer
    l1: Pointer
    l1_weight: Pointer
    fired: Pointer
    M: Int32
    H: Int32
    N: Int32
    added: Int32


class HotHiddenParams(NamedTuple):
    map_x: TensorMap
    map_gate: TensorMap
    map_up: TensorMap
    map_h: TensorMap
    M: Int32
    H: Int32
    K: Int32


class HotBackwardParams(NamedTuple):
    dh: Pointer
    activated: Pointer
    d: Pointer
    h: Pointer
    dl1: Pointer
    l1_weight: Pointer
    M: Int32
    H: Int32


class HotRowsParams(NamedTuple):
    hot: Pointer
    matrices: Pointers3
    parts: Pointers3
    cold: Pointer
    neurons: Pointer
    H: Int32
    N: Int32
    K: Int32


class FewGateParams(NamedTuple):
    x: Pointer
    gate: Pointer
    up: Pointer
    down: Pointer
    found: Pointer
    counts: Pointer
    x_stride: Int64
    gate_stride: Int64
    M: Int32
    N: Int32


class FewDownParams(NamedTuple):
    found: Pointer
    counts: Pointer
    down: Pointer
    y: Pointer
    M: Int32
    blocks: Int32


PARAMS: dict[str, type[tuple[Any, ...]]] = {
    "gate_pack": GatePackParams,
    "quantise": QuantiseParams,
    "gated_down": GatedDownParams,
    "transpose": TransposeParams,
    "token_gradients": TokenGradientsParams,
    "weight_gradients": WeightGradientsParams,
    "hot_forward": HotForwardParams,
    "hot_hidden": HotHiddenParams,
    "hot_backward": HotBackwardParams,
    "hot_rows": HotRowsParams,
    "few_gate": FewGateParams,
    "few_down": FewDownParams,
}


class Layout(NamedTuple):
    """Where the fields lie. fields: name -> (offset, size), in bytes."""

    fields: dict[str, tuple[int, int]]
    size: int
    packer: struct.Struct


@functools.cache
def layout(name: str) -> Layout:
    """The layout of the parameters of `<name>.cu`, by the rules of C."""
    fields, at, strictest, formats = {}, 0, 1, []
    for field, hint in get_type_hints(PARAMS[name], include_extras=True).items():
        ctype: CType = hint.__metadata__[0]
        start = -(-at // ctype.alignment) * ctype.alignment
        formats.append(f"{start - at}x{ctype.format}")
        fields[field] = start, ctype.size
        at, strictest = start + ctype.size, max(strictest, ctype.alignment)
    size = -(-at // strictest) * strictest
    return Layout(fields, size, struct.Struct(f"<{''.join(formats)}{size - at}x"))


def pack(name: str, params: tuple[Any, ...]) -> bytes:
    """The bytes of the struct."""
    values: list[int | bytes] = []
    for value in params:
        if type(value) is tuple:
            values += value
        else:
            values.append(value)
    return layout(name).packer.pack(*values)


def checks(name: str) -> str:
    """C++ that compiles only if the kernel's `Params` is what `pack` writes."""
    expected = layout(name)
    lines = [f'static_assert(sizeof(Params) == {expected.size}, "Params is not the struct that params.py packs");']
    for field, (offset, size) in expected.fields.items():
        # __INTADDR__ is what offsetof expands to; NVRTC has no header that defines it.
        condition = f"__INTADDR__(&((Params*)0)->{field}) == {offset} && sizeof(Params::{field}) == {size}"
        lines.append(f'static_assert({condition}, "Params::{field} is not where params.py puts it");')
    return "\n".join(lines) + "\n"
