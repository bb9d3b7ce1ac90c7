"""Paged attention in fp32, for decode and prefill alike: one task a sequence, KV head and block of queries.

Keys come in chunks of 64 that begin at the sequence's start, each with a running maximum and sum (Milakov and
Gimelshein 2018, FlashAttention). A query's sums are thus taken in the same order alone and in any block: its result has
the same bits whether its prompt came whole, in chunks, or out of the prefix cache.
"""

import numba
import numpy as np
import torch
from numba import float32, int64, prange

from kernels.cpu import tiles
from kernels.cpu.compile import (
    F32_2D,
    F32_3D,
    F32_3D_ROWS,
    F32_4D,
    F32_ROWS,
    HAS_AVX512,
    I32_1D,
    I32_2D,
    I64_2D,
    aligned_zeros,
    kernel,
)
from kernels.cpu.exp import exp_minus, exp_of_negative
from kernels.cpu.recording import call, empty
from kernels.paged_kv import PagedKV

_KEYS = 64  # of a chunk
_QUERIES = 32  # of a task, each with all the heads that share its KV head
_NO_WINDOW = 1 << 62
_HANDS = 16  # about as many as threads, or more

_TALL, _WIDE = (8, 2) if HAS_AVX512 else (4, 1)  # see gemm.py
_LOW = 4  # rows of every product come in fours, filled up with zeros: one alone would wait for its own sums
_tall_tile, _tall_narrow_tile = tiles.products(_TALL, _WIDE), tiles.products(_TALL, 1)
_low_tile, _low_narrow_tile = tiles.products(_LOW, 4), tiles.products(_LOW, 1)
_transpose_tile = tiles.transpose()


def fits(cache: PagedKV) -> bool:
    """Whether the kernel can take the cache: blocks and heads in whole vectors, chunks in whole blocks."""
    block_size = cache.block_size
    return block_size % tiles.LANES == 0 and _KEYS % block_size == 0 and cache.head_dim % tiles.LANES == 0


def paged_attention(
    q: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """See `ops.paged_attention`. Heads of q may lie in a wider tensor."""
    out = empty(*q.shape)
    arrays = (q, cache.keys, cache.values, block_table, seq_lens, cu_seqlens_q)
    call(_attention, *arrays, scale, window or _NO_WINDOW, out)
    return out


@kernel(F32_ROWS, F32_ROWS, F32_ROWS)
def _add_product(x, w, out):
    """out += x @ w; rows of x in fours, columns of w in whole vectors."""
    row, width = 0, w.shape[1]
    while row + _TALL <= x.shape[0]:
        c = 0
        while c + _WIDE * tiles.LANES <= width:
            _tall_tile(x[row:], w[:, c:], out[row:, c:])
            c += _WIDE * tiles.LANES
        while c < width:
            _tall_narrow_tile(x[row:], w[:, c:], out[row:, c:])
            c += tiles.LANES
        row += _TALL
    while row < x.shape[0]:
        c = 0
        while c + 4 * tiles.LANES <= width:
            _low_tile(x[row:], w[:, c:], out[row:, c:])
            c += 4 * tiles.LANES
        while c < width:
            _low_narrow_tile(x[row:], w[:, c:], out[row:, c:])
            c += tiles.LANES
        row += _LOW


@kernel(F32_2D, int64, int64, int64, F32_2D, F32_2D, F32_2D)
def _soften(scores, position, heads, window, largest, total, result):
    """Scores of one chunk to weights, row by row; what the rows had before is scaled to the new maximum.

    Row r belongs to query r // heads; the first query's own key is number `position` of this chunk, which may lie
    outside it.
    """
    for r in range(scores.shape[0]):
        last = position + r // heads
        first = last - window + 1
        row = scores[r]
        if last < 0 or first >= _KEYS:
            row[:] = 0
            continue
        if last + 1 < _KEYS:
            row[last + 1 :] = -np.inf
        if first > 0:
            row[:first] = -np.inf
        top = max(largest[r, 0], tiles.largest_of(scores[r : r + 1]))
        exp_minus(row, top)
        shrink = exp_of_negative(largest[r, 0] - top)
        total[r, 0] = total[r, 0] * shrink + tiles.sum_of(scores[r : r + 1])
        largest[r, 0] = top
        attended = result[r]
        for d in range(attended.shape[0]):
            attended[d] *= shrink


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_1D, int64, int64, float32, int64, F32_3D)
def _task(q, k_cache, v_cache, blocks, first_position, kv_head, scale, window, out):
    """q [queries, heads, head_dim], at positions from `first_position` on: the heads of one KV head."""
    block_size, head_dim = k_cache.shape[2], k_cache.shape[3]
    heads = q.shape[1] // k_cache.shape[1]
    num_rows, first_head = q.shape[0] * heads, kv_head * heads
    num_filled = (num_rows + _LOW - 1) // _LOW * _LOW
    queries, result = aligned_zeros(num_filled, head_dim), aligned_zeros(num_filled, head_dim)
    for r in range(num_rows):
        query, head = queries[r], q[r // heads, first_head + r % heads]
        for d in range(head_dim):
            query[d] = head[d] * scale
    largest, total = np.full((num_filled, 1), -np.inf, np.float32), np.zeros((num_filled, 1), np.float32)
    keys, scores = aligned_zeros(head_dim, _KEYS), aligned_zeros(num_filled, _KEYS)
    length = first_position + q.shape[0]
    if length <= 0:  # fills up a batch
        out[:, first_head : first_head + heads] = 0
        return
    first_key = max(0, first_position - window + 1)
    for start in range(first_key // _KEYS * _KEYS, length, _KEYS):
        end = min(start + _KEYS, length)
        for first in range(start, end, block_size):
            tiles.fetch(v_cache[blocks[first // block_size], kv_head])
            block = k_cache[blocks[first // block_size], kv_head]
            for part in range(0, block_size, tiles.LANES):
                _transpose_tile(block[part:], keys[:, first - start + part :])
        scores[:] = 0
        _add_product(queries, keys, scores)
        _soften(scores, first_position - start, heads, window, largest, total, result)
        for first in range(start, end, block_size):
            if first + _KEYS < length:
                tiles.fetch(k_cache[blocks[(first + _KEYS) // block_size], kv_head])
            values = v_cache[blocks[first // block_size], kv_head, : min(block_size, end - first)]
            _add_product(scores[:, first - start :], values, result)
    for r in range(num_rows):
        attended, head = result[r], out[r // heads, first_head + r % heads]
        for d in range(head_dim):
            head[d] = attended[d] / total[r, 0]


@kernel(I32_1D, I64_2D)
def _deal(cu_seqlens_q, tasks):
    """tasks [tasks, 2] = sequence and first row of each block of queries.

    Each thread takes an unbroken part of the list, and later blocks of a prompt see more keys: so they are dealt out
    like cards, and a part of the list is a few whole hands.
    """
    place = 0
    for hand in range(_HANDS):
        index = 0
        for s in range(cu_seqlens_q.shape[0] - 1):
            for first in range(cu_seqlens_q[s], cu_seqlens_q[s + 1], _QUERIES):
                if index % _HANDS == hand:
                    tasks[place, 0], tasks[place, 1] = s, first
                    place += 1
                index += 1


@numba.njit(cache=True)
def _num_tasks(cu_seqlens_q):
    total = 0
    for s in range(cu_seqlens_q.shape[0] - 1):
        total += (cu_seqlens_q[s + 1] - cu_seqlens_q[s] + _QUERIES - 1) // _QUERIES
    return total


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, I32_1D, float32, int64, F32_3D, parallel=True)
def _attention(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, window, out):
    num_kv_heads = k_cache.shape[1]
    tasks = np.empty((_num_tasks(cu_seqlens_q), 2), np.int64)
    _deal(cu_seqlens_q, tasks)
    for index in prange(tasks.shape[0] * num_kv_heads):
        s, first = tasks[index // num_kv_heads]
        end = min(first + _QUERIES, cu_seqlens_q[s + 1])
        position = seq_lens[s] - cu_seqlens_q[s + 1] + first
        head = index % num_kv_heads
        _task(q[first:end], k_cache, v_cache, block_table[s], position, head, scale, window, out[first:end])
