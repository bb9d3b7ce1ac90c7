"""Token ids to the numbers that the residual stream begins with."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv

_BLOCK = 1024


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """See `ops.embed`."""
    tokens, width = token_ids.shape[0], table.shape[1]
    out = torch.empty(tokens, width, dtype=dtype, device=table.device)
    if tokens:
        grid = (tokens, cdiv(width, _BLOCK))
        _embed[grid](token_ids, table, out, width, scale, BLOCK=_BLOCK, num_warps=4)
    return out


@Launchable
@triton.jit
def _embed(token_ids_ptr, table_ptr, out_ptr, width, scale, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < width
    row = tl.load(token_ids_ptr + token).to(tl.int64)
    numbers = tl.load(table_ptr + row * width + i, mask=is_in, other=0.0)
    # Rounded to the stream's dtype before it is scaled, as the models were trained.
    rounded = numbers.to(out_ptr.dtype.element_ty).to(tl.float32) * scale
    tl.store(out_ptr + token * width + i, rounded.to(out_ptr.dtype.element_ty), mask=is_in)


def aot_cases() -> Iterable[AotCase]:
    for dtype in ("fp16", "bf16"):
        pointers = {"token_ids_ptr": "*i64", "table_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
        yield AotCase(
            name=f"embedding {dtype}",
            kernel=_embed.kernel,
            types={**pointers, "width": "i32", "scale": "fp32"},
            constants={"BLOCK": _BLOCK},
            multiples_of_16=frozenset({"width"}),
        )
