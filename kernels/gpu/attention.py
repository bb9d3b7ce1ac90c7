"""Paged attention on a card: one kernel for sequences with few new tokens, one for prompts; `paged_attention` picks.

A sequence of up to 16 queries (decode, verification of drafts) has its keys split into chunks that run side by side; of
each sequence and KV head the block that ends last adds the chunks up, in their order. Longer ones (prompts, whole or in
part) go by tiles of queries, each over all its keys. In both, the rows of a tile are queries times the heads that share
a KV head, softmax is in fp32 by powers of 2 (Milakov and Gimelshein 2018; Dao et al. 2022), and int8 scales multiply
scores and weights instead of keys and values.

What holds of a query's bits: they depend on its own sequence's keys, length and number of queries in the step, on the
head shapes and on the largest number of queries in a batch of short sequences, which sizes the tile (1 to 4 queries of
4 heads: one size). They do not depend on the other sequences, on where pages lie, or on how the work was spread over
the card. Prompts: also not on how they were cut into steps of more than 16 tokens. So a prefix-cache hit has the bits
of a miss where more than 16 tokens remain, and is within rounding of them elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as cached

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.paged_kv import SHORT_QUERIES, PagedKV

_CHUNK = 256  # keys of the shortest chunk
_ITEMS = 256  # chunks of one sequence times KV heads, at most: more would not help a card of 132 SMs
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """rows: queries times heads of a KV head; keys: of one step of the loop; blocks: that an SM is meant to hold."""

    rows: int
    keys: int
    warps: int
    stages: int
    blocks: int = 1


@triton.jit
def _unpack(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """int16 of two codes each -> the first and the second ones, exactly.

    Without the slow conversion instruction: a code's bits are put into the fraction of a known power of 2.
    """
    if ASM and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, c; xor.b32 x, $2, 0x80808080; mov.b32 c, 0x64806480;
            and.b32 $0, x, 0x00FF00FF; or.b32 $0, $0, 0x64006400; prmt.b32 $1, x, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, a, b, m; mov.b32 m, 0xBF80BF80; shr.u32 x, $2, 8;
            and.b32 a, $2, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, $2, 0x00800080; or.b32 b, b, 0x43004300;
            fma.rn.bf16x2 $0, b, m, a;
            and.b32 a, x, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, x, 0x00800080; or.b32 b, b, 0x43004300;
            fma.rn.bf16x2 $1, b, m, a; }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return ((pairs << 8) >> 8).to(dtype), (pairs >> 8).to(dtype)


@triton.jit
def _load(at, held, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=held, other=0)
    else:
        return tl.load(at)


@triton.jit
def _load_queries(at, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_INT8: tl.constexpr):
    """[M, BLOCK_D] of the heads that begin at the pointers `at` [M]; for int8 codes the even and the odd numbers."""
    if IS_INT8:
        d = tl.arange(0, BLOCK_D // 2) * 2
        held = is_row[:, None] & (d < D)[None, :]
        return tl.load(at[:, None] + d[None, :], held, other=0), tl.load(at[:, None] + d[None, :] + 1, held, other=0)
    else:
        d = tl.arange(0, BLOCK_D)
        queries = tl.load(at[:, None] + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0)
        return queries, queries


@triton.jit
def _start(M: tl.constexpr, BLOCK_D: tl.constexpr, IS_INT8: tl.constexpr):
    """What `_attend` carries: sums of weights, largest scores, attended values (of even and odd place)."""
    total, largest = tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)
    if IS_INT8:
        even = tl.zeros([M, BLOCK_D // 2], tl.float32)
        return total, largest, even, even
    else:
        return total, largest, tl.zeros([M, BLOCK_D], tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def _attend(
    even_q, odd_q, total, largest, even, odd,
    begin, end, positions, table, head,
    keys, values, key_scales, value_scales,
    scale_log2, cap_log2,
    N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, KV_HEADS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys `begin` (a multiple of N) to `end`, in order. Not MASKED: whole tiles that every query sees.

    Scores and maxima are in powers of 2. An int8 cache is read as pairs of codes: their even and odd numbers are two
    products each, so that no byte has to change its place.
    """
    dtype: tl.constexpr = even_q.dtype
    WIDTH: tl.constexpr = D // 2 if IS_INT8 else D
    WIDTH_BLOCK: tl.constexpr = BLOCK_D // 2 if IS_INT8 else BLOCK_D
    d = tl.arange(0, WIDTH_BLOCK)
    for start in tl.range(begin, end, N):
        n = start + tl.arange(0, N)
        is_key = n < end
        page = _load(table + n // PAGE, is_key, MASKED)
        slot = (page.to(tl.int64) * KV_HEADS + head) * PAGE + n % PAGE
        at = slot[:, None] * WIDTH + d[None, :]
        held = (d < WIDTH)[None, :]
        if MASKED:  # what lies past a sequence's end may be NaN, which a weight of 0 does not silence
            held = is_key[:, None] & held
        k = _load(keys + at, held, MASKED or WIDTH < WIDTH_BLOCK)
        v = _load(values + at, held, MASKED or WIDTH < WIDTH_BLOCK)
        if IS_INT8:
            even_k, odd_k = _unpack(k, dtype, ASM)
            scores = tl.dot(even_q, tl.trans(even_k), input_precision="ieee")
            scores = tl.dot(odd_q, tl.trans(odd_k), scores, input_precision="ieee")
            k_scale = _load(key_scales + slot, is_key, MASKED).to(tl.float32)
            scores = scores * (k_scale * scale_log2)[None, :]
        else:
            scores = tl.dot(even_q, tl.trans(k.to(dtype)), input_precision="ieee") * scale_log2
        if HAS_CAP:  # tanh(x) = 1 - 2 / (1 + e ** 2x)
            scores = cap_log2 * (1 - 2 / (1 + tl.exp2(scores)))
        if MASKED:
            seen = (n[None, :] <= positions[:, None]) & is_key[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        top = new_largest
        if MASKED:  # a row that has seen nothing yet
            top = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - top)
        largest = new_largest
        if IS_INT8 and dtype == tl.float16:
            top -= 6  # weights up to 64: those times a small scale are still normal numbers of fp16
        weights = tl.exp2(scores - top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        even = even * shrink[:, None]
        if IS_INT8:
            v_scale = _load(value_scales + slot, is_key, MASKED).to(tl.float32)
            weights = (weights * v_scale[None, :]).to(dtype)
            even_v, odd_v = _unpack(v, dtype, ASM)
            even = tl.dot(weights, even_v, even, input_precision="ieee")
            odd = tl.dot(weights, odd_v, odd * shrink[:, None], input_precision="ieee")
        else:
            even = tl.dot(weights.to(dtype), v.to(dtype), even, input_precision="ieee")
    return total, largest, even, odd


@triton.jit
def _whole(even, odd, IS_INT8: tl.constexpr):
    return tl.interleave(even, odd) if IS_INT8 else even


@triton.jit
def _chunks(length, count, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr, WINDOW: tl.constexpr):
    """First key that a query sees, keys of a chunk, and number of chunks: of one sequence, or of a vector of them.

    Chunks begin at multiples of their size, which grows by doubling until there are few enough.
    """
    first_seen = length * 0
    if WINDOW > 0:
        first_seen = tl.maximum(length - count - WINDOW + 1, 0)
    size = length * 0 + CHUNK
    for _ in tl.static_range(12):
        size = tl.where(length - first_seen > size * (MOST_CHUNKS - 1), size * 2, size)
    return first_seen, size, tl.maximum((length + size - 1) // size - first_seen // size, 1)


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "max_chunks", "num_rows_kept"])
def _split_kernel(
    q, keys, values, key_scales, value_scales, out, partial, stats, counters,
    block_table, seq_lens, cu_seqlens_q,
    num_seqs, q_stride, table_stride, max_chunks, num_rows_kept, scale_log2, cap_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, MOST_CHUNKS: tl.constexpr,
    MOST_QUERIES: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_CHUNKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program (p, h): items p, p + P, ... of the list of all sequences' chunks, for KV head and tile of rows h.

    partial [seqs, kv_heads, max_chunks, rows kept, D], stats [seqs, kv_heads, max_chunks, 2, rows kept] fp32.
    """
    head = tl.program_id(1) % KV_HEADS
    tile = tl.program_id(1) // KV_HEADS
    num_tiles = tl.num_programs(1) // KV_HEADS
    # The list, made by every program for itself: a sequence's number of chunks, and where its chunks end in the list.
    s = tl.arange(0, S)
    lens = tl.load(seq_lens + s, mask=s < num_seqs, other=0)
    firsts = tl.load(cu_seqlens_q + s, mask=s < num_seqs, other=0)
    counts = tl.load(cu_seqlens_q + s + 1, mask=s < num_seqs, other=0) - firsts
    _, _, num_chunks = _chunks(lens, counts, CHUNK, MOST_CHUNKS, WINDOW)
    is_mine = (counts > 0) & (counts <= MOST_QUERIES) & (counts * GROUP > tile * M)
    num_chunks = tl.where(is_mine, num_chunks, 0)
    ends = tl.cumsum(num_chunks, 0)
    num_items = tl.sum(num_chunks, 0)

    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0)):
        seq = tl.sum((ends <= item).to(tl.int32), 0)
        chunk = item - tl.sum(tl.where(ends <= item, num_chunks, 0), 0)
        length = tl.load(seq_lens + seq)
        first_query = tl.load(cu_seqlens_q + seq)
        count = tl.load(cu_seqlens_q + seq + 1) - first_query
        first_seen, chunk_size, chunks = _chunks(length, count, CHUNK, MOST_CHUNKS, WINDOW)
        first_query = first_query.to(tl.int64)

        num_rows = count * GROUP
        row = tile * M + tl.arange(0, M)
        positions = length - count + row // GROUP
        rows_at = (first_query + row // GROUP) * q_stride + (head * GROUP + row % GROUP) * D
        even_q, odd_q = _load_queries(q + rows_at, row < num_rows, D, BLOCK_D, IS_INT8)
        total, largest, even, odd = _start(M, BLOCK_D, IS_INT8)
        begin = (first_seen // chunk_size + chunk) * chunk_size
        end = tl.minimum(begin + chunk_size, length)
        begin = tl.maximum(begin, first_seen // N * N)
        table = block_table + seq.to(tl.int64) * table_stride
        total, largest, even, odd = _attend(
            even_q, odd_q, total, largest, even, odd, begin, end, positions, table, head,
            keys, values, key_scales, value_scales, scale_log2, cap_log2,
            N, D, BLOCK_D, PAGE, KV_HEADS, WINDOW, HAS_CAP, IS_INT8, True, ASM,
        )  # fmt: skip
        result = _whole(even, odd, IS_INT8)

        d = tl.arange(0, BLOCK_D)
        out_seq = out + first_query * (KV_HEADS * GROUP * D) + head * GROUP * D
        if chunks == 1:
            to = (row // GROUP) * (KV_HEADS * GROUP * D) + row % GROUP * D
            attended = result / tl.where(total > 0, total, 1.0)[:, None]
            kept = (row < num_rows)[:, None] & (d < D)[None, :]
            tl.store(out_seq + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=kept)
        else:
            place = (seq * KV_HEADS + head).to(tl.int64) * max_chunks
            partial_at = (place + chunk) * num_rows_kept + row
            kept = (row < num_rows)[:, None] & (d < D)[None, :]
            tl.store(partial + partial_at[:, None] * D + d[None, :], result, mask=kept)
            stats_at = stats + (place + chunk) * 2 * num_rows_kept + row
            tl.store(stats_at, largest, mask=row < num_rows)
            tl.store(stats_at + num_rows_kept, total, mask=row < num_rows)
            tl.debug_barrier()  # all threads' stores come before the one thread's count
            counter = counters + (seq * KV_HEADS + head) * num_tiles + tile
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                tl.store(counter, 0)
                last_row = tl.minimum(tile * M + M, num_rows)
                for first in tl.range(tile * M, last_row, MERGE_ROWS):
                    _merge_rows(
                        partial + place * num_rows_kept * D, stats + place * 2 * num_rows_kept, out_seq,
                        first, last_row, chunks, num_rows_kept,
                        GROUP, KV_HEADS, D, BLOCK_D, MOST_CHUNKS, MERGE_ROWS, MERGE_CHUNKS,
                    )  # fmt: skip


@triton.jit
def _merge_rows(
    partial, stats, out, first_row, end_row, chunks, num_rows_kept,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MOST_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Add up the chunks of some rows of one sequence and KV head. What other blocks wrote is read past the L1 cache."""
    row = first_row + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, MOST_CHUNKS)
    there = (row < end_row)[:, None] & (c < chunks)[None, :]
    stats_at = stats + c[None, :] * 2 * num_rows_kept + row[:, None]
    maxima = tl.load(stats_at, mask=there, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(maxima, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.load(stats_at + num_rows_kept, mask=there, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * tl.exp2(maxima - top[:, None]), 1)
    result = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for first in tl.range(0, chunks, CHUNKS):
        part = first + tl.arange(0, CHUNKS)
        is_part = (row < end_row)[:, None] & (part < chunks)[None, :]
        at = part[None, :] * num_rows_kept + row[:, None]
        largest = tl.load(
            stats + part[None, :] * 2 * num_rows_kept + row[:, None],
            mask=is_part, other=float("-inf"), cache_modifier=".cg",
        )  # fmt: skip
        numbers = tl.load(
            partial + at[:, :, None] * D + d[None, None, :],
            mask=is_part[:, :, None] & (d < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        result += tl.sum(numbers * tl.exp2(largest - top[:, None])[:, :, None], 1)
    to = (row // GROUP) * (KV_HEADS * GROUP * D) + row % GROUP * D
    kept = (row < end_row)[:, None] & (d < D)[None, :]
    attended = result / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _prompt_kernel(
    q, keys, values, key_scales, value_scales, out,
    block_table, seq_lens, cu_seqlens_q,
    num_seqs, q_stride, table_stride, scale_log2, cap_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, LEAST_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, ASM: tl.constexpr,
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

    r = tl.arange(0, M)
    query = tile * QUERIES + r // GROUP
    is_row = (r < QUERIES * GROUP) & (query < count)
    positions = length - count + query
    place = (first_query + query).to(tl.int64)
    head_at = (head * GROUP + r % GROUP) * D
    even_q, odd_q = _load_queries(q + place * q_stride + head_at, is_row, D, BLOCK_D, IS_INT8)
    total, largest, even, odd = _start(M, BLOCK_D, IS_INT8)
    first_position = length - count + tile * QUERIES
    end = tl.minimum(first_position + QUERIES, length)
    table = block_table + seq.to(tl.int64) * table_stride
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // N * N
    else:
        begin = tl.maximum(first_position + 1, 0) // N * N
        total, largest, even, odd = _attend(
            even_q, odd_q, total, largest, even, odd, 0, begin, positions, table, head,
            keys, values, key_scales, value_scales, scale_log2, cap_log2,
            N, D, BLOCK_D, PAGE, KV_HEADS, WINDOW, HAS_CAP, IS_INT8, False, ASM,
        )  # fmt: skip
    total, largest, even, odd = _attend(
        even_q, odd_q, total, largest, even, odd, begin, end, positions, table, head,
        keys, values, key_scales, value_scales, scale_log2, cap_log2,
        N, D, BLOCK_D, PAGE, KV_HEADS, WINDOW, HAS_CAP, IS_INT8, True, ASM,
    )  # fmt: skip
    result = _whole(even, odd, IS_INT8)
    d = tl.arange(0, BLOCK_D)
    is_number = is_row[:, None] & (d < D)[None, :]
    attended = result / tl.where(total > 0, total, 1.0)[:, None]
    to = place * (KV_HEADS * GROUP * D) + head_at
    tl.store(out + to[:, None] + d[None, :], attended.to(out.dtype.element_ty), mask=is_number)


# -- choosing and launching ----------------------------------------------------------------------------------------

# Tiles by (block_d, bytes of a number in the cache): first for cards with 99 KB of shared memory a block, then for
# sm_90. Rows are a bound: a batch whose sequences have fewer takes the next power of 2, 16 at least.
_SPLIT_TILES = {
    (64, 2): (Tile(64, 64, 4, 3, blocks=2), Tile(64, 128, 4, 3, blocks=2)),
    (128, 2): (Tile(64, 32, 4, 3, blocks=2), Tile(64, 64, 4, 3, blocks=2)),
    (256, 2): (Tile(32, 32, 4, 2, blocks=2), Tile(32, 32, 4, 3, blocks=2)),
    (64, 1): (Tile(64, 32, 4, 3, blocks=2), Tile(64, 64, 4, 3, blocks=2)),
    (128, 1): (Tile(64, 32, 4, 3, blocks=2), Tile(64, 32, 4, 3, blocks=3)),
    (256, 1): (Tile(32, 32, 4, 3, blocks=2), Tile(32, 32, 4, 3, blocks=2)),
    (64, 4): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
    (128, 4): (Tile(16, 32, 8, 2), Tile(16, 16, 4, 2)),
    (256, 4): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
}
_PROMPT_TILES = {
    (64, 2): (Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)),
    (128, 2): (Tile(128, 64, 8, 2), Tile(256, 32, 8, 3)),
    (256, 2): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2)),
    (64, 1): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3)),
    (128, 1): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    (256, 1): (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
    (64, 4): (Tile(16, 32, 4, 2), Tile(16, 32, 4, 2)),
    (128, 4): (Tile(16, 32, 4, 2), Tile(16, 16, 4, 2)),
    (256, 4): (Tile(16, 16, 4, 2), Tile(16, 16, 4, 2)),
}


def paged_attention(
    q: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    max_short_query_len: int | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `ops.paged_attention`. Heads of q may lie in a wider tensor. Raises ValueError for a head_dim above 256."""
    if cache.head_dim > 256:
        raise ValueError(f"head_dim is {cache.head_dim}; the card's kernels take up to 256. REFERENCE=1 takes any.")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    call = _Call(q, cache, block_table, seq_lens, cu_seqlens_q, out, scale, window or 0, softcap)
    if max_query_len > SHORT_QUERIES:
        _attend_prompts(call)
    if max_short_query_len is None:
        max_short_query_len = 0 if max_query_len > SHORT_QUERIES and len(seq_lens) == 1 else SHORT_QUERIES
    if max_short_query_len:
        _attend_split(call, min(max_query_len, max_short_query_len), max_seq_len)
    return out


@dataclass(frozen=True)
class _Call:
    """window: 0 for none."""

    q: torch.Tensor
    cache: PagedKV
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    scale: float
    window: int
    softcap: float | None

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.cache.num_kv_heads

    @property
    def factors(self) -> tuple[float, float]:
        """Of the scores, and of their tanh: so that both come out as powers of 2."""
        if self.softcap is None:
            return self.scale * _LOG2_E, 0.0
        return self.scale / self.softcap * 2 * _LOG2_E, self.softcap * _LOG2_E

    def tile(self, tiles: dict[tuple[int, int], tuple[Tile, Tile]]) -> Tile:
        size = 4 if self.q.dtype is torch.float32 else min(self.cache.keys.element_size(), 2)
        return tiles[_block_d(self.cache.head_dim), size][_is_sm_90(self.q.device)]

    def constants(self) -> dict[str, int | bool]:
        return _constants(
            self.group,
            self.cache.num_kv_heads,
            self.cache.head_dim,
            self.cache.block_size,
            self.window,
            self.softcap is not None,
            self.cache.is_int8,
        ) | {"S": _places(self.num_seqs), "ASM": self.q.is_cuda}


def _attend_split(call: _Call, max_query_len: int, max_seq_len: int) -> None:
    q, cache = call.q, call.cache
    tile = call.tile(_SPLIT_TILES)
    num_rows = max_query_len * call.group
    rows = _rows(num_rows, tile)
    num_tiles = triton.cdiv(num_rows, rows)
    most_chunks = _most_chunks(cache.num_kv_heads)
    max_chunks = min(most_chunks, triton.cdiv(max_seq_len, _CHUNK))
    heads = cache.num_kv_heads * num_tiles
    programs = min(call.num_seqs * max_chunks, triton.cdiv(_num_sms(q.device) * tile.blocks, heads))
    shape = (call.num_seqs, cache.num_kv_heads, max_chunks) if max_chunks > 1 else (0, 0, 0)
    partial = torch.empty(*shape, num_rows, cache.head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(*shape, 2, num_rows, dtype=torch.float32, device=q.device)
    _split_kernel[(programs, heads)](
        q,
        *_stored(cache),
        cache.key_scales,
        cache.value_scales,
        call.out,
        partial,
        stats,
        _counters(call),
        call.block_table,
        call.seq_lens,
        call.cu_seqlens_q,
        call.num_seqs,
        q.stride(0),
        call.block_table.stride(0),
        max_chunks,
        num_rows,
        *call.factors,
        **call.constants(),
        **_split_constants(cache.head_dim, most_chunks, rows, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _attend_prompts(call: _Call) -> None:
    q, cache = call.q, call.cache
    tile = call.tile(_PROMPT_TILES)
    queries = tile.rows // call.group if call.group <= tile.rows else 1
    num_tiles = q.shape[0] // queries + call.num_seqs
    _prompt_kernel[(cache.num_kv_heads, num_tiles)](
        q,
        *_stored(cache),
        cache.key_scales,
        cache.value_scales,
        call.out,
        call.block_table,
        call.seq_lens,
        call.cu_seqlens_q,
        call.num_seqs,
        q.stride(0),
        call.block_table.stride(0),
        *call.factors,
        **call.constants(),
        **_prompt_constants(call.group, tile),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _constants(
    group: int, kv_heads: int, head_dim: int, block_size: int, window: int, has_cap: bool, is_int8: bool
) -> dict[str, int | bool]:
    return {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "D": head_dim,
        "BLOCK_D": _block_d(head_dim),
        "PAGE": block_size,
        "WINDOW": window,
        "HAS_CAP": has_cap,
        "IS_INT8": is_int8,
    }


def _split_constants(head_dim: int, most_chunks: int, rows: int, tile: Tile) -> dict[str, int]:
    return {
        "M": rows,
        "N": tile.keys,
        "CHUNK": _CHUNK,
        "MOST_CHUNKS": most_chunks,
        "MOST_QUERIES": SHORT_QUERIES,
        "MERGE_ROWS": 4,
        "MERGE_CHUNKS": 1024 // _block_d(head_dim),
    }


def _prompt_constants(group: int, tile: Tile) -> dict[str, int]:
    return {"M": max(tile.rows, triton.next_power_of_2(group)), "N": tile.keys, "LEAST_QUERIES": SHORT_QUERIES + 1}


def _rows(num_rows: int, tile: Tile) -> int:
    return min(max(16, triton.next_power_of_2(num_rows)), tile.rows)


def _places(num_seqs: int) -> int:
    """Of the list of sequences: few sizes, since each is a compilation. 32 are summed up within a warp."""
    return next(size for size in (32, 128, 512, 4096) if num_seqs <= size)


def _most_chunks(kv_heads: int) -> int:
    """Of one sequence: a power of 2."""
    return max(8, 1 << (_ITEMS // kv_heads).bit_length() - 1) if kv_heads <= _ITEMS else 8


def _block_d(head_dim: int) -> int:
    return max(64, triton.next_power_of_2(head_dim))


def _stored(cache: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes as the pairs that the kernels read."""
    if cache.is_int8:
        return cache.keys.view(torch.int16), cache.values.view(torch.int16)
    return cache.keys, cache.values


def _counters(call: _Call) -> torch.Tensor:
    """Raises ValueError if the cache's are too few."""
    counters, needed = call.cache.counters, call.num_seqs * call.q.shape[1]
    if counters is None:
        raise ValueError("The cache has no counters; give empty_paged_kv zeros of int32, a number a sequence and head.")
    if len(counters) < needed:
        raise ValueError(
            f"{call.num_seqs} sequences of {call.q.shape[1]} heads need {needed} counters; {len(counters)}."
        )
    return counters


@cached
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cached
def _is_sm_90(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


# -- for aot.py ----------------------------------------------------------------------------------------------------

_TYPES = {2: ("*fp16", "*fp16"), 1: ("*bf16", "*i16"), 4: ("*fp32", "*fp32")}  # of q and of the cache, by its bytes
_INTS = ("num_seqs", "q_stride", "table_stride", "max_chunks", "num_rows_kept")


def aot_cases() -> Iterator[AotCase]:
    """Every row of the tables, and a window, a cap and an odd head_dim with the first of each."""
    for (block_d, size), tiles in _SPLIT_TILES.items():
        for tile, archs in zip(tiles, ((80, 86, 89), (90,)), strict=True):
            for rows in {16, tile.rows}:
                yield _split_case(block_d, size, rows, tile, archs)
    for (block_d, size), tiles in _PROMPT_TILES.items():
        for tile, archs in zip(tiles, ((80, 86, 89), (90,)), strict=True):
            yield _prompt_case(block_d, size, tile, archs)
    for place, archs in enumerate(((80, 86, 89), (90,))):
        yield _split_case(96, 2, 16, _SPLIT_TILES[128, 2][place], archs, window=4096)
        yield _prompt_case(96, 2, _PROMPT_TILES[128, 2][place], archs, window=4096)
        yield _split_case(256, 2, 16, _SPLIT_TILES[256, 2][place], archs, window=4096, has_cap=True)
        yield _prompt_case(256, 2, _PROMPT_TILES[256, 2][place], archs, window=4096, has_cap=True)


def _split_case(
    head_dim: int, size: int, rows: int, tile: Tile, archs: tuple[int, ...], window: int = 0, has_cap: bool = False
) -> AotCase:
    constants = _split_constants(head_dim, _most_chunks(8), rows, tile)
    return _case(_split_kernel, f"rows {rows}", head_dim, size, tile, archs, window, has_cap, constants)


def _prompt_case(
    head_dim: int, size: int, tile: Tile, archs: tuple[int, ...], window: int = 0, has_cap: bool = False
) -> AotCase:
    return _case(_prompt_kernel, "", head_dim, size, tile, archs, window, has_cap, _prompt_constants(4, tile))


def _case(
    kernel: triton.JITFunction,
    detail: str,
    head_dim: int,
    size: int,
    tile: Tile,
    archs: tuple[int, ...],
    window: int,
    has_cap: bool,
    constants: dict[str, int],
) -> AotCase:
    q_type, kv_type = _TYPES[size]
    no_scales = {} if size == 1 else {"key_scales": None, "value_scales": None}
    shapes = _constants(4, 8, head_dim, 16, window, has_cap, is_int8=size == 1)
    types = {
        "q": q_type,
        "out": q_type,
        "keys": kv_type,
        "values": kv_type,
        "key_scales": "*fp16",
        "value_scales": "*fp16",
    }
    types |= {name: "*fp32" for name in ("partial", "stats")} | {name: "fp32" for name in ("scale_log2", "cap_log2")}
    types |= {name: "*i32" for name in ("counters", "block_table", "seq_lens", "cu_seqlens_q")}
    types |= {name: "i32" for name in _INTS}
    kind = " ".join(filter(None, ("window" * bool(window), "cap" * has_cap, detail)))
    return AotCase(
        name=f"attention {kernel.__name__.strip('_')} {head_dim} {'i8' if size == 1 else kv_type[1:]} {kind}".strip(),
        kernel=kernel,
        types=types,
        constants=shapes | constants | no_scales | {"S": _places(1), "ASM": True},
        num_warps=tile.warps,
        num_stages=tile.stages,
        multiples_of_16=frozenset({"q_stride"}),
        archs=archs,
    )
