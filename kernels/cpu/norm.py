"""Root-mean-square norm alone and with the residual added first."""

import numpy as np
import torch
from numba import float32, int64, prange

from kernels.cpu.compile import F32_1D, F32_2D, kernel
from kernels.cpu.recording import call, call_parallel, empty
from kernels.cpu.tasks import take

_ROWS = 16  # of one task: a few rows are not worth waking a second thread


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`; x [tokens, hidden] contiguous."""
    normed = empty(*x.shape)
    call(_rms_norm, x, weight, eps, normed)
    return normed


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.add_rms_norm`."""
    normed = empty(*residual.shape)
    arrays = (x, residual, weight, eps, normed)
    call(_few_sums, *arrays) if x.shape[0] <= _ROWS else call_parallel(_many_sums, *arrays)
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
def _few_sums(x, residual, weight, eps, normed):
    for t in range(x.shape[0]):
        row, added = residual[t], x[t]
        for i in range(x.shape[1]):
            row[i] += added[i]
        _norm_row(row, weight, eps, normed[t])


@kernel(F32_2D, F32_2D, F32_1D, float32, F32_2D, int64)
def _task(x, residual, weight, eps, normed, task):
    first, end = task * _ROWS, (task + 1) * _ROWS
    _few_sums(x[first:end], residual[first:end], weight, eps, normed[first:end])


@kernel(F32_2D, F32_2D, F32_1D, float32, F32_2D, int64, parallel=True)
def _many_sums(x, residual, weight, eps, normed, num_threads):
    num_tasks, counter = (x.shape[0] + _ROWS - 1) // _ROWS, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _task(x, residual, weight, eps, normed, task)
            task = take(counter)
