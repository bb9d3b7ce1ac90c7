"""Root-mean-square norm with the residual added first, for few rows of fp32."""

import numpy as np
import torch
from numba import float32

from kernels.cpu.compile import F32_1D, F32_2D, kernel
from kernels.cpu.recording import call, empty


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`; x [tokens, hidden] contiguous."""
    normed = empty(*x.shape)
    call(_rms_norm, x, weight, eps, normed)
    return normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.add_rms_norm`."""
    normed = empty(*residual.shape)
    call(_add_rms_norm, x, residual, weight, eps, normed)
    return normed


@kernel(F32_1D, F32_1D, float32, F32_1D)
def _norm_row(x, weight, eps, normed):
    squares = float32(0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    factor = float32(1) / np.sqrt(squares / float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        normed[i] = x[i] * factor * weight[i]


@kernel(F32_2D, F32_1D, float32, F32_2D)
def _rms_norm(x, weight, eps, normed):
    for t in range(x.shape[0]):
        _norm_row(x[t], weight, eps, normed[t])


@kernel(F32_2D, F32_2D, F32_1D, float32, F32_2D)
def _add_rms_norm(x, residual, weight, eps, normed):
    for t in range(x.shape[0]):
        row, added = residual[t], x[t]
        for i in range(x.shape[1]):
            row[i] += added[i]
        _norm_row(row, weight, eps, normed[t])
