"""x [M, K] times an int8 weight, to fp32: the head, which is read whole for each token, a byte a weight.

A program owns a tile of outputs and all of K, so no sum is shared: there are a thousand tiles and more. The weights are
the row operand of the matrix unit; two codes lie in an int16, become 16-bit numbers without rounding, and a group's
scale comes on its fp32 sums.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import ARCHS, AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv
from kernels.gpu.table import card_of
from kernels.w8 import GROUP, W8Weight


class Config(NamedTuple):
    """Rows of x and outputs of a tile, warps, groups whose loads are under way."""

    bm: int
    bn: int
    warps: int
    stages: int


# By rows, the quickest on an H200 of those that fit an RTX 3090's shared memory; more rows take several tiles.
_SM90 = (
    Config(8, 64, 2, 3),
    Config(16, 64, 4, 3),
    Config(32, 128, 4, 3),
    Config(64, 128, 8, 3),
    Config(128, 128, 8, 3),
)
_SM80 = (*_SM90[:-1], Config(128, 128, 8, 2))  # and later ones before sm_90: with 3 sm_80 spills bf16

# $2 holds two int16, each with the bytes 128 + code of two slabs of inputs. A byte becomes the low mantissa bits of a
# number whose exponent makes one of them one unit: in fp16 that is 1152 + code. bf16 has room for 7 bits: the 8th goes
# by itself to a number that is 128 where it is set and 256 where not, and comes off.
_FP16 = tl.constexpr("""
{
.reg .b32 z;
mov.b32 z, 0x64806480;
lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea;
prmt.b32 $1, $2, 0x64646464, 0x4341;
sub.f16x2 $0, $0, z;
sub.f16x2 $1, $1, z;
}
""")
_BF16 = tl.constexpr("""
{
.reg .b32 h, y, z, m;
mov.b32 m, 0xbf80bf80;
lop3.b32 y, $2, 0x007f007f, 0x43004300, 0xea;
lop3.b32 z, $2, 0x00800080, 0x43804380, 0x6a;
shr.u32 h, $2, 8;
fma.rn.bf16x2 $0, z, m, y;
lop3.b32 y, h, 0x007f007f, 0x43004300, 0xea;
lop3.b32 z, h, 0x00800080, 0x43804380, 0x6a;
fma.rn.bf16x2 $1, z, m, y;
}
""")


def w8_linear(x: torch.Tensor, weight: W8Weight) -> torch.Tensor:
    """See `ops.w8_linear`."""
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.float32, device=x.device)
    if x.shape[0]:
        launch(choose(card_of(x.device).arch, x.shape[0]), x.contiguous(), weight, out)
    return out


def choose(arch: int, num_rows: int) -> Config:
    configs = _SM90 if arch >= 90 else _SM80
    return next((config for config in configs if num_rows <= config.bm), configs[-1])


def launch(config: Config, x: torch.Tensor, weight: W8Weight, out: torch.Tensor) -> None:
    num_rows, num_outputs = out.shape
    tiles = cdiv(num_rows, config.bm) * cdiv(num_outputs, config.bn)
    _w8_gemm[(tiles,)](
        x,
        weight.pairs,
        weight.scales,
        out,
        num_rows,
        num_outputs,
        PORTABLE=not x.is_cuda or x.dtype is torch.float32,
        num_warps=config.warps,
        **_tile(config, weight.num_inputs),
    )


def _tile(config: Config, num_inputs: int) -> dict[str, int]:
    return {"K": num_inputs, "BM": config.bm, "BN": config.bn, "GROUP": GROUP, "num_stages": config.stages}


@Launchable
@triton.jit(do_not_specialize=["num_rows"])
def _w8_gemm(
    x_ptr,
    pairs_ptr,
    scales_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    HALF: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    # Tiles that share weights come one after another, and find them in the L2.
    row_tiles = tl.cdiv(num_rows, BM)
    tile = tl.program_id(0)
    row = ((tile % row_tiles) * BM + tl.arange(0, BM))[None, :]
    output = (tile // row_tiles) * BN + tl.arange(0, BN)
    is_row = row < num_rows
    is_output = output < num_outputs
    # Outputs past the last read its weights again: a mask would keep the copies from being 16 bytes wide.
    held = tl.minimum(output, num_outputs - 1)
    i = tl.arange(0, HALF)
    x_at = x_ptr + row.to(tl.int64) * K + i[:, None]
    pairs_at = pairs_ptr + held.to(tl.int64)[:, None] * (GROUPS * HALF) + i[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for group in tl.range(0, GROUPS):
        pairs = tl.load(pairs_at + group * HALF)
        scale = tl.load(scales_ptr + group * num_outputs + held)
        start = group * GROUP
        if K % GROUP:
            k = start + i[:, None]
            low = tl.load(x_at + start, mask=is_row & (k < K), other=0.0)
            high = tl.load(x_at + start + HALF, mask=is_row & (k + HALF < K), other=0.0)
        else:
            low = tl.load(x_at + start, mask=is_row, other=0.0)
            high = tl.load(x_at + start + HALF, mask=is_row, other=0.0)
        w_low, w_high = _unpack(pairs, x_ptr.dtype.element_ty, PORTABLE)
        part = tl.dot(w_low, low, input_precision="ieee")
        acc += tl.dot(w_high, high, part, input_precision="ieee") * scale[:, None]
    tl.store(out_ptr + row.to(tl.int64) * num_outputs + output[:, None], acc, mask=is_row & is_output[:, None])


@triton.jit
def _unpack(pairs, DTYPE: tl.constexpr, PORTABLE: tl.constexpr):
    """int16 -> the codes of the lower and of the higher bytes, in DTYPE."""
    if PORTABLE:
        wide = pairs.to(tl.int32)
        low = ((wide & 255) - 128).to(DTYPE)
        high = (((wide >> 8) & 255) - 128).to(DTYPE)
    elif tl.float16 == DTYPE:
        low, high = tl.inline_asm_elementwise(_FP16, "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2)
    else:
        low, high = tl.inline_asm_elementwise(_BF16, "=&r,=&r,r", [pairs], (tl.bfloat16, tl.bfloat16), True, 2)
    return low, high


def aot_cases() -> Iterable[AotCase]:
    before = tuple(arch for arch in ARCHS if arch < 90)
    rows = [(config, (90,)) for config in _SM90] + [(config, before) for config in _SM80]
    for config, archs in rows:
        for dtype in ("fp16", "bf16"):
            types = {"x_ptr": f"*{dtype}", "pairs_ptr": "*i16", "scales_ptr": "*fp32", "out_ptr": "*fp32"}
            constants = _tile(config, 4096) | {"PORTABLE": False}
            yield AotCase(
                name=f"w8 {config.bm} {dtype}",
                kernel=_w8_gemm.kernel,
                types=types | {"num_rows": "i32", "num_outputs": "i32"},
                num_stages=constants.pop("num_stages"),
                constants=constants,
                num_warps=config.warps,
                multiples_of_16=frozenset({"num_outputs"}),
                archs=archs,
            )
