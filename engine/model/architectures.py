"""config.json -> ModelSpec. To add a family: one function and one row here, one row in tests/checkpoints.py."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.model.spec import AttentionSpec, FfnSpec, LayerSpec, ModelSpec, RopeSpec

Config = Mapping[str, Any]


def read_spec(config: Config) -> ModelSpec:
    """Raises UnsupportedModel (an architecture or setting that we do not compute) or BadCheckpoint (keys missing)."""
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        found = ", ".join(map(str, names)) or "none"
        raise UnsupportedModel(
            f"Architecture {found} is not supported. Supported: {', '.join(sorted(_ARCHITECTURES))}."
        )
    return _ARCHITECTURES[names[0]](config)


def _llama(config: Config) -> ModelSpec:
    return _decoder(config)


def _qwen2(config: Config) -> ModelSpec:
    _refuse_sliding_window(config)
    return _decoder(config)


def _qwen3(config: Config) -> ModelSpec:
    _refuse_sliding_window(config)
    return _decoder(config, qk_norm=True)


_ARCHITECTURES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _decoder(config: Config, *, qk_norm: bool = False) -> ModelSpec:
    """The shape that all families share; what differs is a field."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported; silu is.")
    num_heads = _need(config, "num_attention_heads")
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or _need(config, "hidden_size") // num_heads,
        qk_norm=qk_norm,
    )
    layer = LayerSpec(attention=attention, ffn=FfnSpec(intermediate_size=_need(config, "intermediate_size")))
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=_need(config, "vocab_size"),
        hidden_size=_need(config, "hidden_size"),
        layers=(layer,) * _need(config, "num_hidden_layers"),
        rope=_rope(config),
        norm_eps=_need(config, "rms_norm_eps"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        context_length=_need(config, "max_position_embeddings"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float16"),
    )


def _need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise BadCheckpoint(f"config.json has no {key!r}.")
    return config[key]


def _rope(config: Config) -> RopeSpec:
    """Both dialects: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(kind=kind, theta=theta, factor=_need(parameters, "factor"))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return RopeSpec(kind=kind, theta=theta, **{key: _need(parameters, key) for key in keys})
    raise UnsupportedModel(f"RoPE type {kind!r} is not supported; default, linear and llama3 are.")


def _refuse_sliding_window(config: Config) -> None:
    if config.get("use_sliding_window"):
        raise UnsupportedModel(
            f"Sliding-window attention (window {config.get('sliding_window')}) is not supported yet."
        )
