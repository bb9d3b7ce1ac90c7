"""The int8 head beside cuBLAS on 16-bit weights: `python -m kernels.bench --op head`, on a card."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kernels import ops
from kernels.gpu.beside import compared, header, line
from kernels.w8 import GROUP, W8Weight, quantize_w8

__all__ = ["header", "line", "rows"]  # what a bench of one op has

SHAPES, ROWS = ((4096, 128_256), (4096, 151_936)), (1, 8, 16, 32, 64, 128)  # K, N: Llama 3.1 8B, Qwen3 8B
_RING = 2  # of 500 MB and more: no cache holds a part of it


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    """Against the product with what the codes stand for; scales are powers of two, so 16 bits hold it exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        for k, n in SHAPES:
            dense = torch.randint(-127, 128, (n, k), device="cuda", dtype=torch.int8).to(dtype) * 2.0**-10
            dense[:, ::GROUP] = 127 * 2.0**-10
            weight = quantize_w8(dense)
            for count in ROWS:
                x = torch.randn(count, k, device="cuda", dtype=dtype)
                yield compared(
                    "head",
                    f"{k}x{n} {str(dtype).removeprefix('torch.')}",
                    count,
                    partial(_ours, x, weight),
                    partial(_cublas, x, dense),
                    tolerance=1e-2,
                    num_bytes=weight.num_bytes,
                    gb_per_s=gb_per_s,
                    ring=_RING,
                )


def _ours(x: torch.Tensor, weight: W8Weight, i: int) -> torch.Tensor:
    return ops.w8_linear(x, weight)


def _cublas(x: torch.Tensor, dense: torch.Tensor, i: int) -> torch.Tensor:
    return torch.mm(x, dense.T)
