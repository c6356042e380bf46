"""bfloat16 in Triton, on a GPU and in the interpreter.

The interpreter (TRITON_INTERPRET=1) does bfloat16 arithmetic wrongly without a word, and truncates where a GPU rounds.
So all arithmetic is in float32, and a kernel is told by INTERPRET to round in integers. Values travel as their bits.
"""

import triton
import triton.language as tl


@triton.jit
def to_bits(value, INTERPRET: tl.constexpr):
    """float32 to the bits of the nearest bfloat16 (ties to even; NaN stays NaN), as uint16."""
    if INTERPRET:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)
    else:
        return value.to(tl.bfloat16).to(tl.uint16, bitcast=True)


@triton.jit
def relu_pairs(low, high, INTERPRET: tl.constexpr):
    """ReLU of two float32, rounded to bfloat16: one word, uint32, `low` in its lower half. NaN stays NaN; the halves
    have no sign bit."""
    if INTERPRET:
        low, high = tl.where(low <= 0, 0.0, low), tl.where(high <= 0, 0.0, high)
        return to_bits(low, INTERPRET).to(tl.uint32) | (to_bits(high, INTERPRET).to(tl.uint32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def high_half(word):
    """The bfloat16 in the upper half of a 32-bit word, as float32."""
    return (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(value):
    """Whether float32 numbers are neither NaN nor Inf."""
    return tl.abs(value) < float("inf")
