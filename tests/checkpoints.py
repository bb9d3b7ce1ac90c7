"""Tiny random checkpoints of every family and format, beside the dense weights that they stand for.

The packers are written from the format descriptions alone, in plain numpy, and share nothing with the readers.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

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
FORMATS = ("dense", "gptq", "gptq_v2", "gptq_act_order", "awq_gemm", "awq_gemm_sym", "awq_gemv_fast")

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
        tensors.update({f"{prefix}.{part}": torch.from_numpy(array) for part, array in packed.items()})
        tensors["!" + name] = torch.from_numpy(dense)
    return _CONFIGS[fmt]


def _random_parts(n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes [K, N] 0..15, zeros [groups, N] 0..15, scales fp16 [groups, N] of both signs."""
    groups = k // _GROUP
    codes = rng.integers(0, 16, (k, n))
    zeros = rng.integers(0, 16, (groups, n))
    scales = rng.uniform(0.005, 0.03, (groups, n)) * rng.choice([-1, 1], (groups, n))
    return codes, zeros, scales.astype(np.float16)


def _dense(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """fp32 [N, K]"""
    return ((codes - zeros[group_of]) * scales.astype(np.float32)[group_of]).T.astype(np.float32).copy()


def _pack_words(fields: np.ndarray) -> np.ndarray:
    """[rows, 8] of 0..15 -> int32 [rows], least significant first."""
    words = np.zeros(fields.shape[0], np.int64)
    for i in range(8):
        words |= fields[:, i].astype(np.int64) << (4 * i)
    return words.astype(np.uint32).view(np.int32)


def _pack_down(fields: np.ndarray) -> np.ndarray:
    """[K, N] -> int32 [K / 8, N]"""
    k, n = fields.shape
    return np.stack([_pack_words(fields[8 * r : 8 * r + 8].T) for r in range(k // 8)]).reshape(k // 8, n)


def _pack_across(fields: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """[rows, N] -> int32 [rows, N / 8]; nibble i of word c is column 8c + order[i]"""
    columns = [_pack_words(fields[:, [8 * c + o for o in order]]) for c in range(fields.shape[1] // 8)]
    return np.stack(columns, axis=1)


def _gptq(n: int, k: int, rng: np.random.Generator, *, shift: int = 1, act_order: bool = False):
    codes, zeros, scales = _random_parts(n, k, rng)
    group_of = np.arange(k) // _GROUP
    if act_order:
        # transformers' q, k and v share one input and so one order; a generator of the shape's own keeps that true.
        group_of = np.random.default_rng(k).permutation(group_of)
    packed = {
        "qweight": _pack_down(codes),
        "qzeros": _pack_across((zeros - shift) % 16),
        "scales": scales,
        "g_idx": group_of.astype(np.int32),
    }
    return packed, _dense(codes, zeros, scales, group_of)


def _awq_gemm(n: int, k: int, rng: np.random.Generator, *, symmetric: bool = False):
    codes, zeros, scales = _random_parts(n, k, rng)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = {"qweight": _pack_across(codes, order), "scales": scales}
    if symmetric:
        zeros = np.full_like(zeros, 8)
    else:
        packed["qzeros"] = _pack_across(zeros, order)
    return packed, _dense(codes, zeros, scales, np.arange(k) // _GROUP)


def _awq_gemv_fast(n: int, k: int, rng: np.random.Generator):
    codes, zeros, scales = _random_parts(n, k, rng)
    offsets = (-scales.astype(np.float32) * zeros).astype(np.float16)
    padded_rows = 8 * -(-(k // _GROUP) // 8)
    pad = ((0, padded_rows - scales.shape[0]), (0, 0))
    packed = {
        "qweight": _gemv_fast_words(codes.T),
        "scales": np.pad(scales, pad),
        "qzeros": np.pad(offsets, pad),
    }
    group_of = np.arange(k) // _GROUP
    dense = codes * scales.astype(np.float32)[group_of] + offsets.astype(np.float32)[group_of]
    return packed, dense.T.astype(np.float32).copy()


def _gemv_fast_words(rows: np.ndarray) -> np.ndarray:
    """codes [N, K] -> int16 [N / 4, K], one value at a time."""
    n, k = rows.shape
    shuffled = np.empty_like(rows)
    for first in range(0, k, 32):
        # 32 values k = 8a + 2b + c are laid out with b outermost, then a, then c; then of each 8 the evens come first.
        order = [8 * a + 2 * b + c for b in range(4) for a in range(4) for c in range(2)]
        order = [order[8 * e + i] for e in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        shuffled[:, first : first + 32] = rows[:, first : first + 32][:, order]
    words = np.zeros((n // 4, k), np.int64)
    for r in range(n // 4):
        for stretch in range(k // 64):
            values = [shuffled[4 * r + row, 64 * stretch + i] for row in range(4) for i in range(64)]
            for w in range(64):
                words[r, 64 * stretch + w] = sum(int(values[4 * w + j]) << (4 * j) for j in range(4))
    return words.astype(np.uint16).view(np.int16)


_PACKERS = {
    "gptq": _gptq,
    "gptq_v2": lambda n, k, rng: _gptq(n, k, rng, shift=0),
    "gptq_act_order": lambda n, k, rng: _gptq(n, k, rng, act_order=True),
    "awq_gemm": _awq_gemm,
    "awq_gemm_sym": lambda n, k, rng: _awq_gemm(n, k, rng, symmetric=True),
    "awq_gemv_fast": _awq_gemv_fast,
}
_GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False}
_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True}
_CONFIGS: dict[str, dict[str, object]] = {
    "gptq": {**_GPTQ_CONFIG, "desc_act": False},
    "gptq_v2": {**_GPTQ_CONFIG, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_act_order": {**_GPTQ_CONFIG, "desc_act": True},
    "awq_gemm": {**_AWQ_CONFIG, "version": "gemm"},
    "awq_gemm_sym": {**_AWQ_CONFIG, "version": "gemm", "zero_point": False},
    "awq_gemv_fast": {**_AWQ_CONFIG, "version": "gemv_fast"},
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
