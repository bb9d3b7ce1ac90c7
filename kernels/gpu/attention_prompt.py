"""Paged attention for prompts, whole or in part: tiles of queries, each over all the keys that they see.

The rows of a tile are queries times the heads that share a KV head. A query's bits depend on its own sequence's keys
and on the heads' shape, not on how its prompt was cut into steps.
"""

import triton
import triton.language as tl

from kernels.gpu.attention_tile import attend, load_keys, load_queries, slots, start, whole
from kernels.gpu.launch import Launchable


@Launchable
@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def prompt_kernel(
    q, keys, values, key_scales, value_scales, out,
    block_table, seq_lens, cu_seqlens_q,
    num_seqs, q_stride, table_stride, scale_log2, cap_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, LEAST_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, IS_BIG: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (h, t): KV head h and tile t of all sequences' tiles of queries, the last (they see most) first."""
    QUERIES: tl.constexpr = M // GROUP
    head = tl.program_id(0)
    s = tl.arange(0, S)
    firsts = tl.load(cu_seqlens_q + s, mask=s < num_seqs, other=0)
    counts = tl.load(cu_seqlens_q + s + 1, mask=s < num_seqs, other=0) - firsts
    num_tiles = tl.where(counts >= LEAST_QUERIES, (counts + QUERIES - 1) // QUERIES, 0)
    ends = tl.cumsum(num_tiles, 0)
    item = tl.sum(num_tiles, 0) - 1 - tl.program_id(1)
    if item < 0:
        return
    seq = tl.sum((ends <= item).to(tl.int32), 0)
    tile = item - tl.sum(tl.where(ends <= item, num_tiles, 0), 0)
    first_query = tl.load(cu_seqlens_q + seq)
    count = tl.load(cu_seqlens_q + seq + 1) - first_query
    length = tl.load(seq_lens + seq)

    # Places of rows are told from the tile's own: what differs between a thread's rows is then known when compiling.
    r = tl.arange(0, M)
    is_row = r < tl.minimum(count - tile * QUERIES, QUERIES) * GROUP
    positions = length - count + tile * QUERIES + r // GROUP
    place = (first_query + tile * QUERIES).to(tl.int64)
    q_tile = q + place * q_stride + head * GROUP * D
    rows_at = r // GROUP * q_stride + r % GROUP * D
    even_q, odd_q = load_queries(q_tile + rows_at, is_row, D, BLOCK_D, IS_INT8)
    total, largest, even, odd = start(M, BLOCK_D, IS_INT8)
    first_position = length - count + tile * QUERIES
    end = tl.minimum(first_position + QUERIES, length)
    table = block_table + seq.to(tl.int64) * table_stride
    first_seen = 0
    if WINDOW > 0:
        first_seen = tl.maximum(first_position - WINDOW + 1, 0)
        begin = first_seen // N * N
    else:
        begin = tl.maximum(first_position + 1, 0) // N * N
        total, largest, even, odd = _attend_keys(
            even_q, odd_q, total, largest, even, odd, 0, begin, first_seen, end - 1, positions, table, head,
            keys, values, key_scales, value_scales, scale_log2, cap_log2,
            N, D, BLOCK_D, PAGE, KV_HEADS, WINDOW, HAS_CAP, IS_INT8, IS_BIG, False, ASM,
        )  # fmt: skip
    total, largest, even, odd = _attend_keys(
        even_q, odd_q, total, largest, even, odd, begin, end, first_seen, end - 1, positions, table, head,
        keys, values, key_scales, value_scales, scale_log2, cap_log2,
        N, D, BLOCK_D, PAGE, KV_HEADS, WINDOW, HAS_CAP, IS_INT8, IS_BIG, True, ASM,
    )  # fmt: skip
    # Read once more, so that not each row's bound is kept in registers that the loop needs.
    count = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_query
    is_row = r < tl.minimum(count - tile * QUERIES, QUERIES) * GROUP
    d = tl.arange(0, BLOCK_D)
    is_number = is_row[:, None] & (d < D)[None, :]
    attended = whole(even, odd, IS_INT8) / tl.where(total > 0, total, 1.0)[:, None]
    out_tile = out + place * (KV_HEADS * GROUP * D) + head * GROUP * D
    to = r // GROUP * (KV_HEADS * GROUP * D) + r % GROUP * D
    tl.store(out_tile + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=is_number)


@triton.jit
def _attend_keys(
    even_q, odd_q, total, largest, even, odd,
    begin, end, first_seen, last, positions, table, head,
    keys, values, key_scales, value_scales, scale_log2, cap_log2,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, IS_BIG: tl.constexpr,
    MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys `begin` (a multiple of N) to `end`, in order; what is asked for ahead ends with `last`.

    Not MASKED: whole tiles that every query sees.
    """
    next_slot = slots(table, begin + tl.arange(0, N), first_seen, last, head, PAGE, KV_HEADS, IS_BIG, WINDOW)
    for first in tl.range(begin, end, N):
        n = first + tl.arange(0, N)
        slot = next_slot
        k, v = load_keys(keys, values, slot, D, BLOCK_D, IS_INT8)
        next_slot = slots(table, n + N, first_seen, last, head, PAGE, KV_HEADS, IS_BIG, WINDOW)
        if IS_INT8:
            k_scale, v_scale = tl.load(key_scales + slot), tl.load(value_scales + slot)
        else:
            k_scale, v_scale = None, None
        total, largest, even, odd = attend(
            even_q, odd_q, total, largest, even, odd, k, v, k_scale, v_scale, n, last, positions, scale_log2, cap_log2,
            WINDOW, HAS_CAP, IS_INT8, MASKED, ASM,
        )  # fmt: skip
    return total, largest, even, odd
