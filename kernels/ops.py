"""The public face of the kernels: one function an op, and the choice of who computes it.

On a CPU the forms under `cpu/` run where they beat torch; everything else is `reference.py`.
REFERENCE=1 in the environment takes the reference everywhere (read once, at import).
"""

import os

import torch

from kernels import reference
from kernels.w4 import W4Weight

_REFERENCE_ONLY = os.environ.get("REFERENCE") == "1"


def _on_cpu(x: torch.Tensor) -> bool:
    return not _REFERENCE_ONLY and x.device.type == "cpu" and x.dtype == torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis. x [..., hidden], weight [hidden] -> x's shape and dtype."""
    if _on_cpu(x):
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return reference.rms_norm(x, weight, eps)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, half-split form (Su et al. 2021, as in GPT-NeoX and Llama).

    x          [tokens, heads, head_dim]
    positions  [tokens] int64
    cos_sin    [max_len, 2, head_dim / 2] fp32
    Returns    x's shape and dtype
    """
    return reference.rope(x, positions, cos_sin)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store each token's key and value in its slot.

    k, v          [tokens, kv_heads, head_dim]
    k_cache       [blocks, kv_heads, block_size, head_dim], v_cache the same
    slot_mapping  [tokens] int64, block * block_size + offset in the block
    """
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping)


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
    """Attend each query token to the keys that its sequence has in the paged cache, itself included (causal).

    q            [tokens, heads, head_dim]; the last tokens of each sequence, sequences one after another
    k_cache      [blocks, kv_heads, block_size, head_dim], v_cache the same; already holding these tokens' KV
    block_table  [sequences, max_blocks] int32; entries past a sequence's length are never read
    seq_lens     [sequences] int32, tokens in the cache for each, these included
    cu_seqlens_q [sequences + 1] int32, where each sequence's queries begin
    Returns      [tokens, heads, head_dim] in q's dtype; softmax in fp32
    Raises       ValueError if heads is not a multiple of kv_heads
    Source       Kwon et al. 2023, PagedAttention
    """
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads over {k_cache.shape[1]} KV heads")
    return reference.paged_attention(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=scale)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's middle: [tokens, 2 * n], gate first -> silu(gate) * up, [tokens, n]."""
    return reference.silu_mul(gate_up)


def w4_linear(x: torch.Tensor, weight: W4Weight) -> torch.Tensor:
    """x [tokens, K] times a packed 4-bit weight -> [tokens, N] in x's dtype; sums in fp32.

    Raises ValueError if K is not the weight's.
    """
    if x.shape[-1] != weight.num_inputs:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight takes {weight.num_inputs}")
    return reference.w4_linear(x, weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, K], weight [N, K] -> [tokens, N]."""
    return torch.nn.functional.linear(x, weight, bias)
