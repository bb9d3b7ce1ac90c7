"""config.json -> ModelSpec. To add a family: one function and one row here, one row in tests/checkpoints.py.

A family's function asks for every key that it computes; a key that nobody asked for is refused, not ignored.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.model.config_reader import ConfigReader
from engine.model.rope_config import read_rope, read_rope_part
from engine.model.spec import (
    AttentionSpec,
    FfnSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    TensorNames,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Raises UnsupportedModel (an architecture or setting that we do not compute) or BadCheckpoint (keys missing)."""
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        found = ", ".join(map(str, names)) or "none"
        raise UnsupportedModel(f"Architecture {found} is not supported. Supported: {', '.join(SUPPORTED)}.")
    reader = ConfigReader(config)
    spec = _ARCHITECTURES[names[0]](reader)
    reader.refuse_unread(names[0])
    return spec


def _llama(config: ConfigReader) -> ModelSpec:
    attention = _attention(config, has_bias=config.get("attention_bias", False))
    return _model(config, _alike(config, attention, _ffn(config, bias=bool(config.get("mlp_bias", False)))))


def _mistral(config: ConfigReader) -> ModelSpec:
    attention = _attention(config, window=config.get("sliding_window", 4096))
    return _model(config, _alike(config, attention, _ffn(config)))


def _mixtral(config: ConfigReader) -> ModelSpec:
    attention = _attention(config, window=config.get("sliding_window"), theta=1_000_000.0)
    experts = MoeSpec(
        expert=_ffn(config),
        num_experts=_num_experts(config),
        num_chosen=config.need("num_experts_per_tok"),
        renormalise=True,
    )
    names = TensorNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    )
    return _model(config, _alike(config, attention, experts), names=names)


def _qwen2(config: ConfigReader) -> ModelSpec:
    attention = replace(_attention(config), qkv_bias=True)
    return _model(config, _windowed(attention, _ffn(config), _qwen_windows(config)))


def _qwen3(config: ConfigReader) -> ModelSpec:
    attention = _qwen3_attention(config, head_dim=128)
    return _model(config, _windowed(attention, _ffn(config), _qwen_windows(config)))


def _qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Experts in every `decoder_sparse_step`-th layer; the others, and those named, have one wide feed-forward."""
    config.ignore("max_window_layers")  # Qwen2's; here a window holds for all layers
    window = config.get("sliding_window", 4096)
    attention = _qwen3_attention(config, window=window if config.get("use_sliding_window", False) else None)
    dense = _ffn(config)
    experts = MoeSpec(
        expert=replace(dense, intermediate_size=config.need("moe_intermediate_size")),
        num_experts=_num_experts(config),
        num_chosen=config.need("num_experts_per_tok"),
        renormalise=bool(config.get("norm_topk_prob", False)),
    )
    _check_alike(config, attention)
    step, dense_layers = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    halves = (
        dense if index in dense_layers or (index + 1) % step else experts
        for index in range(config.need("num_hidden_layers"))
    )
    return _model(config, tuple(LayerSpec(attention=attention, ffn=ffn) for ffn in halves))


def _num_experts(config: ConfigReader) -> int:
    return config.need_any("num_experts", "num_local_experts")


def _qwen3_attention(config: ConfigReader, **options: Any) -> AttentionSpec:
    attention = _attention(config, has_bias=config.get("attention_bias", False), **options)
    return replace(attention, qk_norm=True)


def _phi3(config: ConfigReader) -> ModelSpec:
    attention = _attention(config, window=config.get("sliding_window"), may_be_partial=True)
    names = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    config.ignore("original_max_position_embeddings")  # means something to longrope alone
    return _model(config, _alike(config, attention, _ffn(config)), names=names)


def _gemma2(config: ConfigReader) -> ModelSpec:
    config.ignore("sliding_window_size")  # the window by the name of the first uploads, beside the true one
    softcap = config.get("attn_logit_softcapping", 50.0)
    attention = replace(_gemma_attention(config, read_rope(config, _gemma_head_dim(config))), softcap=softcap)
    layers = _windowed(attention, _gemma_ffn(config), _gemma_windows(config, every=2))
    return _gemma_model(config, layers, logit_softcap=config.get("final_logit_softcapping", 30.0))


def _gemma3(config: ConfigReader) -> ModelSpec:
    """Local layers have angles of their own."""
    everywhere, local = _gemma3_ropes(config, _gemma_head_dim(config))
    attention = replace(_gemma_attention(config, everywhere), qk_norm=True)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    layers = tuple(
        layer if layer.attention.window is None else replace(layer, attention=replace(layer.attention, rope=local))
        for layer in _windowed(attention, _gemma_ffn(config), _gemma_windows(config, every=pattern))
    )
    return _gemma_model(config, layers, logit_softcap=config.get("final_logit_softcapping"))


def _gemma3_with_images(config: ConfigReader) -> ModelSpec:
    """The text part alone. Its config says only what differs from its class's defaults."""
    config.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    outer = {key: config.get(key) for key in ("architectures", "dtype", "torch_dtype", "tie_word_embeddings")}
    text = config.need("text_config")
    reader = ConfigReader({**_GEMMA3_DEFAULTS, **text, **{k: v for k, v in outer.items() if v is not None}})
    spec = _gemma3(reader)
    reader.refuse_unread("the text part of Gemma 3")
    return replace(spec, left_out={"vision_tower": "images", "multi_modal_projector": "images"})


_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}


def _gemma3_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """For layers that see all, and for those with a window: `rope_parameters` by layer type, or two flat keys."""
    theta, local_theta = config.get("rope_theta") or 1_000_000.0, config.get("rope_local_base_freq") or 10_000.0
    if not config.get("rope_parameters"):
        everywhere = read_rope_part(config, config.part("rope_scaling"), head_dim, theta=theta)
        return everywhere, RopeSpec(theta=local_theta, rotary_dim=head_dim)
    by_type = config.part("rope_parameters")
    everywhere, local = (
        read_rope_part(config, by_type.part(kind), head_dim, theta=default)
        for kind, default in (("full_attention", theta), ("sliding_attention", local_theta))
    )
    by_type.refuse_unread("Gemma 3, which has RoPE parameters for each layer type")
    return everywhere, local


def _gemma_head_dim(config: ConfigReader) -> int:
    return config.get("head_dim", 256)


def _gemma_attention(config: ConfigReader, rope: RopeSpec) -> AttentionSpec:
    has_bias = bool(config.get("attention_bias", False))
    return AttentionSpec(
        num_heads=config.need("num_attention_heads"),
        num_kv_heads=config.need("num_key_value_heads"),
        head_dim=_gemma_head_dim(config),
        rope=rope,
        scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _gemma_ffn(config: ConfigReader) -> FfnSpec:
    config.ignore("hidden_act")  # older uploads name the exact GELU there; the models were trained with the other
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return FfnSpec(intermediate_size=config.need("intermediate_size"), activation=_activation(activation))


def _gemma_windows(config: ConfigReader, *, every: int) -> tuple[int | None, ...]:
    """Unless the config lists the layers' types: each `every`-th layer sees all, those between a window."""
    kinds = (_SLIDING if (index + 1) % every else _FULL for index in range(config.need("num_hidden_layers")))
    return _windows(config, config.get("sliding_window", 4096), kinds)


def _gemma_model(config: ConfigReader, layers: tuple[LayerSpec, ...], *, logit_softcap: float | None) -> ModelSpec:
    names = TensorNames(
        after_attention_norm="post_attention_layernorm",
        ffn_norm="pre_feedforward_layernorm",
        after_ffn_norm="post_feedforward_layernorm",
    )
    model = _model(config, layers, names=names, ties_by_default=True)
    return replace(
        model,
        norm=replace(model.norm, unit_offset=True),
        embedding_scale=math.sqrt(model.hidden_size),
        logit_softcap=logit_softcap,
        overflows_float16=True,
    )


_ARCHITECTURES: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_images,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
SUPPORTED = tuple(sorted(_ARCHITECTURES))


def _attention(
    config: ConfigReader,
    *,
    head_dim: int | None = None,
    has_bias: bool = False,
    window: int | None = None,
    theta: float = 10_000.0,
    may_be_partial: bool = False,
) -> AttentionSpec:
    """What most families share. `head_dim` and `theta` are a family's defaults; without the first, hidden / heads.

    window           as the config says it: 0 and null are none
    may_be_partial   the family knows heads of which a part is rotated
    """
    num_heads = config.need("num_attention_heads")
    head_dim = config.get("head_dim") or head_dim or config.need("hidden_size") // num_heads
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, theta=theta, may_be_partial=may_be_partial),
        scale=head_dim**-0.5,
        window=window or None,
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def _ffn(config: ConfigReader, *, bias: bool = False) -> FfnSpec:
    activation = _activation(config.get("hidden_act", "silu"))
    return FfnSpec(intermediate_size=config.need("intermediate_size"), activation=activation, bias=bias)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"Activation {name!r} is not supported; {', '.join(_ACTIVATIONS)} are.")
    return _ACTIVATIONS[name]


def _qwen_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Unless the config lists the layers' types: a window, if it is used, from layer `max_window_layers` on."""
    size, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if not config.get("use_sliding_window", False):
        size = None
    num_layers = config.need("num_hidden_layers")
    return _windows(config, size, (_SLIDING if size and index >= first else _FULL for index in range(num_layers)))


def _windows(config: ConfigReader, size: int | None, default_kinds: Iterable[str]) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees all: by `layer_types`, else by the family's default."""
    kinds = config.get("layer_types") or list(default_kinds)
    if unknown := sorted(set(kinds) - {_FULL, _SLIDING}):
        raise UnsupportedModel(f"Layer type {unknown[0]!r} is not supported; {_FULL} and {_SLIDING} are.")
    if len(kinds) != config.need("num_hidden_layers"):
        raise BadCheckpoint(f"layer_types names {len(kinds)} of {config.need('num_hidden_layers')} layers.")
    if _SLIDING in kinds and not size:
        raise BadCheckpoint(f"layer_types has {_SLIDING}, and no sliding_window says how much such a layer sees.")
    return tuple(size if kind == _SLIDING else None for kind in kinds)


def _alike(config: ConfigReader, attention: AttentionSpec, ffn: FfnSpec | MoeSpec) -> tuple[LayerSpec, ...]:
    _check_alike(config, attention)
    return (LayerSpec(attention=attention, ffn=ffn),) * config.need("num_hidden_layers")


def _check_alike(config: ConfigReader, attention: AttentionSpec) -> None:
    """Families whose layers are alike need no `layer_types`; some writers add it."""
    kind = _FULL if attention.window is None else _SLIDING
    if others := sorted(set(config.get("layer_types") or ()) - {kind}):
        raise UnsupportedModel(f"layer_types has {others[0]}; by the rest of config.json every layer is {kind}.")


def _windowed(attention: AttentionSpec, ffn: FfnSpec, windows: Iterable[int | None]) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec(attention=replace(attention, window=window), ffn=ffn) for window in windows)


def _model(
    config: ConfigReader,
    layers: tuple[LayerSpec, ...],
    *,
    names: TensorNames | None = None,
    ties_by_default: bool = False,
) -> ModelSpec:
    return ModelSpec(
        architecture=config.need("architectures")[0],
        vocab_size=config.need("vocab_size"),
        hidden_size=config.need("hidden_size"),
        layers=layers,
        norm=NormSpec(eps=config.need("rms_norm_eps")),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", ties_by_default)),
        context_length=_context_length(config, layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float16"),
        names=names or TensorNames(),
    )


def _context_length(config: ConfigReader, layers: tuple[LayerSpec, ...]) -> int:
    """max_position_embeddings, or what a scaling makes of it where that key keeps the length before the scaling."""
    ropes = {layer.attention.rope for layer in layers}
    scaled = [int(rope.original_length * rope.factor) for rope in ropes if rope.kind in ("dynamic", "yarn")]
    return max([config.need("max_position_embeddings"), *scaled])
