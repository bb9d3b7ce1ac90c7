"""The attention half of a layer: projections, optional head norms, rotation, cache, attention, output."""

from dataclasses import dataclass

import torch

from engine.forward import ForwardBatch
from engine.model.spec import AttentionSpec
from engine.quant.linear import Linear
from kernels import ops
from kernels.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms on queries and keys."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class Attention:
    def __init__(self, spec: AttentionSpec, qkv: Linear, out: Linear, norms: HeadNorms | None) -> None:
        self.spec, self.qkv, self.out, self.norms = spec, qkv, out, norms

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out

    def __call__(self, x: torch.Tensor, batch: ForwardBatch, cache: PagedKV, cos_sin: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]; writes the tokens' keys and values into the cache."""
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)  # queries, then keys, then values
        queries = heads.narrow(1, 0, spec.num_heads)
        if self.norms is not None:
            keys = heads.narrow(1, spec.num_heads, spec.num_kv_heads)
            queries.copy_(ops.rms_norm(queries, self.norms.q, self.norms.eps))
            keys.copy_(ops.rms_norm(keys, self.norms.k, self.norms.eps))
        ops.rope_write_kv(heads, spec.num_heads, batch.positions, cos_sin, cache, batch.slot_mapping)
        attended = ops.paged_attention(
            queries,
            cache,
            batch.block_table,
            batch.seq_lens,
            batch.cu_seqlens_q,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return self.out(attended.flatten(1))
