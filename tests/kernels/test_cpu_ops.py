"""The CPU kernels against the reference, at odd sizes, into poisoned outputs."""

import numba
import pytest
import torch

from kernels import ops, reference
from kernels.cpu import attention, gemm
from kernels.cpu.compile import set_threads
from kernels.cpu.exp import exp_of_negative
from kernels.paged_kv import PagedKV, by_dimension, empty_paged_kv
from kernels.w4 import W4Weight, pack_w4

# fp32 sums of up to 1,536 terms in another order: some 1e-7 times the square root of their number. One wrong element
# of 257 moves the result by 1e-2 of its RMS.
_TOLERANCE = 3e-6


def _relative_error(ours: torch.Tensor, reference_out: torch.Tensor) -> float:
    assert ours.isfinite().all()
    return float((ours - reference_out).norm() / reference_out.norm())


def _weight(k: int, n: int, group: int, seed: int = 0) -> tuple[W4Weight, torch.Tensor]:
    """A random weight and its dense fp64 form [N, K]."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    scales, offsets = (torch.randn(k // group, n, generator=g) for _ in range(2))
    dense = codes.double() * scales.double().repeat_interleave(group, 0) + offsets.double().repeat_interleave(group, 0)
    return pack_w4(codes, scales, offsets), dense.T


@pytest.mark.parametrize("rows", [1, 2, 7, 31, 63, 257])
@pytest.mark.parametrize(
    ("k", "n", "group"), [(64, 64, 32), (576, 960, 32), (128, 1, 128), (1536, 63, 64), (96, 257, 16)]
)
def test_packed_product_equals_the_dense_one(k: int, n: int, group: int, rows: int) -> None:
    weight, dense = _weight(k, n, group)
    x = torch.randn(rows, k)
    error = (ops.w4_linear(x, weight).double() - x.double() @ dense.T).norm()
    # Against the size of a sum of k such terms: a single output may come out near 0 by chance.
    assert error / ((x.double().abs() @ dense.abs().T).norm() / k**0.5) < _TOLERANCE


def test_packed_product_with_groups_that_the_kernel_cannot_take_runs_on_the_reference() -> None:
    weight, dense = _weight(24, 5, group=3)
    assert not gemm.fits(weight)
    x = torch.randn(3, 24)
    assert _relative_error(ops.w4_linear(x, weight).double(), x.double() @ dense.T) < _TOLERANCE


@pytest.mark.parametrize("n", [1, 64, 65])
def test_packing_keeps_every_code_and_dequantising_is_exact(n: int) -> None:
    codes = torch.randint(0, 16, (32, n), dtype=torch.uint8)
    weight = pack_w4(codes, torch.ones(2, n), torch.zeros(2, n))
    assert torch.equal(weight.codes()[:, :n], codes)
    assert torch.equal(reference.dequantize_w4(weight, torch.float32), codes.T.float())


def test_one_wrong_nibble_moves_its_output() -> None:
    weight, dense = _weight(576, 960, 32)
    weight.packed[3, 5, 7] ^= 0x10
    x = torch.randn(4, 576)
    column = 3 * 64 + 7
    ours, right = ops.w4_linear(x, weight)[:, column].double(), x.double() @ dense[column]
    assert _relative_error(ours, right) > 10 * _TOLERANCE


@numba.njit
def _exponentials(x):
    for i in range(x.shape[0]):
        x[i] = exp_of_negative(x[i])


def test_the_exponential_is_exact_to_fp32_over_its_whole_range() -> None:
    x = torch.cat([torch.linspace(-86.9, 0, 100_003), torch.tensor([-0.0, -1e-8, -87.5, -200.0, -torch.inf])])
    ours = x.clone()
    _exponentials(ours.numpy())
    right = x.double().exp()
    assert ours[-3:].tolist() == [0.0, 0.0, 0.0]
    assert ((ours.double() - right).abs() / right)[:-3].max() < 4e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 31, 63])
@pytest.mark.parametrize(("k", "n"), [(576, 257), (63, 64), (1, 1)])
def test_product_with_a_16_bit_weight_loses_nothing(k: int, n: int, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k).to(dtype), torch.randn(n)
    weight[0, 0] = torch.finfo(dtype).smallest_normal / 2  # a subnormal number must not become zero
    x[:, 0] = 2.0**14
    expected = x.double() @ weight.double().T + bias.double()
    assert _relative_error(ops.linear(x, weight, bias).double(), expected) < _TOLERANCE


def test_a_subnormal_weight_is_read_exactly() -> None:
    weight = torch.tensor([[2.0**-24, -(2.0**-15)]], dtype=torch.float16)
    assert ops.linear(torch.tensor([[2.0**24, 0.0]]), weight).item() == 1.0
    assert ops.linear(torch.tensor([[0.0, 2.0**15]]), weight).item() == -1.0


def test_packed_product_refuses_another_width() -> None:
    weight, _ = _weight(64, 64, 32)
    with pytest.raises(ValueError, match="63 columns, the weight takes 64"):
        ops.w4_linear(torch.randn(1, 63), weight)


def test_packing_refuses_scales_of_other_shapes() -> None:
    with pytest.raises(ValueError, match="codes"):
        pack_w4(torch.zeros(32, 8, dtype=torch.uint8), torch.ones(3, 8), torch.ones(3, 8))


@pytest.mark.parametrize("tokens", [1, 16, 63])
@pytest.mark.parametrize("width", [1, 16, 1537])
def test_silu_mul_equals_the_exact_one(tokens: int, width: int) -> None:
    gate_up = torch.randn(tokens, 2 * width) * 20
    gate_up[0, 0] = -80.0
    gate, up = gate_up.double().chunk(2, dim=1)
    assert _relative_error(ops.silu_mul(gate_up).double(), gate * gate.sigmoid() * up) < _TOLERANCE


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("width", [8, 257])
def test_add_rms_norm_equals_the_reference(tokens: int, width: int) -> None:
    x, residual, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(width)
    ours_residual, their_residual = residual.clone(), residual.clone()
    ours = ops.add_rms_norm(x, ours_residual, weight, 1e-5)
    assert _relative_error(ours, reference.add_rms_norm(x, their_residual, weight, 1e-5)) < _TOLERANCE
    assert torch.equal(ours_residual, their_residual)


@pytest.mark.parametrize("rotated_part", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (1, 1, 4)])
def test_rotation_and_kv_write_equal_the_reference(heads: int, kv_heads: int, head_dim: int, rotated_part: int) -> None:
    tokens = torch.randn(7, heads + 2 * kv_heads, head_dim)
    positions = torch.tensor([0, 5, 6, 7, 30, 31, 2])
    slots = torch.tensor([3, 0, 63, 31, 32, 17, 16])
    cos_sin = torch.randn(32, 2, head_dim // 2 // rotated_part)
    results = []
    for rope_write_kv in (ops.rope_write_kv, reference.rope_write_kv):
        rotated, v_cache = tokens.clone(), torch.full((4, kv_heads, 16, head_dim), 7.0)
        k_cache = by_dimension(v_cache)
        rope_write_kv(rotated, heads, positions, cos_sin, PagedKV(k_cache, v_cache), slots)
        results.append((rotated, k_cache, v_cache))
    for ours, theirs in zip(*results, strict=True):
        assert _relative_error(ours, theirs) < _TOLERANCE
    assert (results[0][1][1, :, 2] == 7.0).all()  # a slot that nobody named is untouched


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 96)])
@pytest.mark.parametrize("q_lens", [[1], [1, 1, 1, 1], [5], [1, 7, 1, 63]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 64, 70])
def test_paged_attention_equals_dense_attention(
    heads: int, kv_heads: int, head_dim: int, q_lens: list[int], window: int | None
) -> None:
    block_size, lengths = 16, [q + past for q, past in zip(q_lens, [16, 1, 0, 257], strict=False)]
    num_blocks = sum(-(-length // block_size) for length in lengths)
    # Blocks in a random order, NaN wherever no token is: nothing outside a sequence may leak in.
    order = torch.randperm(num_blocks + 3).tolist()
    k_cache = torch.full((num_blocks + 3, kv_heads, block_size, head_dim), float("nan"))
    v_cache = k_cache.clone()
    table = torch.zeros(len(lengths), max(-(-length // block_size) for length in lengths), dtype=torch.int32)
    q, expected = torch.randn(sum(q_lens), heads, head_dim), []
    row = 0
    for s, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        keys, values = torch.randn(kv_heads, length, head_dim), torch.randn(kv_heads, length, head_dim)
        for first in range(0, length, block_size):
            block = order.pop()
            table[s, first // block_size] = block
            size = min(block_size, length - first)
            k_cache[block, :, :size] = keys[:, first : first + size]
            v_cache[block, :, :size] = values[:, first : first + size]
        expected.append(_attend(q[row : row + q_len], keys, values, head_dim**-0.5, window))
        row += q_len
    bounds = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    options = {"scale": head_dim**-0.5, "window": window}
    arguments = (q, PagedKV(by_dimension(k_cache), v_cache), table, seq_lens, bounds)
    assert attention.fits(arguments[1])  # else this would compare the reference with itself
    for ours in (
        ops.paged_attention(*arguments, max_query_len=max(q_lens), max_seq_len=max(lengths), **options),
        reference.paged_attention(*arguments, **options),
    ):
        assert _relative_error(ours.double(), torch.cat(expected)) < _TOLERANCE


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("q_lens", "window"), [([1, 1], 70), ([40, 7], 24), ([1, 33], 1), ([9, 1], 64)])
def test_what_a_window_has_passed_by_changes_no_bit(q_lens: list[int], window: int, block_size: int) -> None:
    """Blocks before it are others' by now: here they are NaN, and so is what no token has written yet."""
    lengths, head_dim = [300, 90], 64
    table = torch.arange(2 * 20, dtype=torch.int32).view(2, 20)
    made = torch.Generator().manual_seed(window)
    k_cache, v_cache = (torch.randn(40, 2, block_size, head_dim, generator=made) for _ in range(2))
    q = torch.randn(sum(q_lens), 4, head_dim, generator=made)
    bounds = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens, options = torch.tensor(lengths, dtype=torch.int32), {"scale": 0.2, "window": window}
    sizes = {"max_query_len": max(q_lens), "max_seq_len": max(lengths)}
    results = []
    for _ in range(2):
        arguments = (q, PagedKV(by_dimension(k_cache), v_cache), table, seq_lens, bounds)
        assert attention.fits(arguments[1])
        results.append(
            (ops.paged_attention(*arguments, **sizes, **options), reference.paged_attention(*arguments, **options))
        )
        for s, (length, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
            for cache in (k_cache, v_cache):
                cache[table[s, : max(length - q_len - window + 1, 0) // block_size].long()] = torch.nan
                cache[table[s, length // block_size], :, length % block_size :] = torch.nan
    assert all(torch.equal(before, after) for before, after in zip(*results, strict=True))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Causal attention in fp64, one query and head at a time."""
    n, heads, _ = q.shape
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for i in range(n):
        end = k.shape[1] - n + i + 1
        seen = slice(max(0, end - window) if window else 0, end)
        for h in range(heads):
            kv = h // (heads // k.shape[0])
            weights = (k[kv, seen] @ q[i, h] * scale).softmax(0)
            out[i, h] = weights @ v[kv, seen]
    return out


# -- a row's bits do not depend on its company ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 7, 8, 9, 31, 300])
def test_a_row_of_a_packed_product_has_the_same_bits_in_any_company(rows: int) -> None:
    weight, _ = _weight(576, 200, 32)
    x = torch.randn(rows, 576)
    together = ops.w4_linear(x, weight)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(ops.w4_linear(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(ops.w4_linear(x[1:], weight), together[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 8, 9, 31, 70])
def test_a_row_of_a_dense_product_has_the_same_bits_in_any_company(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 331), torch.randn(133, 331).to(dtype)
    together = ops.linear(x, weight)
    for row in (0, rows // 2, rows - 1):
        assert torch.equal(ops.linear(x[row : row + 1], weight)[0], together[row])
    assert torch.equal(ops.linear(x[1:], weight), together[1:])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 16)])
def test_attention_gives_a_prompt_the_same_bits_whole_in_chunks_and_beside_others(
    heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    length, blocks = 150, 10
    k_cache, v_cache = (torch.randn(2 * blocks, kv_heads, 16, head_dim) for _ in range(2))
    cache = PagedKV(by_dimension(k_cache), v_cache)
    table = torch.randperm(2 * blocks).to(torch.int32).view(2, blocks)
    q = torch.randn(length, heads, head_dim)

    def attend(rows: slice, *, beside: bool = False) -> torch.Tensor:
        """The rows as one chunk of their prompt, with the other sequence's as many before them or without."""
        num, end = rows.stop - rows.start, rows.stop
        queries = torch.cat([q[:num].flip(0), q[rows]]) if beside else q[rows]
        bounds = torch.tensor([0, num, 2 * num] if beside else [0, num], dtype=torch.int32)
        lengths = torch.tensor([num, end] if beside else [end], dtype=torch.int32)
        tables = table if beside else table[1:]
        out = ops.paged_attention(
            queries,
            cache,
            tables,
            lengths,
            bounds,
            max_query_len=num,
            max_seq_len=end,
            scale=0.3,
            window=window,
        )
        return out[-num:]

    whole = attend(slice(0, length))
    for step in (1, 7, 33, 64, 149):
        for beside in (False, True):
            starts = range(0, length, step)
            chunks = [attend(slice(start, min(start + step, length)), beside=beside) for start in starts]
            assert torch.equal(torch.cat(chunks), whole)


def test_attention_refuses_heads_that_do_not_divide() -> None:
    cache = torch.zeros(1, 2, 16, 8)
    with pytest.raises(ValueError, match="3 query heads over 2 KV heads"):
        ops.paged_attention(
            torch.zeros(1, 3, 8),
            PagedKV(cache, cache),
            *(torch.zeros(1, 1),) * 3,
            max_query_len=1,
            max_seq_len=1,
            scale=1.0,
        )


@pytest.mark.parametrize(("offset", "dtype"), [(-1.5, torch.float16), (-1.0 / 3, torch.float32)])
def test_scales_and_offsets_are_held_in_16_bits_where_that_loses_nothing(offset: float, dtype: torch.dtype) -> None:
    codes, scales, offsets = (
        torch.zeros(32, 64, dtype=torch.uint8),
        torch.full((1, 64), 0.25),
        torch.full((1, 64), offset),
    )
    weight = pack_w4(codes, scales, offsets)
    assert weight.terms.dtype is dtype
    assert torch.equal(weight.scales[0], scales) and torch.equal(weight.offsets[0], offsets)


def test_a_row_has_the_same_bits_with_terms_in_16_and_in_32_bits() -> None:
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    narrow = pack_w4(codes, torch.randn(2, 128).half(), torch.randn(2, 128).half())
    wide = W4Weight(narrow.packed, narrow.terms.float(), narrow.num_outputs)
    assert narrow.terms.dtype is torch.float16
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64)
        assert torch.equal(ops.w4_linear(x, narrow), ops.w4_linear(x, wide))


def test_a_token_is_rotated_and_stored_alike_alone_and_among_many() -> None:
    num_tokens, heads, kv_heads = 41, 3, 1
    tokens = torch.randn(num_tokens, heads + 2 * kv_heads, 64)
    positions, slots = torch.arange(num_tokens), torch.randperm(48)[:num_tokens]
    cos_sin = torch.randn(num_tokens, 2, 32)
    caches = [empty_paged_kv((3, kv_heads, 16, 64), torch.float32, by_dimension=True) for _ in range(2)]
    for cache in caches:
        cache.keys.zero_()
        cache.values.zero_()
    many, alone = tokens.clone(), tokens.clone()
    ops.rope_write_kv(many, heads, positions, cos_sin, caches[0], slots)
    for t in range(num_tokens):
        ops.rope_write_kv(alone[t : t + 1], heads, positions[t : t + 1], cos_sin, caches[1], slots[t : t + 1])
    assert torch.equal(many, alone)
    assert torch.equal(caches[0].keys, caches[1].keys) and torch.equal(caches[0].values, caches[1].values)


@pytest.mark.parametrize("rows", [1, 8, 40, 200])
def test_results_have_the_same_bits_however_many_threads_share_the_tasks(rows: int) -> None:
    packed, _ = _weight(576, 200, 32)
    x, dense, gate_up = torch.randn(rows, 576), torch.randn(700, 576), torch.randn(rows, 128)

    def compute() -> list[torch.Tensor]:
        return [ops.w4_linear(x, packed), ops.linear(x, dense), ops.silu_mul(gate_up)]

    results = []
    before = numba.get_num_threads()
    try:
        for num_threads in (1, min(2, before)):
            set_threads(num_threads)
            results.append(compute())
    finally:
        set_threads(before)
    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)
