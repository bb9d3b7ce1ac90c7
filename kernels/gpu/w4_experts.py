"""The products of a mixture's experts over rows grouped by expert, in one launch for all of them.

A block owns a tile of outputs for a tile of rows that one expert takes, all of K. Which expert that is, and whether a
tile is used at all, is read on the card (`moe.py`), so nothing waits for it and the grid depends on shapes alone.
"""

from collections.abc import Callable, Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu import moe
from kernels.gpu.cases import AotCase, WeightLoop
from kernels.gpu.launch import Launchable
from kernels.gpu.moe import Grouping
from kernels.gpu.planar import PLANES, StackedWeights
from kernels.gpu.sizes import cdiv
from kernels.gpu.w4_tile import add_step, finish, load_slabs

_ROW_TILES = (8, 16, 32, 64)
_TILE_N, _WARPS, _STAGES = 64, 4, 3
_SCALED_FROM = 64  # rows of a tile from which the weights are scaled, not the sums: the registers hold no second sum


def mixture(
    x: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gate_up: StackedWeights,
    down: StackedWeights,
    gated: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """See `ops.w4_mixture`; `gated` is the activation's function."""
    num_chosen, num_experts = chosen.shape[1], gate_up.codes.shape[0]
    grouping = moe.group_by_expert(chosen, num_experts, row_tile(chosen.numel(), num_experts))
    inside = gated(product(x, gate_up, grouping, num_chosen, chosen.numel()))  # the product's memory is free again
    return moe.add_up(product(inside, down, grouping, 1, chosen.numel()), shares)


def row_tile(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile for so many pairs: about what an expert gets, so that few tiles have few rows."""
    wanted = -(-num_pairs // num_experts)
    return next((tile for tile in _ROW_TILES if wanted <= tile), _ROW_TILES[-1])


def product(
    x: torch.Tensor, weights: StackedWeights, grouping: Grouping, pairs_a_row: int, num_pairs: int
) -> torch.Tensor:
    """Row p // pairs_a_row of x times the weight of pair p's expert -> [pairs, N]."""
    one = weights.one
    out = torch.empty(num_pairs, one.num_outputs, dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    _w4_experts[(cdiv(one.num_outputs, _TILE_N), grouping.experts.numel())](
        x,
        weights.codes,
        weights.words,
        grouping.pairs,
        grouping.experts,
        out,
        num_pairs,
        one.num_outputs,
        one.num_padded,
        one.num_inputs,
        x.stride(0),
        one.num_steps,
        one.words.shape[0],
        pairs_a_row,
        WHOLE_K=one.num_inputs == one.num_steps * PLANES * one.depth,
        PORTABLE=not x.is_cuda or x.dtype is torch.float32,
        **_constants(grouping.tile, one.depth, one.planes_a_group, one.has_zeros),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


def _constants(tile: int, depth: int, planes_a_group: int, has_zeros: bool) -> dict[str, int | bool]:
    sizes = {"BM": tile, "BN": _TILE_N, "Q": depth, "GROUP": planes_a_group, "STAGES": _STAGES}
    return sizes | {"SCALE_WEIGHTS": tile >= _SCALED_FROM, "HAS_ZEROS": has_zeros}


@Launchable
@triton.jit(do_not_specialize=["num_pairs", "num_steps", "num_groups", "pairs_a_row"])
def _w4_experts(
    x,
    codes,
    words,
    pairs,
    experts,
    out,
    num_pairs,
    num_outputs,
    num_padded,
    num_inputs,
    x_stride,
    num_steps,
    num_groups,
    pairs_a_row,
    BM: tl.constexpr,
    BN: tl.constexpr,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    PORTABLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tile_id = tl.program_id(1)
    expert = tl.load(experts + row_tile_id).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs + row_tile_id * BM + tl.arange(0, BM))[None, :]
        is_row = pair >= 0
        first_output = tl.program_id(0) * BN
        outputs = first_output + tl.arange(0, BN)
        q = tl.arange(0, Q)
        x_at = x + (tl.where(is_row, pair, 0) // pairs_a_row).to(tl.int64) * x_stride + q[:, None]
        codes_at = codes + expert * num_steps * num_padded * Q + outputs[:, None] * Q + q[None, :]
        words_at = words + expert * num_groups * num_padded + outputs
        acc = tl.zeros((BN, BM), tl.float32)
        for step in tl.range(0, num_steps, num_stages=STAGES):
            packed = tl.load(codes_at)
            k = step * (4 * Q) + q[:, None]
            x0, x1, x2, x3 = load_slabs(x_at, is_row, k, num_inputs, Q, WHOLE_K)
            acc = add_step(
                acc, packed, x0, x1, x2, x3, words_at, step * 4, num_padded, GROUP, SCALE_WEIGHTS, HAS_ZEROS, PORTABLE
            )
            codes_at += num_padded * Q
            x_at += 4 * Q
        rows = tl.where(is_row, pair, num_pairs)
        finish(acc, rows, first_output, None, None, out, num_pairs, num_outputs, False, False, None)


def aot_cases() -> Iterable[AotCase]:
    """Every tile of rows, as Mixtral and Qwen3-MoE need them."""
    for tile in _ROW_TILES:
        for dtype, has_zeros in (("fp16", False), ("bf16", True))[: 2 if tile == _ROW_TILES[0] else 1]:
            sizes = ("num_outputs", "num_padded", "num_inputs", "x_stride")
            types = {"x": f"*{dtype}", "out": f"*{dtype}", "codes": "*i16", "words": "*i32"}
            types |= {"pairs": "*i32", "experts": "*i32"}
            types |= dict.fromkeys((*sizes, "num_pairs", "num_steps", "num_groups", "pairs_a_row"), "i32")
            yield AotCase(
                f"w4 experts {dtype} tiles of {tile} rows, {'zeros' if has_zeros else 'symmetric'}",
                _w4_experts.kernel,
                types,
                _constants(tile, 64, 2, has_zeros) | {"WHOLE_K": True, "PORTABLE": False},
                _WARPS,
                _STAGES,
                frozenset(sizes),
                weight_loop=WeightLoop(256 / (tile / 8), 5.0),
            )
