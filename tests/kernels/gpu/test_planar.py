"""The planar form holds a weight's numbers exactly, wherever groups and tails fall."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gpu.planar import can_hold, pack_planar, pair_halves
from tests.kernels.gpu.weights import Numbers, numbers
from tests.kernels.gpu.where import DEVICE


@settings(max_examples=40, deadline=None)
@given(
    group=st.sampled_from([16, 32, 48, 64, 96, 128, 576]),
    num_groups=st.integers(1, 5),
    tail=st.integers(0, 15),
    n=st.integers(1, 300),
    has_zeros=st.booleans(),
    scales_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_packing_loses_nothing(group, num_groups, tail, n, has_zeros, scales_dtype, seed) -> None:
    """The last group may be short."""
    given = numbers(group * num_groups - tail, n, group, has_zeros, seed, scales_dtype)
    weight = pack_planar(*given.parts, group)
    assert torch.equal(weight.dequantize(torch.float32), given.dense())
    assert weight.has_zeros == has_zeros


@pytest.mark.parametrize("k", [1, 63, 129, 257])
def test_one_group_for_all_may_have_any_length(k: int) -> None:
    given = numbers(k, 40, k, has_zeros=True)
    assert torch.equal(pack_planar(*given.parts, k).dequantize(torch.float32), given.dense())


def test_codes_lie_in_planes() -> None:
    """Bits 4j of (s, n, q) are the code of k = (4s + j) * Q + q, as the kernels read them."""
    given = numbers(512, 3, 128, has_zeros=False)
    weight = pack_planar(*given.parts, 128)
    assert weight.depth == 64
    for s, j, q, n in [(0, 0, 0, 0), (0, 3, 63, 2), (1, 1, 5, 1), (1, 2, 62, 0)]:
        nibble = (int(weight.codes[s, n, q]) >> 4 * j) & 15
        assert nibble == given.codes[(4 * s + j) * 64 + q, n]


def test_zeros_rounded_to_16_bits_are_taken_for_the_whole_numbers_that_they_are() -> None:
    """As llm-awq stores them: scale * zero in fp16."""
    given = numbers(256, 64, 128, has_zeros=True)
    rounded = Numbers(given.codes, given.scales, given.offsets.half().float(), 128)
    assert not torch.equal(rounded.offsets, given.offsets)
    assert torch.equal(pack_planar(*rounded.parts, 128).dequantize(torch.float32), given.dense())


@pytest.mark.parametrize(
    ("group", "zero", "is_held"),
    [(128, 7.0, True), (128, 7.05, False), (128, -1.0, False), (128, 128.0, False), (8, 7.0, False)],
)
def test_what_has_no_planar_form_is_refused(group: int, zero: float, is_held: bool) -> None:
    given = numbers(256, 8, group, has_zeros=False)
    offsets = given.offsets.clone()
    offsets[0, 3] = -zero * float(given.scales[0, 3])
    assert can_hold(group, given.scales, offsets, torch.float16) == is_held
    if not is_held:
        with pytest.raises(ValueError, match="no planar form"):
            pack_planar(given.codes, given.scales, offsets, group)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_offsets_rounded_to_16_bits_still_tell_their_zeros_to_arithmetic_that_rounds_as_much(
    dtype: torch.dtype,
) -> None:
    """Of every zero under 4,096 scales of the type. fp32 sees the difference: there the stored numbers count."""
    scales = (torch.rand(1, 4096, device=DEVICE) * 0.1 + 0.001).to(dtype)
    zeros = torch.arange(4096, device=DEVICE) % 17
    offsets = (-zeros * scales.float()).to(dtype).float()
    assert can_hold(64, scales, offsets, dtype)
    assert not can_hold(64, scales, offsets, torch.float32)
    assert can_hold(64, scales, -zeros * scales.float(), torch.float32)
    codes = torch.zeros(64, 4096, dtype=torch.uint8, device=DEVICE)
    weight = pack_planar(codes, scales, offsets, 64, dtype)
    assert torch.equal(weight.dequantize(torch.float32)[:, 0], -zeros * scales[0].float())


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    given = numbers(256, 8, 128, has_zeros=False)
    with pytest.raises(ValueError, match=r"codes \(256, 8\) with scales \(1, 8\)"):
        pack_planar(given.codes, given.scales[:1], given.offsets[:1], 128)


def test_a_group_without_scale_has_no_weights() -> None:
    given = numbers(256, 8, 128, has_zeros=False)
    given.scales[1, 2] = given.offsets[1, 2] = 0
    assert not pack_planar(*given.parts, 128).dequantize(torch.float32)[2, 128:].any()


@pytest.mark.parametrize("n", [16, 48, 304])
def test_pairs_are_eight_gates_and_their_ups_by_turns(n: int) -> None:
    weight = pack_planar(*numbers(200, n, 64, has_zeros=True).parts, 64)
    pairs = pair_halves(weight)
    assert pairs is not None and pairs.planar.num_outputs == n
    gates, ups = weight.dequantize(torch.float32).chunk(2)
    rows = [half[i : i + 8] for i in range(0, n // 2, 8) for half in (gates, ups)]
    assert torch.equal(pairs.planar.dequantize(torch.float32), torch.cat(rows))


def test_halves_that_are_no_eights_are_not_paired() -> None:
    assert pair_halves(pack_planar(*numbers(64, 24, 64, has_zeros=False).parts, 64)) is None
