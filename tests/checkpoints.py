"""Tiny random checkpoints of every family and format, beside the dense weights that they stand for.

The quantised ones are written by `tests/packers.py`, which shares nothing with the readers.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
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
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama3": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=32),
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
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    _randomise_norms_and_biases(model)
    config = json.loads(model.config.to_json_string())
    config["architectures"] = [type(model).__name__]
    tensors = {name: tensor.half().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if fmt != "dense":
        config["quantization_config"] = _quantise_layers(tensors, fmt, np.random.default_rng(seed))
    _write(folder, config, {k: v for k, v in tensors.items() if not k.startswith("!")}, shards)
    dense = {k.removeprefix("!"): v.float() for k, v in tensors.items() if k.startswith("!") or k in model.state_dict()}
    missing, unexpected = model.load_state_dict(dense, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model


def _randomise_norms_and_biases(model: PreTrainedModel) -> None:
    """Fresh models have ones and zeros there, which would hide a forgotten norm or bias."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)


def _quantise_layers(tensors: dict[str, torch.Tensor], fmt: str, rng: np.random.Generator) -> dict[str, object]:
    """Replace each projection by its packed form; '!name' keeps the dense fp32 weight that it stands for."""
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        n, k = tensors.pop(name).shape
        prefix = name.removesuffix(".weight")
        packed, dense = _PACKERS[fmt](n, k, rng)
        tensors.update({f"{prefix}.{part}": tensor for part, tensor in packed.items()})
        tensors["!" + name] = torch.from_numpy(dense)
    return _CONFIGS[fmt]


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
