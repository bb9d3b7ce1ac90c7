"""What the kernels of paged attention share: a tile of keys and values, read from pages and attended to by some rows.

Softmax is in fp32 by powers of 2 (Milakov and Gimelshein 2018; Dao et al. 2022). Of an int8 cache the scales multiply
scores and weights instead of keys and values; its codes are read in pairs, and their even and odd numbers are two
products each, so that no byte has to change its place.
"""

import triton
import triton.language as tl


@triton.jit
def _unpack(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """int16 of two codes each -> the first and the second ones, exactly.

    Without the slow conversion instruction: a code's bits are put into the fraction of a known power of 2.
    """
    if ASM and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, c; xor.b32 x, $2, 0x80808080; mov.b32 c, 0x64806480;
            and.b32 $0, x, 0x00FF00FF; or.b32 $0, $0, 0x64006400; prmt.b32 $1, x, 0x64646464, 0x4341;
            sub.rn.f16x2 $0, $0, c; sub.rn.f16x2 $1, $1, c; }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif ASM and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 x, a, b, m; mov.b32 m, 0xBF80BF80; shr.u32 x, $2, 8;
            and.b32 a, $2, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, $2, 0x00800080; or.b32 b, b, 0x43004300;
            fma.rn.bf16x2 $0, b, m, a;
            and.b32 a, x, 0x007F007F; or.b32 a, a, 0x43004300; and.b32 b, x, 0x00800080; or.b32 b, b, 0x43004300;
            fma.rn.bf16x2 $1, b, m, a; }""",
            "=&r,=&r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return ((pairs << 8) >> 8).to(dtype), (pairs >> 8).to(dtype)


@triton.jit
def load_queries(at, is_row, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_INT8: tl.constexpr):
    """[M, BLOCK_D] of the heads that begin at the pointers `at` [M]; for int8 codes the even and the odd numbers."""
    if IS_INT8:
        d = tl.arange(0, BLOCK_D // 2) * 2
        held = is_row[:, None] & (d < D)[None, :]
        return tl.load(at[:, None] + d[None, :], held, other=0), tl.load(at[:, None] + d[None, :] + 1, held, other=0)
    else:
        d = tl.arange(0, BLOCK_D)
        queries = tl.load(at[:, None] + d[None, :], mask=is_row[:, None] & (d < D)[None, :], other=0)
        return queries, queries


@triton.jit
def start(M: tl.constexpr, BLOCK_D: tl.constexpr, IS_INT8: tl.constexpr):
    """What `attend` adds to: sums of weights, largest scores, attended values (of even and odd place)."""
    total, largest = tl.zeros([M], tl.float32), tl.full([M], float("-inf"), tl.float32)
    if IS_INT8:
        even = tl.zeros([M, BLOCK_D // 2], tl.float32)
        return total, largest, even, even
    else:
        return total, largest, tl.zeros([M, BLOCK_D], tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def slots(
    table, n, first, last, head, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, IS_BIG: tl.constexpr, WINDOW: tl.constexpr
):
    """Where the numbers of keys n lie: in heads of the cache. 32 bits where they do, which spares registers.

    In place of keys past the `last` that one, and of those before the `first` that a window leaves that one: what lies
    there may be another sequence's, or NaN, which a weight of 0 keeps.
    """
    n = tl.minimum(n, last)
    if WINDOW > 0:
        n = tl.maximum(n, first)
    n = n.to(tl.uint32)
    page = tl.load(table + n // PAGE)
    if IS_BIG:
        page = page.to(tl.int64)
    return (page * KV_HEADS + head) * PAGE + (n % PAGE).to(tl.int32)


@triton.jit
def load_keys(keys, values, slot, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_INT8: tl.constexpr):
    WIDTH: tl.constexpr = D // 2 if IS_INT8 else D
    WIDTH_BLOCK: tl.constexpr = BLOCK_D // 2 if IS_INT8 else BLOCK_D
    d = tl.arange(0, WIDTH_BLOCK)
    at = slot[:, None] * WIDTH + d[None, :]
    if WIDTH < WIDTH_BLOCK:
        held = (d < WIDTH)[None, :]
        return tl.load(keys + at, mask=held, other=0), tl.load(values + at, mask=held, other=0)
    else:
        return tl.load(keys + at), tl.load(values + at)


@triton.jit
def attend(
    even_q, odd_q, total, largest, even, odd, k, v, k_scale, v_scale, n, last, positions, scale_log2, cap_log2,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys n up to the `last`. Not MASKED: all are, and every query sees them. Scores and maxima: powers of 2."""
    dtype: tl.constexpr = even_q.dtype
    ARE_SCALED: tl.constexpr = IS_INT8 or HAS_CAP
    if IS_INT8:
        even_k, odd_k = _unpack(k, dtype, ASM)
        scores = tl.dot(even_q, tl.trans(even_k), input_precision="ieee")
        scores = tl.dot(odd_q, tl.trans(odd_k), scores, input_precision="ieee")
        scores = scores * (k_scale.to(tl.float32) * scale_log2)[None, :]
    else:
        scores = tl.dot(even_q, tl.trans(k.to(dtype)), input_precision="ieee")
    if HAS_CAP:  # tanh(x) = 1 - 2 / (1 + e ** 2x)
        if not IS_INT8:
            scores = scores * scale_log2
        scores = cap_log2 * (1 - 2 / (1 + tl.exp2(scores)))
    if MASKED:
        seen = n[None, :] <= tl.minimum(positions, last)[:, None]
        if WINDOW > 0:
            seen = seen & (n[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.max(scores, 1)
    if not ARE_SCALED:
        new_largest = new_largest * scale_log2  # which is above 0
    new_largest = tl.maximum(largest, new_largest)
    top = new_largest
    if MASKED:  # a row that has seen nothing yet
        top = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = tl.exp2(largest - top)
    if IS_INT8 and dtype == tl.float16:
        top -= 6  # weights up to 64: those times a small scale are still normal numbers of fp16
    below = scores - top[:, None] if ARE_SCALED else tl.fma(scores, scale_log2, -top[:, None])
    weights = tl.exp2(below)
    total = total * shrink + tl.sum(weights, 1)
    even = even * shrink[:, None]
    if IS_INT8:
        weights = (weights * v_scale.to(tl.float32)[None, :]).to(dtype)
        even_v, odd_v = _unpack(v, dtype, ASM)
        even = tl.dot(weights, even_v, even, input_precision="ieee")
        odd = tl.dot(weights, odd_v, odd * shrink[:, None], input_precision="ieee")
    else:
        even = tl.dot(weights.to(dtype), v.to(dtype), even, input_precision="ieee")
    return total, new_largest, even, odd


@triton.jit
def whole(even, odd, IS_INT8: tl.constexpr):
    """[M, BLOCK_D] of what `start` and `attend` give."""
    return tl.interleave(even, odd) if IS_INT8 else even
