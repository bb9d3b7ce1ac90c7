"""fp32 activations times a dense weight kept in fp16 or bf16: widened as it is read, for half the memory traffic.

Four outputs at a time are widened into a buffer that stays in the first cache, and every row of activations uses them.
"""

from collections.abc import Callable
from typing import Any

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


def _make(widen: Callable[..., Any]) -> Callable[..., None]:
    @kernel(F32_2D, U16_2D, F32_2D, uint64)
    def task(x, weight, out, tile):
        num_rows, num_inputs = x.shape
        w = np.zeros((_OUTPUTS, num_inputs), np.float32)
        end = min((tile + uint64(1)) * uint64(_TILE), uint64(weight.shape[0]))
        first = tile * uint64(_TILE)
        while first < end:
            count = min(uint64(_OUTPUTS), end - first)
            for j in range(count):
                narrow, wide = weight[first + uint64(j)], w[j]
                for k in range(num_inputs):
                    wide[k] = widen(narrow[k])
            w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
            for m in range(num_rows):
                row = x[m]
                y0 = y1 = y2 = y3 = float32(0)
                for k in range(num_inputs):
                    a = row[k]
                    y0 += a * w0[k]
                    y1 += a * w1[k]
                    y2 += a * w2[k]
                    y3 += a * w3[k]
                sums = (y0, y1, y2, y3)
                for j in range(count):
                    out[m, first + uint64(j)] = sums[j]
            first += uint64(_OUTPUTS)

    @kernel(F32_2D, U16_2D, F32_2D, parallel=True)
    def run(x, weight, out):
        for tile in prange((weight.shape[0] + _TILE - 1) // _TILE):
            task(x, weight, out, tile)

    return run


_LINEAR = {torch.float16: _make(_widen_fp16), torch.bfloat16: _make(_widen_bf16)}
