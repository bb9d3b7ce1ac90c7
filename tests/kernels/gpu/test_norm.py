"""The norm in one launch against the reference's chain of operations."""

import pytest
import torch

from kernels import reference
from kernels.gpu import norm
from tests.kernels.gpu.where import DEVICE, DTYPES, error_of, random, steps

_EPS = 1e-5
WIDTHS = (63, 576, 1100)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_normed", [False, True], ids=["", "x_norm"])
@pytest.mark.parametrize("ordered", [False, True], ids=["", "order"])
def test_sum_and_norm_are_the_references(dtype: torch.dtype, width: int, ordered: bool, x_normed: bool) -> None:
    x, residual, weight = random(3, width, dtype=dtype), random(3, width, dtype=dtype, seed=1), random(width, seed=2)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(3)).to(DEVICE) if ordered else None
    x_norm = random(width, dtype=dtype, seed=4) if x_normed else None
    for weights in (weight, weight.to(dtype)):
        ours, theirs = residual.clone(), residual.clone()
        normed = norm.add_rms_norm(x, ours, weights, _EPS, order, x_norm)
        expected = reference.add_rms_norm(x, theirs, weights, _EPS, order, x_norm)
        assert normed.dtype is dtype
        assert error_of(ours, theirs) <= steps(dtype, 16 if x_normed else 0)
        assert error_of(normed, expected) <= steps(dtype, 24)  # a root that falls on the other side moves by a step


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_to_add_leaves_the_residual_as_it_is(dtype: torch.dtype) -> None:
    residual, weight = random(5, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    before = residual.clone()
    normed = norm.add_rms_norm(None, residual, weight, _EPS)
    assert torch.equal(residual, before)
    assert error_of(normed, reference.rms_norm(before, weight, _EPS)) <= steps(dtype, 12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normalised_each_by_itself_out_of_a_wider_row(dtype: torch.dtype) -> None:
    heads, weight = random(2, 7, 40, dtype=dtype), random(40, dtype=dtype, seed=1)
    some = heads.narrow(1, 2, 3)
    ours = norm.rms_norm(some, weight, _EPS)
    assert ours.shape == some.shape
    assert error_of(ours, reference.rms_norm(some, weight, _EPS)) <= steps(dtype, 12)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, residual, weight = random(9, 576), random(9, 576, seed=1), random(576, seed=2)
    together = norm.add_rms_norm(x, residual.clone(), weight, _EPS)
    for row in (0, 4, 8):
        alone = norm.add_rms_norm(x[row : row + 1], residual[row : row + 1].clone(), weight, _EPS)
        assert torch.equal(alone[0], together[row])


def test_no_rows_are_no_launch() -> None:
    empty = random(0, 64)
    assert norm.add_rms_norm(empty, empty.clone(), random(64), _EPS).shape == (0, 64)


def test_fp16_rows_whose_squares_leave_its_range_are_summed_in_fp32() -> None:
    x = torch.full((1, 256), 3e4, dtype=torch.float16, device=DEVICE)
    assert torch.equal(norm.rms_norm(x, torch.ones(256, dtype=torch.float16, device=DEVICE), _EPS), torch.ones_like(x))
