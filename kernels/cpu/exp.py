"""The exponential as arithmetic that compiles to vectors; numba's own calls the C library for each number."""

from llvmlite import ir
from numba import float32
from numba.core import cgutils
from numba.extending import intrinsic

_LEAST = -87.0
_LOG2_E = 1.44269504
# ln 2 in two parts (Cody and Waite 1980): the first has trailing zeros, so that n * _LN2_HIGH is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)  # Taylor's, whose rest is below 1e-8
_CONTRACT = ("contract",)


def exponential(builder: ir.IRBuilder, d: ir.Value) -> ir.Value:
    """exp(d) for fp32 d <= 0, a number or a vector. Below -87 the result is 0; relative error under 4e-7.

    exp(d) = 2^n exp(r), n whole and r in [-ln2 / 2, ln2 / 2].
    """
    kind = d.type

    def times_plus(a: ir.Value, b: ir.Value | float, c: ir.Value | float) -> ir.Value:
        term = builder.fmul(a, _number(kind, b), flags=_CONTRACT)
        return builder.fadd(term, _number(kind, c), flags=_CONTRACT)

    is_small = builder.fcmp_ordered(">", d, _number(kind, _LEAST))
    bounded = builder.select(is_small, d, _number(kind, _LEAST))
    n = _floor(builder, times_plus(bounded, _LOG2_E, 0.5))
    r = times_plus(n, -_LN2_LOW, times_plus(n, -_LN2_HIGH, bounded))
    series = _number(kind, _SERIES[0])
    for coefficient in _SERIES[1:]:
        series = times_plus(series, r, coefficient)
    power = _power_of_two(builder, n)
    return builder.select(is_small, builder.fmul(series, power), _number(kind, 0.0))


@intrinsic
def exp_of_negative(typing_context, d):
    """float32 -> float32, see `exponential`."""

    def generate(context, builder, signature, arguments):
        return exponential(builder, arguments[0])

    return float32(float32), generate


def _number(kind: ir.Type, value: ir.Value | float) -> ir.Value:
    if isinstance(value, ir.Value):
        return value
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _floor(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    suffix = f"v{x.type.count}f32" if isinstance(x.type, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(x.type, [x.type]), f"llvm.floor.{suffix}")
    return builder.call(function, [x])


def _power_of_two(builder: ir.IRBuilder, n: ir.Value) -> ir.Value:
    """2^n for a whole number in fp32, by its exponent bits."""
    count = n.type.count if isinstance(n.type, ir.VectorType) else None
    whole = ir.VectorType(ir.IntType(32), count) if count else ir.IntType(32)
    bias, bits = (ir.Constant(whole, [value] * count if count else value) for value in (127, 23))
    exponent = builder.add(builder.fptosi(n, whole), bias)
    return builder.bitcast(builder.shl(exponent, bits), n.type)
