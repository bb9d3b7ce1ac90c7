"""The attention half of a layer: projections, optional head norms, rotation, cache, attention, output."""

from dataclasses import dataclass

import torch

from engine.forward import ForwardBatch
from engine.model.kv_cache import LayerCache
from engine.model.spec import AttentionSpec
from engine.quant.linear import Linear
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

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out

    def __call__(
        self,
        x: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        cos_sin: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden], or the `wanted` rows of that; writes the tokens' keys and values into
        the cache.
        """
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)  # queries, then keys, then values
        norms = None if self.norms is None else (self.norms.q, self.norms.k, self.norms.eps)
        paged, slot_mapping = cache.paged, batch.slot_mappings[cache.group]
        ops.rope_write_kv(heads, spec.num_heads, batch.positions, cos_sin, paged, slot_mapping, norms)
        attended = ops.paged_attention(
            heads.narrow(1, 0, spec.num_heads),
            paged,
            batch.block_tables[cache.group],
            batch.seq_lens,
            batch.cu_seqlens_q,
            max_query_len=batch.max_query_len,
            max_short_query_len=batch.max_short_query_len,
            max_seq_len=batch.max_seq_len,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        return self.out(_rows(attended.flatten(1), wanted))


def _rows(x: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    return x if wanted is None else x[wanted]
