"""The 4-bit product against fp64 over the weight's own numbers: every form of weight, every way of computing it."""

from functools import partial
from itertools import product

import pytest
import torch

from kernels.gpu import activation as kernels_activation
from kernels.gpu import table, w4_dense, w4_gemm
from kernels.gpu.planar import PlanarWeight, pack_planar, pair_halves, paired
from kernels.gpu.table import Config
from tests.kernels.gpu.compiled import compile_side_by_side
from tests.kernels.gpu.weights import numbers
from tests.kernels.gpu.where import DEVICE, DTYPES, ON_CARD, random

# Of the sums' Frobenius norm: fp32 sums; the result's rounding to 16 bits, and that of a dense weight.
_TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
_SIXTEEN_BITS = [dtype for dtype in DTYPES if not (ON_CARD and dtype is torch.float32)]

# k, n, group: whole steps; ragged everywhere; two groups a step, one a plane; one for all; thin planes; 9 x 64
SHAPES = [(256, 70, 128), (200, 300, 128), (320, 40, 64), (160, 33, 32), (100, 20, 100), (144, 40, 48), (1152, 20, 576)]
CONFIGS = {
    "one share": Config(8, 64, 2, 3),
    "shares": Config(16, 64, 2, 3, blocks_an_sm=4),
    "scaled weights": Config(16, 64, 4, 2, scale_weights=True),
    "parts of planes": Config(16, 64, 4, 2, blocks_an_sm=2, depth=32),
}


def _weight(k: int, n: int, group: int, has_zeros: bool = True) -> PlanarWeight:
    return pack_planar(*numbers(k, n, group, has_zeros).parts, group)


def _launch(config: Config, x: torch.Tensor, weight: PlanarWeight, **addends: torch.Tensor) -> torch.Tensor:
    """Into memory that holds no numbers, beside more of it for the shares."""
    out = torch.full((x.shape[0], weight.num_outputs), torch.nan, dtype=x.dtype, device=DEVICE)
    torch.full((2**16,), torch.nan, device=DEVICE)
    w4_gemm.launch(config, x, weight, addends.get("bias"), addends.get("residual"), out)
    return out


def _exact(x: torch.Tensor, weight: PlanarWeight) -> torch.Tensor:
    return x.double() @ weight.dequantize(torch.float64).T


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def _multiply(shape: tuple[int, int, int], has_zeros: bool, config: Config, dtype: torch.dtype) -> None:
    _launch(config, random(3, shape[0], dtype=dtype), _weight(*shape, has_zeros))


def _copy(shape: tuple[int, int, int], has_zeros: bool, dtype: torch.dtype) -> None:
    w4_dense.dequantize(_weight(*shape, has_zeros), 0, shape[1], dtype)


GATED = [((256, 96, 128), "silu"), ((200, 304, 64), "gelu_tanh")]


def _multiply_gates(gated: tuple[tuple[int, int, int], str], config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """In one product, and apart."""
    shape, activation = gated
    weight = _weight(*shape)
    pairs = pair_halves(weight)
    x, bias = random(3, shape[0], dtype=torch.float16), random(shape[1], dtype=torch.float16, seed=1)
    out = torch.full((3, shape[1] // 2), torch.nan, dtype=x.dtype, device=DEVICE)
    assert pairs is not None
    w4_gemm.launch(config, x, pairs.planar, paired(bias), None, out, activation)
    return out, getattr(kernels_activation, f"{activation}_mul")(_launch(config, x, weight, bias=bias))


@pytest.fixture(scope="module")
def forms_compiled() -> None:
    products = product(SHAPES, (False, True), CONFIGS.values(), _SIXTEEN_BITS)
    copies = product(SHAPES, (False, True), DTYPES)
    gates = product(GATED, CONFIGS.values())
    launches = [(_multiply, products), (_copy, copies), (_multiply_gates, gates)]
    compile_side_by_side([partial(launch, *case) for launch, cases in launches for case in cases])


@pytest.mark.usefixtures("forms_compiled")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_the_weights_own(shape: tuple[int, int, int], has_zeros: bool, config: Config) -> None:
    weight = _weight(*shape, has_zeros)
    for dtype in _SIXTEEN_BITS:
        x = random(3, shape[0], dtype=dtype)
        assert _error(_launch(config, x, weight), _exact(x, weight)) < _TOLERANCE[dtype]
    assert not weight.counters.any()


@pytest.mark.parametrize("num_rows", [1, 8, 9, 17])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_rows_past_a_tile_go_to_the_next(config: Config, num_rows: int) -> None:
    weight = _weight(256, 130, 128)
    x = random(num_rows, 256, dtype=torch.float16)
    assert _error(_launch(config, x, weight), _exact(x, weight)) < _TOLERANCE[torch.float16]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_bias_and_residual_are_added_before_rounding(config: Config) -> None:
    weight = _weight(200, 70, 64)
    x, bias, residual = (random(*s, dtype=torch.float16, seed=i) for i, s in enumerate([(5, 200), (70,), (5, 70)]))
    bias *= 100
    ours = _launch(config, x, weight, bias=bias, residual=residual)
    exact = _exact(x, weight) + bias.double() + residual.double()
    assert float((ours.double() - exact).abs().max()) <= 2**-11 * float(exact.abs().max()) * 1.1


@pytest.mark.usefixtures("forms_compiled")
@pytest.mark.parametrize("gated", GATED, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gated_product_has_the_bits_of_the_product_and_the_activation(
    config: Config, gated: tuple[tuple[int, int, int], str]
) -> None:
    assert torch.equal(*_multiply_gates(gated, config))


def test_gates_take_the_way_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch, or by a dense weight and the activation over pairs."""
    weight = _weight(256, 96, 128)
    gated = pair_halves(weight)
    x = random(5, 256, dtype=torch.float16)
    assert gated is not None
    one = w4_gemm.w4_gated(x, gated, None, "silu")
    assert torch.equal(one, kernels_activation.silu_mul(w4_gemm.w4_linear(x, weight)))
    monkeypatch.setattr(table, "choose", lambda *arguments: None)
    dense = w4_gemm.w4_gated(x, gated, None, "silu")
    assert torch.equal(dense, kernels_activation.silu_mul(w4_dense.w4_linear(x, weight)))


def test_a_row_does_not_depend_on_its_company() -> None:
    weight = _weight(512, 70, 128)
    x = random(8, 512, dtype=torch.float16)
    together = w4_gemm.w4_linear(x, weight)
    assert torch.equal(w4_gemm.w4_linear(x[3:4], weight)[0], together[3])
    assert torch.equal(w4_gemm.w4_linear(x[2:7], weight), together[2:7])


def test_rows_of_a_wider_tensor_are_taken_where_they_lie() -> None:
    weight = _weight(256, 70, 128)
    wide = random(4, 512, dtype=torch.float16)
    for x in (wide[:, 256:], wide.T[:256, :4].T, wide[::2, :256]):
        assert _error(w4_gemm.w4_linear(x, weight), _exact(x, weight)) < _TOLERANCE[torch.float16]


def test_no_rows_give_no_rows() -> None:
    assert w4_gemm.w4_linear(random(0, 256, dtype=torch.float16), _weight(256, 70, 128)).shape == (0, 70)


@pytest.mark.usefixtures("forms_compiled")
@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dense_copy_is_the_weight_bit_for_bit(shape: tuple[int, int, int], has_zeros: bool) -> None:
    weight = _weight(*shape, has_zeros)
    for dtype in DTYPES:
        dense = w4_dense.dequantize(weight, 0, weight.num_outputs, dtype)
        assert torch.equal(dense, weight.dequantize(dtype))


def test_a_dense_copy_in_pieces_gives_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4_dense, "_SCRATCH_BYTES", 64 * 2 * 200)
    weight = _weight(200, 300, 128)
    x, bias = random(5, 200, dtype=torch.float16), random(300, dtype=torch.float16)
    ours = w4_dense.w4_linear(x, weight, bias, None)
    assert _error(ours, _exact(x, weight) + bias.double()) < _TOLERANCE[torch.float16]


@pytest.mark.parametrize(("k", "n"), [(14336, 4096), (4096, 28672), (4096, 6144), (5120, 151936), (200, 300)])
@pytest.mark.parametrize("num_rows", [300, 2048, 8192])
def test_pieces_of_a_dense_copy_are_alike_and_no_larger_than_the_scratch_or_half_of_the_result(
    k: int, n: int, num_rows: int
) -> None:
    weight = PlanarWeight.of(
        torch.empty(-(-k // 256), n, 64, dtype=torch.int16, device="meta"),
        torch.empty(-(-k // 128), n, dtype=torch.int32, device="meta"),
        has_zeros=False,
        group_size=128,
        num_inputs=k,
        num_outputs=n,
    )
    outputs = w4_dense._outputs_of_a_piece(weight, num_rows, 2)
    assert outputs * k * 2 <= max(w4_dense._SCRATCH_BYTES, num_rows * n)
    pieces = -(-n // outputs)
    assert pieces * outputs - n < 256 * pieces  # the last lacks less than a tile for each piece
    assert pieces == 1 or pieces * outputs < n + outputs


@pytest.mark.parametrize("arch", table.TABLE)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (128, 64)])
def test_shares_are_the_same_for_all_rows_of_a_bucket_and_never_empty(arch: int, n: int, k: int) -> None:
    card = table.Card(arch, 82)
    for first, last in zip((1, *(b + 1 for b in table.BUCKETS)), table.BUCKETS, strict=False):
        configs = {table.choose(card, n, k, rows) for rows in (first, last)}
        assert len(configs - {None}) <= 1
        for config in configs - {None}:
            assert 1 <= config.split(last, n, -(-k // 128), card.num_sms) <= max(1, -(-k // 128) // 2)


REAL_SHAPES = [(4096, 6144), (4096, 28672), (14336, 4096), (4096, 1024)]
REAL_ROWS = (1, 5, 16, 29, 64, 100, 256, 300, 1100)


def _multiply_zeros(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    """Of the same form as a test's weight, and made at once."""
    k, n = shape
    codes = torch.zeros(k // 256, -(-n // 256) * 256, 64, dtype=torch.int16, device=DEVICE)
    words = torch.zeros(k // 128, codes.shape[1], dtype=torch.int32, device=DEVICE)
    weight = PlanarWeight.of(codes, words, has_zeros=n == 1024, group_size=128, num_inputs=k, num_outputs=n)
    w4_gemm.w4_linear(torch.zeros(num_rows, k, dtype=dtype, device=DEVICE), weight)


@pytest.fixture(scope="module")
def buckets_compiled() -> None:
    cases = product(REAL_SHAPES, REAL_ROWS, _SIXTEEN_BITS)
    compile_side_by_side([partial(_multiply_zeros, *case) for case in cases])


@pytest.mark.gpu
@pytest.mark.usefixtures("buckets_compiled")
@pytest.mark.parametrize(("k", "n"), REAL_SHAPES)
def test_real_shapes_are_right_for_every_bucket_and_the_same_a_hundred_times(k: int, n: int) -> None:
    weight = _weight(k, n, 128, has_zeros=n == 1024)
    dense = weight.dequantize(torch.float64).T
    for num_rows, dtype in product(REAL_ROWS, _SIXTEEN_BITS):
        x = random(num_rows, k, dtype=dtype)
        first = w4_gemm.w4_linear(x, weight)
        assert _error(first, x.double() @ dense) < _TOLERANCE[dtype]
        again = torch.stack([(w4_gemm.w4_linear(x, weight) != first).any() for _ in range(100)])
        assert not again.any()


@pytest.mark.gpu
def test_a_replayed_graph_gives_what_eager_gives() -> None:
    weight = _weight(4096, 6144, 128)
    x = random(3, 4096, dtype=torch.float16)
    eager = w4_gemm.w4_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = w4_gemm.w4_linear(x, weight)
    for _ in range(3):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)
