"""GPTQ checkpoints (AutoGPTQ, GPTQModel), 4 bits, v1 and v2.

For y[N] = W[N, K] x[K], module `<name>`:
    qweight  int32 [K / 8, N]        eight rows k a word, least significant first
    qzeros   int32 [K / G, N / 8]    packed along N; v1 stores zero - 1 modulo 16, v2 the zero itself
    scales   fp16  [K / G, N]        sign kept
    g_idx    int32 [K]               group of each input row; absent means k // G
    W[k, n] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])
Source: GPTQModel, nn_modules/qlinear and utils/model_dequant.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.errors import BadCheckpoint, UnsupportedModel
from engine.quant.base import QuantizedTensors, read_bias
from engine.quant.bits import unpack_fields
from engine.weights.reader import CheckpointReader


class GptqFormat:
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is quantization_config. Raises UnsupportedModel for what we do not read."""
        bits = config.get("bits")
        if bits != 4:
            raise UnsupportedModel(f"GPTQ with bits={bits} is not supported; 4-bit checkpoints are.")
        checkpoint_format = config.get("checkpoint_format") or config.get("format") or "gptq"
        if checkpoint_format not in ("gptq", "gptq_v2"):
            raise UnsupportedModel(
                f"GPTQ checkpoint_format={checkpoint_format!r} is not supported; gptq and gptq_v2 are."
            )
        self._zero_shift = 1 if checkpoint_format == "gptq" else 0

    def claims(self, reader: CheckpointReader, prefix: str) -> bool:
        return reader.has(f"{prefix}.qweight")

    def read(self, reader: CheckpointReader, prefix: str) -> QuantizedTensors:
        codes = unpack_fields(reader.get(f"{prefix}.qweight"), 4, dim=0)  # [K, N]
        scales = reader.get(f"{prefix}.scales").float()  # [groups, N]
        stored = unpack_fields(reader.get(f"{prefix}.qzeros"), 4, dim=1)[:, : codes.shape[1]]
        # Field by field: adding 0x11111111 to the packed word would carry over from a stored 15.
        zeros = (stored + self._zero_shift) & 15
        _check_shapes(prefix, codes, scales, zeros)
        codes, order = _order_by_group(reader, prefix, codes, num_groups=scales.shape[0])
        return QuantizedTensors(codes, scales, -zeros.float() * scales, order, read_bias(reader, prefix))


def _check_shapes(prefix: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    if scales.shape[1] != codes.shape[1] or zeros.shape != scales.shape:
        raise BadCheckpoint(
            f"`{prefix}`: qweight holds {tuple(codes.shape)} weights, scales are {tuple(scales.shape)}, "
            f"zeros {tuple(zeros.shape)}; they do not belong together."
        )


def _order_by_group(
    reader: CheckpointReader, prefix: str, codes: torch.Tensor, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows sorted so that each group is contiguous, and the order; None where they already are."""
    num_inputs = codes.shape[0]
    group_size = num_inputs // num_groups
    if num_inputs % num_groups:
        raise BadCheckpoint(f"`{prefix}`: {num_inputs} inputs do not divide into {num_groups} groups.")
    if not reader.has(f"{prefix}.g_idx"):
        return codes, None
    g_idx = reader.get(f"{prefix}.g_idx").long()
    if torch.equal(g_idx, torch.arange(num_inputs) // group_size):
        return codes, None
    if not torch.equal(g_idx.bincount(minlength=num_groups), torch.full((num_groups,), group_size)):
        raise BadCheckpoint(f"`{prefix}`: g_idx does not give {group_size} inputs to each of {num_groups} groups.")
    order = torch.argsort(g_idx, stable=True)
    return codes[order], order
