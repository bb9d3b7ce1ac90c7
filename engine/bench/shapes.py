"""Architectures by name, as their config.json has them: measured with random weights, without a file."""

from pathlib import Path
from typing import Any

from engine.checkpoint import Checkpoint
from engine.errors import BadRequest
from engine.model.architectures import read_spec
from engine.quant.formats import format_of
from engine.quant.stated import read_stated
from engine.weights.dummy import GROUP_SIZE, DummyReader

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}
_QWEN3: dict[str, Any] = {
    **_LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        **_LLAMA,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama3.1-8b": {
        **_LLAMA,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-8b": {**_QWEN3, "num_hidden_layers": 36, "intermediate_size": 12288},
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
    "mixtral-8x7b": {
        **_LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 1_000_000.0,
    },
    # For tests, and to see that a machine can run the bench at all.
    "tiny": {
        **_LLAMA,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
        "max_position_embeddings": 16384,
    },
}
_QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"},
}


def dummy_checkpoint(shape: str, quant: str) -> Checkpoint:
    """Raises BadRequest for names that are not in the tables."""
    for name, known in ((shape, SHAPES), (quant, _QUANTIZATION)):
        if name not in known:
            raise BadRequest(f"{name!r} is none of {', '.join(known)}.")
    spec = read_spec(SHAPES[shape])
    stated = read_stated(Path(shape), {"quantization_config": _QUANTIZATION[quant]})
    fmt = format_of(stated, shape) if stated else None
    packing = None if fmt is None else fmt.name
    return Checkpoint(Path(shape), spec, stated, fmt, (), lambda device: DummyReader(shape, spec, packing, device))
