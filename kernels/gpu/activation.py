"""Gated activations: the first half of a row through SiLU or GELU, times the second."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase

_BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_mul`."""
    return _launch(gate_up, is_gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.gelu_tanh_mul`."""
    return _launch(gate_up, is_gelu=True)


def _launch(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens:
        _gated[(tokens, triton.cdiv(width, _BLOCK))](gate_up, out, width, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit
def _gated(gate_up_ptr, out_ptr, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < width
    gate = tl.load(gate_up_ptr + 2 * row * width + i, mask=is_in, other=0.0)
    up = tl.load(gate_up_ptr + (2 * row + 1) * width + i, mask=is_in, other=0.0)
    activated = _gelu_tanh(gate.to(tl.float32)) if IS_GELU else _silu(gate.to(tl.float32))
    # Rounded before the product, as two operations of torch would.
    product = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * width + i, product.to(gate.dtype), mask=is_in)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x):
    """0.5 * (1 + tanh(y)) is the sigmoid of 2 * y."""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 * sqrt(2 / pi)


def aot_cases() -> Iterable[AotCase]:
    for dtype, is_gelu in (("fp16", False), ("bf16", True)):
        yield AotCase(
            name=f"activation {dtype} {'gelu' if is_gelu else 'silu'}",
            kernel=_gated,
            types={"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "width": "i32"},
            constants={"IS_GELU": is_gelu, "BLOCK": _BLOCK},
            multiples_of_16=frozenset({"width"}),
        )
