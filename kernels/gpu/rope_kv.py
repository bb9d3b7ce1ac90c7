"""Between the product for queries, keys and values and attention, in one launch: the heads' norms, their rotation, and
the write of keys and values into the paged cache, as int8 if the cache is. A program takes a few heads of one token.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv, next_power_of_2
from kernels.paged_kv import PagedKV

_HEADS, _NUM_WARPS = 8, 4  # of a program, of which one token has half a dozen


def rope_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    cache: PagedKV,
    slot_mapping: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """See `ops.rope_write_kv`."""
    tokens, num_all, head_dim = heads.shape
    assert heads.is_contiguous(), "heads are changed in place"
    if not tokens:
        return
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    half = cos_sin.shape[2]
    _rope_write_kv[(tokens, cdiv(num_all, _HEADS))](
        heads,
        positions,
        cos_sin,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        slot_mapping,
        q_norm,
        k_norm,
        eps,
        num_heads,
        cache.num_kv_heads,
        cache.block_size,
        HEAD_DIM=head_dim,
        HALF=half,
        **_tile(head_dim, half),
        num_warps=_NUM_WARPS,
    )


def _tile(head_dim: int, half: int) -> dict[str, int]:
    """What is not rotated is a tile of its own, of one column if there is nothing."""
    rest = next_power_of_2(max(head_dim - 2 * half, 1))
    return {"HEADS": _HEADS, "HALF_BLOCK": next_power_of_2(half), "REST_BLOCK": rest}


@Launchable
@triton.jit
def _rope_write_kv(
    heads_ptr,
    positions_ptr,
    cos_sin_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    num_heads,
    num_kv_heads,
    block_size,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_all = num_heads + 2 * num_kv_heads
    is_head = (head < num_all)[:, None]
    is_key = (head >= num_heads) & (head < num_heads + num_kv_heads)
    is_rotated = (head < num_heads + num_kv_heads)[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    j = tl.arange(0, REST_BLOCK)[None, :] + 2 * HALF
    is_half = is_head & (i < HALF)
    is_rest = is_head & (j < HEAD_DIM)
    row = heads_ptr + (token * num_all + head[:, None]) * HEAD_DIM
    first = tl.load(row + i, mask=is_half, other=0.0)
    second = tl.load(row + i + HALF, mask=is_half, other=0.0)
    rest = tl.load(row + j, mask=is_rest, other=0.0)

    if q_norm_ptr is not None:
        a, b, c = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        squares = tl.sum(a * a + b * b, axis=1) + tl.sum(c * c, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _normed(first, factor, q_norm_ptr, k_norm_ptr, i, is_half, is_key[:, None], is_rotated)
        second = _normed(second, factor, q_norm_ptr, k_norm_ptr, i + HALF, is_half, is_key[:, None], is_rotated)
        rest = _normed(rest, factor, q_norm_ptr, k_norm_ptr, j, is_rest, is_key[:, None], is_rotated)

    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * HALF
    cos = tl.load(angles + i, mask=i < HALF, other=1.0)
    sin = tl.load(angles + HALF + i, mask=i < HALF, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_rotated, (a * cos - b * sin).to(first.dtype), first)
    second = tl.where(is_rotated, (b * cos + a * sin).to(second.dtype), second)
    tl.store(row + i, first, mask=is_half & is_rotated)
    tl.store(row + i + HALF, second, mask=is_half & is_rotated)
    tl.store(row + j, rest, mask=is_rest & is_rotated)

    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block = slot // block_size
    kv_head = tl.where(is_key, head - num_heads, head - num_heads - num_kv_heads)
    place = (block * num_kv_heads + kv_head) * block_size + slot % block_size
    is_stored = (head >= num_heads) & (head < num_all) & (slot >= 0)
    is_value = is_stored & (head >= num_heads + num_kv_heads)
    if key_scales_ptr is not None:
        largest = tl.maximum(
            tl.max(tl.abs(first.to(tl.float32)), axis=1), tl.max(tl.abs(second.to(tl.float32)), axis=1)
        )
        largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), axis=1))
        scale = tl.minimum(tl.div_rn(largest, 127.0), 65504.0).to(tl.float16)
        tl.store(key_scales_ptr + place, scale, mask=is_stored & is_key)
        tl.store(value_scales_ptr + place, scale, mask=is_value)
        divisor = scale.to(tl.float32)[:, None]
        first, second, rest = _codes(first, divisor), _codes(second, divisor), _codes(rest, divisor)
    to_keys = keys_ptr + place[:, None] * HEAD_DIM
    to_values = values_ptr + place[:, None] * HEAD_DIM
    _store(to_keys, first, second, rest, i, j, is_half, is_rest, (is_stored & is_key)[:, None], HALF)
    _store(to_values, first, second, rest, i, j, is_half, is_rest, is_value[:, None], HALF)


@triton.jit
def _normed(x, factor, q_norm_ptr, k_norm_ptr, at, is_in, is_key, is_normed):
    """Queries and keys by their weights, rounded as the reference rounds; values as they are."""
    of_query = tl.load(q_norm_ptr + at, mask=is_in & is_normed & (is_key == 0), other=0.0)
    of_key = tl.load(k_norm_ptr + at, mask=is_in & is_key, other=0.0)
    weight = tl.where(is_key, of_key, of_query)
    scaled = (x.to(tl.float32) * factor).to(weight.dtype).to(tl.float32)
    return tl.where(is_normed, (scaled * weight.to(tl.float32)).to(x.dtype), x)


@triton.jit
def _codes(x, scale):
    """x / scale as int8, half to even: a sum with 1.5 * 2 ** 23 leaves fp32 no place for fractions."""
    codes = (tl.div_rn(x.to(tl.float32), tl.where(scale > 0.0, scale, 1.0)) + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return tl.where(scale > 0.0, codes, 0.0).to(tl.int8)


@triton.jit
def _store(to, first, second, rest, i, j, is_half, is_rest, is_row, HALF: tl.constexpr):
    dtype = to.dtype.element_ty
    tl.store(to + i, first.to(dtype), mask=is_half & is_row)
    tl.store(to + i + HALF, second.to(dtype), mask=is_half & is_row)
    tl.store(to + j, rest.to(dtype), mask=is_rest & is_row)


def aot_cases() -> Iterable[AotCase]:
    """Llama; Qwen3 with an int8 cache; a head of 96 numbers of which a part is rotated (Phi-3 small)."""
    for dtype, head_dim, half, is_normed, is_int8 in (
        ("fp16", 128, 64, False, False),
        ("bf16", 128, 64, True, True),
        ("bf16", 96, 36, False, True),
    ):
        cache = "i8" if is_int8 else dtype
        types = {"heads_ptr": f"*{dtype}", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32", "slot_mapping_ptr": "*i64"}
        types |= {"keys_ptr": f"*{cache}", "values_ptr": f"*{cache}", "eps": "fp32"}
        types |= {"num_heads": "i32", "num_kv_heads": "i32", "block_size": "i32"}
        constants: dict[str, int | None] = {"HEAD_DIM": head_dim, "HALF": half, **_tile(head_dim, half)}
        optional = {"key_scales_ptr": "*fp16", "value_scales_ptr": "*fp16"} if is_int8 else {}
        optional |= {"q_norm_ptr": f"*{dtype}", "k_norm_ptr": f"*{dtype}"} if is_normed else {}
        for name in ("key_scales_ptr", "value_scales_ptr", "q_norm_ptr", "k_norm_ptr"):
            if name not in optional:
                constants[name] = None
        yield AotCase(
            name=f"rope_kv {dtype} {head_dim}{' norms' if is_normed else ''}{' int8' if is_int8 else ''}",
            kernel=_rope_write_kv.kernel,
            types=types | optional,
            constants=constants,
            num_warps=_NUM_WARPS,
            multiples_of_16=frozenset({"num_heads", "block_size"}),
        )
