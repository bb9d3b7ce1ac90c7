"""Large M: the weight is made dense, a piece at a time, and cuBLAS takes it from there."""

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import Launchable
from kernels.gpu.nibbles import scale_of, unpack
from kernels.gpu.planar import PlanarWeight
from kernels.gpu.sizes import cdiv

_TILE, _WARPS = 64, 8  # outputs of a block, which takes one step of K
_SCRATCH_BYTES = 64 * 2**20
_PIECE = 256  # outputs of a piece are a multiple of it: of the tiles that cuBLAS takes


@Launchable
@triton.jit
def _dequantize(
    codes,
    words,
    dense,
    num_padded,
    num_inputs,
    TILE: tl.constexpr,
    Q: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """One step of K for TILE outputs -> dense [outputs, K]. Stores are 16 bytes wide where num_inputs is known to be a
    multiple of 16: it must stay specialised.
    """
    step = tl.program_id(0)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    q = tl.arange(0, Q)
    packed = tl.load(codes + step.to(tl.int64) * num_padded * Q + rows[:, None] * Q + q[None, :])
    for j in tl.static_range(4):
        group = (step * 4 + j) // GROUP if GROUP else 0
        w = tl.load(words + group * num_padded + rows)[:, None]
        planes = unpack(packed, w, dense.dtype.element_ty, HAS_ZEROS, PORTABLE)
        k = (step * 4 + j) * Q + q[None, :]
        values = planes[j].to(tl.float32) * scale_of(w, HAS_ZEROS)
        at = dense + rows[:, None].to(tl.int64) * num_inputs + k
        tl.store(at, values.to(dense.dtype.element_ty), mask=k < num_inputs)


def dequantize(weight: PlanarWeight, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Outputs `first` to `first + count`, both multiples of the tile or the end -> dense [count, K]."""
    rows = cdiv(count, _TILE) * _TILE
    dense = torch.empty(rows, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    _dequantize[(weight.num_steps, rows // _TILE)](
        weight.codes[:, first:] if first else weight.codes,
        weight.words[:, first:] if first else weight.words,
        dense,
        weight.num_padded,
        weight.num_inputs,
        TILE=_TILE,
        Q=weight.depth,
        GROUP=weight.planes_a_group,
        HAS_ZEROS=weight.has_zeros,
        PORTABLE=not dense.is_cuda or dtype == torch.float32,
        num_warps=_WARPS,
    )
    return dense if count == rows else dense[:count]


def w4_linear(
    x: torch.Tensor, weight: PlanarWeight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, K] -> [M, N]. A piece of the weight is dense at a time: at most `_SCRATCH_BYTES` of scratch, or half of the
    result's, which a feed-forward's next step takes anyway.
    """
    outputs = _outputs_of_a_piece(weight, x.shape[0], x.element_size())
    if weight.num_outputs <= outputs:  # views cost the host as much as a launch
        out = torch.mm(x, dequantize(weight, 0, weight.num_outputs, x.dtype).T)
    else:
        out = _in_pieces(x, weight, outputs)
    for addend in (bias, residual):
        if addend is not None:
            out += addend
    return out


def _outputs_of_a_piece(weight: PlanarWeight, num_rows: int, element_size: int) -> int:
    """Pieces are as few as the scratch allows and alike: cuBLAS's tiles fill the card in waves, and two products of
    2,304 and 1,792 outputs take one wave more than two of 2,048.
    """
    scratch_bytes = max(_SCRATCH_BYTES, num_rows * weight.num_outputs * element_size // 2)
    most = max(1, scratch_bytes // (weight.num_inputs * element_size) // _TILE) * _TILE
    num_pieces = cdiv(weight.num_outputs, most)
    return min(most, cdiv(cdiv(weight.num_outputs, num_pieces), _PIECE) * _PIECE)


def _in_pieces(x: torch.Tensor, weight: PlanarWeight, outputs: int) -> torch.Tensor:
    """So many outputs at a time."""
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.num_outputs, outputs):
        count = min(outputs, weight.num_outputs - first)
        torch.mm(x, dequantize(weight, first, count, x.dtype).T, out=out[:, first : first + count])
    return out
