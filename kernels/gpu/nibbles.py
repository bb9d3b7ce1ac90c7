"""Four planes of 4-bit codes out of one tile of int16, less their zero, as 16-bit numbers ready for the matrix unit.

The codes become the low mantissa bits of a number whose exponent makes one code one unit (fp16: 1024 + code, bf16:
128 + code); one exact subtraction then leaves code - zero. That costs nine instructions for eight weights, none of them
a conversion. Inline assembly does not run in Triton's interpreter: PORTABLE takes the plain form there.
"""

import triton
import triton.language as tl

# $4 is two int16, $5 (where there are zeros) 1024 + zero, twice. A plane at bits 4 to 7 holds 16 * code: it is divided,
# and loses 64 + zero = 1024 + zero - 960.
_FP16 = """
{
.reg .b32 t, z, h, s;
mov.b32 z, %s;
mov.b32 h, %s;
mov.b32 s, 0x2c002c00;
shr.u32 t, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, t, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, t, 0x00f000f0, 0x64006400, 0xea;
%s
sub.f16x2 $0, $0, z;
fma.rn.f16x2 $1, $1, s, h;
sub.f16x2 $2, $2, z;
fma.rn.f16x2 $3, $3, s, h;
}
"""
_FP16_SYMMETRIC = tl.constexpr(_FP16 % ("0x64086408", "0xd480d480", ""))
_FP16_ZEROS = tl.constexpr(_FP16 % ("$5", "0x63806380", "sub.f16x2 h, h, z;"))

# $5 is -(128 + zero), twice. Seven bits of mantissa have no room at bits 4 to 7, so each plane is shifted down.
_BF16 = """
{
.reg .b32 t, z, one;
mov.b32 z, %s;
mov.b32 one, 0x3f803f80;
lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
shr.u32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, 0x43004300, 0xea;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
shr.u32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, 0x43004300, 0xea;
fma.rn.bf16x2 $0, $0, one, z;
fma.rn.bf16x2 $1, $1, one, z;
fma.rn.bf16x2 $2, $2, one, z;
fma.rn.bf16x2 $3, $3, one, z;
}
"""
_BF16_SYMMETRIC = tl.constexpr(_BF16 % "0xc308c308")
_BF16_ZEROS = tl.constexpr(_BF16 % "$5")

# Outputs are written before the input is read for the last time: early-clobber, or they may share a register with it.
_OUTPUTS = "=&r,=&r,=&r,=&r,"
_ONE_INPUT = tl.constexpr(_OUTPUTS + "r")
_TWO_INPUTS = tl.constexpr(_OUTPUTS + "r,r")


@triton.jit
def unpack(packed, words, DTYPE: tl.constexpr, HAS_ZEROS: tl.constexpr, PORTABLE: tl.constexpr):
    """packed int16, words int32 broadcastable to it (see `planar.py`) -> four tensors of packed's shape in DTYPE: of
    plane j, code - zero. Without zeros, code - 8.
    """
    if PORTABLE:
        wide = packed.to(tl.int32)
        zeros = words & 255 if HAS_ZEROS else 8
        w0 = ((wide & 15) - zeros).to(DTYPE)
        w1 = (((wide >> 4) & 15) - zeros).to(DTYPE)
        w2 = (((wide >> 8) & 15) - zeros).to(DTYPE)
        w3 = (((wide >> 12) & 15) - zeros).to(DTYPE)
    elif tl.float16 == DTYPE:
        FP16X4: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        if HAS_ZEROS:
            zeros = ((words & 255) | 0x6400).to(tl.int16)
            w0, w1, w2, w3 = tl.inline_asm_elementwise(_FP16_ZEROS, _TWO_INPUTS, [packed, zeros], FP16X4, True, 2)
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(_FP16_SYMMETRIC, _ONE_INPUT, [packed], FP16X4, True, 2)
    else:
        BF16X4: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        if HAS_ZEROS:
            zeros = ((words & 255) | 0xC300).to(tl.int16)
            w0, w1, w2, w3 = tl.inline_asm_elementwise(_BF16_ZEROS, _TWO_INPUTS, [packed, zeros], BF16X4, True, 2)
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(_BF16_SYMMETRIC, _ONE_INPUT, [packed], BF16X4, True, 2)
    return w0, w1, w2, w3


@triton.jit
def scale_of(words, HAS_ZEROS: tl.constexpr):
    """The fp32 scale in int32 words; their lowest 8 bits hold the zero where there are zeros."""
    bits = words & -256 if HAS_ZEROS else words
    return bits.to(tl.float32, bitcast=True)
