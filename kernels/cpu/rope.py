"""Rotation of queries and keys in place and the write of keys and values into the paged cache, in one pass."""

import numpy as np
import torch
from numba import int64, prange

from kernels.cpu.compile import F32_3D, F32_4D, I64_1D, kernel
from kernels.cpu.recording import call, call_parallel
from kernels.cpu.tasks import take
from kernels.paged_kv import PagedKV

_TOKENS = 8  # of one task: a few are not worth waking a second thread
_ARGUMENTS = (F32_3D, int64, I64_1D, F32_3D, F32_4D, F32_4D, I64_1D)


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedKV,
    slot_mapping: torch.Tensor,
) -> None:
    """See `ops.rope_write_kv`; a cache whose keys lie by dimension."""
    arrays = (heads, num_heads, positions, cos_sin, cache.keys.mT, cache.values, slot_mapping)
    call(_few_tokens, *arrays) if heads.shape[0] <= _TOKENS else call_parallel(_many_tokens, *arrays)


@kernel(*_ARGUMENTS)
def _few_tokens(heads, num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping):
    num_kv_heads, block_size = v_cache.shape[1], v_cache.shape[2]
    half, head_dim = cos_sin.shape[2], heads.shape[2]
    for t in range(heads.shape[0]):
        position, slot = positions[t], slot_mapping[t]
        for h in range(num_heads + num_kv_heads):
            for i in range(half):
                a, b = heads[t, h, i], heads[t, h, half + i]
                cos, sin = cos_sin[position, 0, i], cos_sin[position, 1, i]
                heads[t, h, i] = a * cos - b * sin
                heads[t, h, half + i] = b * cos + a * sin
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for h in range(num_kv_heads):
            key, value = heads[t, num_heads + h], heads[t, num_heads + num_kv_heads + h]
            keys, kept = k_cache[block, h], v_cache[block, h, offset]
            for i in range(head_dim):
                kept[i] = value[i]
            for i in range(head_dim):
                keys[i, offset] = key[i]


@kernel(*_ARGUMENTS, int64, int64)
def _task(heads, num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping, num_tokens, task):
    first, end = task * num_tokens, (task + 1) * num_tokens
    positions, slot_mapping = positions[first:end], slot_mapping[first:end]
    _few_tokens(heads[first:end], num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping)


@kernel(*_ARGUMENTS, int64, parallel=True)
def _many_tokens(heads, num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping, num_threads):
    # Keys of 16 tokens share a line of the cache. Threads that write into one at the same time wait for each other:
    # of a prompt each takes many tokens at once.
    num_tokens = max(_TOKENS, heads.shape[0] // (4 * num_threads))
    num_tasks, counter = (heads.shape[0] + num_tokens - 1) // num_tokens, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _task(heads, num_heads, positions, cos_sin, k_cache, v_cache, slot_mapping, num_tokens, task)
            task = take(counter)
