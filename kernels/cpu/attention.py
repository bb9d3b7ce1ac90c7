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

from kernels.cpu.attention_tiles import products_across, products_along, soften
from kernels.cpu.compile import (
    F32_1D,
    F32_2D,
    F32_3D,
    F32_3D_ROWS,
    F32_4D,
    HAS_AVX512,
    I32_1D,
    I32_2D,
    I64_2D,
    aligned_empty,
    kernel,
)
from kernels.cpu.recording import call_parallel, empty
from kernels.cpu.tasks import take
from kernels.cpu.vectors import LANES
from kernels.paged_kv import PagedKV

_KEYS = 64  # of a chunk
_QUERIES = 32  # of a task, each with all the heads that share its KV head
_NO_WINDOW = 1 << 62
_ENOUGH = 8  # tasks a thread

_TALL, _WIDE = (8, 2) if HAS_AVX512 else (4, 1)  # see gemm.py
_LOW = 4  # rows of every product come in fours, filled up with zeros: one alone would wait for its own sums
_PARTS = _KEYS // LANES  # of a chunk: keys of one vector of scores, and their values

_tall_scores_tile, _low_scores_tile = products_across(_TALL, _WIDE), products_across(_LOW, _PARTS)
_tall_tile, _tall_narrow_tile = products_along(_TALL, _WIDE), products_along(_TALL, 1)
_low_tile, _low_narrow_tile = products_along(_LOW, 4), products_along(_LOW, 1)
_soften_row = soften(_PARTS)

# Addresses of a chunk's parts.
_CHUNK = numba.types.UniTuple(int64, _PARTS)


def fits(cache: PagedKV) -> bool:
    """Whether the kernel can take the cache: keys by dimension, blocks and heads in whole vectors, chunks in whole
    blocks.
    """
    block_size = cache.block_size
    sizes_fit = block_size % LANES == 0 and _KEYS % block_size == 0 and cache.head_dim % LANES == 0
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
def _two(parts, v):
    return parts[v], parts[v + 1]


@numba.njit
def _one(parts, v):
    return (parts[v],)


_side_by_side = _two if _WIDE == 2 else _one


@kernel(F32_2D, _CHUNK, _CHUNK, int64, F32_2D)
def _score(queries, keys, ahead, row_bytes, scores):
    """scores += queries @ keys, rows in fours; `ahead` is asked for meanwhile."""
    whole = queries.shape[0] // _TALL * _TALL
    if whole:
        for v in range(0, _PARTS, _WIDE):
            place = scores[:, v * LANES :]
            _tall_scores_tile(queries, _side_by_side(keys, v), _side_by_side(ahead, v), row_bytes, place)
    if whole < queries.shape[0]:
        _low_scores_tile(queries[whole:], keys, ahead, row_bytes, scores[whole:])


@kernel(F32_2D, _CHUNK, _CHUNK, int64, int64, F32_2D)
def _add_values(scores, values, ahead, row_bytes, count, result):
    """result += scores @ values, rows in fours, columns in whole vectors; `ahead` is asked for meanwhile."""
    whole, width = scores.shape[0] // _TALL * _TALL, result.shape[1]
    if whole:
        c = 0
        while c + _WIDE * LANES <= width:
            _tall_tile(scores, values, ahead, row_bytes, count, c, result[:, c:])
            c += _WIDE * LANES
        while c < width:
            _tall_narrow_tile(scores, values, ahead, row_bytes, count, c, result[:, c:])
            c += LANES
    if whole < scores.shape[0]:
        weights = scores[whole:]
        c = 0
        while c + 4 * LANES <= width:
            _low_tile(weights, values, ahead, row_bytes, count, c, result[whole:, c:])
            c += 4 * LANES
        while c < width:
            _low_narrow_tile(weights, values, ahead, row_bytes, count, c, result[whole:, c:])
            c += LANES


@kernel(F32_2D, int64, int64, int64, F32_2D, F32_2D)
def _soften(scores, position, heads, window, state, result):
    """Scores of one chunk to weights, row by row; what the rows had before is scaled to the new maximum.

    Row r belongs to query r // heads; the first query's own key is number `position` of this chunk, which may lie
    outside it. state [rows, 2] = maximum and sum.
    """
    for r in range(scores.shape[0]):
        last = position + r // heads
        first = last - window + 1
        if last < 0 or first >= _KEYS:
            scores[r] = 0
        else:
            _soften_row(scores, r, max(first, 0), min(last, _KEYS - 1), state, result)


@kernel(F32_2D, int64)
def _skip(weights, skipped):
    """Leave out the first columns: those of keys that no query sees, whose values may be NaN by now."""
    for r in range(weights.shape[0]):
        row = weights[r]
        for c in range(_KEYS - skipped):
            row[c] = row[c + skipped]


@numba.njit
def _place(head, blocks, token):
    address, block_bytes, block_size, token_bytes, _ = head
    return address + blocks[token // block_size] * block_bytes + token % block_size * token_bytes


@numba.njit
def _chunk(head, blocks, start, end):
    """Addresses of 16 tokens each, from `start` to before `end`; in the place of some that are not there the last."""
    last = (end - 1) // LANES * LANES
    return (
        _place(head, blocks, start),
        _place(head, blocks, min(start + LANES, last)),
        _place(head, blocks, min(start + 2 * LANES, last)),
        _place(head, blocks, min(start + 3 * LANES, last)),
    )


@numba.njit
def _heads_of(k_cache, v_cache, kv_head):
    """Where the keys and the values of one KV head lie.

    Of each: the address, the bytes of a block, the tokens of one, the bytes from a token to the next, those of a row.
    """
    block_size, head_dim = v_cache.shape[2:]
    return (
        (k_cache.ctypes.data + kv_head * k_cache.strides[1], k_cache.strides[0], block_size, 4, k_cache.strides[2]),
        (
            v_cache.ctypes.data + kv_head * v_cache.strides[1],
            v_cache.strides[0],
            block_size,
            4 * head_dim,
            4 * head_dim,
        ),
    )


@numba.njit
def _after(block_table, seq_lens, s, kv_head, num_kv_heads, start, length):
    """What is read after this chunk: the next of these keys, or the first ones of the next head or sequence.

    Sequence, KV head, start and end. It is only asked for ahead, so that a good guess is enough: tasks are taken from
    the last sequence to the first.
    """
    if start + _KEYS < length:
        return s, kv_head, start + _KEYS, min(start + 2 * _KEYS, length)
    kv_head = (kv_head + 1) % num_kv_heads
    if kv_head == 0 and s > 0:
        s -= 1
    return s, kv_head, 0, min(_KEYS, max(seq_lens[s], 1))


@numba.njit
def _cut(space, start, rows, columns):
    return space[start : start + rows * columns].reshape(rows, columns)


@numba.njit
def _num_filled(num_rows):
    return (num_rows + _LOW - 1) // _LOW * _LOW


@numba.njit
def _size(num_rows, head_dim):
    """Numbers of a task's space, see `_task`."""
    return _num_filled(num_rows) * (2 * head_dim + _KEYS + LANES)


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, int64, int64, int64, float32, int64, F32_1D, F32_3D)
def _task(q, k_cache, v_cache, block_table, seq_lens, s, first_position, kv_head, scale, window, space, out):
    """q [queries, heads, head_dim] of sequence s, at positions from `first_position` on: the heads of one KV head.

    k_cache [blocks, kv_heads, head_dim, block_size], v_cache [blocks, kv_heads, block_size, head_dim]
    space   to write on: it belongs to the thread, since to make arrays for each task takes longer than some tasks
    """
    head_dim, num_kv_heads = v_cache.shape[3], k_cache.shape[1]
    heads = q.shape[1] // num_kv_heads
    num_rows, first_head = q.shape[0] * heads, kv_head * heads
    length = first_position + q.shape[0]
    if length <= 0:  # fills up a batch
        out[:, first_head : first_head + heads] = 0
        return
    n = _num_filled(num_rows)
    queries, result = _cut(space, 0, n, head_dim), _cut(space, n * head_dim, n, head_dim)
    scores, state = _cut(space, 2 * n * head_dim, n, _KEYS), _cut(space, n * (2 * head_dim + _KEYS), n, 2)
    for r in range(num_rows):
        query, head = queries[r], q[r // heads, first_head + r % heads]
        for d in range(head_dim):
            query[d] = head[d] * scale
    queries[num_rows:] = 0
    result[:] = 0
    state[:, 0], state[:, 1] = -np.inf, 0
    blocks, (keys, values) = block_table[s], _heads_of(k_cache, v_cache, kv_head)
    first_key = max(0, first_position - window + 1)
    for start in range(first_key // _KEYS * _KEYS, length, _KEYS):
        end = min(start + _KEYS, length)
        next_s, next_head, next_start, next_end = _after(block_table, seq_lens, s, kv_head, num_kv_heads, start, length)
        next_blocks, (next_keys, next_values) = block_table[next_s], _heads_of(k_cache, v_cache, next_head)
        scores[:] = 0
        keys_ahead = _chunk(next_keys, next_blocks, next_start, next_end)
        _score(queries, _chunk(keys, blocks, start, end), keys_ahead, keys[4], scores)
        _soften(scores, first_position - start, heads, window, state, result)
        values_ahead = _chunk(next_values, next_blocks, next_start, next_end)
        seen = max(start, first_key // LANES * LANES)
        if seen > start:
            _skip(scores, seen - start)
        _add_values(scores, _chunk(values, blocks, seen, end), values_ahead, values[4], end - seen, result)
    for r in range(num_rows):
        attended, head = result[r], out[r // heads, first_head + r % heads]
        for d in range(head_dim):
            head[d] = attended[d] / state[r, 1]


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
def _longest(cu_seqlens_q):
    """Queries of the largest task."""
    longest = 1
    for s in range(cu_seqlens_q.shape[0] - 1):
        longest = max(longest, cu_seqlens_q[s + 1] - cu_seqlens_q[s])
    return min(longest, _QUERIES)


@numba.njit(cache=True)
def _num_tasks(cu_seqlens_q):
    total = 0
    for s in range(cu_seqlens_q.shape[0] - 1):
        total += (cu_seqlens_q[s + 1] - cu_seqlens_q[s] + _QUERIES - 1) // _QUERIES
    return total


@kernel(
    *(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, I32_1D, I64_2D, float32, int64, F32_1D, F32_3D, int64, int64),
)
def _heads_task(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, tasks, scale, window, space, out, heads, task
):
    """A block of queries with some of the KV heads, of which there are `heads` tasks."""
    s, first = tasks[task // heads]
    end = min(first + _QUERIES, cu_seqlens_q[s + 1])
    position = seq_lens[s] - cu_seqlens_q[s + 1] + first
    count = k_cache.shape[1] // heads
    for kv_head in range(task % heads * count, (task % heads + 1) * count):
        chunk = slice(first, end)
        _task(q[chunk], k_cache, v_cache, block_table, seq_lens, s, position, kv_head, scale, window, space, out[chunk])


@kernel(F32_3D_ROWS, F32_4D, F32_4D, I32_2D, I32_1D, I32_1D, float32, int64, F32_3D, int64, parallel=True)
def _attention(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale, window, out, num_threads):
    tasks = np.empty((_num_tasks(cu_seqlens_q), 2), np.int64)
    _list(cu_seqlens_q, tasks)
    # One thread reads all heads of a block, which lie side by side, where there is work enough for the others.
    heads = 1 if tasks.shape[0] >= _ENOUGH * num_threads else k_cache.shape[1]
    num_tasks, counter = tasks.shape[0] * heads, np.zeros(1, np.int64)
    num_rows = _longest(cu_seqlens_q) * (q.shape[1] // k_cache.shape[1])
    spaces = aligned_empty(num_threads, _size(num_rows, q.shape[2]))
    for thread in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _heads_task(
                *(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, tasks, scale, window, spaces[thread], out),
                heads,
                task,
            )
            task = take(counter)
