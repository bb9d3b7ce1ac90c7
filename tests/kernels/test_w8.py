"""int8 weights: rounding, scales and the order of bytes."""

import pytest
import torch

from kernels import reference
from kernels.w8 import GROUP, quantize_w8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_inputs", [33, 128, 300])
def test_each_group_is_rounded_by_its_own_largest_weight(dtype: torch.dtype, num_inputs: int) -> None:
    weight = torch.randn(50, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight *= torch.logspace(-3, 2, 50).unsqueeze(1).to(dtype)
    held = quantize_w8(weight)
    assert held.codes.shape == weight.shape and held.num_inputs == num_inputs
    groups = zip(
        weight.float().split(GROUP, 1), held.codes.split(GROUP, 1), held.dequantize().split(GROUP, 1), strict=True
    )
    for exact, codes, close in groups:
        largest = exact.abs().amax(dim=1)
        assert torch.equal(codes.abs().amax(dim=1), torch.full((50,), 127, dtype=torch.int8))
        assert bool(((close - exact).abs().amax(dim=1) <= largest / 127 / 2 * 1.0001).all())


def test_a_group_of_zeros_stays_zeros() -> None:
    weight = torch.zeros(2, 2 * GROUP)
    weight[:, GROUP:] = 1.0
    held = quantize_w8(weight)
    assert torch.equal(held.dequantize(), weight)


def test_a_pair_holds_the_codes_of_two_slabs_and_zeros_past_the_last_input() -> None:
    weight = torch.zeros(1, GROUP + 3)
    weight[0, 0], weight[0, 64], weight[0, 65], weight[0, GROUP + 2] = 127.0, -127.0, 5.0, 1.0
    pairs = quantize_w8(weight).pairs[0].to(torch.int32) & 0xFFFF
    bytes_of = [(int(pair) & 255, int(pair) >> 8) for pair in pairs]
    assert len(bytes_of) == GROUP
    assert bytes_of[:3] == [(255, 1), (128, 133), (128, 128)]
    assert bytes_of[64:68] == [(128, 128), (128, 128), (255, 128), (128, 128)]


def test_outputs_are_quantised_alike_in_pieces_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 150, generator=torch.Generator().manual_seed(1))
    whole = quantize_w8(weight)
    monkeypatch.setattr("kernels.w8._ROWS", 7)
    pieces = quantize_w8(weight)
    assert torch.equal(whole.pairs, pieces.pairs) and torch.equal(whole.scales, pieces.scales)


def test_the_reference_multiplies_by_what_is_held() -> None:
    weight = quantize_w8(torch.randn(50, 150, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(3, 150, generator=torch.Generator().manual_seed(2))
    dense = weight.codes.double()
    for k in range(150):
        dense[:, k] *= weight.scales[k // GROUP]
    torch.testing.assert_close(reference.w8_linear(x, weight).double(), x.double() @ dense.T, rtol=1e-5, atol=1e-5)
