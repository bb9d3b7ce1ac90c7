"""Paged attention for single query tokens (decode) in fp32: one task a sequence and KV head."""

import numpy as np
import torch
from numba import float32, prange, uint64

from kernels.cpu.compile import F32_3D, F32_4D, I32_1D, I32_2D, kernel
from kernels.cpu.exp import exp_minus

_ARGUMENTS = (F32_3D, F32_4D, F32_4D, I32_2D, I32_1D, float32, F32_3D)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [sequences, heads, head_dim], one token each -> the same shape. The rest as `ops.paged_attention`."""
    out = torch.empty_like(q)
    tensors = (t.numpy() for t in (q, k_cache, v_cache, block_table, seq_lens))
    _decode(*tensors, scale, out.numpy())
    return out


@kernel(*_ARGUMENTS, uint64)
def _decode_task(q, k_cache, v_cache, block_table, seq_lens, scale, out, task):
    num_kv_heads, block_size, head_dim = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    s, kv_head = task // uint64(num_kv_heads), task % uint64(num_kv_heads)
    length = seq_lens[s]
    per_kv_head = q.shape[1] // num_kv_heads
    weights = np.empty(length, np.float32)
    for g in range(per_kv_head):
        head = kv_head * uint64(per_kv_head) + uint64(g)
        query = q[s, head]
        largest = float32(-np.inf)
        for first in range(0, length, block_size):
            keys = k_cache[block_table[s, first // block_size], kv_head]
            for i in range(min(block_size, length - first)):
                key = keys[i]
                dot = float32(0)
                for d in range(head_dim):
                    dot += query[d] * key[d]
                weights[first + i] = dot * scale
                largest = max(largest, dot * scale)
        exp_minus(weights, largest)
        total = float32(0)
        for i in range(length):
            total += weights[i]
        result = np.zeros(head_dim, np.float32)
        for first in range(0, length, block_size):
            values = v_cache[block_table[s, first // block_size], kv_head]
            for i in range(min(block_size, length - first)):
                value, weight = values[i], weights[first + i]
                for d in range(head_dim):
                    result[d] += weight * value[d]
        for d in range(head_dim):
            out[s, head, d] = result[d] / total


@kernel(*_ARGUMENTS, parallel=True)
def _decode(q, k_cache, v_cache, block_table, seq_lens, scale, out):
    for task in prange(q.shape[0] * k_cache.shape[1]):
        _decode_task(q, k_cache, v_cache, block_table, seq_lens, scale, out, task)
