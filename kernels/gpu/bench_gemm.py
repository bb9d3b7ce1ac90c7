"""The 4-bit product beside its reference, cuBLAS on dense fp16 weights and torch's own 4-bit product (tinygemm), at
Llama-3.1-8B's shapes: `python -m kernels.bench --op gemm`, on a card.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kernels import ops, reference
from kernels.gpu.planar import PlanarWeight, pack_planar
from kernels.gpu.timing import graph_us, ring_size

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # K, N: qkv, o, gate and up, down
ROWS = (1, 8, 16, 32, 64, 128, 256, 2048)
_GROUP = 128
_TOLERANCE = 1e-3  # relative Frobenius error of an fp16 product with fp32 sums
_TIMES_TORCH = 8  # largest error of an element, in errors that the dense fp16 product makes itself
_TINYGEMM_ROWS = 64  # past these it takes milliseconds


def rows(gb_per_s: float) -> Iterator[dict[str, Any]]:
    """One for each shape and number of rows. Raises SystemExit before the speed of a wrong result."""
    for k, n in SHAPES:
        weights = [_random_weight(k, n, seed) for seed in range(ring_size(k * n // 2))]
        dense = [reference.dequantize_w4(weight, torch.float16) for weight in weights[: ring_size(k * n * 2)]]
        tiny = [_random_tinygemm(k, n) for _ in weights]
        for num_rows in ROWS:
            x = torch.randn(num_rows, k, device="cuda", dtype=torch.float16)
            error = _checked(x, weights[0], dense[0])
            times = _times(x, weights, dense, tiny if num_rows <= _TINYGEMM_ROWS else [])
            share = weights[0].num_bytes / times["ours_us"] / 1e3 / gb_per_s
            ratio = times["cublas_us"] / times["ours_us"]
            sizes = {"op": "gemm", "k": k, "n": n, "rows": num_rows}
            yield {**sizes, **times, "cublas_over_ours": ratio, "error": error, "of_read": share}


def header() -> str:
    names = ("ours us", "reference", "cuBLAS", "tinygemm", "cuBLAS/ours", "of read")
    return f"{'K x N':<14}{'rows':>6}" + "".join(f"{name:>12}" for name in names)


def line(row: dict[str, Any]) -> str:
    times = [row.get(f"{name}_us") for name in ("ours", "reference", "cublas", "tinygemm")]
    shown = "".join(f"{'-' if time is None else f'{time:.1f}':>12}" for time in times)
    shape = f"{row['k']}x{row['n']}"
    return f"{shape:<14}{row['rows']:>6}{shown}{row['cublas_over_ours']:>12.2f}{row['of_read']:>12.0%}"


def _random_weight(k: int, n: int, seed: int) -> PlanarWeight:
    generator = torch.Generator("cuda").manual_seed(seed)
    codes = torch.randint(0, 16, (k, n), generator=generator, dtype=torch.uint8, device="cuda")
    scales = (torch.rand(k // _GROUP, n, generator=generator, device="cuda") * 0.01 + 0.001).half()
    return pack_planar(codes, scales, -8 * scales.float(), _GROUP)


def _random_tinygemm(k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    return packed, torch.rand(k // _GROUP, n, 2, device="cuda", dtype=torch.bfloat16)


def _checked(x: torch.Tensor, weight: PlanarWeight, dense: torch.Tensor) -> float:
    """The relative error of our product. Raises SystemExit if it, or that of any element, is too large."""
    exact = x.double() @ reference.dequantize_w4(weight, torch.float64).T
    ours, theirs = ((y.double() - exact).abs() for y in (ops.w4_linear(x, weight), x @ dense.T))
    error = float(ours.norm() / exact.norm())
    largest = float(ours.max() / theirs.max())
    if not (error <= _TOLERANCE and largest <= _TIMES_TORCH):
        raise SystemExit(
            f"gemm {weight.num_inputs}x{weight.num_outputs} with {x.shape[0]} rows is off by {error:.1e}, an element "
            f"by {largest:.1f} times the dense product's error; no figures until that is mended."
        )
    return error


def _times(
    x: torch.Tensor,
    weights: list[PlanarWeight],
    dense: list[torch.Tensor],
    tiny: list[tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, float]:
    times = {
        "ours_us": graph_us(lambda i: ops.w4_linear(x, weights[i]), len(weights)),
        "reference_us": graph_us(lambda i: reference.w4_linear(x, weights[i]), 2),
        "cublas_us": graph_us(lambda i: torch.mm(x, dense[i].T), len(dense)),
    }
    if tiny:
        product, wide = torch.ops.aten._weight_int4pack_mm, x.bfloat16()
        times["tinygemm_us"] = graph_us(lambda i: product(wide, tiny[i][0], _GROUP, tiny[i][1]), len(tiny))
    return times
