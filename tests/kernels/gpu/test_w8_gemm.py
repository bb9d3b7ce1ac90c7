"""Products of int8 weights against the reference and fp64."""

from functools import partial
from itertools import product

import pytest
import torch

from kernels import reference
from kernels.gpu import w8_gemm
from kernels.w8 import quantize_w8
from tests.kernels.gpu.compiled import compile_side_by_side
from tests.kernels.gpu.where import DEVICE, DTYPES, ON_CARD, random

# Relative to the largest: fp32 sums of 16-bit products are exact to 1e-6, torch's fp32 products on a card to 1e-3 (TF32
# is off by default; the reference multiplies in fp32).
_TOLERANCE = 1e-4
SHAPES = [(576, 200), (97, 65), (256, 128), *([(4096, 32_000), (3584, 152_064), (5120, 151_936)] if ON_CARD else [])]
_FEW, _ALL = (1, 31), (1, 7, 9, 31, 63, *((64, 65, 129) if ON_CARD else (65,)))
CASES = [(rows, dtype) for dtype in DTYPES for rows in (_FEW if dtype is torch.float32 else _ALL)]


def _multiply(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    num_inputs, num_outputs = shape
    weight = quantize_w8(torch.zeros(num_outputs, num_inputs, dtype=torch.float16, device=DEVICE))
    w8_gemm.w8_linear(torch.zeros(num_rows, num_inputs, dtype=dtype, device=DEVICE), weight)


@pytest.fixture(scope="module")
def shapes_compiled() -> None:
    compile_side_by_side([partial(_multiply, shape, *case) for shape, case in product(SHAPES, CASES)])


@pytest.mark.usefixtures("shapes_compiled")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_the_codes(shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    weight = quantize_w8(random(num_outputs, num_inputs, seed=1))
    dense = weight.dequantize().double().T
    for num_rows, dtype in CASES:
        x = random(num_rows, num_inputs, dtype=dtype, seed=2)
        ours, exact = w8_gemm.w8_linear(x, weight), x.double() @ dense
        assert ours.dtype is torch.float32
        for result in (ours, reference.w8_linear(x, weight)):
            assert float((result - exact).abs().max() / exact.abs().max()) <= _TOLERANCE


def test_a_row_has_the_same_bits_whatever_else_its_tile_holds() -> None:
    weight, x = quantize_w8(random(130, 96, seed=1)), random(8, 96, dtype=torch.float16, seed=2)
    together = w8_gemm.w8_linear(x, weight)
    assert torch.equal(w8_gemm.w8_linear(x[3:4], weight)[0], together[3])


def test_rows_past_the_last_do_not_leak_into_it() -> None:
    """What lies behind x and behind the codes is no number."""
    x = torch.full((16, 96), torch.nan, dtype=torch.float16, device=DEVICE)
    x[:5] = random(5, 96, dtype=torch.float16)
    weight = quantize_w8(random(70, 96, seed=1))
    assert bool(w8_gemm.w8_linear(x[:5], weight).isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_a_captured_product_has_the_bits_of_a_launch_100_times(num_rows: int) -> None:
    weight, x = quantize_w8(random(32_000, 4096, seed=1)), random(num_rows, 4096, dtype=torch.bfloat16, seed=2)
    expected = w8_gemm.w8_linear(x, weight).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = w8_gemm.w8_linear(x, weight)
    for _ in range(100):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)
