"""fp32 activations times a packed 4-bit weight, from the packed form, for few rows.

The tile of 64 outputs is the vector axis: codes of eight outputs become eight lanes with one widening move and one
conversion, and the scale is applied once a group instead of once a weight. For one row the sum of a group's inputs
carries the offset; for more rows a stretch of weights is expanded once and used by every row.
"""

import numpy as np
import torch
from numba import float32, int32, prange, uint64

from kernels.cpu.compile import F32_2D, F32_3D, U8_3D, kernel
from kernels.w4 import TILE_N, W4Weight

_STEP = 16  # inputs taken at once: their 16 values stay in registers
_W4 = (F32_2D, U8_3D, F32_3D, F32_3D, F32_2D)


def fits(weight: W4Weight) -> bool:
    """Whether these kernels can take the weight: groups in whole steps."""
    return weight.group_size % _STEP == 0


def w4_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """x [rows, K] fp32 contiguous -> [rows, N] fp32. See `ops.w4_linear`."""
    out = torch.empty(x.shape[0], weight.packed.shape[0] * TILE_N)
    run = _one_row if x.shape[0] == 1 else _rows
    run(x.numpy(), *weight.arrays, out.numpy())
    return out if out.shape[1] == weight.num_outputs else out[:, : weight.num_outputs]


def dequantize(weight: W4Weight) -> torch.Tensor:
    """The dense weight, fp32, as [K, N padded to whole tiles]."""
    out = torch.empty(weight.num_inputs, weight.packed.shape[0] * TILE_N)
    _dequantize(out.numpy(), *weight.arrays)
    return out


@kernel(*_W4, uint64)
def _one_row_tile(x, packed, scales, offsets, out, tile):
    num_groups = scales.shape[1]
    group = x.shape[1] // num_groups
    row = x[0]
    first = tile * uint64(TILE_N)
    total = np.zeros(TILE_N, np.float32)
    for g in range(num_groups):
        inputs = float32(0)
        for i in range(group):
            inputs += row[g * group + i]
        part = np.zeros(TILE_N, np.float32)
        for step in range(group // _STEP):
            k = uint64(g * group + step * _STEP)
            a = row[k : k + uint64(16)]
            q = packed[tile, k // uint64(2) : k // uint64(2) + uint64(8)]
            a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
            b0, b1, b2, b3, b4, b5, b6, b7 = a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]
            for n in range(TILE_N):
                # int32() again after the mask: numba widens to 64 bits, whose conversion has no vector form on AVX2.
                part[n] += (
                    float32(int32(q[0, n] & 15)) * a0
                    + float32(int32(q[0, n] >> 4)) * a1
                    + float32(int32(q[1, n] & 15)) * a2
                    + float32(int32(q[1, n] >> 4)) * a3
                    + float32(int32(q[2, n] & 15)) * a4
                    + float32(int32(q[2, n] >> 4)) * a5
                    + float32(int32(q[3, n] & 15)) * a6
                    + float32(int32(q[3, n] >> 4)) * a7
                    + float32(int32(q[4, n] & 15)) * b0
                    + float32(int32(q[4, n] >> 4)) * b1
                    + float32(int32(q[5, n] & 15)) * b2
                    + float32(int32(q[5, n] >> 4)) * b3
                    + float32(int32(q[6, n] & 15)) * b4
                    + float32(int32(q[6, n] >> 4)) * b5
                    + float32(int32(q[7, n] & 15)) * b6
                    + float32(int32(q[7, n] >> 4)) * b7
                )
        scale, offset = scales[tile, g], offsets[tile, g]
        for n in range(TILE_N):
            total[n] += part[n] * scale[n] + inputs * offset[n]
    out[0, first : first + uint64(TILE_N)] = total


@kernel(*_W4, parallel=True)
def _one_row(x, packed, scales, offsets, out):
    for tile in prange(packed.shape[0]):
        _one_row_tile(x, packed, scales, offsets, out, tile)


@kernel(F32_2D, U8_3D, F32_3D, F32_3D, uint64, uint64, uint64)
def _expand(dense, packed, scales, offsets, tile, first_k, g):
    """dense [rows, 64] = weights of inputs first_k .. first_k + rows - 1, all in group g."""
    scale, offset = scales[tile, g], offsets[tile, g]
    for i in range(dense.shape[0] // 2):
        q = packed[tile, first_k // uint64(2) + uint64(i)]
        # Two loops with one output each: with both in one loop the compiler gives up on vectors (six times slower).
        low = dense[2 * i]
        for n in range(TILE_N):
            low[n] = float32(int32(q[n] & 15)) * scale[n] + offset[n]
        high = dense[2 * i + 1]
        for n in range(TILE_N):
            high[n] = float32(int32(q[n] >> 4)) * scale[n] + offset[n]


@kernel(*_W4, uint64)
def _rows_tile(x, packed, scales, offsets, out, tile):
    num_rows, num_inputs = x.shape
    steps_a_group = num_inputs // scales.shape[1] // _STEP
    total = np.zeros((num_rows, TILE_N), np.float32)
    w = np.empty((_STEP, TILE_N), np.float32)
    for step in range(num_inputs // _STEP):
        k = uint64(step * _STEP)
        _expand(w, packed, scales, offsets, tile, k, uint64(step // steps_a_group))
        for m in range(num_rows):
            a = x[m, k : k + uint64(16)]
            y = total[m]
            a0, a1, a2, a3, a4, a5, a6, a7 = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]
            b0, b1, b2, b3, b4, b5, b6, b7 = a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]
            for n in range(TILE_N):
                y[n] += (
                    w[0, n] * a0
                    + w[1, n] * a1
                    + w[2, n] * a2
                    + w[3, n] * a3
                    + w[4, n] * a4
                    + w[5, n] * a5
                    + w[6, n] * a6
                    + w[7, n] * a7
                    + w[8, n] * b0
                    + w[9, n] * b1
                    + w[10, n] * b2
                    + w[11, n] * b3
                    + w[12, n] * b4
                    + w[13, n] * b5
                    + w[14, n] * b6
                    + w[15, n] * b7
                )
    first = tile * uint64(TILE_N)
    out[:, first : first + uint64(TILE_N)] = total


@kernel(*_W4, parallel=True)
def _rows(x, packed, scales, offsets, out):
    for tile in prange(packed.shape[0]):
        _rows_tile(x, packed, scales, offsets, out, tile)


@kernel(F32_2D, U8_3D, F32_3D, F32_3D, uint64)
def _dequantize_tile(out, packed, scales, offsets, tile):
    first = tile * uint64(TILE_N)
    steps_a_group = out.shape[0] // scales.shape[1] // _STEP
    w = np.empty((_STEP, TILE_N), np.float32)
    for step in range(out.shape[0] // _STEP):
        k = uint64(step * _STEP)
        _expand(w, packed, scales, offsets, tile, k, uint64(step // steps_a_group))
        out[k : k + uint64(_STEP), first : first + uint64(TILE_N)] = w


@kernel(F32_2D, U8_3D, F32_3D, F32_3D, parallel=True)
def _dequantize(out, packed, scales, offsets):
    for tile in prange(packed.shape[0]):
        _dequantize_tile(out, packed, scales, offsets, tile)
