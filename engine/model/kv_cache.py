"""The paged KV cache: one pair of tensors a layer over one block numbering."""

from dataclasses import dataclass

import torch

from engine.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCache:
    """keys, values: [blocks, kv_heads, block_size, head_dim]"""

    keys: torch.Tensor
    values: torch.Tensor


class KVCache:
    """All layers' caches, allocated whole at start; nothing grows later."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(_allocate(layer, num_blocks, block_size, dtype, device) for layer in spec.layers)


def _allocate(
    layer: LayerSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    attention = layer.attention
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    return LayerCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
