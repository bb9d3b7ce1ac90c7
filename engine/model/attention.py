"""The attention half of a layer: projections, optional head norms, rotation, cache, attention, output."""

from dataclasses import dataclass

import torch

from engine.forward import ForwardBatch
from engine.model.kv_cache import LayerCache
from engine.model.spec import AttentionSpec
from engine.quant.base import Linear
from kernels import ops


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms on queries and keys."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class Attention:
    def __init__(self, spec: AttentionSpec, qkv: Linear, out: Linear, norms: HeadNorms | None) -> None:
        self.spec, self.qkv, self.out, self.norms = spec, qkv, out, norms

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values into the cache."""
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)  # queries, then keys, then values
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if self.norms is not None:
            q = ops.rms_norm(q, self.norms.q, self.norms.eps)
            k = ops.rms_norm(k, self.norms.k, self.norms.eps)
        q = ops.rope(q, batch.positions, cos_sin)
        k = ops.rope(k, batch.positions, cos_sin)
        ops.write_kv(k, v, cache.keys, cache.values, batch.slot_mapping)
        attended = ops.paged_attention(
            q,
            cache.keys,
            cache.values,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            scale=spec.scale,
        )
        return self.out(attended.flatten(1))
