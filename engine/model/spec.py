"""An architecture as data: everything the one decoder needs to know about a model, read once from config.json."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. `kind` default | linear | llama3; the other fields belong to the kinds that use them."""

    kind: str = "default"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention. qk_norm: each head's query and key is normalised before the rotation (Qwen3)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnSpec:
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    ffn: FfnSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    tie_word_embeddings: bool
    context_length: int
    dtype: str  # of the checkpoint: float16 | bfloat16 | float32

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers that one token leaves in the cache, over all layers (times the cache's bytes a number)."""
        return sum(2 * layer.attention.num_kv_heads * layer.attention.head_dim for layer in self.layers)
