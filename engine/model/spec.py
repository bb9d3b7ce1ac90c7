"""An architecture as data: everything the one decoder needs to know about a model, read once from config.json.

A number that differs between families is a field; a different computation is a spec type and a module of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.layout import LayerGroups, group_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` numbers of each head. Fields belong to the kinds that use them.

    kind              default | linear | dynamic | llama3 | yarn | longrope
    original_length   positions that the plain angles were trained for
    attention_factor  multiplies cosines and sines (yarn, longrope)
    short_factors, long_factors  [rotary_dim / 2] each
    """

    kind: str = "default"
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention.

    scale     multiplies the scores
    window    tokens that a query sees, itself included; None sees all before it
    softcap   bounds the scores by tanh (Gemma 2)
    qk_norm   each head's query and key is normalised before the rotation
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    window: int | None = None
    softcap: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FfnSpec:
    """Gated feed-forward: down(activation(gate(x)) * up(x)). activation: silu | gelu_tanh."""

    intermediate_size: int
    activation: str = "silu"
    bias: bool = False

    @property
    def widest(self) -> int:
        """Most numbers that exist for one token at once."""
        return 2 * self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Experts, each a gated feed-forward; a token goes through its `num_chosen` likeliest.

    renormalise   the chosen probabilities are made to sum to 1
    """

    expert: FfnSpec
    num_experts: int
    num_chosen: int
    renormalise: bool

    @property
    def widest(self) -> int:
        return self.expert.widest * self.num_chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What one layer keeps of each token that it has seen: a key and a value for every KV head.

    window   tokens back that can still be read; None all
    """

    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    ffn: FfnSpec | MoeSpec

    @property
    def cache(self) -> CacheSpec:
        attention = self.attention
        return CacheSpec(num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim, window=attention.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Root-mean-square norm. unit_offset: the checkpoint stores the weight less 1 (Gemma)."""

    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Where a layer's tensors lie, below `model.layers.N.`. Several names are stored apart and computed as one.

    after_attention_norm, after_ffn_norm   norms of what a half adds to the residual stream; None where there are none
    expert_gate_up, expert_down            below `experts.E.`
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    after_attention_norm: str | None = None
    ffn_norm: str = "post_attention_layernorm"
    after_ffn_norm: str | None = None
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """
    embedding_scale     multiplies the embedded tokens
    logit_softcap       bounds the logits by tanh (Gemma 2)
    context_length      tokens that a sequence may have; what scales the angles is counted in
    dtype               of the checkpoint: float16 | bfloat16 | float32
    overflows_float16   its activations leave float16's range: bfloat16 or float32 only (Gemma)
    left_out            what of the checkpoint is not computed, by the first word of its tensors' names: in words
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_word_embeddings: bool
    context_length: int
    dtype: str
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    overflows_float16: bool = False
    names: TensorNames = TensorNames()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer_groups(self) -> LayerGroups:
        """Of the KV cache. A window that no sequence outgrows is none; layers of several shapes cannot lie in the same
        tensors in turns, and are one group that keeps everything.
        """
        caches = [layer.cache for layer in self.layers]
        if len({(cache.num_kv_heads, cache.head_dim) for cache in caches}) > 1:
            return group_layers([None] * len(caches))
        return group_layers([None if (cache.window or 0) >= self.context_length else cache.window for cache in caches])
