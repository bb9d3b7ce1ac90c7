"""AWQ checkpoints (AutoAWQ, llm-awq), 4 bits. Which of three layouts a module has is seen from its tensors.

GEMM:       qweight int32 [K, N / 8]; nibble i of word c is column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
            qzeros int32 [K / G, N / 8] in the same order, the true zero; scales fp16 [K / G, N]
            W = (q - zero) * scale; without qzeros (zero_point = false) the zero is 8
GEMV:       qweight int32 [N, K / 8] and qzeros int32 [N, width], in natural order along K and the groups
            scales fp16 [N, 8 * width], columns past K / G are padding; W as above
GEMV_FAST:  qweight int16 [N / 4, K], see `_codes_of_gemv_fast`; scales fp16 [>= K / G, N], rows past K / G are padding
            qzeros (llm-awq: scaled_zeros) fp16, same shape, already -scale * zero:  W = q * scale + qzeros
Source: AutoAWQ, awq/modules/linear/gemm.py, gemv.py and gemv_fast.py.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.base import QuantizedTensors, check_same_shape, read_bias, rows_a_group
from engine.quant.bits import unpack_fields
from engine.weights.reader import CheckpointReader

_VERSIONS = ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin", "exllama", "exllamav2")  # the last three: GEMM on disk
_GEMM_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # codes uint8 [K, N], scales, offsets fp32 [groups, N]


class AwqFormat:
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is quantization_config under its current names. Raises UnsupportedModel for what we do not read."""
        if config.get("bits") != 4:
            raise UnsupportedModel(f"AWQ with bits={config.get('bits')} is not supported; 4-bit checkpoints are.")
        version = str(config.get("format") or "gemm").lower()
        if version not in _VERSIONS:
            raise UnsupportedModel(f"AWQ version={version!r} is not supported; gemm, gemv and gemv_fast are.")
        self._group_size = int(config.get("group_size", 128))

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        return reader.has(f"{prefix}.qweight")

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        codes, scales, offsets = self._read_parts(reader, prefix)
        check_same_shape(prefix, codes, scales, offsets)
        group_size = rows_a_group(prefix, codes.shape[0], scales.shape[0], self._group_size)
        return QuantizedTensors(prefix, 4, group_size, codes, scales, offsets, None, read_bias(reader, prefix))

    def _read_parts(self, reader: CheckpointReader, prefix: str) -> _Parts:
        qweight, scales = reader.get(f"{prefix}.qweight"), reader.get(f"{prefix}.scales")
        if qweight.dtype == torch.int16:
            return self._gemv_fast(reader, prefix, qweight, scales)
        if qweight.shape[1] * 8 == scales.shape[1]:
            return _gemm(reader, prefix, qweight, scales)
        if qweight.shape[0] == scales.shape[0]:
            return self._gemv(reader, prefix, qweight, scales)
        raise BadCheckpoint(
            f"`{prefix}`: qweight {tuple(qweight.shape)} and scales {tuple(scales.shape)} are of no AWQ layout."
        )

    def _groups(self, num_inputs: int) -> int:
        return 1 if self._group_size == -1 else -(-num_inputs // self._group_size)

    def _gemv(self, reader: CheckpointReader, prefix: str, qweight: torch.Tensor, scales: torch.Tensor) -> _Parts:
        codes = unpack_fields(qweight, 4, dim=1).T
        num_groups = self._groups(codes.shape[0])
        zeros = _fields(reader, f"{prefix}.qzeros")
        scales = scales.T[:num_groups]
        return codes, scales, _offsets(prefix, codes, scales, None if zeros is None else zeros.T[:num_groups])

    def _gemv_fast(self, reader: CheckpointReader, prefix: str, qweight: torch.Tensor, scales: torch.Tensor) -> _Parts:
        num_groups = self._groups(qweight.shape[1])
        name = f"{prefix}.scaled_zeros"
        offsets = reader.get(name if reader.has(name) else f"{prefix}.qzeros").float()
        return _codes_of_gemv_fast(prefix, qweight), scales[:num_groups], offsets[:num_groups]


def _gemm(reader: CheckpointReader, prefix: str, qweight: torch.Tensor, scales: torch.Tensor) -> _Parts:
    codes = _natural_columns(unpack_fields(qweight, 4, dim=1))
    zeros = _fields(reader, f"{prefix}.qzeros")
    return codes, scales, _offsets(prefix, codes, scales, None if zeros is None else _natural_columns(zeros))


def _fields(reader: CheckpointReader, name: str) -> torch.Tensor | None:
    """The 4-bit fields of a tensor packed along its rows; None where it is not there."""
    return unpack_fields(reader.get(name), 4, dim=1) if reader.has(name) else None


def _offsets(prefix: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """fp32 [groups, N]: -zero * scale; the zero is 8 where none is stored."""
    if zeros is None:
        return -8.0 * scales.float()
    check_same_shape(prefix, codes, scales, zeros)
    return -zeros.float() * scales.float()


def _natural_columns(fields: torch.Tensor) -> torch.Tensor:
    """[rows, N] in nibble order -> [rows, N] in column order."""
    nibble_of_column = torch.tensor(_GEMM_COLUMN_OF_NIBBLE, device=fields.device).argsort()
    return fields.unflatten(1, (-1, 8))[:, :, nibble_of_column].flatten(1)


def _codes_of_gemv_fast(prefix: str, qweight: torch.Tensor) -> torch.Tensor:
    """int16 [N / 4, K] -> uint8 [K, N].

    One row of words holds four rows of W. Its K words are K / 64 stretches of 64; read as four nibbles each, a stretch
    is 4 x 64 codes: 64 of the first row, then of the second, and so on. Inside a row, each 32 codes lie as
    (pair, eighth, half) of k = 8 * eighth + 2 * pair + half, and then each 8 as evens before odds.
    """
    rows_of_four, num_inputs = qweight.shape
    if num_inputs % 64:
        raise BadCheckpoint(f"`{prefix}`: gemv_fast needs inputs in multiples of 64, found {num_inputs}.")
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int16, device=qweight.device)
    nibbles = ((qweight.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)  # [N / 4, K, 4]
    by_row = nibbles.view(rows_of_four, num_inputs // 64, 4, 64).transpose(1, 2).reshape(-1, num_inputs // 8, 2, 4)
    in_pairs = by_row.transpose(2, 3).reshape(-1, num_inputs // 32, 4, 4, 2)  # evens before odds undone
    return in_pairs.transpose(2, 3).reshape(-1, num_inputs).T.contiguous()
