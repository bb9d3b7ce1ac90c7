"""Tiny random checkpoints of every family and format, beside the dense weights that they stand for.

The quantised ones are written by `tests/packers.py`, which shares nothing with the readers.
"""

import json
import re
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests import packers

_SHAPE = dict(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=259,
    max_position_embeddings=256,
    initializer_range=0.2,
    bos_token_id=1,
    eos_token_id=2,
)
_WINDOW = 24  # no multiple of the block size, and well below the tests' prompts
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
_PARTIAL_ROPE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)
_LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
)
_GEMMA3_ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=10000.0),
)
# head_dim is not hidden / heads, the caps are low enough to be felt, and the first layer alone has a window.
_GEMMA = dict(head_dim=32, query_pre_attn_scalar=24, sliding_window=_WINDOW, pad_token_id=0)
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=64, num_experts=8)

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama3": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "llama_biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True, head_dim=24),
    "llama_yarn": LlamaConfig(**_SHAPE, rope_parameters=_YARN_ROPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=_WINDOW),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2_window": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
    "phi3": Phi3Config(**_SHAPE, sliding_window=_WINDOW, rope_parameters=_PARTIAL_ROPE, pad_token_id=0),
    "gemma2": Gemma2Config(**_SHAPE, **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(
        **_SHAPE, **_GEMMA, rope_parameters=_GEMMA3_ROPE, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=_WINDOW),
    "qwen3_moe": Qwen3MoeConfig(**_SHAPE, **_MOE, head_dim=32, mlp_only_layers=[0], norm_topk_prob=True),
    "qwen3_moe_raw": Qwen3MoeConfig(**_SHAPE, **_MOE, head_dim=32),
}
MIXTURES = ("mixtral", "qwen3_moe", "qwen3_moe_raw")
# Angles that depend on a length, from 64 tokens on.
STRETCHED: dict[str, PreTrainedConfig] = {
    "llama_dynamic": LlamaConfig(
        **{**_SHAPE, "max_position_embeddings": 64},
        rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
    ),
    "phi3_longrope": Phi3Config(
        **_SHAPE, original_max_position_embeddings=64, rope_parameters=_LONG_ROPE, pad_token_id=0
    ),
}
# Layers of both kinds, whose groups in the KV cache have a place too many.
_SLIDING_OF_SEVEN = [
    kind + "_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding", "full", "sliding")
]
WINDOWED: dict[str, PreTrainedConfig] = {
    "gemma3_deep": Gemma3TextConfig(
        **{**_SHAPE, "num_hidden_layers": 7},
        **_GEMMA,
        rope_parameters=_GEMMA3_ROPE,
        layer_types=_SLIDING_OF_SEVEN,
    ),
}
FORMATS = (
    *("dense", "gptq", "gptq_v2", "gptq_act_order", "gptq_3bit"),
    *("awq_gemm", "awq_gemm_sym", "awq_gemv", "awq_gemv_fast", "compressed", "compressed_sym_channel"),
)

_GROUP = 32


def tiny_checkpoint(
    folder: Path, family: str, fmt: str = "dense", *, seed: int = 0, shards: int = 1
) -> PreTrainedModel:
    """Write a checkpoint; returns the fp32 model of transformers with exactly its (dequantised) weights."""
    torch.manual_seed(seed)
    # eager: what another transformers takes by default may leave Gemma's soft cap out (5.17)
    shape = (FAMILIES | STRETCHED | WINDOWED)[family]
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="eager").eval()
    _randomise_norms_and_biases(model)
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    stored = stored_tensors(model)
    tensors = {name: tensor.half() for name, tensor in stored.items()}
    dense = {name: tensor.float() for name, tensor in tensors.items()}
    if fmt != "dense":
        dense |= _quantise_layers(tensors, fmt, np.random.default_rng(seed))
        config["quantization_config"] = _CONFIGS[fmt]
    _write(folder, config, tensors, shards)
    for name, tensor in stored.items():
        tensor.copy_(dense[name])
    return model


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that its family's checkpoints have: views, so that they can be written to.

    transformers keeps the experts of a layer in one tensor, and checkpoints each by itself.
    """
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for part, view in _apart(name, tensor, is_mixtral=model.config.model_type == "mixtral"):
            stored[part] = view
    return stored


def _apart(name: str, tensor: torch.Tensor, *, is_mixtral: bool) -> list[tuple[str, torch.Tensor]]:
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
    prefix = name.rpartition(".")[0]
    if name.endswith("experts.gate_up_proj"):
        halves = zip((gate, up), tensor.chunk(2, dim=1), strict=True)
        return [(f"{prefix}.{e}.{half}.weight", view) for half, both in halves for e, view in enumerate(both)]
    if name.endswith("experts.down_proj"):
        return [(f"{prefix}.{e}.{down}.weight", view) for e, view in enumerate(tensor)]
    return [(name, tensor)]


def _randomise_norms_and_biases(model: PreTrainedModel) -> None:
    """Fresh models have ones and zeros there, which would hide a forgotten norm or bias."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 0.2)  # some start at zero, where every expert is as likely


def _quantise_layers(tensors: dict[str, torch.Tensor], fmt: str, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Replace each projection by its packed form; returns the dense fp32 weights that they stand for."""
    dense = {}
    for name in [name for name in tensors if re.search(r"(_proj|experts\.\d+\.w\d)\.weight$", name)]:
        n, k = tensors.pop(name).shape
        prefix = name.removesuffix(".weight")
        packed, weight = _PACKERS[fmt](n, k, rng)
        tensors.update({f"{prefix}.{part}": tensor for part, tensor in packed.items()})
        dense[name] = torch.from_numpy(weight)
    return dense


def _gptq(n: int, k: int, rng: np.random.Generator, *, version: int = 1, act_order: bool = False, **options):
    # transformers' q, k and v share one input and so one order; a generator of the shape's own keeps that true.
    group_of = packers.permuted_groups(np.random.default_rng(k), k, _GROUP) if act_order else None
    parts = packers.random_parts(rng, n, k, group_of=group_of, group_size=_GROUP, **options)
    return packers.gptq(parts, version=version), parts.dense


def _awq_gemm(n: int, k: int, rng: np.random.Generator, *, symmetric: bool = False):
    parts = packers.random_parts(rng, n, k, group_size=_GROUP, symmetric=symmetric)
    return packers.awq_gemm(parts, with_zeros=not symmetric), parts.dense


def _awq_gemv(n: int, k: int, rng: np.random.Generator):
    parts = packers.random_parts(rng, n, k, group_size=_GROUP)
    return packers.awq_gemv(parts), parts.dense


def _awq_gemv_fast(n: int, k: int, rng: np.random.Generator):
    parts = packers.random_parts(rng, n, k, group_size=_GROUP)
    return packers.awq_gemv_fast(parts), packers.dense_of_gemv_fast(parts)


def _compressed(n: int, k: int, rng: np.random.Generator, *, symmetric: bool = False, group_size: int = _GROUP):
    parts = packers.random_parts(rng, n, k, group_size=group_size, symmetric=symmetric, scale_dtype=torch.bfloat16)
    return packers.compressed(parts, with_zeros=not symmetric), parts.dense


_PACKERS = {
    "gptq": _gptq,
    "gptq_v2": lambda n, k, rng: _gptq(n, k, rng, version=2),
    "gptq_act_order": lambda n, k, rng: _gptq(n, k, rng, act_order=True),
    "gptq_3bit": lambda n, k, rng: _gptq(n, k, rng, bits=3),
    "awq_gemm": _awq_gemm,
    "awq_gemm_sym": lambda n, k, rng: _awq_gemm(n, k, rng, symmetric=True),
    "awq_gemv": _awq_gemv,
    "awq_gemv_fast": _awq_gemv_fast,
    "compressed": _compressed,
    "compressed_sym_channel": lambda n, k, rng: _compressed(n, k, rng, symmetric=True, group_size=-1),
}
_GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False}
_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True}


def _compressed_config(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


_CONFIGS: dict[str, dict[str, object]] = {
    "gptq": {**_GPTQ_CONFIG, "desc_act": False},
    "gptq_v2": {**_GPTQ_CONFIG, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_act_order": {**_GPTQ_CONFIG, "desc_act": True},
    "gptq_3bit": {**_GPTQ_CONFIG, "bits": 3},
    "awq_gemm": {**_AWQ_CONFIG, "version": "gemm"},
    "awq_gemm_sym": {**_AWQ_CONFIG, "version": "gemm", "zero_point": False},
    "awq_gemv": {**_AWQ_CONFIG, "version": "gemv"},
    "awq_gemv_fast": {**_AWQ_CONFIG, "version": "gemv_fast"},
    "compressed": _compressed_config(symmetric=False, strategy="group", group_size=_GROUP),
    "compressed_sym_channel": _compressed_config(symmetric=True, strategy="channel", group_size=None),
}


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
