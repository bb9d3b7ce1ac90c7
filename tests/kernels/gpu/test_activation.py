"""Gated activations and the embedding against the reference."""

import pytest
import torch

from kernels import reference
from kernels.gpu import activation, embedding
from tests.kernels.gpu.where import DEVICE, DTYPES, error_of, random, steps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [17, 1024, 1536])
@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activation_is_the_references(op: str, dtype: torch.dtype, width: int) -> None:
    gate_up = 3 * random(3, 2 * width, dtype=dtype)
    ours, theirs = getattr(activation, op)(gate_up), getattr(reference, op)(gate_up)
    assert ours.dtype is dtype
    assert error_of(ours, theirs) <= steps(dtype, 12)


@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh_mul"])
def test_gates_far_out_are_nothing_or_themselves(op: str) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 200.0, 6e4], device=DEVICE)
    ours = getattr(activation, op)(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))
    torch.testing.assert_close(ours[0], gate.clamp(min=0.0), atol=1e-30, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 55.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_embedding_has_the_references_bits(stored: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    table, ids = random(11, 1100, dtype=stored), torch.tensor([0, 10, 3, 3], device=DEVICE)
    assert torch.equal(embedding.embed(ids, table, scale, dtype), reference.embed(ids, table, scale, dtype))
