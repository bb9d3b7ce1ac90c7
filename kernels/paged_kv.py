"""The paged KV cache of one layer, as the kernels are given it, and the bytes that it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

Shape = tuple[int, int, int, int]

# A sequence with so many new tokens or fewer (decode, drafts to be checked) is short: on a card its keys are split.
SHORT_QUERIES = 16


@dataclass(frozen=True, slots=True)
class PagedKV:
    """
    keys, values  [blocks, kv_heads, block_size, head_dim] fp32 | fp16 | bf16, or int8 codes. Keys may lie with the
                  tokens of a block side by side, dimension after dimension: see `empty_paged_kv`
    key_scales, value_scales  [blocks, kv_heads, block_size] fp16 of int8 codes, one a token and head; else None
    counters      int32 at least [sequences * query heads], zeros between kernels: what the blocks of a launch count
                  each other by. One for all layers, as one stream runs them one after another; None on a CPU
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    counters: torch.Tensor | None = None

    @property
    def is_int8(self) -> bool:
        return self.key_scales is not None

    @property
    def is_by_dimension(self) -> bool:
        return self.keys.mT.is_contiguous()

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]


def empty_paged_kv(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    counters: torch.Tensor | None = None,
    empty: Callable[[Shape, torch.dtype], torch.Tensor] | None = None,
    *,
    by_dimension: bool = False,
) -> PagedKV:
    """Uninitialised: shape [blocks, kv_heads, block_size, head_dim], with scales where dtype is int8.

    empty         finds the memory for keys and values, if it is not torch that is to
    by_dimension  keys lie as [blocks, kv_heads, head_dim, block_size], which the CPU kernels ask for: a vector of 16
                  keys' numbers is read as it is, for as many scores at once
    """
    if empty is None:
        empty = partial(_empty, device=device)
    values = empty(shape, dtype)
    keys = empty((*shape[:2], shape[3], shape[2]), dtype).mT if by_dimension else empty(shape, dtype)
    if dtype is not torch.int8:
        return PagedKV(keys, values, counters=counters)
    key_scales, value_scales = (torch.empty(shape[:3], dtype=torch.float16, device=device) for _ in range(2))
    return PagedKV(keys, values, key_scales, value_scales, counters)


def by_dimension(keys: torch.Tensor) -> torch.Tensor:
    """A copy of the same keys that lies as the CPU kernels ask."""
    return keys.mT.contiguous().mT


def _empty(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
