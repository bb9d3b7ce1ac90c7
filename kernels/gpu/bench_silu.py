"""SiLU times up beside torch's operations: `python -m kernels.bench --op silu`, on a card."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from kernels import ops, reference
from kernels.gpu.beside import compared, header, line
from kernels.gpu.timing import ring_size

__all__ = ["header", "line", "rows"]  # what a bench of one op has

WIDTH, ROWS = 14336, (1, 8, 32, 128, 2048)


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    for count in ROWS:
        num_bytes = 3 * count * WIDTH * 2
        ring = min(ring_size(num_bytes), 256)
        gate_up = torch.randn(ring, count, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
        yield compared(
            "silu",
            f"{WIDTH}",
            count,
            partial(_product, ops.silu_mul, gate_up),
            partial(_product, reference.silu_mul, gate_up),
            tolerance=1e-2,
            num_bytes=num_bytes,
            gb_per_s=gb_per_s,
            ring=ring,
        )


def _product(op: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor, i: int) -> torch.Tensor:
    return op(gate_up[i])
