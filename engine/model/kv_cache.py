"""The paged KV cache: one pair of tensors a layer over one block numbering."""

import torch

from engine.model.spec import ModelSpec
from kernels.paged_kv import bytes_per_token_and_head, empty_paged_kv


class KVCache:
    """All layers' caches, each by its own spec, allocated whole at start; nothing grows later."""

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
    ) -> None:
        most_heads = max(layer.attention.num_heads for layer in spec.layers)
        counters = torch.zeros(max_num_seqs * most_heads, dtype=torch.int32, device=device)
        shapes = ((num_blocks, layer.cache.num_kv_heads, block_size, layer.cache.head_dim) for layer in spec.layers)
        self.layers = tuple(empty_paged_kv(shape, dtype, device, counters) for shape in shapes)


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What one token takes in the cache, over all layers, scales of int8 included."""
    caches = (layer.cache for layer in spec.layers)
    return sum(cache.num_kv_heads * bytes_per_token_and_head(cache.head_dim, dtype) for cache in caches)
