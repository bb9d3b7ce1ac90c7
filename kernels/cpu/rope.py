"""Rotation of queries and keys in place and the write of keys and values into the paged cache, in one pass."""

import torch
from numba import int64

from kernels.cpu.compile import F32_3D, F32_4D, I64_1D, kernel
from kernels.cpu.recording import call
from kernels.paged_kv import PagedKV


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedKV,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.rope_write_kv`."""
    call(_rope_write_kv, heads, num_heads, positions, cos_sin, cache.keys, cache.values, slot_mapping)


@kernel(F32_3D, int64, I64_1D, F32_3D, F32_4D, F32_4D, I64_1D)
def _rope_write_kv(heads, num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping):
    num_kv_heads, block_size = k_cache.shape[1], k_cache.shape[2]
    half = cos_sin.shape[2]
    for t in range(heads.shape[0]):
        cos, sin = cos_sin[positions[t], 0], cos_sin[positions[t], 1]
        for h in range(num_heads + num_kv_heads):
            first, second = heads[t, h, :half], heads[t, h, half : 2 * half]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * cos[i] - b * sin[i]
                second[i] = b * cos[i] + a * sin[i]
        if slot_mapping[t] < 0:
            continue
        block, offset = slot_mapping[t] // block_size, slot_mapping[t] % block_size
        for h in range(num_kv_heads):
            k_cache[block, h, offset] = heads[t, num_heads + h]
            v_cache[block, h, offset] = heads[t, num_heads + num_kv_heads + h]
