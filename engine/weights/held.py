"""Bytes of a checkpoint's weights as they will be held, from the headers of its files alone. Free of torch."""

from collections.abc import Iterable
from math import prod
from typing import Protocol

from engine.model.spec import ModelSpec
from engine.quant.stated import Stated

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}  # of a number, by the name of its type

_HEAD_GROUP = 128  # inputs of an 8-bit head that share a scale (`kernels.w8`)
_PACKED_BITS = 4  # modules of more bits are held in 16, of fewer in 4
_CODES = ("qweight", "weight_packed")
_SCALES = ("scales", "weight_scale")
_ZEROS = ("qzeros", "weight_zero_point", "scaled_zeros")
_BESIDE_CODES = (*_CODES, *_SCALES, *_ZEROS, "g_idx", "weight_g_idx", "weight_shape")
_HALF_BYTES, _FP32_BYTES = 2, 4


class StoredType(Protocol):
    """torch.dtype, or the app's word of one."""

    @property
    def itemsize(self) -> int: ...


class Headers(Protocol):
    """What a checkpoint's files say of their tensors."""

    @property
    def names(self) -> Iterable[str]: ...
    def header(self, name: str) -> tuple[tuple[int, ...], StoredType]:
        """Shape and type as stored."""
        ...


def weights_bytes(
    spec: ModelSpec, headers: Headers, stated: Stated | None, kind: str, dtype: str, *, head_in_8_bits: bool
) -> int:
    """kind: "cpu" or "cuda". stated: of the quantisation; None for a dense checkpoint. dtype: of the arithmetic."""
    names = {name for name in headers.names if not _is_left_out(spec, name)}
    total = _head_bytes(spec, headers, names, kind, dtype, head_in_8_bits)
    for name in names:
        module, _, part = name.rpartition(".")
        if part in _CODES and stated is not None:
            total += _module_bytes(headers, names, module, part, stated, kind)
        elif part not in (*_BESIDE_CODES, "inv_freq") and name != "lm_head.weight":
            total += _dense_bytes(headers, name, kind, dtype)
    return total


def _is_left_out(spec: ModelSpec, name: str) -> bool:
    return name.removeprefix("model.").partition(".")[0] in spec.left_out


def _dense_bytes(headers: Headers, name: str, kind: str, dtype: str) -> int:
    shape, stored = headers.header(name)
    return prod(shape) * (BYTES[dtype] if kind == "cuda" else stored.itemsize)


def _module_bytes(headers: Headers, names: set[str], module: str, codes: str, stated: Stated, kind: str) -> int:
    """Codes in 4 bits beside the terms of their groups; or 16 bits a weight."""
    shape, stored = headers.header(f"{module}.{codes}")
    bits = _bits(headers, names, module, shape, stated)
    num_weights = prod(shape) * stored.itemsize * 8 // bits
    if bits > _PACKED_BITS:
        return num_weights * _HALF_BYTES
    scales = next(f"{module}.{part}" for part in _SCALES if f"{module}.{part}" in names)
    num_groups, scale = prod(headers.header(scales)[0]), headers.header(scales)[1]
    if stated.group_size > 0:
        num_groups = min(num_groups, -(-num_weights // stated.group_size))  # some layouts pad their scales
    return num_weights * _PACKED_BITS // 8 + num_groups * _term_bytes(names, headers, module, scale, stated, kind)


def _bits(headers: Headers, names: set[str], module: str, shape: tuple[int, ...], stated: Stated) -> int:
    """A module's own where its index tells how many inputs there are: a GPTQ checkpoint may mix them."""
    if f"{module}.g_idx" not in names:
        return stated.bits
    return shape[0] * 32 // headers.header(f"{module}.g_idx")[0][0]


def _term_bytes(names: set[str], headers: Headers, module: str, scale: StoredType, stated: Stated, kind: str) -> int:
    """Of a group: on a card its scale in fp32, the zero within; on a CPU scale and offset, in fp16 where they fit."""
    if kind == "cuda":
        return _FP32_BYTES
    zeros = [f"{module}.{part}" for part in _ZEROS if f"{module}.{part}" in names]
    are_offsets = any(name.endswith("scaled_zeros") or headers.header(name)[1].itemsize == 2 for name in zeros)
    fits_half = scale.itemsize == _HALF_BYTES and (stated.is_symmetric or not zeros or are_offsets)
    return 2 * (_HALF_BYTES if fits_half else _FP32_BYTES)


def _head_bytes(spec: ModelSpec, headers: Headers, names: set[str], kind: str, dtype: str, head_in_8_bits: bool) -> int:
    """Of a head that is not quantised in the files: in 8 bits; or in 16, where it may be the embedding itself."""
    if any(name.startswith("lm_head.") and name.endswith(_CODES) for name in names):
        return 0
    if head_in_8_bits:
        return spec.vocab_size * -(-spec.hidden_size // _HEAD_GROUP) * (_HEAD_GROUP + _FP32_BYTES)
    return 0 if spec.tie_word_embeddings else _dense_bytes(headers, "lm_head.weight", kind, dtype)
