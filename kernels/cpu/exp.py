"""The exponential as arithmetic that compiles to vectors; numba's own calls the C library for each number."""

import numpy as np
from llvmlite import ir
from numba import float32, int32, types
from numba.extending import intrinsic

from kernels.cpu.compile import F32_1D, function, kernel

_LOG2_E = np.float32(1.44269504)
# ln 2 in two parts (Cody and Waite 1980): the first has trailing zeros, so that n * _LN2_HIGH is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@intrinsic
def _float_of_bits(typing_context, bits):
    """int32 -> the float32 with these bits"""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@function(float32(float32))
def exp_of_negative(d):
    """exp(d) for d <= 0. Below -87 the result is 0; relative error under 4e-7.

    exp(r) on [-ln2 / 2, ln2 / 2] is its Taylor series to the seventh power, whose rest is below 1e-8.
    """
    bounded = max(d, float32(-87.0))
    n = np.floor(bounded * _LOG2_E + float32(0.5))
    r = bounded - n * _LN2_HIGH - n * _LN2_LOW
    series = float32(1 / 5040)
    series = series * r + float32(1 / 720)
    series = series * r + float32(1 / 120)
    series = series * r + float32(1 / 24)
    series = series * r + float32(1 / 6)
    series = series * r + float32(0.5)
    series = series * r + float32(1.0)
    series = series * r + float32(1.0)
    power = _float_of_bits(int32((int32(n) + 127) << 23))
    return series * power if d > float32(-87.0) else float32(0.0)


@kernel(F32_1D, float32)
def exp_minus(x, largest):
    """x = exp(x - largest) in place, for x <= largest."""
    for i in range(x.shape[0]):
        x[i] = exp_of_negative(x[i] - largest)
