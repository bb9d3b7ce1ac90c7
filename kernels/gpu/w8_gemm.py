"""x [M, K] times an int8 weight, to fp32: the head, which is read whole for each token, a byte a weight.

A program owns a tile of outputs and all of K, so no sum is shared: there are a thousand tiles and more. The weights are
the row operand of the matrix unit; codes become 16-bit numbers without rounding, and the scale comes on the fp32 sums.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.w8 import W8Weight


class Config(NamedTuple):
    """Rows of x and outputs of a tile, depth of a step, warps, steps whose loads are under way."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


# By rows, the quickest on an H200 of those that fit an RTX 3090's shared memory; more rows take several tiles.
_CONFIGS = (
    Config(8, 64, 128, 4, 4),
    Config(16, 128, 128, 4, 3),
    Config(32, 64, 128, 4, 4),
    Config(64, 128, 128, 8, 3),
    Config(128, 128, 64, 8, 3),
)


def w8_linear(x: torch.Tensor, weight: W8Weight) -> torch.Tensor:
    """See `ops.w8_linear`."""
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.float32, device=x.device)
    if x.shape[0]:
        launch(choose(x.shape[0]), x.contiguous(), weight, out)
    return out


def choose(num_rows: int) -> Config:
    return next((config for config in _CONFIGS if num_rows <= config.bm), _CONFIGS[-1])


def launch(config: Config, x: torch.Tensor, weight: W8Weight, out: torch.Tensor) -> None:
    num_rows, num_outputs = out.shape
    tiles = triton.cdiv(num_rows, config.bm) * triton.cdiv(num_outputs, config.bn)
    _w8_gemm[(tiles,)](
        x,
        weight.codes,
        weight.scales,
        out,
        num_rows,
        num_outputs,
        num_warps=config.warps,
        num_stages=config.stages,
        **_tile(config, weight.num_inputs),
    )


def _tile(config: Config, num_inputs: int) -> dict[str, int]:
    return {"K": num_inputs, "BM": config.bm, "BN": config.bn, "BK": config.bk}


@triton.jit(do_not_specialize=["num_rows"])
def _w8_gemm(
    x_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    # Tiles that share weights come one after another, and find them in the L2.
    row_tiles = tl.cdiv(num_rows, BM)
    tile = tl.program_id(0)
    row = ((tile % row_tiles) * BM + tl.arange(0, BM))[None, :]
    output = (tile // row_tiles) * BN + tl.arange(0, BN)
    is_row = row < num_rows
    is_output = output < num_outputs
    k = tl.arange(0, BK)
    x_at = x_ptr + row.to(tl.int64) * K + k[:, None]
    # Outputs past the last read its weights again: a mask would keep the copies from being 16 bytes wide.
    codes_at = codes_ptr + tl.minimum(output, num_outputs - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, K, BK):
        if K % BK:
            is_k = k < K - start
            codes = tl.load(codes_at + start, mask=is_k[None, :], other=0)
            x = tl.load(x_at + start, mask=is_row & is_k[:, None], other=0.0)
        else:
            codes = tl.load(codes_at + start)
            x = tl.load(x_at + start, mask=is_row, other=0.0)
        acc = tl.dot(codes.to(x.dtype), x, acc, input_precision="ieee")
    acc *= tl.load(scales_ptr + output, mask=is_output, other=0.0)[:, None]
    tl.store(out_ptr + row.to(tl.int64) * num_outputs + output[:, None], acc, mask=is_row & is_output[:, None])


def aot_cases() -> Iterable[AotCase]:
    for config in _CONFIGS:
        for dtype in ("fp16", "bf16"):
            types = {"x_ptr": f"*{dtype}", "codes_ptr": "*i8", "scales_ptr": "*fp32", "out_ptr": "*fp32"}
            yield AotCase(
                name=f"w8 {config.bm} {dtype}",
                kernel=_w8_gemm,
                types=types | {"num_rows": "i32", "num_outputs": "i32"},
                constants=_tile(config, 4096),
                num_warps=config.warps,
                num_stages=config.stages,
                multiples_of_16=frozenset({"num_outputs"}),
            )
