"""x [M, K] times a planar 4-bit weight, in one launch a product. `table.py` has its tiles, and says from how many rows
on the weight is made dense instead (`w4_dense.py`).

A block owns a tile of outputs and rows, and a share of K. Its weights go from memory to shared memory as they lie, from
there to registers as the row operand of the matrix unit, where four nibble planes become 16-bit numbers: nothing is
shuffled, nothing is stored again. Where K is shared among blocks, the one that comes last adds all shares up in their
order. Sums are fp32; a row has the same bits each time, whatever the other rows of its bucket hold.
"""

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu import table, w4_dense
from kernels.gpu.activation import gated_pairs
from kernels.gpu.cases import AotCase, WeightLoop
from kernels.gpu.launch import Launchable
from kernels.gpu.planar import PLANES, PairedWeight, PlanarWeight
from kernels.gpu.sizes import cdiv
from kernels.gpu.table import Config
from kernels.gpu.w4_tile import add_step, finish, load_slabs

_GATED_ROWS = 64  # of a tile: with 128 the activation costs 8 us more at the end of a product than by itself
_SUMS_AHEAD = 16384  # fp32 sums that a block of 8 warps holds in registers beside its own


def w4_linear(
    x: torch.Tensor, weight: PlanarWeight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.w4_linear`. `residual` [tokens, N] is added as well."""
    num_rows = x.shape[0]
    config = choose(weight, num_rows, x.device)
    if config is None or (x.is_cuda and x.dtype is torch.float32):
        return w4_dense.w4_linear(x, weight, bias, residual)
    out = torch.empty(num_rows, weight.num_outputs, dtype=x.dtype, device=x.device)
    if num_rows:
        launch(config, x if x.stride(-1) == 1 else x.contiguous(), weight, bias, residual, out)
    return out


def w4_gated(x: torch.Tensor, weight: PairedWeight, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """See `ops.w4_gated`: the bits of the product and the activation one after the other."""
    planar, num_rows = weight.planar, x.shape[0]
    config = choose(planar, num_rows, x.device)
    if config is None or config.bm > _GATED_ROWS or (x.is_cuda and x.dtype is torch.float32):
        return gated_pairs(w4_linear(x, planar, bias), activation)
    out = torch.empty(num_rows, planar.num_outputs // 2, dtype=x.dtype, device=x.device)
    if num_rows:
        launch(config, x if x.stride(-1) == 1 else x.contiguous(), planar, bias, None, out, activation)
    return out


def choose(weight: PlanarWeight, num_rows: int, device: torch.device) -> Config | None:
    """What was measured for this weight on this card, or else the table's choice. None: the dense way."""
    config = table.choose(table.card_of(device), weight.num_outputs, weight.num_inputs, num_rows)
    return config if config is None else weight.measured.get(table.bucket_of(num_rows), config)


def launch(
    config: Config,
    x: torch.Tensor,
    weight: PlanarWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None = None,
) -> None:
    """One product in the way of `config`; everything but the last axis of x is contiguous. With an activation out has
    half of the weight's outputs, which are paired.
    """
    num_rows, num_outputs = x.shape[0], weight.num_outputs
    sizes = (num_rows, num_outputs, weight.num_padded, weight.num_inputs, x.stride(0))
    operands = (x, weight.codes, weight.words, bias, residual, out)
    constants = _constants(config, weight.depth, weight.planes_a_group, weight.has_zeros)
    constants |= {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "PORTABLE": not x.is_cuda}
    constants["ACTIVATION"] = activation
    constants["WHOLE_K"] = weight.num_inputs == weight.num_steps * PLANES * weight.depth
    bucket = table.bucket_of(num_rows)
    split = config.split(bucket, num_outputs, weight.num_steps, table.card_of(x.device).num_sms)
    steps_a_share = cdiv(weight.num_steps, split)
    split = cdiv(weight.num_steps, steps_a_share)  # so that no share is empty
    tiles = cdiv(num_rows, config.bm) * cdiv(num_outputs, config.bn)
    partials, counters = None, None
    if split > 1:
        assert tiles <= weight.counters.numel(), f"{tiles} tiles, {weight.counters.numel()} counters"
        partials = torch.empty(split * tiles * config.bm * config.bn, dtype=torch.float32, device=x.device)
        counters = weight.counters
    _w4_gemm[(tiles, split)](
        *operands, partials, counters, *sizes, steps_a_share, weight.num_steps, IS_SPLIT=split > 1, **constants
    )


def _constants(config: Config, depth: int, planes_a_group: int, has_zeros: bool) -> dict[str, Any]:
    """Those that the table and the weight's form give."""
    return {
        "BM": config.bm,
        "BN": config.bn,
        "Q": depth,
        "PART": min(depth, config.depth),
        "GROUP": planes_a_group,
        "SCALE_WEIGHTS": config.scale_weights,
        "HAS_ZEROS": has_zeros,
        "STAGES": config.stages,
        "AHEAD": min(4, max(1, _SUMS_AHEAD // (config.bm * config.bn))),
        "num_warps": config.warps_for(depth),
        "num_stages": config.stages,
    }


@Launchable
@triton.jit(do_not_specialize=["num_rows", "steps_a_share", "num_steps"])
def _w4_gemm(
    x,
    codes,
    words,
    bias,
    residual,
    out,
    partials,
    counters,
    num_rows,
    num_outputs,
    num_padded,
    num_inputs,
    x_stride,
    steps_a_share,
    num_steps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    Q: tl.constexpr,  # depth of a plane
    PART: tl.constexpr,  # of it, what a turn of the loop takes: 4 * PART of K
    GROUP: tl.constexpr,  # planes that share a scale, 0 if all do
    IS_SPLIT: tl.constexpr,  # K goes to several blocks
    SCALE_WEIGHTS: tl.constexpr,  # scale the weights, which many rows share, and not a step's sums
    HAS_ZEROS: tl.constexpr,
    WHOLE_K: tl.constexpr,  # num_inputs fills the steps
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a paired weight's two halves, or None
    PORTABLE: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # shares' sums read at once
):
    # Blocks that share weights come one after another, and find them in the L2.
    row_tiles = tl.cdiv(num_rows, BM)
    tile = tl.program_id(0)
    share = tl.program_id(1)
    rows = ((tile % row_tiles) * BM + tl.arange(0, BM))[None, :]
    first_output = (tile // row_tiles) * BN
    outputs = first_output + tl.arange(0, BN)
    first = share * steps_a_share
    end = tl.minimum(first + steps_a_share, num_steps)
    q = tl.arange(0, PART)
    is_row = rows < num_rows
    x_at = x + rows.to(tl.int64) * x_stride + q[:, None] + first * (4 * Q)
    codes_at = codes + first.to(tl.int64) * num_padded * Q + outputs[:, None] * Q + q[None, :]
    acc = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(first * (Q // PART), end * (Q // PART), num_stages=STAGES):
        step, part = turn // (Q // PART), turn % (Q // PART) * PART
        packed = tl.load(codes_at)
        k = step * (4 * Q) + part + q[:, None]
        x0, x1, x2, x3 = load_slabs(x_at, is_row, k, num_inputs, Q, WHOLE_K)
        acc = add_step(
            acc,
            packed,
            x0,
            x1,
            x2,
            x3,
            words + outputs,
            step * 4,
            num_padded,
            GROUP,
            SCALE_WEIGHTS,
            HAS_ZEROS,
            PORTABLE,
        )
        if PART == Q:
            codes_at += num_padded * Q
            x_at += 4 * Q
        else:
            is_last = part == Q - PART
            codes_at += tl.where(is_last, num_padded * Q - (Q - PART), PART)
            x_at += tl.where(is_last, 4 * Q - (Q - PART), PART)
    if IS_SPLIT:
        # A share's sums lie [BM, BN] in `partials`: [share, tile, BM, BN].
        at = partials + tile * (BM * BN) + tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        stride = tl.num_programs(0) * (BM * BN)
        num_shares = tl.num_programs(1)
        tl.store(at + share * stride, acc, mask=is_row)
        tl.debug_barrier()  # every thread's sums are written before one thread tells of them
        if tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == num_shares - 1:
            total = tl.zeros_like(acc)
            for i in tl.range(0, num_shares, AHEAD):
                for j in tl.static_range(AHEAD):
                    is_share = is_row & (i + j < num_shares)
                    total += tl.load(at + (i + j) * stride, mask=is_share, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            finish(
                total,
                rows,
                first_output,
                bias,
                residual,
                out,
                num_rows,
                num_outputs,
                HAS_BIAS,
                HAS_RESIDUAL,
                ACTIVATION,
            )
    else:
        finish(acc, rows, first_output, bias, residual, out, num_rows, num_outputs, HAS_BIAS, HAS_RESIDUAL, ACTIVATION)


def aot_cases() -> Iterable[AotCase]:
    """Every row of the table as symmetric fp16 weights in groups of 128 need it, the wide ones as a gate and an up too;
    other forms for one row of each.
    """
    for arch, rows in table.TABLE.items():
        configs = {c: bucket for bucket, row in reversed(rows.items()) for c in (row.square, row.wide, row.deep)}
        for config, bucket in reversed(configs.items()):
            yield _aot_case(arch, bucket, config, "fp16", 64, 2, False)
        gated = {row.wide: bucket for bucket, row in reversed(rows.items()) if row.wide.bm <= _GATED_ROWS}
        for config, bucket in gated.items():
            yield _aot_case(arch, bucket, config, "fp16", 64, 2, False, "silu")
        for dtype, depth, group, has_zeros in _OTHER_FORMS:
            yield _aot_case(arch, 8, rows[8].square, dtype, depth, group, has_zeros)


# dtype, depth of a plane, planes a group, zeros: bf16, zeros, groups of 64 and 32, one group, a depth of 16
_OTHER_FORMS = (
    ("bf16", 64, 2, False),
    ("bf16", 64, 2, True),
    ("fp16", 64, 2, True),
    ("fp16", 64, 1, True),
    ("fp16", 32, 1, False),
    ("fp16", 64, 0, False),
    ("fp16", 16, 9, False),
)


def _aot_case(
    arch: int,
    bucket: int,
    config: Config,
    dtype: str,
    depth: int,
    group: int,
    has_zeros: bool,
    activation: str | None = None,
) -> AotCase:
    constants = _constants(config, depth, group, has_zeros)
    constants |= {"bias": None, "residual": None, "HAS_BIAS": False, "HAS_RESIDUAL": False, "PORTABLE": False}
    constants |= {"WHOLE_K": True, "IS_SPLIT": config.blocks_an_sm > 0, "ACTIVATION": activation}
    num_warps, num_stages = constants.pop("num_warps"), constants.pop("num_stages")
    types = {"x": f"*{dtype}", "out": f"*{dtype}", "codes": "*i16", "words": "*i32"}
    types |= {"partials": "*fp32", "counters": "*i32"}
    sizes = ("num_outputs", "num_padded", "num_inputs", "x_stride")
    types |= dict.fromkeys((*sizes, "num_rows", "steps_a_share", "num_steps"), "i32")
    form = f"{'zeros' if has_zeros else 'symmetric'}, groups of {group * depth or 'all'} in planes of {depth}"
    tile = f"{config.bm}x{config.bn}x{4 * min(depth, config.depth)}, {config.warps} warps, {config.stages} stages"
    return AotCase(
        f"w4 {dtype} to {bucket} rows{f' and {activation}' if activation else ''}: {tile}, {form}",
        _w4_gemm.kernel,
        types,
        constants,
        num_warps,
        num_stages,
        frozenset(sizes),
        (arch,),
        WeightLoop(256 / (config.bm / 8), _limit(arch, bucket, depth)),
    )


def _limit(arch: int, bucket: int, depth: int) -> float:
    """Instructions a weight. From 64 rows on the matrix unit sets the pace, and on sm_90 the best rows for small shapes
    wait for memory; thin planes cost more (5.1 by Triton 3.6 for sm_90) and are rare (groups of 16 or 48).
    """
    if depth <= 16:
        return 5.5
    return 3.0 if arch < 90 and bucket <= 32 else 5.0
