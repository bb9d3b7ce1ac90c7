"""The residual's sum and its norm beside torch's operations: `python -m kernels.bench --op norm`, on a card."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kernels import ops, reference
from kernels.gpu.beside import compared, header, line
from kernels.gpu.timing import ring_size

__all__ = ["header", "line", "rows"]  # what a bench of one op has

WIDTHS, ROWS = (4096, 5120), (1, 8, 32, 128, 2048)


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    for width in WIDTHS:
        weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
        for count in ROWS:
            num_bytes = 4 * count * width * 2
            ring = min(ring_size(num_bytes), 256)
            x, residual = (torch.randn(ring, count, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            yield compared(
                "norm",
                f"{width}",
                count,
                partial(_normed, ops.add_rms_norm, x, residual, weight),
                partial(_normed, reference.add_rms_norm, x, residual.clone(), weight),
                tolerance=1e-2,
                num_bytes=num_bytes,
                gb_per_s=gb_per_s,
                ring=ring,
            )


def _normed(
    op: Callable[..., torch.Tensor], x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, i: int
) -> torch.Tensor:
    return op(x[i], residual[i], weight, 1e-5)
