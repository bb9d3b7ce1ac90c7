"""An 8-bit weight: the head of a model whose other weights have 4 bits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 128  # inputs that share a scale: also a step of the kernel
_HALF = GROUP // 2
_ROWS = 16384  # quantised at once, in fp32: 268 MB at 4,096 inputs


@dataclass(frozen=True, slots=True)
class W8Weight:
    """y[n] = sum over groups g of scales[g, n] * sum over the group's k of x[k] * code[n, k]; codes are -127 to 127.

    pairs   int16 [N, groups * 64]: the lower byte of (n, 64g + i) is 128 + the code of k = 128g + i, the higher one
            that of k = 128g + 64 + i. Two slabs of inputs thus meet a tile's bytes without a move. Past K codes are 0
    scales  fp32 [groups, N]: the largest magnitude of a group's weights / 127
    num_inputs  K
    """

    pairs: torch.Tensor
    scales: torch.Tensor
    num_inputs: int

    @property
    def num_outputs(self) -> int:
        return self.pairs.shape[0]

    @property
    def num_bytes(self) -> int:
        return 2 * self.pairs.numel() + 4 * self.scales.numel()

    @property
    def codes(self) -> torch.Tensor:
        """int8 [N, K]"""
        slabs = self.pairs.view(torch.uint8).view(self.num_outputs, -1, _HALF, 2).transpose(2, 3)
        return (slabs.flatten(1) ^ 128).view(torch.int8)[:, : self.num_inputs]

    def dequantize(self) -> torch.Tensor:
        """fp32 [N, K]"""
        return self.codes * self.scales.T.repeat_interleave(GROUP, dim=1)[:, : self.num_inputs]


def quantize_w8(weight: torch.Tensor) -> W8Weight:
    """weight [N, K] of any float type, each group by itself, to the nearest code; a group of zeros has scale 0."""
    (num_outputs, num_inputs), device = weight.shape, weight.device
    groups = -(-num_inputs // GROUP)
    pairs = torch.empty(num_outputs, groups * _HALF, dtype=torch.int16, device=device)
    scales = torch.empty(groups, num_outputs, dtype=torch.float32, device=device)
    for first in range(0, num_outputs, _ROWS):
        rows = slice(first, first + _ROWS)
        pairs[rows], scales[:, rows] = _quantize(weight[rows].float(), groups)
    return W8Weight(pairs, scales, num_inputs)


def _quantize(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of fp32 [rows, K]: pairs int16 [rows, groups * 64] and scales [groups, rows]."""
    wide = F.pad(weight, (0, groups * GROUP - weight.shape[1])).unflatten(1, (groups, GROUP))
    scales = wide.abs().amax(dim=2) / 127
    divisor = torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    codes = (wide / divisor).round().clamp_(-127, 127).to(torch.int8).view(torch.uint8) ^ 128
    slabs = codes.unflatten(2, (2, _HALF)).transpose(2, 3).contiguous()  # [rows, groups, 64, 2]
    return slabs.view(torch.int16).flatten(1), scales.T
