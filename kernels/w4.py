"""A 4-bit weight as the kernels hold it: one layout for every checkpoint format, packed once at load."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

TILE_N = 64  # outputs that lie side by side: one tile is a contiguous stream along K for one core


@dataclass(frozen=True)
class W4Weight:
    """y[n] = sum over k of x[k] * (code[k, n] * scale[k // group, n] + offset[k // group, n]).

    All that a tile of 64 outputs needs lies together, in the order in which one core reads it; N is padded with zeros
    to whole tiles.

    packed   uint8 [tiles, K / 2, 64]: byte (t, i, j) holds code[2i, 64t + j] low and code[2i + 1, 64t + j] high
    terms    [tiles, K / group, 2, 64]: scale, sign kept, and offset = -zero * scale of each group. In fp16 where all
             are fp16 numbers, else fp32: of a group of 32 they are 20 or 33 % of the bytes
    num_outputs  N before padding

    A scale and an offset, instead of a scale and an integer zero point, hold every format without loss: GPTQ and
    AWQ (their product fits fp32 exactly) and llm-awq's scaled zeros, which are fp16 numbers of their own.
    """

    packed: torch.Tensor
    terms: torch.Tensor
    num_outputs: int

    @property
    def scales(self) -> torch.Tensor:
        """fp32 [tiles, K / group, 64]"""
        return self.terms[:, :, 0].float()

    @property
    def offsets(self) -> torch.Tensor:
        """fp32 [tiles, K / group, 64]"""
        return self.terms[:, :, 1].float()

    @cached_property
    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """packed, and terms [tiles, 2 * K / group, 64] as fp32 or as the bits of fp16, as numpy sees them (CPU only).

        Made once, since a layer's product takes 50 us.
        """
        terms = self.terms.flatten(1, 2)
        return self.packed.numpy(), (terms.view(torch.uint16) if terms.dtype is torch.float16 else terms).numpy()

    @cached_property
    def num_inputs(self) -> int:
        return self.packed.shape[1] * 2

    @cached_property
    def num_padded(self) -> int:
        """Outputs in whole tiles."""
        return self.packed.shape[0] * TILE_N

    @cached_property
    def group_size(self) -> int:
        return self.num_inputs // self.terms.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.packed, self.terms))

    def codes(self) -> torch.Tensor:
        """uint8 [K, N padded]"""
        pairs = torch.stack((self.packed & 15, self.packed >> 4), dim=2)  # [tiles, K / 2, 2, 64]
        return _join_tiles(pairs.flatten(1, 2))


def _split_tiles(rows: torch.Tensor) -> torch.Tensor:
    """[rows, N] -> [tiles, rows, 64], padded with zeros"""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % TILE_N))
    return padded.unflatten(1, (-1, TILE_N)).transpose(0, 1).contiguous()


def _join_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """[tiles, rows, 64] -> [rows, N padded]"""
    return tiles.transpose(0, 1).flatten(1)


def pack_w4(codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> W4Weight:
    """codes uint8 [K, N] of 0..15, K even; scales, offsets [K / group, N].

    Raises ValueError when the shapes do not belong together.
    """
    k, n = codes.shape
    if k % 2 or scales.shape != offsets.shape or scales.shape[1] != n or k % scales.shape[0]:
        raise ValueError(
            f"codes {tuple(codes.shape)} with scales {tuple(scales.shape)}, offsets {tuple(offsets.shape)}"
        )
    pairs = _split_tiles(codes).unflatten(1, (-1, 2))
    packed = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    terms = torch.stack([_split_tiles(part.float()) for part in (scales, offsets)], dim=2)
    return W4Weight(packed, _narrowed(terms), n)


def _narrowed(numbers: torch.Tensor) -> torch.Tensor:
    """fp32 -> fp16 if no number changes by that."""
    narrow = numbers.half()
    return narrow if torch.equal(narrow.float(), numbers) else numbers
