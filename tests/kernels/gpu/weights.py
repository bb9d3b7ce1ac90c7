"""Random 4-bit weights as a checkpoint gives them, and what they mean."""

from dataclasses import dataclass

import torch

from tests.kernels.gpu.where import DEVICE


@dataclass(frozen=True)
class Numbers:
    """As `ops.pack_weight` takes them."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    group: int

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.offsets

    def dense(self) -> torch.Tensor:
        """fp32 [N, K], each weight from its own group, spelled out."""
        group_of = torch.arange(self.codes.shape[0], device=self.codes.device) // self.group
        zeros = (-self.offsets / self.scales.float()).round()
        return ((self.codes.float() - zeros[group_of]) * self.scales.float()[group_of]).T


def numbers(
    k: int, n: int, group: int, has_zeros: bool, seed: int = 0, scales_dtype: torch.dtype = torch.float16
) -> Numbers:
    """Scales of both signs; with zeros, of 0 to 16."""
    on = {"generator": torch.Generator(DEVICE).manual_seed(seed), "device": DEVICE}
    num_groups = -(-k // group)
    codes = torch.randint(0, 16, (k, n), dtype=torch.uint8, **on)
    signs = torch.randint(0, 2, (num_groups, n), **on) * 2 - 1
    scales = ((torch.rand(num_groups, n, **on) + 0.1) * 0.01 * signs).to(scales_dtype)
    zeros = torch.full((num_groups, n), 8.0, device=DEVICE)
    if has_zeros:
        zeros = torch.randint(0, 17, (num_groups, n), **on).float()
        zeros[0, 0] = 3  # not by chance all 8
    return Numbers(codes, scales, -zeros * scales.float(), group)
