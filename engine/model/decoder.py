"""The one decoder: a stack of layers, each attention and feed-forward. `builder.py` makes one from a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.forward import ForwardBatch
from engine.model.attention import Attention
from engine.model.ffn import GatedFfn, Moe
from engine.model.kv_cache import KVCache, LayerCache
from engine.model.rope import cos_sin_table, stretching_note
from engine.model.spec import ModelSpec
from engine.quant.linear import DenseLinear, Linear
from kernels import ops


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Weights [hidden]: before each half, and (Gemma) of what a half adds to the residual stream.

    attention_order, ffn_order   [hidden] int64: in which a half wants its inputs (act-order weights); None: as they are
    """

    attention: torch.Tensor
    after_attention: torch.Tensor | None
    ffn: torch.Tensor
    after_ffn: torch.Tensor | None
    eps: float
    attention_order: torch.Tensor | None
    ffn_order: torch.Tensor | None


class Layer:
    def __init__(self, norms: LayerNorms, attention: Attention, ffn: GatedFfn | Moe) -> None:
        self.norms, self.attention, self.ffn = norms, attention, ffn

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.attention.linears, *self.ffn.linears

    def __call__(
        self,
        step: "Addend",
        residual: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        cos_sin: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple["Addend", torch.Tensor]:
        """`step` is what the layer before has to add to the residual stream; returns what this one has, and the stream:
        the same, or the `wanted` rows of it, as attention is the last to need the others.
        """
        norms = self.norms
        row = step.add_to(residual, norms.attention, norms.eps, norms.attention_order)
        x = self.attention(row, batch, cache, cos_sin, wanted)
        if wanted is not None:
            residual = residual[wanted]
        row = Addend(x, norms.after_attention).add_to(residual, norms.ffn, norms.eps, norms.ffn_order)
        return Addend(self.ffn(row), norms.after_ffn), residual


@dataclass(frozen=True, slots=True)
class Addend:
    """What is to be added to the residual stream next: x [tokens, hidden], or nothing yet, and the norm that it goes
    through before. One launch does this, the sum and the norm that follows.
    """

    x: torch.Tensor | None = None
    norm: torch.Tensor | None = None

    def add_to(
        self, residual: torch.Tensor, weight: torch.Tensor, eps: float, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Change the residual in place; returns the norm of the sum by `weight`, in `order`."""
        return ops.add_rms_norm(self.x, residual, weight, eps, order, self.norm)


class Decoder:
    """Token ids to hidden states, hidden states to logits. Arithmetic in `dtype`."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Linear,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.embedding, self.layers, self.norm, self.head = embedding, layers, norm, head
        self._dtype = dtype
        # Rounded as the model was trained: sqrt(3072) = 55.4 counts as 55.5 in bf16.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self._cos_sin: tuple[torch.Tensor, ...] = ()

    def set_max_len(self, max_len: int) -> tuple[str, ...]:
        """Make the angles of positions below `max_len`, the longest that a sequence may become. To be called first.

        Returns what there is to tell of them.
        """
        ropes = [layer.attention.rope for layer in self.spec.layers]
        if not self._cos_sin or self.max_len != max_len:
            tables = {rope: cos_sin_table(rope, max_len).to(self.embedding.device) for rope in set(ropes)}
            self._cos_sin = tuple(tables[rope] for rope in ropes)
        return tuple(note for rope in dict.fromkeys(ropes) if (note := stretching_note(rope, max_len)))

    @property
    def waits_for_nothing(self) -> bool:
        """Whether a step on a card is all launches, as a CUDA graph asks for."""
        return ops.waits_for_nothing() and all(layer.ffn.waits_for_nothing for layer in self.layers)

    @property
    def max_len(self) -> int:
        """Positions that have angles."""
        return self._cos_sin[0].shape[0]

    @property
    def linears(self) -> list[Linear]:
        """Of all layers, the head left out."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as held, and of the angles; a tied head counts once."""
        linears = self.linears
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        total = sum(linear.num_bytes for linear in linears) + (0 if tied else self.head.num_bytes)
        angles = {table.data_ptr(): table.nbytes for table in self._cos_sin}
        return total + self.embedding.nbytes + sum(angles.values())

    def hidden(self, batch: ForwardBatch, cache: KVCache, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, hidden] after the last norm: what the head, or a pooling, is given; or the `wanted` rows of it."""
        return self.stacked(self.embedded(batch), batch, cache, wanted)

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """[tokens, hidden]: the residual stream before the first layer."""
        return ops.embed(batch.token_ids, self.embedding, self._embedding_scale, self._dtype)

    def stacked(
        self, residual: torch.Tensor, batch: ForwardBatch, cache: KVCache, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rest of `hidden`; changes the residual in place."""
        step = Addend()
        for layer, layer_cache, cos_sin in zip(self.layers, cache.layers, self._cos_sin, strict=True):
            rows = wanted if layer is self.layers[-1] else None
            step, residual = layer(step, residual, batch, layer_cache, cos_sin, rows)
        return step.add_to(residual, self.norm, self.spec.norm.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32"""
        logits = self.head(hidden).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
