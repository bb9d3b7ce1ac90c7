"""Every op in plain torch, fp32 inside: the definition, the oracle of the faster forms, the fallback.

Shapes here are the contract; `ops.py` documents the public face. Nothing below knows of models.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from kernels.gpu.planar import PlanarWeight
from kernels.paged_kv import PagedKV
from kernels.w4 import W4Weight
from kernels.w8 import W8Weight

_SOFTCAP_ROWS = 128  # queries whose scores exist at once: 34 MB at 8 heads and 8,192 keys


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """See `ops.embed`."""
    rows = table[token_ids].to(dtype)
    return rows if scale == 1.0 else rows * scale


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    order: torch.Tensor | None = None,
    x_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.add_rms_norm`."""
    if x is not None:
        residual.add_(x if x_norm is None else rms_norm(x, x_norm, eps))
    normed = rms_norm(residual, weight, eps)
    return normed if order is None else normed[:, order]


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first numbers of each head by halves. x [tokens, heads, head_dim]; cos_sin as `ops.rope_write_kv`."""
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)  # [tokens, 1, rotary_dim / 2]
    half = cos.shape[-1]
    first, second, rest = x.float().split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def norm_heads(
    heads: torch.Tensor, num_heads: int, num_kv_heads: int, norms: tuple[torch.Tensor, torch.Tensor, float] | None
) -> None:
    """Normalise the queries and keys among heads, in place; norms as `ops.rope_write_kv`."""
    if norms is not None:
        q_weight, k_weight, eps = norms
        queries, keys = heads.narrow(1, 0, num_heads), heads.narrow(1, num_heads, num_kv_heads)
        queries.copy_(rms_norm(queries, q_weight, eps))
        keys.copy_(rms_norm(keys, k_weight, eps))


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedKV,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """See `ops.rope_write_kv`."""
    norm_heads(heads, num_heads, cache.num_kv_heads, norms)
    rotated = heads[:, : num_heads + cache.num_kv_heads]
    rotated.copy_(rope(rotated, positions, cos_sin))
    is_stored = slot_mapping >= 0
    slots, stored = slot_mapping[is_stored], heads[is_stored, num_heads:]
    block, offset = slots // cache.block_size, slots % cache.block_size
    parts = ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))
    for part, (codes, scales) in zip(stored.split(cache.num_kv_heads, dim=1), parts, strict=True):
        if scales is None:
            codes[block, :, offset] = part.to(codes.dtype)
        else:
            codes[block, :, offset], scales[block, :, offset] = quantize_int8(part)


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] -> codes of that shape and fp16 scales [...], for which x is about codes * scale.

    The scale is the largest magnitude / 127, rounded to fp16; codes are x / scale in fp32, rounded half to even. All
    zeros have scale 0, and so has what fp16 rounds to it (magnitudes below 4e-6).
    """
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    scales = (largest / 127).clamp(max=torch.finfo(torch.float16).max).half()
    codes = (x.float() / scales.float()).round().clamp(-127, 127)
    return torch.where(scales > 0, codes, 0).to(torch.int8), scales.squeeze(-1)


def paged_attention(
    q: torch.Tensor,
    cache: PagedKV,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `ops.paged_attention`. One sequence after another, all keys that its queries can see at once."""
    out = torch.zeros_like(q)
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        if lengths[sequence] == 0:
            continue
        start = _first_visible(lengths[sequence], last - first, window, cache.block_size)
        keys, values = gather_kv(cache, block_table[sequence], start, lengths[sequence])
        out[first:last] = attend_causal(q[first:last], keys, values, scale, window, softcap)
    return out


def _first_visible(length: int, num_queries: int, window: int | None, block_size: int) -> int:
    """First position that any of a sequence's last queries sees, rounded down to the start of its block."""
    first = 0 if window is None else max(0, length - num_queries - window + 1)
    return first // block_size * block_size


def attend_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [n, heads, d] are the last n of k, v [kv_heads, length, d] -> [n, heads, d] in q's dtype."""
    if softcap is not None:
        return _attend_softcapped(q, k, v, scale, window, softcap)
    n, length = q.shape[0], k.shape[1]
    # A prompt's first chunk needs no mask tensor, and torch then leaves out what is above the diagonal.
    is_whole = n == length and (window is None or window >= length)
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1).unsqueeze(0),
        k.float().unsqueeze(0),
        v.float().unsqueeze(0),
        attn_mask=None if is_whole else _visible(n, length, window, q.device),
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).to(q.dtype)


def _attend_softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float
) -> torch.Tensor:
    """torch's attention has no place for the cap, so the scores are made here, a slab of queries at a time."""
    heads_of = (k.shape[0], q.shape[1] // k.shape[0])
    keys, values = (t.float().unsqueeze(1) for t in (k, v))  # [kv_heads, 1, length, d]
    visible = _visible(q.shape[0], k.shape[1], window, q.device)
    out = torch.empty_like(q)
    for rows in torch.arange(q.shape[0], device=q.device).split(_SOFTCAP_ROWS):
        queries = q[rows].float().transpose(0, 1).unflatten(0, heads_of)  # [kv_heads, heads a kv_head, rows, d]
        scores = torch.tanh(queries @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
        weights = scores.masked_fill_(~visible[rows], -torch.inf).softmax(dim=-1)
        out[rows] = (weights @ values).flatten(0, 1).transpose(0, 1).to(q.dtype)
    return out


def _visible(n: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [n, length]: which keys each of the last n positions sees, itself and the window - 1 before it."""
    mask = torch.ones(n, length, dtype=torch.bool, device=device).tril(length - n)
    return mask if window is None else mask.triu(length - n - window + 1)


def gather_kv(cache: PagedKV, blocks: torch.Tensor, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv_heads, length - start, head_dim] of one sequence, int8 as fp32; start begins a block."""
    used = blocks[start // cache.block_size : -(-length // cache.block_size)]

    def joined(paged: torch.Tensor) -> torch.Tensor:
        return paged[used].transpose(0, 1).flatten(1, 2)[:, : length - start]

    keys, values = joined(cache.keys), joined(cache.values)
    if cache.key_scales is None or cache.value_scales is None:
        return keys, values
    key_scales, value_scales = (
        joined(scales).float().unsqueeze(-1) for scales in (cache.key_scales, cache.value_scales)
    )
    return keys * key_scales, values * value_scales


def route_experts(logits: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route_experts`."""
    weights, chosen = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    chosen, places = chosen[:, :num_chosen].sort(dim=-1)
    weights = weights[:, :num_chosen].gather(1, places)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalise else weights), chosen.to(torch.int32)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n], gate first -> silu(gate) * up, [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n], gate first -> gelu(gate) * up with the tanh form of GELU, [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear`."""
    return F.linear(x, weight.to(x.dtype), bias)


def dequantize_w4(weight: W4Weight | PlanarWeight, dtype: torch.dtype) -> torch.Tensor:
    """The dense [N, K] weight: codes * scale + offset in fp32, then rounded to dtype."""
    if isinstance(weight, PlanarWeight):
        return weight.dequantize(dtype)
    codes = weight.codes().float()  # [K, N padded]
    scales, offsets = (t.transpose(0, 1).flatten(1).unsqueeze(1) for t in (weight.scales, weight.offsets))
    groups = codes.unflatten(0, (-1, weight.group_size))  # [groups, group, N padded]
    dense = (groups * scales + offsets).flatten(0, 1)
    return dense[:, : weight.num_outputs].T.to(dtype)


def w4_linear(x: torch.Tensor, weight: W4Weight | PlanarWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, K] -> [tokens, N] in x's dtype."""
    return F.linear(x, dequantize_w4(weight, x.dtype), bias)


def w8_linear(x: torch.Tensor, weight: W8Weight) -> torch.Tensor:
    """See `ops.w8_linear`."""
    return F.linear(x.float(), weight.dequantize())
