"""The paged KV cache: one pair of tensors a layer over one block numbering."""

from dataclasses import dataclass

import torch

from engine.model.spec import CacheSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """keys, values: [blocks, kv_heads, block_size, head_dim]"""

    keys: torch.Tensor
    values: torch.Tensor


class KVCache:
    """All layers' caches, each by its own spec, allocated whole at start; nothing grows later."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(_allocate(layer.cache, num_blocks, block_size, dtype, device) for layer in spec.layers)


def _allocate(
    spec: CacheSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    return LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
