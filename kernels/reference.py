"""Every op in plain torch, fp32 inside: the definition, the oracle of the faster forms, the fallback.

Shapes here are the contract; `ops.py` documents the public face. Nothing below knows of models.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F

from kernels.w4 import W4Weight


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., hidden] -> same shape and dtype. Rounds to x's dtype before the weight, as transformers does."""
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; the norm of the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head. x [tokens, heads, head_dim]; cos_sin [max_len, 2, head_dim / 2] fp32."""
    cos, sin = cos_sin[positions].unsqueeze(2).unbind(1)  # [tokens, 1, head_dim / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.rope_write_kv`."""
    num_kv_heads, block_size = k_cache.shape[1:3]
    rotated = heads[:, : num_heads + num_kv_heads]
    rotated.copy_(rope(rotated, positions, cos_sin))
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    k_cache[block, :, offset] = rotated[:, num_heads:].to(k_cache.dtype)
    v_cache[block, :, offset] = heads[:, num_heads + num_kv_heads :].to(v_cache.dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """See `ops.paged_attention`. One sequence after another, whole key range at once."""
    out = torch.empty_like(q)
    bounds, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for sequence, (first, last) in enumerate(pairwise(bounds)):
        keys = _gather(k_cache, block_table[sequence], lengths[sequence])
        values = _gather(v_cache, block_table[sequence], lengths[sequence])
        out[first:last] = attend_causal(q[first:last], keys, values, scale)
    return out


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [n, heads, d] are the last n of k, v [kv_heads, length, d] -> [n, heads, d] in q's dtype."""
    n, length = q.shape[0], k.shape[1]
    # A prompt's first chunk needs no mask tensor, and torch then leaves out what is above the diagonal.
    is_whole = n == length
    visible = None if is_whole else torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    out = F.scaled_dot_product_attention(
        q.float().transpose(0, 1).unsqueeze(0),
        k.float().unsqueeze(0),
        v.float().unsqueeze(0),
        attn_mask=visible,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).to(q.dtype)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """[kv_heads, length, head_dim] of one sequence out of the paged cache."""
    block_size = cache.shape[2]
    used = blocks[: (length + block_size - 1) // block_size]
    return cache[used].transpose(0, 1).flatten(1, 2)[:, :length]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n], gate first -> silu(gate) * up, [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `ops.linear`."""
    return F.linear(x, weight.to(x.dtype), bias)


def dequantize_w4(weight: W4Weight, dtype: torch.dtype) -> torch.Tensor:
    """The dense [N, K] weight: codes * scale + offset in fp32, then rounded to dtype."""
    codes = weight.codes().float()  # [K, N padded]
    scales, offsets = (t.transpose(0, 1).flatten(1).unsqueeze(1) for t in (weight.scales, weight.offsets))
    groups = codes.unflatten(0, (-1, weight.group_size))  # [groups, group, N padded]
    dense = (groups * scales + offsets).flatten(0, 1)
    return dense[:, : weight.num_outputs].T.to(dtype)


def w4_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """x [tokens, K] -> [tokens, N] in x's dtype."""
    return F.linear(x, dequantize_w4(weight, x.dtype))
