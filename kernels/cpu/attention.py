"""Paged attention in fp32, for decode and prefill alike: a task is a block of queries of one
sequence with one KV head, or with all of them where that leaves work enough for every thread.

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
from kernels.cpu.recording import call_parallel, empty
from kernels.cpu.tasks import take
from kernels.paged_kv import PagedKV

_KEYS = 64  # of a chunk
_QUERIES = 32  # of a task, each with all the heads that share its KV head
_NO_WINDOW = 1 << 62
_ENOUGH = 8  # tasks a thread

_TALL, _WIDE = (8, 2) if HAS_AVX512 else (4, 1)  # see gemm.py
_LOW = 4  # rows of every product come in fours, filled up with zeros: one alone would wait for its own sums
_PARTS = _KEYS // tiles.LANES  # of a chunk: keys of one vector of scores, and their values
_CHUNK = numba.types.UniTuple(F32_ROWS, _PARTS)

_tall_scores_tile, _low_scores_tile = tiles.products_across(_TALL, _WIDE), tiles.products_across(_LOW, _PARTS)
_tall_tile, _tall_narrow_tile = tiles.products_along(_TALL, _WIDE), tiles.products_along(_TALL, 1)
_low_tile, _low_narrow_tile = tiles.products_along(_LOW, 4), tiles.products_along(_LOW, 1)


def fits(cache: PagedKV) -> bool:
    """Whether the kernel can take the cache: keys by dimension, blocks and heads in whole vectors, chunks in whole
    blocks.
    """
    block_size = cache.block_size
    sizes_fit = block_size % tiles.LANES == 0 and _KEYS % block_size == 0 and cache.head_dim % tiles.LANES == 0
    return sizes_fit and cache.is_by_dimension


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
    arrays = (q, cache.keys.mT, cache.values, block_table, seq_lens, cu_seqlens_q)
    call_parallel(_attention, *arrays, scale, window or _NO_WINDOW, out)
    return out


@numba.njit
def _columns(parts, c):
    return parts[0][:, c:], parts[1][:, c:], parts[2][:, c:], parts[3][:, c:]


@numba.njit
def _two(parts, v):
    return parts[v], parts[v + 1]


@numba.njit
def _one(parts, v):
    return (parts[v],)


_side_by_side = _two if _WIDE == 2 else _one


@kernel(F32_2D, _CHUNK, _CHUNK, F32_2D)
def _score(queries, keys, ahead, scores):
    """scores += queries @ keys, rows in fours; `ahead` is asked for meanwhile."""
    whole = queries.shape[0] // _TALL * _TALL
    if whole:
        for v in range(0, _PARTS, _WIDE):
            place = scores[:, v * tiles.LANES :]
            _tall_scores_tile(queries, _side_by_side(keys, v), _side_by_side(ahead, v), place)
    if whole < queries.shape[0]:
        _low_scores_tile(queries[whole:], keys, ahead, scores[whole:])


@kernel(F32_2D, _CHUNK, _CHUNK, F32_2D)
def _add_values(scores, values, ahead, result):
    """result += scores @ values, rows in fours, columns in whole vectors; `ahead` is asked for meanwhile."""
    whole, width = scores.shape[0] // _TALL * _TALL, result.shape[1]
    if whole:
        c = 0
        while c + _WIDE * tiles.LANES <= width:
            _tall_tile(scores, _columns(values, c), _columns(ahead, c), result[:, c:])
            c += _WIDE * tiles.LANES
        while c < width:
            _tall_narrow_tile(scores, _columns(values, c), _columns(ahead, c), result[:, c:])
            c += tiles.LANES
    if whole < scores.shape[0]:
        c = 0
        while c + 4 * tiles.LANES <= width:
            _low_tile(scores[whole:], _columns(values, c), _columns(ahead, c), result[whole:, c:])
            c += 4 * tiles.LANES
        while c < width:
            _low_narrow_tile(scores[whole:], _columns(values, c), _columns(ahead, c), result[whole:, c:])
            c += tiles.LANES


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
        if top > largest[r, 0]:  # else all that is here is scaled by exactly 1
            shrink = exp_of_negative(largest[r, 0] - top)
            total[r, 0] *= shrink
            largest[r, 0] = top
            attended = result[r]
            for d in range(attended.shape[0]):
                attended[d] *= shrink
        total[r, 0] += tiles.sum_of(scores[r : r + 1])


@numba.njit
def _chunk(k_cache, v_cache, blocks, kv_head, start, end):
    """Keys and values from `start` to before `end`: of 16 tokens each."""
    return (
        (
            _sixteen_keys(k_cache, blocks, kv_head, start, end),
            _sixteen_keys(k_cache, blocks, kv_head, start + 16, end),
            _sixteen_keys(k_cache, blocks, kv_head, start + 32, end),
            _sixteen_keys(k_cache, blocks, kv_head, start + 48, end),
        ),
        (
            _sixteen_values(v_cache, blocks, kv_head, start, end),
            _sixteen_values(v_cache, blocks, kv_head, start + 16, end),
            _sixteen_values(v_cache, blocks, kv_head, start + 32, end),
            _sixteen_values(v_cache, blocks, kv_head, start + 48, end),
        ),
    )


@numba.njit
def _sixteen_keys(k_cache, blocks, kv_head, first, end):
    """[head_dim, 16 or more]; in the place of keys that are not there some that are."""
    token, block_size = min(first, end - 1), k_cache.shape[3]
    return k_cache[blocks[token // block_size], kv_head, :, first % block_size :]


@numba.njit
def _sixteen_values(v_cache, blocks, kv_head, first, end):
    """[16, head_dim], or fewer where no more are there."""
    token, block_size = min(first, end - 1), v_cache.shape[2]
    offset, count = first % block_size, max(0, min(tiles.LANES, end - first))
    return v_cache[blocks[token // block_size], kv_head, offset : offset + count]


@numba.njit
def _chunk_after(k_cache, v_cache, block_table, seq_lens, s, kv_head, start, length):
    """What is read after this chunk: the next of these keys, or the first ones of the next head or sequence.

    It is only asked for ahead, so that a good guess is enough: tasks are taken from the last sequence to the first.
    """
    if start + _KEYS < length:
        return _chunk(k_cache, v_cache, block_table[s], kv_head, start + _KEYS, min(start + 2 * _KEYS, length))
    kv_head = (kv_head + 1) % k_cache.shape[1]
    if kv_head == 0 and s > 0:
        s -= 1
    return _chunk(k_cache, v_cache, block_table[s], kv_head, 0, min(_KEYS, max(seq_lens[s], 1)))


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, int64, int64, int64, float32, int64, F32_3D)
def _task(q, k_cache, v_cache, block_table, seq_lens, s, first_position, kv_head, scale, window, out):
    """q [queries, heads, head_dim] of sequence s, at positions from `first_position` on: the heads of one KV head.

    k_cache [blocks, kv_heads, head_dim, block_size], v_cache [blocks, kv_heads, block_size, head_dim]
    """
    head_dim = v_cache.shape[3]
    heads = q.shape[1] // k_cache.shape[1]
    num_rows, first_head = q.shape[0] * heads, kv_head * heads
    num_filled = (num_rows + _LOW - 1) // _LOW * _LOW
    queries, result = aligned_zeros(num_filled, head_dim), aligned_zeros(num_filled, head_dim)
    for r in range(num_rows):
        query, head = queries[r], q[r // heads, first_head + r % heads]
        for d in range(head_dim):
            query[d] = head[d] * scale
    largest, total = np.full((num_filled, 1), -np.inf, np.float32), np.zeros((num_filled, 1), np.float32)
    scores = aligned_zeros(num_filled, _KEYS)
    length = first_position + q.shape[0]
    if length <= 0:  # fills up a batch
        out[:, first_head : first_head + heads] = 0
        return
    first_key = max(0, first_position - window + 1)
    for start in range(first_key // _KEYS * _KEYS, length, _KEYS):
        keys, values = _chunk(k_cache, v_cache, block_table[s], kv_head, start, min(start + _KEYS, length))
        keys_after, values_after = _chunk_after(k_cache, v_cache, block_table, seq_lens, s, kv_head, start, length)
        scores[:] = 0
        _score(queries, keys, keys_after, scores)
        _soften(scores, first_position - start, heads, window, largest, total, result)
        _add_values(scores, values, values_after, result)
    for r in range(num_rows):
        attended, head = result[r], out[r // heads, first_head + r % heads]
        for d in range(head_dim):
            head[d] = attended[d] / total[r, 0]


@kernel(I32_1D, I64_2D)
def _list(cu_seqlens_q, tasks):
    """tasks [tasks, 2] = sequence and first row of each block of queries, the last ones first: of a prompt they see the
    most keys, and whoever takes the last task should not keep the others waiting for long.
    """
    place = tasks.shape[0]
    for s in range(cu_seqlens_q.shape[0] - 1):
        for first in range(cu_seqlens_q[s], cu_seqlens_q[s + 1], _QUERIES):
            place -= 1
            tasks[place, 0], tasks[place, 1] = s, first


@numba.njit(cache=True)
def _num_tasks(cu_seqlens_q):
    total = 0
    for s in range(cu_seqlens_q.shape[0] - 1):
        total += (cu_seqlens_q[s + 1] - cu_seqlens_q[s] + _QUERIES - 1) // _QUERIES
    return total


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, I32_1D, I64_2D, float32, int64, F32_3D, int64, int64)
def _heads_task(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, tasks, scale, window, out, heads, task):
    """A block of queries with some of the KV heads, of which there are `heads` tasks."""
    s, first = tasks[task // heads]
    end = min(first + _QUERIES, cu_seqlens_q[s + 1])
    position = seq_lens[s] - cu_seqlens_q[s + 1] + first
    count = k_cache.shape[1] // heads
    for kv_head in range(task % heads * count, (task % heads + 1) * count):
        chunk = slice(first, end)
        _task(q[chunk], k_cache, v_cache, block_table, seq_lens, s, position, kv_head, scale, window, out[chunk])


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, I32_1D, float32, int64, F32_3D, int64, parallel=True)
def _attention(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, window, out, num_threads):
    tasks = np.empty((_num_tasks(cu_seqlens_q), 2), np.int64)
    _list(cu_seqlens_q, tasks)
    # One thread reads all heads of a block, which lie side by side, where there is work enough for the others.
    heads = 1 if tasks.shape[0] >= _ENOUGH * num_threads else k_cache.shape[1]
    num_tasks, counter = tasks.shape[0] * heads, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _heads_task(
                q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, tasks, scale, window, out, heads, task
            )
            task = take(counter)
