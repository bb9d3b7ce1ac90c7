"""Kernels that are compiled before they are launched: ready, and nothing was launched for it."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from kernels import reference
from kernels.gpu import norm
from kernels.gpu.ahead import compile_ahead


def _nothing() -> None:
    pass


@pytest.mark.gpu
def test_kernels_are_ready_and_nothing_was_launched() -> None:
    x = torch.randn(5, 1000, dtype=torch.bfloat16, device="cuda")
    residual, weight = torch.randn_like(x), torch.randn(1000, dtype=torch.bfloat16, device="cuda")
    kept = residual.clone()

    def work() -> torch.Tensor:
        return norm.add_rms_norm(x, residual, weight, 1e-3)

    assert compile_ahead(work, _nothing, 2)() == 1
    assert torch.equal(residual, kept)
    assert compile_ahead(work, work, 2)() == 0
    assert torch.equal(work(), reference.add_rms_norm(x, kept, weight, 1e-3))
    assert torch.equal(residual, kept)


def test_a_fault_leaves_launches_as_they_were() -> None:
    run = JITFunction.run
    with pytest.raises(ZeroDivisionError):
        compile_ahead(lambda: 1 // 0, _nothing, 2)
    assert JITFunction.run is run
