"""AWQ checkpoints (AutoAWQ), 4 bits: the GEMM layout that nearly all files have, and GEMV_FAST (llm-awq).

GEMM:       qweight int32 [K, N / 8]; nibble i of word c is column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
            qzeros int32 [K / G, N / 8] in the same order, the true zero; scales fp16 [K / G, N]
            W = (q - zero) * scale
GEMV_FAST:  qweight int16 [N / 4, K], see `_codes_of_gemv_fast`; scales fp16 [>= K / G, N], rows past K / G are padding
            qzeros fp16, same shape, already -scale * zero:  W = q * scale + qzeros
Source: AutoAWQ, awq/modules/linear/gemm.py and gemv_fast.py.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.base import QuantizedTensors, read_bias
from engine.quant.bits import unpack_fields
from engine.weights.reader import CheckpointReader

_GEMM_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


class AwqFormat:
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is quantization_config. Raises UnsupportedModel for what we do not read."""
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise UnsupportedModel(f"AWQ with bits={bits} is not supported; 4-bit checkpoints are.")
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if config.get("backend") == "llm-awq" or version in ("gemv_fast", "llm-awq"):
            self._read_weights = self._read_gemv_fast
        elif version == "gemm":
            self._read_weights = self._read_gemm
        else:
            raise UnsupportedModel(f"AWQ version={version!r} is not supported; gemm and gemv_fast are.")
        self._group_size = int(config.get("group_size", config.get("q_group_size", 128)))

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        return reader.has(f"{prefix}.qweight")

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        codes, scales, offsets = self._read_weights(reader, prefix)
        if scales.shape != offsets.shape or scales.shape[1] != codes.shape[1] or codes.shape[0] % scales.shape[0]:
            raise BadCheckpoint(
                f"`{prefix}`: qweight holds {tuple(codes.shape)} weights, scales are {tuple(scales.shape)}, "
                f"zeros {tuple(offsets.shape)}; they do not belong together."
            )
        return QuantizedTensors(codes, scales, offsets, None, read_bias(reader, prefix))

    def _read_gemm(self, reader: CheckpointReader, prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes = _natural_columns(unpack_fields(reader.get(f"{prefix}.qweight"), 4, dim=1))
        scales = reader.get(f"{prefix}.scales").float()
        if not reader.has(f"{prefix}.qzeros"):  # zero_point = false
            return codes, scales, -8.0 * scales
        zeros = _natural_columns(unpack_fields(reader.get(f"{prefix}.qzeros"), 4, dim=1))
        return codes, scales, -zeros.float() * scales if zeros.shape == scales.shape else zeros.float()

    def _read_gemv_fast(self, reader: CheckpointReader, prefix: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qweight = reader.get(f"{prefix}.qweight")
        num_groups = 1 if self._group_size == -1 else -(-qweight.shape[1] // self._group_size)
        scales, offsets = (reader.get(f"{prefix}.{part}").float()[:num_groups] for part in ("scales", "qzeros"))
        return _codes_of_gemv_fast(prefix, qweight), scales, offsets


def _natural_columns(fields: torch.Tensor) -> torch.Tensor:
    """[rows, N] in nibble order -> [rows, N] in column order."""
    nibble_of_column = torch.argsort(torch.tensor(_GEMM_COLUMN_OF_NIBBLE))
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
    shifts = torch.tensor([0, 4, 8, 12], dtype=torch.int16)
    nibbles = ((qweight.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)  # [N / 4, K, 4]
    by_row = nibbles.view(rows_of_four, num_inputs // 64, 4, 64).transpose(1, 2).reshape(-1, num_inputs // 8, 2, 4)
    in_pairs = by_row.transpose(2, 3).reshape(-1, num_inputs // 32, 4, 4, 2)  # evens before odds undone
    return in_pairs.transpose(2, 3).reshape(-1, num_inputs).T.contiguous()
