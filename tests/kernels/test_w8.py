"""int8 weights: rounding and scales."""

import pytest
import torch

from kernels import reference
from kernels.w8 import quantize_w8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_output_is_rounded_by_its_own_largest_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight *= torch.logspace(-3, 2, 50).unsqueeze(1).to(dtype)
    held = quantize_w8(weight)
    largest = weight.float().abs().amax(dim=1)
    assert torch.equal(held.codes.abs().amax(dim=1), torch.full((50,), 127, dtype=torch.int8))
    error = (held.codes.float() * held.scales.unsqueeze(1) - weight.float()).abs().amax(dim=1)
    assert bool((error <= largest / 127 / 2 * 1.0001).all())


def test_an_output_of_zeros_stays_zeros() -> None:
    held = quantize_w8(torch.zeros(2, 8))
    assert not held.codes.any() and not held.scales.any()


def test_outputs_are_quantised_alike_in_pieces_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    whole = quantize_w8(weight)
    monkeypatch.setattr("kernels.w8._ROWS", 7)
    pieces = quantize_w8(weight)
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.scales, pieces.scales)


def test_the_reference_multiplies_by_what_is_held() -> None:
    weight = quantize_w8(torch.randn(50, 16, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(2))
    dense = weight.codes.double() * weight.scales.double().unsqueeze(1)
    torch.testing.assert_close(reference.w8_linear(x, weight).double(), x.double() @ dense.T, rtol=1e-5, atol=1e-5)
