"""Paged attention for sequences with few new tokens (decode, drafts to be checked): their keys are split into chunks.

Chunks run side by side; of each sequence and KV head the block that ends last adds the chunks up, in their order. How
keys are split depends on the sequence alone, so its bits do not depend on its company or on how chunks are spread.
"""

import triton
import triton.language as tl

from kernels.gpu.attention_tile import attend, load_keys, load_queries, slots, start, whole
from kernels.gpu.launch import Launchable


@triton.jit
def _log2_above(x):
    """The smallest k with 2 ** k >= x, for x of 1 to 2 ** 24: an exponent of fp32."""
    return ((x.to(tl.float32).to(tl.int32, bitcast=True) - 1) >> 23) - 126


@triton.jit
def _chunks(length, count, N: tl.constexpr, CHUNK_LOG2: tl.constexpr, MOST_CHUNKS: tl.constexpr, WINDOW: tl.constexpr):
    """First key that a query sees, log2 of a chunk's keys, number of chunks: of one sequence, or of a vector of them.

    Chunks begin at multiples of their size: the least one up to 4 of them, twice that up to 8, four times that up to
    MOST_CHUNKS, then the power of 2 that keeps to those; N keys at least. A short sequence waits for its few blocks;
    adding up the many of long ones costs more than it spares.
    """
    first_seen = length * 0
    FEWEST: tl.constexpr = MOST_CHUNKS - (WINDOW > 0)  # what is seen may begin within a chunk
    if WINDOW > 0:
        first_seen = tl.maximum(length - count - WINDOW + 1, 0)
    num_seen = tl.maximum(length - first_seen, 1)
    least_log2 = CHUNK_LOG2 + (num_seen > (4 << CHUNK_LOG2)).to(tl.int32) + (num_seen > (16 << CHUNK_LOG2)).to(tl.int32)
    size_log2 = tl.maximum(_log2_above(tl.maximum((num_seen + FEWEST - 1) // FEWEST, N)), least_log2)
    return first_seen, size_log2, (tl.maximum(length - 1, 0) >> size_log2) - (first_seen >> size_log2) + 1


@Launchable
@triton.jit(do_not_specialize=["num_seqs", "table_stride", "max_chunks", "num_rows_kept"])
def split_kernel(
    q, keys, values, key_scales, value_scales, out, partial, stats, counters,
    block_table, seq_lens, cu_seqlens_q,
    num_seqs, q_stride, table_stride, max_chunks, num_rows_kept, scale_log2, cap_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CHUNK_LOG2: tl.constexpr, MOST_CHUNKS: tl.constexpr,
    LEAST_QUERIES: tl.constexpr, MOST_QUERIES: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_INT8: tl.constexpr, IS_BIG: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_CHUNKS: tl.constexpr,
    A_CHUNK_EACH: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (h, p): for KV head and tile of rows h part p of the list of all sequences' chunks; A_CHUNK_EACH: chunk
    p % max_chunks of sequence p // max_chunks, if there is one.

    Heads first: what few chunks there are goes to as many multiprocessors, and a page's heads are read side by side.

    partial [seqs, kv_heads, max_chunks, rows kept, D], stats [seqs, kv_heads, max_chunks, 2, rows kept] fp32.
    """
    tile = tl.program_id(0) // KV_HEADS
    if A_CHUNK_EACH:
        first_seq = tl.program_id(1) // max_chunks
        end_seq = first_seq + 1
        first_item = tl.program_id(1) - first_seq * max_chunks
        end_item = first_item + 1
    else:
        # The list, made by every program for itself: a sequence's number of chunks, and where they end in the list.
        s = tl.arange(0, S)
        lens = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
        firsts = tl.load(cu_seqlens_q + s, mask=s < num_seqs, other=0)
        counts = tl.load(cu_seqlens_q + s + 1, mask=s < num_seqs, other=0) - firsts
        _firsts, _sizes, num_chunks = _chunks(lens, counts, N, CHUNK_LOG2, MOST_CHUNKS, WINDOW)
        is_mine = (counts >= LEAST_QUERIES) & (counts <= MOST_QUERIES) & (counts * GROUP > tile * M)
        num_chunks = tl.where(is_mine, num_chunks, 0)
        ends = tl.cumsum(num_chunks, 0)
        num_items = tl.sum(num_chunks, 0)
        each, rest = num_items // tl.num_programs(1), num_items % tl.num_programs(1)
        first_item = each * tl.program_id(1) + tl.minimum(tl.program_id(1), rest)
        end_item = first_item + each + (tl.program_id(1) < rest).to(tl.int32)
        first_seq = tl.sum((ends <= first_item).to(tl.int32), 0)
        end_seq = tl.minimum(tl.sum((ends < end_item).to(tl.int32), 0) + 1, num_seqs)

    for seq in tl.range(first_seq, end_seq):
        length = tl.load(seq_lens + seq)
        first_query = tl.load(cu_seqlens_q + seq)
        count = tl.load(cu_seqlens_q + seq + 1) - first_query
        first_seen, size_log2, chunks = _chunks(length, count, N, CHUNK_LOG2, MOST_CHUNKS, WINDOW)
        if A_CHUNK_EACH:
            is_mine = (count >= LEAST_QUERIES) & (count <= MOST_QUERIES) & (count * GROUP > tile * M)
            first_chunk, end_chunk = first_item, tl.minimum(end_item, tl.where(is_mine, chunks, 0))
        else:
            past = tl.sum(tl.where(s < seq, num_chunks, 0), 0)
            chunks = tl.sum(tl.where(s == seq, num_chunks, 0), 0)
            first_chunk = tl.maximum(first_item - past, 0)
            end_chunk = tl.minimum(end_item - past, chunks)
        if first_chunk < end_chunk:
            _attend_chunks(
                q, keys, values, key_scales, value_scales, out, partial, stats, counters, block_table,
                seq, length, first_query.to(tl.int64), count, first_seen, size_log2, first_chunk, end_chunk, chunks,
                q_stride, table_stride, max_chunks, num_rows_kept, scale_log2, cap_log2,
                GROUP, KV_HEADS, D, BLOCK_D, PAGE, M, N, WINDOW, HAS_CAP, IS_INT8, IS_BIG,
                MERGE_ROWS, MERGE_CHUNKS, ASM,
            )  # fmt: skip


@triton.jit
def _attend_chunks(
    q, keys, values, key_scales, value_scales, out, partial, stats, counters, block_table,
    seq, length, first_query, count, first_seen, size_log2, first_chunk, end_chunk, chunks,
    q_stride, table_stride, max_chunks, num_rows_kept, scale_log2, cap_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    IS_INT8: tl.constexpr, IS_BIG: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_CHUNKS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Chunks `first_chunk` to `end_chunk` of the `chunks` of one sequence; the last to end adds all of them up."""
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    num_rows = count * GROUP
    row = tile * M + tl.arange(0, M)
    is_row = row < num_rows
    d = tl.arange(0, BLOCK_D)
    is_number = is_row[:, None] & (d < D)[None, :]
    positions = length - count + row // GROUP
    rows_at = (first_query + row // GROUP) * q_stride + (head * GROUP + row % GROUP) * D
    even_q, odd_q = load_queries(q + rows_at, is_row, D, BLOCK_D, IS_INT8)
    total, largest, even, odd = start(M, BLOCK_D, IS_INT8)
    chunk_zero = first_seen >> size_log2
    begin = tl.maximum((chunk_zero + first_chunk) << size_log2, first_seen // N * N)
    end = tl.minimum((chunk_zero + end_chunk) << size_log2, length)
    last = tl.maximum(end - 1, 0)
    table = block_table + table_stride.to(tl.int64) * seq
    place = max_chunks.to(tl.int64) * (seq * KV_HEADS + head)
    # A tile's slots, and its scales, are asked for a tile before: such small loads would be waited for here.
    next_slot = slots(table, begin + tl.arange(0, N), first_seen, last, head, PAGE, KV_HEADS, IS_BIG, WINDOW)
    if IS_INT8:
        next_k_scale, next_v_scale = tl.load(key_scales + next_slot), tl.load(value_scales + next_slot)
    chunk = first_chunk
    for first in tl.range(begin, end, N):
        n = first + tl.arange(0, N)
        k, v = load_keys(keys, values, next_slot, D, BLOCK_D, IS_INT8)
        next_slot = slots(table, n + N, first_seen, last, head, PAGE, KV_HEADS, IS_BIG, WINDOW)
        if IS_INT8:
            k_scale, v_scale = next_k_scale, next_v_scale
            next_k_scale, next_v_scale = tl.load(key_scales + next_slot), tl.load(value_scales + next_slot)
        else:
            k_scale, v_scale = None, None
        total, largest, even, odd = attend(
            even_q, odd_q, total, largest, even, odd, k, v, k_scale, v_scale, n, last, positions, scale_log2, cap_log2,
            WINDOW, HAS_CAP, IS_INT8, True, ASM,
        )  # fmt: skip
        is_last = ((first + N) & ((1 << size_log2) - 1) == 0) | (first + N >= end)
        if is_last & (chunks > 1):  # the next chunk begins anew; the loads of its keys are under way
            at = (place + chunk) * num_rows_kept
            chunk += 1
            tl.store(partial + (at + row)[:, None] * D + d[None, :], whole(even, odd, IS_INT8), mask=is_number)
            tl.store(stats + 2 * at + row, largest, mask=is_row)
            tl.store(stats + 2 * at + num_rows_kept + row, total, mask=is_row)
            total, largest, even, odd = start(M, BLOCK_D, IS_INT8)

    out_seq = out + first_query * (KV_HEADS * GROUP * D) + head * GROUP * D
    if chunks == 1:
        to = (row // GROUP) * (KV_HEADS * GROUP * D) + row % GROUP * D
        attended = whole(even, odd, IS_INT8) / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_seq + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=is_number)
    else:
        tl.debug_barrier()  # all threads' stores come before the one thread's count
        num_tiles = tl.num_programs(0) // KV_HEADS
        counter = counters + (seq * KV_HEADS + head) * num_tiles + tile
        num_done = end_chunk - first_chunk
        if tl.atomic_add(counter, num_done, sem="acq_rel", scope="gpu") == chunks - num_done:
            tl.store(counter, 0)
            last_row = tl.minimum(tile * M + M, num_rows)
            for first_row in tl.range(tile * M, last_row, MERGE_ROWS):
                _merge_rows(
                    partial + place * num_rows_kept * D, stats + place * 2 * num_rows_kept, out_seq,
                    first_row, last_row, chunks, num_rows_kept,
                    GROUP, KV_HEADS, D, BLOCK_D, MERGE_ROWS, MERGE_CHUNKS,
                )  # fmt: skip


@triton.jit
def _merge_rows(
    partial, stats, out, first_row, end_row, chunks, num_rows_kept,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add up the chunks of some rows of one sequence and KV head. What other blocks wrote is read past the L1 cache."""
    row = first_row + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    total, top = tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    result = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        there = (row < end_row)[:, None] & (chunk < chunks)[None, :]
        at = chunk[None, :] * num_rows_kept + row[:, None]
        stats_at = stats + at + (chunk * num_rows_kept)[None, :]
        largest = tl.load(stats_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats_at + num_rows_kept, mask=there, other=0.0, cache_modifier=".cg")
        is_number = there[:, :, None] & (d < D)[None, None, :]
        numbers_at = partial + at[:, :, None] * D + d[None, None, :]
        numbers = tl.load(numbers_at, mask=is_number, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(largest, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor, shrink = tl.exp2(largest - base[:, None]), tl.exp2(top - base)
        top = new_top
        total = total * shrink + tl.sum(sums * factor, 1)
        result = result * shrink[:, None] + tl.sum(numbers * factor[:, :, None], 1)
    to = (row // GROUP) * (KV_HEADS * GROUP * D) + row % GROUP * D
    kept = (row < end_row)[:, None] & (d < D)[None, :]
    attended = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=kept)
