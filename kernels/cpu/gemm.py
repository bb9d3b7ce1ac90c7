"""fp32 activations times a packed 4-bit weight, from the packed form.

A task is half a tile of the weight, or a tile for many rows. It expands its weights once and uses them for every row;
for a few rows they never leave the registers. Either way a row's sums are taken in the same order, so its result has
the same bits alone and in any company: a prefix-cache hit equals a miss, a request in a batch the request alone.
"""

import numba
import numpy as np
import torch
from numba import int64, prange

from kernels.cpu import tiles
from kernels.cpu.compile import (
    F32_2D,
    F32_3D,
    F32_ROWS,
    HAS_AVX512,
    U8_3D,
    U16_3D,
    aligned_empty,
    aligned_zeros,
    kernel,
)
from kernels.cpu.recording import call_parallel, empty
from kernels.cpu.tasks import take
from kernels.cpu.vectors import LANES
from kernels.w4 import TILE_N, W4Weight

_OUTPUTS = 32  # of one task: 576 outputs are 18 tasks, which 2, 3 or 6 cores share evenly; many rows take 64
_INPUTS = 128  # expanded at once: with 64 outputs 32 KiB, which stay in the first cache
_ROWS = 128  # of one task: that many inputs stay in the second cache

# Sums of one tile that fit into the registers: 32 of 16 numbers with AVX-512, 16 of 8 with AVX2, 32 of 4 with NEON.
_TALL, _WIDE = (8, 2) if HAS_AVX512 else (4, 1)
_CODED, _FEW = (8, 8) if HAS_AVX512 else (2, 4)  # rows of a tile whose weights stay in registers, and of such a product
_ALONE = 2  # more rows than these fill a tile, with rows that nobody wants: that costs less than single ones
# Outputs of a single row's task. Each sum waits for itself: with four vectors instead of two it took 0.8 of the time.
_ALONE_OUTPUTS = 64 if HAS_AVX512 else 32

_tall_tile = tiles.products(_TALL, _WIDE)
_one_row_tile = tiles.products(1, _OUTPUTS // LANES)
_coded_row_tile = tiles.coded_products(1, _ALONE_OUTPUTS // LANES)
_coded_tile = tiles.coded_products(_CODED, _OUTPUTS // LANES)
_expand_tile = tiles.expand(_OUTPUTS // LANES)

_W4 = (F32_2D, U8_3D, (F32_3D, U16_3D), F32_2D)


def fits(weight: W4Weight) -> bool:
    """Whether these kernels can take the weight: both codes of a byte are in one group."""
    return weight.group_size % 2 == 0


def w4_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """x [rows, K] fp32 contiguous -> [rows, N] fp32. See `ops.w4_linear`."""
    out = empty(x.shape[0], weight.num_padded)
    run = _single_rows if x.shape[0] <= _ALONE else _few_rows if x.shape[0] <= _FEW else _rows
    call_parallel(run, x, *weight.arrays, out)
    return out if weight.num_outputs == weight.num_padded else out[:, : weight.num_outputs]


@kernel(*_W4, int64)
def _single_rows_task(x, packed, terms, out, task):
    tile, first = task * _ALONE_OUTPUTS // TILE_N, task * _ALONE_OUTPUTS % TILE_N
    for row in range(x.shape[0]):
        place = out[row:, task * _ALONE_OUTPUTS :]
        _coded_row_tile(x[row:], packed[tile, :, first:], terms[tile, :, first:], place)


@kernel(*_W4, int64, parallel=True)
def _single_rows(x, packed, terms, out, num_threads):
    num_tasks, counter = out.shape[1] // _ALONE_OUTPUTS, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _single_rows_task(x, packed, terms, out, task)
            task = take(counter)


@kernel(*_W4, int64)
def _few_rows_task(x, packed, terms, out, task):
    """x and out have whole tiles of rows."""
    tile, first = task * _OUTPUTS // TILE_N, task * _OUTPUTS % TILE_N
    for row in range(0, x.shape[0], _CODED):
        place = out[row:, task * _OUTPUTS :]
        _coded_tile(x[row:], packed[tile, :, first:], terms[tile, :, first:], place)


@kernel(*_W4, int64, parallel=True)
def _few_rows(x, packed, terms, out, num_threads):
    num_rows = out.shape[0]
    num_filled = (num_rows + _CODED - 1) // _CODED * _CODED
    filled, sums = x, out
    if num_filled > num_rows:  # with zeros
        filled, sums = aligned_zeros(num_filled, x.shape[1]), aligned_empty(num_filled, out.shape[1])
        filled[:num_rows] = x
    num_tasks, counter = out.shape[1] // _OUTPUTS, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _few_rows_task(filled, packed, terms, sums, task)
            task = take(counter)
    if num_filled > num_rows:
        out[:] = sums[:num_rows]


@numba.njit
def _part(group):
    """Inputs to expand at once: whole groups, or a whole part of a large one."""
    if group <= _INPUTS:
        return _INPUTS // group * group
    return _INPUTS if group % _INPUTS == 0 else group


@kernel(F32_ROWS, F32_2D, F32_ROWS)
def _add_rows(x, dense, out):
    whole = x.shape[0] // _TALL * _TALL
    for c in range(0, dense.shape[1], _WIDE * LANES):
        _tall_tile(x, dense[:, c:], out[:, c:])
    if whole < x.shape[0]:
        for c in range(0, dense.shape[1], _OUTPUTS):
            _one_row_tile(x[whole:], dense[:, c:], out[whole:, c:])


@kernel(*_W4, int64, int64)
def _rows_task(x, packed, terms, out, width, task):
    """A chunk of rows times `width` outputs: part after part of the weights is expanded, and used while it is near."""
    num_tasks_a_chunk = packed.shape[0] * TILE_N // width
    first_row, first_output = task // num_tasks_a_chunk * _ROWS, task % num_tasks_a_chunk * width
    tile, first = first_output // TILE_N, first_output % TILE_N
    rows, place = x[first_row : first_row + _ROWS], out[first_row : first_row + _ROWS, first_output:]
    tiles.clear(place[:, :width])
    group = x.shape[1] // (terms.shape[1] // 2)
    part = _part(group)
    dense = aligned_empty(part, width)
    for k in range(0, x.shape[1], part):
        end = min(k + part, x.shape[1])
        codes, g = packed[tile, k // 2 : end // 2], slice(k // group * 2, (end - 1) // group * 2 + 2)
        for c in range(0, width, _OUTPUTS):
            n = first + c
            _expand_tile(codes[:, n:], terms[tile, g, n:], dense[:, c:])
        _add_rows(rows[:, k:], dense[: end - k], place)


@kernel(*_W4, int64, parallel=True)
def _rows(x, packed, terms, out, num_threads):
    width = TILE_N if x.shape[0] >= _ROWS else _OUTPUTS
    num_chunks = (x.shape[0] + _ROWS - 1) // _ROWS
    num_tasks, counter = num_chunks * packed.shape[0] * TILE_N // width, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _rows_task(x, packed, terms, out, width, task)
            task = take(counter)
