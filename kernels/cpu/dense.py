"""fp32 activations times a dense weight kept in fp16 or bf16: widened as it is read, for half the memory traffic.

Four outputs at a time are widened into a buffer that stays in the first cache, and every row of activations uses them.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import float32, prange, types, uint64
from numba.extending import intrinsic

from kernels.cpu.compile import F32_2D, U16_2D, kernel

_OUTPUTS = 4  # share each load of an activation
_TILE = 64  # outputs of one task


@intrinsic
def _widen_fp16(typing_context, bits):
    """uint16 bits of an fp16 number -> float32, one instruction on every CPU with F16C or NEON."""

    def generate(context, builder, signature, arguments):
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _widen_bf16(typing_context, bits):
    """uint16 bits of a bf16 number -> float32: the upper half of its bits."""

    def generate(context, builder, signature, arguments):
        wide = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), generate


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, K] fp32 contiguous, weight [N, K] fp16 or bf16 contiguous, any N -> [rows, N] fp32."""
    out = torch.empty(x.shape[0], weight.shape[0])
    _LINEAR[weight.dtype](x.numpy(), weight.view(torch.uint16).numpy(), out.numpy())
    return out


@kernel(F32_2D, F32_2D, F32_2D, uint64, uint64)
def _dot(x, w, out, first, count):
    """out[:, first : first + count] = x @ w[:count].T"""
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    for m in range(x.shape[0]):
        row = x[m]
        y0 = y1 = y2 = y3 = float32(0)
        for k in range(x.shape[1]):
            a = row[k]
            y0 += a * w0[k]
            y1 += a * w1[k]
            y2 += a * w2[k]
            y3 += a * w3[k]
        sums = (y0, y1, y2, y3)
        for j in range(count):
            out[m, first + uint64(j)] = sums[j]


@kernel(F32_2D, U16_2D, F32_2D, uint64)
def _fp16_tile(x, weight, out, tile):
    w = np.zeros((_OUTPUTS, x.shape[1]), np.float32)
    end = min((tile + uint64(1)) * uint64(_TILE), uint64(weight.shape[0]))
    for first in range(tile * uint64(_TILE), end, uint64(_OUTPUTS)):
        count = min(uint64(_OUTPUTS), end - first)
        for j in range(count):
            narrow, wide = weight[first + uint64(j)], w[j]
            for k in range(x.shape[1]):
                wide[k] = _widen_fp16(narrow[k])
        _dot(x, w, out, first, count)


@kernel(F32_2D, U16_2D, F32_2D, uint64)
def _bf16_tile(x, weight, out, tile):
    w = np.zeros((_OUTPUTS, x.shape[1]), np.float32)
    end = min((tile + uint64(1)) * uint64(_TILE), uint64(weight.shape[0]))
    for first in range(tile * uint64(_TILE), end, uint64(_OUTPUTS)):
        count = min(uint64(_OUTPUTS), end - first)
        for j in range(count):
            narrow, wide = weight[first + uint64(j)], w[j]
            for k in range(x.shape[1]):
                wide[k] = _widen_bf16(narrow[k])
        _dot(x, w, out, first, count)


# Two of each, written out: a kernel made by a function would be compiled anew in every process, since numba's cache
# knows a function by its place in the file.
@kernel(F32_2D, U16_2D, F32_2D, parallel=True)
def _fp16(x, weight, out):
    for tile in prange((weight.shape[0] + _TILE - 1) // _TILE):
        _fp16_tile(x, weight, out, tile)


@kernel(F32_2D, U16_2D, F32_2D, parallel=True)
def _bf16(x, weight, out):
    for tile in prange((weight.shape[0] + _TILE - 1) // _TILE):
        _bf16_tile(x, weight, out, tile)


_LINEAR = {torch.float16: _fp16, torch.bfloat16: _bf16}
