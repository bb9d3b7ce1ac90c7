"""GPTQ checkpoints (AutoGPTQ, GPTQModel), v1 and v2, in 2, 3, 4 and 8 bits.

For y[N] = W[N, K] x[K], module `<name>`, G inputs a group:
    qweight  int32 [ceil(K * bits / 32), N]              packed along K, least significant first
    qzeros   int32 [ceil(K / G), ceil(N * bits / 32)]    packed along N; v1 stores zero - 1 modulo 2^bits, v2 the zero
    scales   fp16 or bf16 [ceil(K / G), N]               sign kept
    g_idx    int32 [K]                                   group of each input row; absent means k // G
    W[k, n] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])
Source: GPTQModel, nn_modules/qlinear, utils/model_dequant and quantization/config.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.base import QuantizedTensors, check_same_shape, order_of_rows, read_bias, rows_a_group
from engine.quant.bits import unpack_fields, words_of
from engine.weights.reader import CheckpointReader

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class _Packing:
    """How one module is packed."""

    bits: int
    group_size: int
    is_symmetric: bool


class GptqFormat:
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is quantization_config under its current names. Raises UnsupportedModel for what we do not read."""
        checkpoint_format = config.get("format") or "gptq"
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"GPTQ with format (checkpoint_format) {checkpoint_format!r} is not supported; gptq and gptq_v2 are."
            )
        if config.get("is_marlin_format"):
            raise UnsupportedModel("GPTQ with is_marlin_format=true is not supported; get the model as plain GPTQ.")
        self._zero_shift = 1 if checkpoint_format == "gptq" else 0
        self._is_borrowed = "gptqmodel" in str((config.get("meta") or {}).get("quantizer"))
        self._overrides = _Overrides(config)
        self._overrides.check()

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        return reader.has(f"{prefix}.qweight")

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        packing = self._overrides.packing_of(prefix)
        codes, g_idx = _read_codes(reader, prefix, packing.bits)
        scales = reader.get(f"{prefix}.scales")  # [groups, N]
        zeros = self._read_zeros(reader, prefix, packing, scales)
        check_same_shape(prefix, codes, scales, zeros)
        group_size = rows_a_group(prefix, codes.shape[0], scales.shape[0], packing.group_size)
        order = None if g_idx is None else order_of_rows(prefix, g_idx, scales.shape[0], group_size)
        return QuantizedTensors(
            prefix,
            packing.bits,
            group_size,
            codes if order is None else codes[order],
            scales,
            -zeros.float() * scales.float(),
            order,
            read_bias(reader, prefix),
        )

    def _read_zeros(
        self, reader: CheckpointReader, prefix: str, packing: _Packing, scales: torch.Tensor
    ) -> torch.Tensor:
        """uint8 [groups, N]"""
        middle = 1 << (packing.bits - 1)
        if packing.is_symmetric and not reader.has(f"{prefix}.qzeros"):
            return torch.full_like(scales, middle, dtype=torch.uint8)
        zeros = self._true_zeros(reader.get(f"{prefix}.qzeros"), packing.bits)[:, : scales.shape[1]]
        if packing.is_symmetric:
            self._check_middle(prefix, zeros, middle)
        return zeros

    def _true_zeros(self, words: torch.Tensor, bits: int) -> torch.Tensor:
        """int32 [groups, words] as stored -> uint8 [groups, fields], v1's lowering by 1 undone as it was done.

        Field by field, where adding 0x11111111 to the word would carry over from a stored 15. But GPTQModel lowers
        whole words, so that a zero of 0 borrows from its neighbour: only the whole word's sum gives both back.
        """
        if self._zero_shift and self._is_borrowed and 32 % bits == 0:
            return unpack_fields(words + sum(1 << shift for shift in range(0, 32, bits)), bits, dim=1)
        return (unpack_fields(words, bits, dim=1) + self._zero_shift) & ((1 << bits) - 1)

    def _check_middle(self, prefix: str, zeros: torch.Tensor, middle: int) -> None:
        """A symmetric file has one zero everywhere. If it is beside the middle, the file is of the other version."""
        beside = middle + (1 if self._zero_shift else -1)
        if bool((zeros == beside).all()):
            said, other = ("gptq", "gptq_v2") if self._zero_shift else ("gptq_v2", "gptq")
            raise BadCheckpoint(
                f"`{prefix}`: every zero point is {beside}; in a symmetric checkpoint of format {said} it is {middle}. "
                f'Its tensors look like {other}: set "checkpoint_format": "{other}" in its quantization_config.'
            )


def _read_codes(reader: CheckpointReader, prefix: str, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """codes uint8 [K, N], and g_idx [K] if the module has one."""
    qweight = reader.get(f"{prefix}.qweight")
    g_idx = reader.get(f"{prefix}.g_idx") if reader.has(f"{prefix}.g_idx") else None
    if g_idx is None or not g_idx.numel():
        return unpack_fields(qweight, bits, dim=0), None
    num_inputs = g_idx.shape[0]
    if qweight.shape[0] != words_of(num_inputs, bits):
        raise BadCheckpoint(
            f"`{prefix}`: qweight has {qweight.shape[0]} rows; {num_inputs} inputs (g_idx) of {bits} bits "
            f"take {words_of(num_inputs, bits)}."
        )
    return unpack_fields(qweight, bits, dim=0)[:num_inputs], g_idx


class _Overrides:
    """`dynamic`: a regular expression over module names -> other numbers for those modules.

    GPTQModel's rule: keys that begin with "-:" leave a module as it was and go first; of the others ("+:" or nothing
    before the expression) the first match counts. Whether a module is quantised we see from its tensors, so the
    first kind says nothing new.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        dynamic = config.get("dynamic") or {}
        self._rules: list[tuple[re.Pattern[str], dict[str, Any]]] = [
            (_compiled(key.removeprefix("+:")), changes) for key, changes in dynamic.items() if key[:2] != "-:"
        ]

    def check(self) -> None:
        """Raises UnsupportedModel for numbers that no module may have."""
        _packing(self._config)
        for rule, changes in self._rules:
            _packing({**self._config, **changes}, f" (dynamic {rule.pattern!r})")

    def packing_of(self, prefix: str) -> _Packing:
        matching = (changes for rule, changes in self._rules if rule.match(prefix))
        return _packing({**self._config, **next(matching, {})})


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise BadCheckpoint(f"quantization_config: dynamic {pattern!r} is no regular expression ({error}).") from error


def _packing(config: Mapping[str, Any], where: str = "") -> _Packing:
    bits, group_size = config.get("bits"), config.get("group_size", 128)
    if bits not in _BITS:
        raise UnsupportedModel(f"GPTQ with bits={bits}{where} is not supported; 2, 3, 4 and 8 are.")
    return _Packing(bits, int(group_size), bool(config.get("sym", True)))
