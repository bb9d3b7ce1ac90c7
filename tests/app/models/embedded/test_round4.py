"""Rounding to four bits: never worse than the textbook way, exact where exact is possible."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from app.models.embedded.round4 import Rounded, round_asymmetric, round_symmetric

GROUP = 32


def dense(rounded: Rounded) -> NDArray[np.float32]:
    scales = rounded.scales.astype(np.float32).repeat(GROUP, axis=1)
    return (rounded.codes.astype(np.float32) - rounded.zeros.repeat(GROUP, axis=1)) * scales


def group_errors(weights: NDArray[np.float32], approximation: NDArray[np.float32]) -> NDArray[np.float32]:
    squares = (weights - approximation) ** 2
    return squares.reshape(len(weights), -1, GROUP).sum(axis=2)


def textbook_symmetric(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    groups = weights.reshape(len(weights), -1, GROUP)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 7
    return (np.clip(np.rint(groups / scales), -8, 7) * scales).reshape(weights.shape)


def textbook_asymmetric(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    groups = weights.reshape(len(weights), -1, GROUP)
    low, high = np.minimum(groups.min(2, keepdims=True), 0), np.maximum(groups.max(2, keepdims=True), 0)
    scales = (high - low) / 15
    zeros = np.rint(-low / scales)
    return ((np.clip(np.rint(groups / scales) + zeros, 0, 15) - zeros) * scales).reshape(weights.shape)


# Squared error measured on these weights: 0.70 and 0.92 of the textbook's.
@pytest.mark.parametrize(
    ("round_it", "textbook", "gain"),
    [(round_symmetric, textbook_symmetric, 0.75), (round_asymmetric, textbook_asymmetric, 0.94)],
)
def test_search_beats_the_full_range_on_bell_shaped_weights(
    round_it: Callable[[NDArray[np.float32], int], Rounded],
    textbook: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    gain: float,
) -> None:
    weights = np.random.default_rng(3).normal(0, 0.1, (64, 256)).astype(np.float32)
    ours = group_errors(weights, dense(round_it(weights, GROUP)))
    theirs = group_errors(weights, textbook(weights))
    assert ours.sum() < gain * theirs.sum()
    assert (ours <= theirs * 1.001).all(), "our scales are fp16, the textbook's fp32: no more than that may be lost"


@pytest.mark.parametrize("sign", [1, -1])
def test_symmetric_weights_on_a_grid_come_back_exactly_also_with_a_negative_scale(sign: int) -> None:
    steps = np.random.default_rng(5).integers(-8, 8, (8, 2 * GROUP))
    steps[:, ::GROUP] = -8
    weights = (steps * sign * 0.125).astype(np.float32)
    rounded = round_symmetric(weights, GROUP)
    np.testing.assert_array_equal(dense(rounded), weights)
    assert (np.sign(rounded.scales) == sign).all()


def test_asymmetric_weights_on_a_grid_come_back_exactly() -> None:
    random = np.random.default_rng(5)
    codes = random.integers(0, 16, (8, 2, GROUP))
    codes[..., 0], codes[..., 1] = 0, 15
    zeros = random.integers(0, 16, (8, 2, 1))
    weights = ((codes - zeros) * 0.125).reshape(8, 2 * GROUP).astype(np.float32)
    rounded = round_asymmetric(weights, GROUP)
    np.testing.assert_array_equal(dense(rounded), weights)
    np.testing.assert_array_equal(rounded.zeros, zeros[..., 0])


@pytest.mark.parametrize("round_it", [round_symmetric, round_asymmetric])
@pytest.mark.parametrize("value", [0.0, 0.5, -0.5])
def test_a_constant_group_is_kept(round_it: Callable[[NDArray[np.float32], int], Rounded], value: float) -> None:
    weights = np.full((4, GROUP), value, np.float32)
    # relative 2^-11: half a step of the fp16 scale
    np.testing.assert_allclose(dense(round_it(weights, GROUP)), weights, rtol=2**-11)
