"""Gated activations: the first half of a row through SiLU or GELU, times the second; or of each 16 numbers the first 8,
as paired weights give them (`planar.py`).
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    return _launch(gate_up, "silu", is_paired=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.gelu_tanh_mul`."""
    return _launch(gate_up, "gelu_tanh", is_paired=False)


def gated_pairs(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[tokens, 2 * n], 8 gates and their 8 ups by turns -> [tokens, n]."""
    return _launch(gate_up, activation, is_paired=True)


def _launch(gate_up: torch.Tensor, activation: str, *, is_paired: bool) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens:
        grid = (tokens, cdiv(width, _BLOCK))
        _gated[grid](gate_up, out, width, ACTIVATION=activation, IS_PAIRED=is_paired, BLOCK=_BLOCK, num_warps=4)
    return out


@Launchable
@triton.jit
def _gated(gate_up_ptr, out_ptr, width, ACTIVATION: tl.constexpr, IS_PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < width
    gate_at = gate_up_ptr + 2 * row * width + (i // 8 * 16 + i % 8 if IS_PAIRED else i)
    gate = tl.load(gate_at, mask=is_in, other=0.0)
    up = tl.load(gate_at + (8 if IS_PAIRED else width), mask=is_in, other=0.0)
    tl.store(out_ptr + row * width + i, gated(gate, up, ACTIVATION), mask=is_in)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Rounded before the product, as two operations of torch would."""
    wide = gate.to(tl.float32)
    activated = _silu(wide) if ACTIVATION == "silu" else _gelu_tanh(wide)
    return (activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x):
    """0.5 * (1 + tanh(y)) is the sigmoid of 2 * y."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 * sqrt(2 / pi)


def aot_cases() -> Iterable[AotCase]:
    for dtype, activation, is_paired in (("fp16", "silu", False), ("bf16", "gelu_tanh", False), ("fp16", "silu", True)):
        yield AotCase(
            name=f"activation {dtype} {activation}{' paired' if is_paired else ''}",
            kernel=_gated.kernel,
            types={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "width": "i32"},
            constants={"ACTIVATION": activation, "IS_PAIRED": is_paired, "BLOCK": _BLOCK},
            multiples_of_16=frozenset({"width"}),
        )
