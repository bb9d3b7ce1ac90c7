"""The rotary embedding that config.json asks for, in both dialects: config -> RopeSpec.

transformers 5 writes `rope_parameters`, older versions `rope_theta` beside `rope_scaling`.
"""

import math
from collections.abc import Callable
from typing import Any

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.model.config_reader import ConfigReader
from engine.model.spec import RopeSpec

# Kinds by older names.
_ALIASES = {"su": "longrope"}


def read_rope(
    config: ConfigReader, head_dim: int, *, theta: float = 10_000.0, may_be_partial: bool = False
) -> RopeSpec:
    """`theta` is the family's default; `may_be_partial` where it knows `partial_rotary_factor`.

    Raises UnsupportedModel for a kind or key that we do not compute.
    """
    parameters = _parameters(config)
    share = 1.0
    if may_be_partial:
        share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return read_rope_part(config, parameters, int(head_dim * share), theta=config.get("rope_theta") or theta)


def _parameters(config: ConfigReader) -> ConfigReader:
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise BadCheckpoint("config.json has `rope_scaling` and `rope_parameters`, which differ. Keep one of them.")
    return config.part("rope_scaling" if scaling else "rope_parameters")


def read_rope_part(config: ConfigReader, parameters: ConfigReader, rotary_dim: int, *, theta: float) -> RopeSpec:
    """The kind and its numbers out of `parameters`, which end read whole; lengths may stand in `config` itself."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters.ignore("type")  # `rope_type` by its older name
    kind = _ALIASES.get(kind, kind)
    if kind not in _KINDS:
        raise UnsupportedModel(f"RoPE type {kind!r} is not supported; {', '.join(_KINDS)} are.")
    fields = _KINDS[kind](config, parameters)
    rope = RopeSpec(
        kind=kind,
        theta=float(parameters.get("rope_theta") or theta),
        rotary_dim=rotary_dim,
        **fields,
    )
    parameters.refuse_unread(f"RoPE type {kind!r}")
    _check(rope)
    return rope


def _check(rope: RopeSpec) -> None:
    if rope.rotary_dim % 2 or rope.rotary_dim < 2:
        raise BadCheckpoint(f"RoPE would rotate {rope.rotary_dim} numbers of a head; it takes an even number.")
    if rope.kind == "longrope":
        lengths = {len(rope.short_factors), len(rope.long_factors)}
        if lengths != {rope.rotary_dim // 2}:
            raise BadCheckpoint(
                f"longrope has {len(rope.short_factors)} short and {len(rope.long_factors)} long factors; "
                f"{rope.rotary_dim} rotated numbers need {rope.rotary_dim // 2} of each."
            )


def _default(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    """Some writers leave the numbers of a scaling that they switched off."""
    parameters.ignore("factor", "original_max_position_embeddings")
    return {}


def _linear(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    return {"factor": float(parameters.need("factor"))}


def _dynamic(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    return {"factor": float(parameters.need("factor")), "original_length": config.need("max_position_embeddings")}


def _llama3(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    return {
        "factor": float(parameters.need("factor")),
        "low_freq_factor": float(parameters.need("low_freq_factor")),
        "high_freq_factor": float(parameters.need("high_freq_factor")),
        "original_length": _original_length(config, parameters),
    }


def _yarn(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    parameters.ignore("finetuned")  # a note of the first YaRN models
    original = _original_length(config, parameters)
    factor = _stretch(config, parameters)
    return {
        "factor": factor,
        "original_length": original,
        "attention_factor": _yarn_attention_factor(parameters, factor),
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "truncate": bool(parameters.get("truncate", True)),
    }


def _yarn_attention_factor(parameters: ConfigReader, factor: float) -> float:
    """The temperature of the YaRN paper (Peng et al. 2023), with DeepSeek's two multipliers where they are given."""
    given, numerator, denominator = (parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)

    def temperature(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    return temperature(numerator) / temperature(denominator) if numerator and denominator else temperature(1.0)


def _longrope(config: ConfigReader, parameters: ConfigReader) -> dict[str, Any]:
    original = _original_length(config, parameters)
    factor = _stretch(config, parameters)
    given = parameters.get("attention_factor")
    computed = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_length": original,
        "attention_factor": computed if given is None else float(given),
        "short_factors": tuple(map(float, parameters.need("short_factor"))),
        "long_factors": tuple(map(float, parameters.need("long_factor"))),
    }


def _stretch(config: ConfigReader, parameters: ConfigReader) -> float:
    """The factor, or (Phi-3) how much longer the model is than its original length.

    Raises BadCheckpoint where neither is told: stretched by a wrong factor, a model answers in noise.
    """
    factor = parameters.get("factor")
    if factor is None and (original := _told_original_length(config, parameters)):
        return float(config.need("max_position_embeddings") / original)
    return float(parameters.need("factor"))


def _original_length(config: ConfigReader, parameters: ConfigReader) -> int:
    return _told_original_length(config, parameters) or int(config.need("max_position_embeddings"))


def _told_original_length(config: ConfigReader, parameters: ConfigReader) -> int | None:
    """Phi-3 keeps it beside the RoPE parameters, and then that one counts."""
    beside, inside = (part.get("original_max_position_embeddings") for part in (config, parameters))
    return int(beside or inside) if beside or inside else None


_KINDS: dict[str, Callable[[ConfigReader, ConfigReader], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
