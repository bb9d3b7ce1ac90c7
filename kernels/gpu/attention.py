"""Paged attention on a card: `paged_attention` launches one kernel for sequences with few new tokens, one for prompts.

A sequence of up to 16 queries (decode, drafts to be checked) goes to `attention_split.py`, longer ones to
`attention_prompt.py`; `attention_table.py` has their tiles.

What holds of a query's bits: they depend on its own sequence's keys, length and number of queries in the step, and on
the shape of the heads; not on the other sequences, on where pages lie, or on how the work was spread over the card.
Prompts: also not on how they were cut into steps of more than 16 tokens. So attention gives a prefix-cache hit the bits
of a miss where more than 16 tokens remain, and is within rounding of them elsewhere.
"""

from dataclasses import dataclass
from functools import cache as cached

import torch

from kernels.gpu.attention_prompt import prompt_kernel
from kernels.gpu.attention_split import split_kernel
from kernels.gpu.attention_table import CHUNK_LOG2, DECODE, LEAST_ROWS, PROMPT, VERIFY, Table, Tile, most_chunks
from kernels.gpu.sizes import cdiv, next_power_of_2
from kernels.paged_kv import SHORT_QUERIES, PagedKV

_FEW_SEQS = 8  # whose chunks get a block each: the larger batches of a start's compilations shall be of the other kind
_LOG2_E = 1.4426950408889634


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
    """See `ops.paged_attention`. Heads of q may lie in a wider tensor.

    Raises ValueError for a head_dim above 256, and for a scale that is not above 0.
    """
    if cache.head_dim > 256:
        raise ValueError(f"head_dim is {cache.head_dim}; the card's kernels take up to 256. REFERENCE=1 takes any.")
    if scale <= 0:  # the largest score is found before scores are scaled
        raise ValueError(f"scale is {scale}; it must be above 0.")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    call = _Call(q, cache, block_table, seq_lens, cu_seqlens_q, out, scale, window or 0, softcap)
    if max_query_len > SHORT_QUERIES:
        _attend_prompts(call)
    if max_short_query_len is None:
        max_short_query_len = 0 if max_query_len > SHORT_QUERIES and len(seq_lens) == 1 else SHORT_QUERIES
    most, few = min(max_query_len, max_short_query_len), LEAST_ROWS // call.group  # queries that fit the lowest tile
    if few and most:
        _attend_split(call, DECODE, range(1, few + 1), min(most, few), max_seq_len)
    if most > few:
        _attend_split(call, VERIFY, range(few + 1, SHORT_QUERIES + 1), most, max_seq_len)
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

    def tile(self, table: Table) -> Tile:
        sizes = (self.q.element_size(), self.cache.keys.element_size())
        size = 4 if 4 in sizes else sizes[1]
        return table[_block_d(self.cache.head_dim), size][_is_sm_90(self.q.device)]

    def constants(self) -> dict[str, int | bool]:
        return shape_constants(
            self.group,
            self.cache.num_kv_heads,
            self.cache.head_dim,
            self.cache.block_size,
            self.window,
            self.softcap is not None,
            self.cache.is_int8,
        ) | {"S": places(self.num_seqs), "ASM": self.q.is_cuda, "IS_BIG": self.cache.keys.numel() >= 2**31}


def _attend_split(call: _Call, table: Table, counts: range, max_query_len: int, max_seq_len: int) -> None:
    """Those sequences that have so many queries. Which tile a sequence gets depends on nothing but itself."""
    q, cache = call.q, call.cache
    tile = call.tile(table)
    num_rows = max_query_len * call.group
    max_chunks = _max_chunks(max_seq_len, tile, cache.num_kv_heads, call.window > 0)
    heads = cache.num_kv_heads * cdiv(num_rows, tile.rows)
    programs, at_once = call.num_seqs * max_chunks, cdiv(_num_sms(q.device) * tile.blocks, heads)
    a_chunk_each = call.num_seqs <= _FEW_SEQS and programs <= 2 * at_once
    shape = (call.num_seqs, cache.num_kv_heads, max_chunks) if max_chunks > 1 else (0, 0, 0)
    partial = torch.empty(*shape, num_rows, cache.head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(*shape, 2, num_rows, dtype=torch.float32, device=q.device)
    split_kernel[(heads, programs if a_chunk_each else min(programs, at_once))](
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
        **split_constants(cache.head_dim, cache.num_kv_heads, call.group, tile, counts, a_chunk_each),
        **tile.options,
    )


def _attend_prompts(call: _Call) -> None:
    q, cache = call.q, call.cache
    tile = call.tile(PROMPT)
    queries = tile.rows // call.group if call.group <= tile.rows else 1
    num_tiles = q.shape[0] // queries + call.num_seqs
    prompt_kernel[(cache.num_kv_heads, num_tiles)](
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
        **prompt_constants(call.group, tile),
        **tile.options,
    )


def shape_constants(
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


def split_constants(
    head_dim: int, kv_heads: int, group: int, tile: Tile, counts: range, a_chunk_each: bool
) -> dict[str, int]:
    """counts: of queries that a sequence may have."""
    block_d = _block_d(head_dim)
    # As many rows at once for all sequences that take the tile: how chunks are added up depends on it.
    least_rows = max(4, 4 * 32 * tile.warps // block_d)  # which gives all chunks of a row's number to one thread
    return {
        "M": tile.rows,
        "N": tile.keys,
        "CHUNK_LOG2": CHUNK_LOG2,
        "MOST_CHUNKS": most_chunks(kv_heads),
        "LEAST_QUERIES": counts[0],
        "MOST_QUERIES": counts[-1],
        "MERGE_ROWS": max(min(next_power_of_2(counts[0] * group), 8), least_rows),
        "MERGE_CHUNKS": 1024 // block_d,
        "A_CHUNK_EACH": a_chunk_each,
    }


def prompt_constants(group: int, tile: Tile) -> dict[str, int]:
    return {"M": max(tile.rows, next_power_of_2(group)), "N": tile.keys, "LEAST_QUERIES": SHORT_QUERIES + 1}


def places(num_seqs: int) -> int:
    """Of the list of sequences: few sizes, since each is a compilation. 32 are summed up within a warp."""
    return next(size for size in (32, 128, 512, 4096) if num_seqs <= size)


def _max_chunks(max_seq_len: int, tile: Tile, kv_heads: int, has_window: bool) -> int:
    """Of a sequence that is no longer: no fewer than `attention_split` makes of any length."""
    sizes = (max(size << CHUNK_LOG2, tile.keys) for size in (1, 2, 4))
    by_size = (min(cdiv(max_seq_len, size), most) for size, most in zip(sizes, (4, 8, max_seq_len), strict=True))
    return min(max(by_size) + has_window, most_chunks(kv_heads))


def _block_d(head_dim: int) -> int:
    return max(64, next_power_of_2(head_dim))


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
