"""The one decoder: a stack of pre-norm layers, built from a ModelSpec and whatever the checkpoint holds."""

from collections.abc import Callable, Sequence

import torch

from engine.forward import ForwardBatch
from engine.model.attention import Attention, HeadNorms
from engine.model.ffn import GatedFfn
from engine.model.kv_cache import KVCache, LayerCache
from engine.model.rope import cos_sin_table
from engine.model.spec import LayerSpec, ModelSpec
from engine.quant.base import Format
from engine.quant.linear import DenseLinear, Linear, LinearLoader, place
from engine.weights.reader import CheckpointReader
from kernels import ops


class Layer:
    def __init__(
        self, attention_norm: torch.Tensor, attention: Attention, ffn_norm: torch.Tensor, ffn: GatedFfn, eps: float
    ) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.ffn_norm, self.ffn = ffn_norm, ffn
        self.eps = eps

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.qkv, self.attention.out, self.ffn.gate_up, self.ffn.down

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """x is what the layer before has to add to the residual stream; returns what this one has."""
        x = self.attention(ops.add_rms_norm(x, residual, self.attention_norm, self.eps), batch, cache, cos_sin)
        return self.ffn(ops.add_rms_norm(x, residual, self.ffn_norm, self.eps))


class Decoder:
    """Token ids to hidden states, hidden states to logits."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        head: Linear,
        cos_sin: torch.Tensor,
    ) -> None:
        self.spec = spec
        self.embedding, self.layers, self.norm, self.head, self.cos_sin = embedding, layers, norm, head, cos_sin

    @property
    def max_len(self) -> int:
        """Positions that have angles."""
        return self.cos_sin.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as held; a tied head counts once."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        tied = isinstance(self.head, DenseLinear) and self.head.weight is self.embedding
        total = sum(linear.num_bytes for linear in linears) + (0 if tied else self.head.num_bytes)
        return total + self.embedding.numel() * self.embedding.element_size()

    def hidden(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        """[tokens, hidden] before the last norm."""
        x = self.embedding[batch.token_ids].to(self.norm.dtype)
        residual = torch.zeros_like(x)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = layer(x, residual, batch, layer_cache, self.cos_sin)
        return residual + x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32"""
        return self.head(ops.rms_norm(hidden, self.norm, self.spec.norm_eps)).float()


class DecoderBuilder:
    """Reads one checkpoint into a Decoder, layer after layer, so that host memory holds one module at a time."""

    def __init__(
        self, spec: ModelSpec, reader: CheckpointReader, fmt: Format | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spec, self._reader = spec, reader
        self._linears = LinearLoader(reader, fmt, device, dtype, spec.dtype)
        self._device, self._dtype = device, dtype

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the weights while they were read, in words, one line a kind."""
        return self._linears.notes

    def build(self, max_len: int, on_layer: Callable[[int], None]) -> Decoder:
        """`max_len` positions get angles; `on_layer(n)` is called after each of the spec's layers."""
        spec = self._spec
        embedding = place(self._reader.get("model.embed_tokens.weight"), self._device, self._dtype)
        layers = []
        for index, layer in enumerate(spec.layers):
            layers.append(self._layer(f"model.layers.{index}", layer))
            on_layer(index + 1)
        head_dim = spec.layers[0].attention.head_dim
        cos_sin = cos_sin_table(spec.rope, head_dim, max_len).to(self._device)
        return Decoder(spec, embedding, layers, self._tensor("model.norm.weight"), self._head(embedding), cos_sin)

    def _tensor(self, name: str) -> torch.Tensor:
        return self._reader.get(name).to(self._device, self._dtype)

    def _linear(self, *prefixes: str, shape: tuple[int, int]) -> Linear:
        return self._linears.load(prefixes, shape)

    def _layer(self, prefix: str, spec: LayerSpec) -> Layer:
        hidden, heads, ffn_size = self._spec.hidden_size, spec.attention, spec.ffn.intermediate_size
        attended = heads.num_heads * heads.head_dim
        of_qkv = attended + 2 * heads.num_kv_heads * heads.head_dim
        attention = Attention(
            spec.attention,
            qkv=self._linear(*(f"{prefix}.self_attn.{name}_proj" for name in "qkv"), shape=(of_qkv, hidden)),
            out=self._linear(f"{prefix}.self_attn.o_proj", shape=(hidden, attended)),
            norms=self._head_norms(f"{prefix}.self_attn") if spec.attention.qk_norm else None,
        )
        ffn = GatedFfn(
            gate_up=self._linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", shape=(2 * ffn_size, hidden)),
            down=self._linear(f"{prefix}.mlp.down_proj", shape=(hidden, ffn_size)),
        )
        return Layer(
            self._tensor(f"{prefix}.input_layernorm.weight"),
            attention,
            self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            ffn,
            self._spec.norm_eps,
        )

    def _head_norms(self, prefix: str) -> HeadNorms:
        return HeadNorms(
            self._tensor(f"{prefix}.q_norm.weight"), self._tensor(f"{prefix}.k_norm.weight"), self._spec.norm_eps
        )

    def _head(self, embedding: torch.Tensor) -> Linear:
        """Tied models may still carry a copy of the head; the config decides, except for a head that was quantised."""
        if self._spec.tie_word_embeddings and not self._linears.is_quantized("lm_head"):
            if self._reader.has("lm_head.weight"):
                self._reader.skip("lm_head.weight")
            return DenseLinear(embedding, None)
        return self._linear("lm_head", shape=(self._spec.vocab_size, self._spec.hidden_size))
