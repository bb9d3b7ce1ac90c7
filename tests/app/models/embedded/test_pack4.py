"""Packing against plain readers written from the formats' descriptions (unpack.py)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.embedded import pack4
from tests.app.models.embedded import unpack

shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))


def random_codes(num_rows: int, num_columns: int, seed: int) -> pack4.Codes:
    return np.random.default_rng(seed).integers(0, 16, (num_rows, num_columns), np.uint8)


@given(shapes)
@settings(max_examples=20, deadline=None)
def test_gptq_weights_are_packed_along_k_and_zeros_along_n_one_too_small(shape: tuple[int, int, int]) -> None:
    codes = random_codes(8 * shape[0], 32 * shape[1], shape[2])
    zeros = random_codes(8 * shape[0], shape[1], shape[2] ^ 1)
    arrays = {
        "m.qweight": pack4.pack_gptq_weight(codes),
        "m.qzeros": pack4.pack_gptq_zeros(zeros),
        "m.scales": np.ones((shape[1], 8 * shape[0]), np.float16),
        "m.g_idx": np.arange(32 * shape[1], dtype=np.int32) // 32,
    }
    assert arrays["m.qweight"].dtype == arrays["m.qzeros"].dtype == np.int32
    # A zero of 0 is stored as 15 and read back as 16 & 15 = 0: the loader adds one modulo 16.
    expected = codes.astype(np.float32) - zeros.repeat(32, axis=1)
    np.testing.assert_array_equal(unpack.gptq(arrays, "m"), expected)


def test_symmetric_gptq_zeros_are_the_word_that_loaders_look_for() -> None:
    words = pack4.pack_gptq_zeros(np.full((16, 3), 8, np.uint8))
    assert words.shape == (3, 2)
    assert set(words.ravel().tolist()) == {0x77777777}


@given(shapes)
@settings(max_examples=20, deadline=None)
def test_awq_gemm_packs_codes_and_zeros_along_n_in_its_own_order(shape: tuple[int, int, int]) -> None:
    codes = random_codes(8 * shape[0], 32 * shape[1], shape[2])
    zeros = random_codes(8 * shape[0], shape[1], shape[2] ^ 1)
    arrays = {
        "m.qweight": pack4.pack_awq_gemm(codes),
        "m.qzeros": pack4.pack_awq_gemm(zeros),
        "m.scales": np.ones((shape[1], 8 * shape[0]), np.float16),
    }
    expected = codes.astype(np.float32) - zeros.repeat(32, axis=1)
    np.testing.assert_array_equal(unpack.awq_gemm(arrays, "m", 32), expected)


@given(shapes)
@settings(max_examples=20, deadline=None)
def test_gemv_fast_puts_each_code_where_the_format_says(shape: tuple[int, int, int]) -> None:
    codes = random_codes(4 * shape[0], 64 * shape[1], shape[2])
    packed = pack4.pack_awq_gemv_fast(codes)
    assert packed.dtype == np.int16
    assert packed.shape == (shape[0], 64 * shape[1])
    n, k = np.ogrid[: codes.shape[0], : codes.shape[1]]
    np.testing.assert_array_equal(unpack.gemv_fast_code(packed, n, k), codes)
    np.testing.assert_array_equal(pack4.unpack_awq_gemv_fast(packed), codes)


@pytest.mark.parametrize(
    ("num_columns", "group_size", "rows"),
    [(576, 32, 32), (1536, 32, 64), (576, 64, 16), (1024, 128, 8), (4096, 128, 32)],
)
def test_gemv_fast_scales_are_padded_as_autoawq_pads_them(num_columns: int, group_size: int, rows: int) -> None:
    # ZW = ceil(ceil(K / G / 8) / m) * m words of eight, m = 1 (G >= 128), 2 (64), 4 (32)
    assert pack4.gemv_fast_scale_rows(num_columns, group_size) == rows
