"""An 8-bit weight: the head of a model whose other weights have 4 bits."""

from dataclasses import dataclass

import torch

_ROWS = 16384  # quantised at once, in fp32: 268 MB at 4,096 inputs


@dataclass(frozen=True, slots=True)
class W8Weight:
    """y[n] = scales[n] * sum over k of x[k] * codes[n, k]

    codes   int8 [N, K] of -127..127
    scales  fp32 [N]: the largest magnitude of each output's weights / 127
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()


def quantize_w8(weight: torch.Tensor) -> W8Weight:
    """weight [N, K] of any float type, each output by itself, to the nearest code; an output of zeros has scale 0."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for rows, rows_codes, rows_scales in zip(*(t.split(_ROWS) for t in (weight, codes, scales)), strict=True):
        wide = rows.float()
        rows_scales.copy_(wide.abs().amax(dim=1) / 127)
        divisor = torch.where(rows_scales > 0, rows_scales, 1.0).unsqueeze(1)
        rows_codes.copy_((wide / divisor).round().clamp_(-127, 127))
    return W8Weight(codes, scales)
