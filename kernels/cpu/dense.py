"""fp32 activations times a dense weight, which may be kept in fp16 or bf16: widened as it is read, for half the memory.

As in gemm.py a row's result has the same bits alone and in any company.
"""

import numpy as np
import torch
from numba import int64, prange

from kernels.cpu import tiles
from kernels.cpu.compile import F32_2D, F32_ROWS, HAS_AVX512, I16_2D, U16_2D, aligned_empty, aligned_zeros, kernel
from kernels.cpu.recording import call_parallel, empty
from kernels.cpu.tasks import take

_OUTPUTS = 64  # of one task: with their inputs they stay in the second cache while the rows go by

# Rows and outputs of a tile, see gemm.py; a single row takes more outputs instead.
_ROWS, _WIDE = (8, 2) if HAS_AVX512 else (2, 2)
_ALONE, _ALONE_WIDE = 2, 4  # more rows than these fill a tile, with rows that nobody wants

_tile = tiles.dot_products(_ROWS, _WIDE)
_row_tile, _row_narrow_tile = tiles.dot_products(1, _ALONE_WIDE), tiles.dot_products(1, 1)

_HELD_AS = {torch.float32: torch.float32, torch.float16: torch.uint16, torch.bfloat16: torch.int16}
_WEIGHT = (F32_2D, U16_2D, I16_2D)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, K] fp32 contiguous, weight [N, K] fp32, fp16 or bf16 contiguous -> [rows, N] fp32."""
    out = empty(x.shape[0], weight.shape[0])
    call_parallel(_linear, x, weight.view(_HELD_AS[weight.dtype]), out)
    return out


@kernel(F32_2D, _WEIGHT, F32_ROWS)
def _single_rows(x, weight, out):
    for row in range(x.shape[0]):
        j = 0
        while j + _ALONE_WIDE <= weight.shape[0]:
            _row_tile(x[row:], weight[j:], out[row:, j:])
            j += _ALONE_WIDE
        while j < weight.shape[0]:
            _row_narrow_tile(x[row:], weight[j:], out[row:, j:])
            j += 1


@kernel(F32_2D, _WEIGHT, F32_ROWS)
def _whole_tiles(x, weight, out):
    """For at least `_ROWS` rows. The last tile begins early enough to be whole: some rows are computed twice."""
    for row in range(0, x.shape[0], _ROWS):
        first = min(row, x.shape[0] - _ROWS)
        for j in range(0, weight.shape[0], _WIDE):
            _tile(x[first:], weight[j:], out[first:, j:])


@kernel(F32_2D, _WEIGHT, F32_2D, int64)
def _task(x, weight, out, task):
    weight, out = weight[task * _OUTPUTS : (task + 1) * _OUTPUTS], out[:, task * _OUTPUTS : (task + 1) * _OUTPUTS]
    if x.shape[0] < _ROWS:
        _single_rows(x, weight, out)
        return
    whole = weight.shape[0] // _WIDE * _WIDE
    _whole_tiles(x, weight[:whole], out)
    _single_rows(x, weight[whole:], out[:, whole:])


@kernel(F32_2D, _WEIGHT, F32_2D, int64, parallel=True)
def _linear(x, weight, out, num_threads):
    num_rows = out.shape[0]
    filled, sums = x, out
    if _ALONE < num_rows < _ROWS:
        filled, sums = aligned_zeros(_ROWS, x.shape[1]), aligned_empty(_ROWS, out.shape[1])
        filled[:num_rows] = x
    num_tasks, counter = (weight.shape[0] + _OUTPUTS - 1) // _OUTPUTS, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _task(filled, weight, sums, task)
            task = take(counter)
    if _ALONE < num_rows < _ROWS:
        out[:] = sums[:num_rows]
