"""Root-mean-square norm, with what comes before it in one launch: the residual's sum, the norm of what is added, the
gather of act-order weights. One program a row, which stays in registers.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _launch(None, rows, weight, eps, None, None).view(x.shape)


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    order: torch.Tensor | None = None,
    x_norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.add_rms_norm`."""
    return _launch(None if x is None else x.contiguous(), residual, weight, eps, order, x_norm)


def _launch(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    order: torch.Tensor | None,
    x_norm: torch.Tensor | None,
) -> torch.Tensor:
    assert residual.is_contiguous(), "the residual stream is changed in place"
    tokens, width = residual.shape
    out = torch.empty_like(residual)
    block = next_power_of_2(width)
    if tokens:
        _add_rms_norm[(tokens,)](
            x, residual, weight, x_norm, order, out, width, eps, BLOCK=block, num_warps=_num_warps(block)
        )
    return out


def _num_warps(block: int) -> int:
    """Eight numbers a thread: 16 bytes of a 16-bit type, the widest load."""
    return min(max(block // 256, 1), 16)


@Launchable
@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, x_norm_ptr, order_ptr, out_ptr, width, eps, BLOCK: tl.constexpr):
    """out[row, i] = norm(residual[row] + x[row])[order[i]]; pointers that are None leave their part out."""
    start = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    is_in = i < width
    row = tl.load(residual_ptr + start + i, mask=is_in, other=0.0)
    if x_ptr is not None:
        x = tl.load(x_ptr + start + i, mask=is_in, other=0.0)
        if x_norm_ptr is not None:
            x = _normed(x, tl.load(x_norm_ptr + i, mask=is_in, other=0.0), width, eps)
        row = (row.to(tl.float32) + x.to(tl.float32)).to(row.dtype)
        tl.store(residual_ptr + start + i, row, mask=is_in)
    normed = _normed(row, tl.load(weight_ptr + i, mask=is_in, other=0.0), width, eps)
    if order_ptr is not None:
        normed = tl.gather(normed, tl.load(order_ptr + i, mask=is_in, other=0).to(tl.int32), axis=0)
    tl.store(out_ptr + start + i, normed, mask=is_in)


@triton.jit
def _normed(row, weight, width, eps):
    """Rounded to the weight's dtype before the product, as the reference. What is past the width must be 0."""
    wide = row.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    return (scaled.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(row.dtype)


def aot_cases() -> Iterable[AotCase]:
    """Plain, with everything at once, and Gemma's fp32 weights; the widths of 8B and 14B models."""
    for width, dtype, weights, parts in (
        (4096, "fp16", "fp16", ()),
        (5120, "bf16", "bf16", ("x_ptr",)),
        (4096, "fp16", "fp16", ("x_ptr", "order_ptr")),
        (3584, "bf16", "fp32", ("x_ptr", "x_norm_ptr")),
    ):
        block = next_power_of_2(width)
        pointers = {"residual_ptr": dtype, "weight_ptr": weights, "out_ptr": dtype}
        optional = {"x_ptr": dtype, "x_norm_ptr": weights, "order_ptr": "i64"}
        pointers |= {name: optional[name] for name in parts}
        yield AotCase(
            name=f"norm {width} {dtype} {' '.join(parts)}",
            kernel=_add_rms_norm.kernel,
            types={name: f"*{of}" for name, of in pointers.items()} | {"width": "i32", "eps": "fp32"},
            constants={"BLOCK": block} | {name: None for name in optional if name not in parts},
            num_warps=_num_warps(block),
            multiples_of_16=frozenset({"width"}),
        )
