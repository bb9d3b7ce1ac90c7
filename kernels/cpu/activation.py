"""The middle of a gated feed-forward: the activation of the gate times the other half, in one pass."""

import numpy as np
import torch
from numba import float32, int64, prange

from kernels.cpu.compile import F32_2D, kernel
from kernels.cpu.exp import exp_of_negative
from kernels.cpu.recording import call, call_parallel, empty
from kernels.cpu.tasks import take

_ROWS = 16  # of one task: a few rows are not worth waking a second thread


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    out = empty(gate_up.shape[0], gate_up.shape[1] // 2)
    call(_one_task, gate_up, out) if gate_up.shape[0] <= _ROWS else call_parallel(_silu_mul, gate_up, out)
    return out


@kernel(F32_2D, F32_2D)
def _one_task(gate_up, out):
    width = out.shape[1]
    for t in range(out.shape[0]):
        row, result = gate_up[t], out[t]
        for i in range(width):
            gate = row[i]
            small = exp_of_negative(-abs(gate))
            share = (float32(1) if gate >= float32(0) else small) / (float32(1) + small)
            result[i] = gate * share * row[width + i]


@kernel(F32_2D, F32_2D, int64)
def _task(gate_up, out, task):
    _one_task(gate_up[task * _ROWS : (task + 1) * _ROWS], out[task * _ROWS : (task + 1) * _ROWS])


@kernel(F32_2D, F32_2D, int64, parallel=True)
def _silu_mul(gate_up, out, num_threads):
    num_tasks, counter = (out.shape[0] + _ROWS - 1) // _ROWS, np.zeros(1, np.int64)
    for _ in prange(num_threads):
        task = take(counter)
        while task < num_tasks:
            _task(gate_up, out, task)
            task = take(counter)
