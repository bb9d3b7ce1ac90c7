"""Head norms, rotation and the cache's write beside torch's operations: `python -m kernels.bench --op rope`, on a card.

torch's are those of the reference without its choice of the rows that have a slot, which waits for the card.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels import ops, reference
from kernels.gpu.beside import compared, header, line
from kernels.gpu.timing import ring_size
from kernels.paged_kv import PagedKV, empty_paged_kv

__all__ = ["header", "line", "rows"]  # what a bench of one op has

ROWS = (1, 8, 32, 128, 2048)
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_NUM_ALL = _HEADS + 2 * _KV_HEADS


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    """Llama 3.1 8B's heads; with norms Qwen3 8B's; an int8 cache."""
    angles = torch.rand(2048, _HEAD_DIM // 2, device="cuda")
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    weight = torch.rand(_HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    for shape, norms, dtype in (
        ("", None, torch.bfloat16),
        ("norms", (weight, weight, 1e-6), torch.bfloat16),
        ("int8", None, torch.int8),
    ):
        cache = empty_paged_kv((128, _KV_HEADS, 16, _HEAD_DIM), dtype, "cuda")
        for count in ROWS:
            num_bytes = 2 * count * _NUM_ALL * _HEAD_DIM * 2
            ring = min(ring_size(num_bytes), 256)
            heads = torch.randn(ring, count, _NUM_ALL, _HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            at = torch.arange(count, device="cuda")
            yield compared(
                "rope",
                shape,
                count,
                partial(_ours, heads, at, cos_sin, cache, norms),
                partial(_theirs, heads.clone(), at, cos_sin, cache, norms),
                tolerance=1e-2,
                num_bytes=num_bytes,
                gb_per_s=gb_per_s,
                ring=ring,
            )


_Norms = tuple[torch.Tensor, torch.Tensor, float] | None


def _ours(
    heads: torch.Tensor, at: torch.Tensor, cos_sin: torch.Tensor, cache: PagedKV, norms: _Norms, i: int
) -> torch.Tensor:
    ops.rope_write_kv(heads[i], _HEADS, at, cos_sin, cache, at, norms)
    return heads[i]


def _theirs(
    all_heads: torch.Tensor, at: torch.Tensor, cos_sin: torch.Tensor, cache: PagedKV, norms: _Norms, i: int
) -> torch.Tensor:
    heads = all_heads[i]
    reference.norm_heads(heads, _HEADS, _KV_HEADS, norms)
    rotated = heads[:, : _HEADS + _KV_HEADS]
    rotated.copy_(reference.rope(rotated, at, cos_sin))
    for part, codes, scales in (
        (rotated[:, _HEADS:], cache.keys, cache.key_scales),
        (heads[:, _HEADS + _KV_HEADS :], cache.values, cache.value_scales),
    ):
        place = (at // 16, slice(None), at % 16)
        if scales is None:
            codes[place] = part
        else:
            codes[place], scales[place] = reference.quantize_int8(part)
    return heads
