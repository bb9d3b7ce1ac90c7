"""Root-mean-square norm with the residual added first, for few rows of fp32."""

import numpy as np
import torch
from numba import float32

from kernels.cpu.compile import F32_1D, F32_2D, kernel


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.add_rms_norm`."""
    normed = torch.empty_like(residual)
    _add_rms_norm(x.numpy(), residual.numpy(), weight.numpy(), eps, normed.numpy())
    return normed


@kernel(F32_2D, F32_2D, F32_1D, float32, F32_2D)
def _add_rms_norm(x, residual, weight, eps, normed):
    width = x.shape[1]
    for t in range(x.shape[0]):
        row, added, out = residual[t], x[t], normed[t]
        squares = float32(0)
        for i in range(width):
            row[i] += added[i]
            squares += row[i] * row[i]
        factor = float32(1) / np.sqrt(squares / float32(width) + eps)
        for i in range(width):
            out[i] = row[i] * factor * weight[i]
