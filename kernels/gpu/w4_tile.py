"""What a block does with its tile of a 4-bit product: activations meet their planes, sums get to their place. The
products over one weight (`w4_gemm.py`) and over a mixture's experts (`w4_experts.py`) are made of it.
"""

import triton
import triton.language as tl

from kernels.gpu.activation import gated
from kernels.gpu.nibbles import scale_of, unpack


@triton.jit
def load_slabs(x_at, is_row, k, num_inputs, Q: tl.constexpr, WHOLE_K: tl.constexpr):
    """Of each plane, the activations that meet it; `k` numbers the inputs of the first."""
    if WHOLE_K:
        x0 = tl.load(x_at, mask=is_row, other=0.0)
        x1 = tl.load(x_at + Q, mask=is_row, other=0.0)
        x2 = tl.load(x_at + 2 * Q, mask=is_row, other=0.0)
        x3 = tl.load(x_at + 3 * Q, mask=is_row, other=0.0)
    else:
        x0 = tl.load(x_at, mask=is_row & (k < num_inputs), other=0.0)
        x1 = tl.load(x_at + Q, mask=is_row & (k + Q < num_inputs), other=0.0)
        x2 = tl.load(x_at + 2 * Q, mask=is_row & (k + 2 * Q < num_inputs), other=0.0)
        x3 = tl.load(x_at + 3 * Q, mask=is_row & (k + 3 * Q < num_inputs), other=0.0)
    return x0, x1, x2, x3


@triton.jit
def add_step(
    acc,
    packed,
    x0,
    x1,
    x2,
    x3,
    words_at,
    plane,
    num_padded,
    GROUP: tl.constexpr,
    SCALE_WEIGHTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """acc plus the products of one step, whose first plane is number `plane`: one scale for the step, for each half or
    for each plane, as groups can change within it.
    """
    DTYPE: tl.constexpr = x0.dtype
    if GROUP % 4 == 0:
        s = tl.load(words_at + (plane // GROUP * num_padded if GROUP else 0))[:, None]
        w0, w1, w2, w3 = unpack(packed, s, DTYPE, HAS_ZEROS, PORTABLE)
        if SCALE_WEIGHTS:
            acc = _add_pair(acc, w0, x0, w1, x1, s, True, HAS_ZEROS)
            acc = _add_pair(acc, w2, x2, w3, x3, s, True, HAS_ZEROS)
        else:
            part = _dot(w1, x1, _dot(w0, x0, None))
            acc += _dot(w3, x3, _dot(w2, x2, part)) * scale_of(s, HAS_ZEROS)
    elif GROUP % 2 == 0:
        s = tl.load(words_at + plane // GROUP * num_padded)[:, None]
        t = tl.load(words_at + (plane + 2) // GROUP * num_padded)[:, None]
        w0, w1, _, _ = unpack(packed, s, DTYPE, HAS_ZEROS, PORTABLE)
        _, _, w2, w3 = unpack(packed, t, DTYPE, HAS_ZEROS, PORTABLE)
        acc = _add_pair(acc, w0, x0, w1, x1, s, SCALE_WEIGHTS, HAS_ZEROS)
        acc = _add_pair(acc, w2, x2, w3, x3, t, SCALE_WEIGHTS, HAS_ZEROS)
    else:
        s0 = tl.load(words_at + plane // GROUP * num_padded)[:, None]
        s1 = tl.load(words_at + (plane + 1) // GROUP * num_padded)[:, None]
        s2 = tl.load(words_at + (plane + 2) // GROUP * num_padded)[:, None]
        s3 = tl.load(words_at + (plane + 3) // GROUP * num_padded)[:, None]
        w0, _, _, _ = unpack(packed, s0, DTYPE, HAS_ZEROS, PORTABLE)
        _, w1, _, _ = unpack(packed, s1, DTYPE, HAS_ZEROS, PORTABLE)
        _, _, w2, _ = unpack(packed, s2, DTYPE, HAS_ZEROS, PORTABLE)
        _, _, _, w3 = unpack(packed, s3, DTYPE, HAS_ZEROS, PORTABLE)
        acc = _add_plane(acc, w0, x0, s0, SCALE_WEIGHTS, HAS_ZEROS)
        acc = _add_plane(acc, w1, x1, s1, SCALE_WEIGHTS, HAS_ZEROS)
        acc = _add_plane(acc, w2, x2, s2, SCALE_WEIGHTS, HAS_ZEROS)
        acc = _add_plane(acc, w3, x3, s3, SCALE_WEIGHTS, HAS_ZEROS)
    return acc


@triton.jit
def _add_pair(acc, w, x, v, y, words, SCALE_WEIGHTS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """acc plus two planes of one scale."""
    scale = scale_of(words, HAS_ZEROS)
    if SCALE_WEIGHTS:
        acc = _dot(v * scale.to(v.dtype), y, _dot(w * scale.to(w.dtype), x, acc))
    else:
        acc += _dot(v, y, _dot(w, x, None)) * scale
    return acc


@triton.jit
def _add_plane(acc, w, x, words, SCALE_WEIGHTS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    scale = scale_of(words, HAS_ZEROS)
    if SCALE_WEIGHTS:
        acc = _dot(w * scale.to(w.dtype), x, acc)
    else:
        acc += _dot(w, x, None) * scale
    return acc


@triton.jit
def _dot(w, x, acc):
    """Numbers of 32 bits are multiplied as such, not as 19."""
    return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def finish(
    acc,
    rows,
    first_output,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """acc [BN, BM] plus what is asked for, to its place; with an activation, what that makes of paired outputs."""
    BN: tl.constexpr = acc.shape[0]
    outputs = first_output + tl.arange(0, BN)
    is_output = outputs < num_outputs
    if HAS_BIAS:
        acc += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is None:
        is_inside = is_output[:, None] & (rows < num_rows)
        at = rows.to(tl.int64) * num_outputs + outputs[:, None]
        if HAS_RESIDUAL:
            acc += tl.load(residual + at, mask=is_inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_inside)
    else:
        # Eight gates, then their ups: both are in one thread's registers wherever the matrix unit leaves its sums.
        pairs = acc.to(out.dtype.element_ty).reshape(BN // 16, 2, 8, acc.shape[1]).permute(0, 2, 3, 1)
        gate, up = tl.split(pairs)
        halves = first_output // 2 + tl.arange(0, BN // 2)
        is_inside = (halves < num_outputs // 2)[:, None] & (rows < num_rows)
        at = rows.to(tl.int64) * (num_outputs // 2) + halves[:, None]
        tl.store(out + at, gated(gate, up, ACTIVATION).reshape(BN // 2, acc.shape[1]), mask=is_inside)
