"""compressed-tensors checkpoints (llm-compressor) in the form pack-quantized, 4 and 8 bits, weights alone.

For y[N] = W[N, K] x[K], module `<name>`, G inputs a group, one group for the strategy "channel":
    weight_packed      int32 [N, ceil(K * bits / 32)]    packed along K, least significant first; signed value + middle
    weight_scale       [N, ceil(K / G)]                  the model's dtype
    weight_zero_point  int32 [ceil(N * bits / 32), ceil(K / G)], packed along N as the weight; absent means symmetric
                       (early writers: int8 [N, ceil(K / G)], the signed value itself)
    weight_g_idx       int32 [K]                         group of each input; absent or -1 means k // G
    weight_shape       int64 [2]                         N, K
    W = (q - zero) * scale; the middles of q and zero cancel
Source: compressed-tensors, compressors/pack_quantized and quantization/quant_args.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.base import QuantizedTensors, check_same_shape, order_of_rows, read_bias, rows_a_group
from engine.quant.bits import unpack_fields, words_of
from engine.weights.reader import CheckpointReader

_BITS = (4, 8)
_STRATEGIES = ("group", "channel")
_INSTEAD = "Get the model as W4A16 (pack-quantized), GPTQ or AWQ."


class CompressedTensorsFormat:
    name = "compressed-tensors"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is quantization_config. Raises UnsupportedModel for what we do not read, naming the key."""
        _check_config(config)
        # Which group of the config a module belongs to is not asked: bits and zeros are seen from its tensors, and the
        # size of a group that ends ragged is whichever of these gives as many groups as there are scales.
        groups = (config.get("config_groups") or {}).values()
        self._group_sizes = [int((group.get("weights") or {}).get("group_size") or -1) for group in groups]

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        return reader.has(f"{prefix}.weight_packed")

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        packed = reader.get(f"{prefix}.weight_packed")
        num_outputs, num_inputs = (int(size) for size in reader.get(f"{prefix}.weight_shape"))
        bits = _bits_of(prefix, packed, num_outputs, num_inputs)
        codes = unpack_fields(packed, bits, dim=1)[:, :num_inputs].T  # [K, N]
        scales = reader.get(f"{prefix}.weight_scale").T  # [groups, N]
        zeros = _read_zeros(reader, prefix, bits, num_outputs, scales)
        check_same_shape(prefix, codes, scales, zeros)
        group_size = self._rows_a_group(prefix, num_inputs, scales.shape[0])
        order = _read_order(reader, prefix, num_inputs, scales.shape[0], group_size)
        return QuantizedTensors(
            prefix,
            bits,
            group_size,
            codes if order is None else codes[order],
            scales,
            -zeros.float() * scales.float(),
            order,
            read_bias(reader, prefix),
        )

    def _rows_a_group(self, prefix: str, num_inputs: int, num_groups: int) -> int:
        fitting = [size for size in self._group_sizes if size > 0 and -(-num_inputs // size) == num_groups]
        return rows_a_group(prefix, num_inputs, num_groups, fitting[0] if fitting else -1)


def _bits_of(prefix: str, packed: torch.Tensor, num_outputs: int, num_inputs: int) -> int:
    for bits in _BITS:
        if packed.shape == (num_outputs, words_of(num_inputs, bits)):
            return bits
    raise BadCheckpoint(
        f"`{prefix}`: weight_packed is {tuple(packed.shape)}; weight_shape ({num_outputs}, {num_inputs}) asks for "
        f"{' or '.join(f'({num_outputs}, {words_of(num_inputs, bits)})' for bits in _BITS)}."
    )


def _read_zeros(
    reader: CheckpointReader, prefix: str, bits: int, num_outputs: int, scales: torch.Tensor
) -> torch.Tensor:
    """[groups, N], the middle of the codes included"""
    middle = 1 << (bits - 1)
    name = f"{prefix}.weight_zero_point"
    if not reader.has(name):
        return torch.full_like(scales, middle, dtype=torch.uint8)
    stored = reader.get(name)
    if stored.dtype == torch.int8:
        return (stored.short() + middle).T
    return unpack_fields(stored, bits, dim=0)[:num_outputs].T


def _read_order(
    reader: CheckpointReader, prefix: str, num_inputs: int, num_groups: int, group_size: int
) -> torch.Tensor | None:
    name = f"{prefix}.weight_g_idx"
    if not reader.has(name):
        return None
    g_idx = reader.get(name)
    if bool((g_idx == -1).all()):  # never set by the writer
        return None
    if g_idx.shape != (num_inputs,):
        raise BadCheckpoint(f"`{prefix}`: weight_g_idx has {tuple(g_idx.shape)} entries for {num_inputs} inputs.")
    return order_of_rows(prefix, g_idx, num_groups, group_size)


# --- what the config says, before any tensor is read


def _check_config(config: Mapping[str, Any]) -> None:
    forms = ("pack-quantized", "mixed-precision")
    form = config.get("format", "pack-quantized")
    if form not in forms:
        raise _unsupported("format", form)
    for key in ("transform_config", "kv_cache_scheme"):
        if config.get(key):
            raise _unsupported(key, config[key])
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _unsupported("sparsity_config.format", sparsity)
    for name, group in (config.get("config_groups") or {}).items():
        _check_group(f"config_groups.{name}", group)


def _check_group(where: str, group: Mapping[str, Any]) -> None:
    form = group.get("format") or "pack-quantized"
    if form != "pack-quantized":
        raise _unsupported(f"{where}.format", form)
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _unsupported(f"{where}.{key}", f"{group[key].get('type')}{group[key].get('num_bits')}")
    weights = group.get("weights") or {}
    for key, allowed in (("type", ("int",)), ("num_bits", _BITS), ("strategy", _STRATEGIES)):
        value = weights.get(key)  # what is not said is seen from the tensors
        if value is not None and value not in allowed:
            raise _unsupported(f"{where}.weights.{key}", value)


def _unsupported(key: str, value: object) -> UnsupportedModel:
    return UnsupportedModel(f"compressed-tensors with {key}={value!r} is not supported. {_INSTEAD}")
