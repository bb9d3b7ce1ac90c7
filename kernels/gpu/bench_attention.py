"""Paged attention at Llama-3.1-8B's heads (32 over 8, of 128) beside the bandwidth of memory and torch's own flash
attention, which gets the same keys and values contiguous and in 16 bits: `python -m kernels.bench --op attention`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import ops, reference
from kernels.gpu.timing import graph_us, ring_size
from kernels.paged_kv import PagedKV, empty_paged_kv

_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE = 32, 8, 128, 16
_SCALE = _HEAD_DIM**-0.5
# Sequences, tokens of each in the cache, of those new ones: few tokens, other engines' benches, drafts, prompts.
_FEW = ((1, 256, 1), (8, 256, 1), (32, 384, 1), (64, 1024, 1))
SHAPES = (*_FEW, (1, 8192, 1), (8, 4096, 1), (64, 4096, 1), (1, 8192, 4), (1, 8192, 16))
PROMPTS = ((1, 2048, 2048), (1, 8192, 8192), (1, 8192, 2048))
_TOLERANCE = 2e-3  # relative Frobenius error with fp16 weights of the softmax


@dataclass(frozen=True)
class _Work:
    q: torch.Tensor
    caches: list[PagedKV]
    table: torch.Tensor
    seq_lens: torch.Tensor
    bounds: torch.Tensor
    num_bytes: int

    def attend(self, i: int) -> torch.Tensor:
        count = len(self.q) // len(self.seq_lens)
        return ops.paged_attention(
            self.q,
            self.caches[i],
            self.table,
            self.seq_lens,
            self.bounds,
            max_query_len=count,
            max_seq_len=self.table.shape[1] * _PAGE,
            scale=_SCALE,
        )


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    """One for each shape and type of the cache. Raises SystemExit before the speed of a wrong result."""
    for dtype in (torch.float16, torch.int8):
        for shape in (*SHAPES, *PROMPTS):
            yield _row(*shape, dtype, gb_per_s)


def header() -> str:
    names = ("ours us", "reference", "flash", "flash/ours", "TFLOP/s", "of read")
    return f"{'sequences x tokens':<20}{'new':>6}{'KV':>6}" + "".join(f"{name:>12}" for name in names)


def line(row: dict[str, Any]) -> str:
    shape = f"{row['sequences']} x {row['tokens']}"
    flash, ratio = (f"{row[k]:.2f}" if k in row else "-" for k in ("flash_us", "flash_over_ours"))
    numbers = f"{row['ours_us']:>12.1f}{row['reference_us']:>12.1f}{flash:>12}{ratio:>12}"
    return f"{shape:<20}{row['new']:>6}{row['kv']:>6}{numbers}{row['tflop_s']:>12.0f}{row['of_read']:>12.0%}"


def _row(sequences: int, tokens: int, new: int, dtype: torch.dtype, gb_per_s: float) -> dict[str, Any]:
    work = _work(sequences, tokens, new, dtype)
    error = _checked(work)
    us = graph_us(work.attend, len(work.caches))
    seen = tokens - (new - 1) / 2  # keys of a query, on average
    row = {
        "op": "attention",
        "sequences": sequences,
        "tokens": tokens,
        "new": new,
        "kv": "int8" if dtype is torch.int8 else "fp16",
        "ours_us": us,
        "reference_us": _eager_us(partial(_reference, work)),
        "tflop_s": 4 * sequences * new * seen * _HEADS * _HEAD_DIM / us / 1e6,
        "of_read": work.num_bytes / us / 1e3 / gb_per_s,
        "error": error,
    }
    if new in (1, tokens):  # where its causal mask and ours are one
        row["flash_us"] = _flash_us(work)
        row["flash_over_ours"] = row["flash_us"] / us
    return row


def _work(sequences: int, tokens: int, new: int, dtype: torch.dtype) -> _Work:
    """Pages of random numbers in a random order, in as many caches as no L2 holds."""
    num_pages = sequences * tokens // _PAGE
    scale_bytes = torch.float16.itemsize if dtype is torch.int8 else 0
    num_bytes = sequences * tokens * _KV_HEADS * 2 * (_HEAD_DIM * dtype.itemsize + scale_bytes)
    counters = torch.zeros(sequences * _HEADS, dtype=torch.int32, device="cuda")
    shape = (num_pages, _KV_HEADS, _PAGE, _HEAD_DIM)
    return _Work(
        q=torch.randn(sequences * new, _HEADS, _HEAD_DIM, dtype=torch.float16, device="cuda"),
        caches=[_filled(empty_paged_kv(shape, dtype, "cuda", counters)) for _ in range(ring_size(num_bytes))],
        table=torch.randperm(num_pages, device="cuda").to(torch.int32).view(sequences, -1),
        seq_lens=torch.full((sequences,), tokens, dtype=torch.int32, device="cuda"),
        bounds=torch.arange(0, sequences * new + 1, new, dtype=torch.int32, device="cuda"),
        num_bytes=num_bytes,
    )


def _filled(cache: PagedKV) -> PagedKV:
    for numbers, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        if scales is None:
            numbers.normal_()
        else:
            numbers.random_(-127, 128), scales.uniform_(0.01, 0.03)
    return cache


def _reference(work: _Work) -> torch.Tensor:
    return reference.paged_attention(work.q, work.caches[0], work.table, work.seq_lens, work.bounds, scale=_SCALE)


def _checked(work: _Work) -> float:
    """The relative error. Raises SystemExit if it is too large."""
    ours, exact = work.attend(0).float(), _reference(work).float()
    error = float((ours - exact).norm() / exact.norm())
    if not error < _TOLERANCE:
        raise SystemExit(
            f"attention of {len(work.q)} tokens over {work.table.numel() * _PAGE} is off by {error:.1e}; "
            "no figures until that is mended."
        )
    return error


def _eager_us(case: Callable[[], torch.Tensor]) -> float:
    """Of one call with the host's part in it: the reference asks for the lengths."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    case()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _flash_us(work: _Work) -> float:
    """torch's. A prompt's keys and values are repeated for every query head, which it takes fastest."""
    sequences = len(work.seq_lens)
    q = work.q.unflatten(0, (sequences, -1)).transpose(1, 2).contiguous()  # [sequences, heads, new, head_dim]
    is_prompt = q.shape[2] > 1
    copies = [_contiguous(work, cache, _HEADS // _KV_HEADS if is_prompt else 1) for cache in work.caches]
    options = {"is_causal": is_prompt, "enable_gqa": not is_prompt, "scale": _SCALE}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return graph_us(lambda i: F.scaled_dot_product_attention(q, *copies[i], **options), len(copies))


def _contiguous(work: _Work, cache: PagedKV, repeats: int) -> tuple[torch.Tensor, ...]:
    """Keys and values [sequences, kv_heads * repeats, tokens, head_dim] fp16."""
    tokens = work.table.shape[1] * _PAGE
    each = [reference.gather_kv(cache, pages, 0, tokens) for pages in work.table]
    return tuple(torch.stack(parts).half().repeat_interleave(repeats, dim=1) for parts in zip(*each, strict=True))
