"""The reference ops against their definitions, spelled out one token and one head at a time in fp64."""

import math

import pytest
import torch

from kernels import ops, reference
from kernels.paged_kv import PagedKV, empty_paged_kv

_BLOCK = 4


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _attention_of_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """q [d] over the keys [n, d] that it sees."""
    scores = [float(torch.dot(q, key)) * scale for key in keys]
    scores = scores if softcap is None else [math.tanh(score / softcap) * softcap for score in scores]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)


def _reference_attention(*arguments: torch.Tensor, max_query_len: int, max_seq_len: int, **options) -> torch.Tensor:
    return reference.paged_attention(*arguments, **options)


@pytest.mark.parametrize("softcap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 100])
@pytest.mark.parametrize("op", [_reference_attention, ops.paged_attention], ids=["reference", "ops"])
def test_attention_sees_the_window_and_caps_the_scores(op, window: int | None, softcap: float | None) -> None:
    """A long chunk, one decoding token past the window, one before it, and a whole prompt, over scattered blocks."""
    lengths, queries = [21, 13, 2, 6], [9, 1, 1, 6]
    num_kv_heads, heads, d = 2, 4, 5
    blocks = [-(-length // _BLOCK) for length in lengths]
    order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    k_cache, v_cache = (_random(sum(blocks) + 3, num_kv_heads, _BLOCK, d, seed=seed) for seed in (2, 3))
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for s, used in enumerate(order[: sum(blocks)].split(blocks)):
        tables[s, : blocks[s]] = used
        k_cache[used[-1], :, (lengths[s] - 1) % _BLOCK + 1 :] = torch.nan  # past a sequence's end: never read
    q = _random(sum(queries), heads, d, seed=4)
    bounds = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    arguments = (q, PagedKV(k_cache, v_cache), tables, torch.tensor(lengths, dtype=torch.int32), bounds)
    ours = op(*arguments, max_query_len=9, max_seq_len=21, scale=0.7, window=window, softcap=softcap)
    for s, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        used = tables[s, : blocks[s]].long()
        keys, values = (c[used].transpose(0, 1).flatten(1, 2).double() for c in (k_cache, v_cache))
        for i in range(count):
            last = length - count + i + 1
            first = 0 if window is None else max(0, last - window)
            for head in range(heads):
                seen = [t[head // 2, first:last] for t in (keys, values)]
                row = int(bounds[s]) + i
                expected = _attention_of_one(q[row, head].double(), *seen, scale=0.7, softcap=softcap)
                torch.testing.assert_close(ours[row, head].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_queries", [127, 128, 129, 300])
def test_capped_attention_is_the_same_in_slabs_of_queries(num_queries: int) -> None:
    q, k, v = _random(num_queries, 2, 8), _random(1, 310, 8, seed=1), _random(1, 310, 8, seed=2)
    whole = reference.attend_causal(q, k, v, 0.5, window=50, softcap=2.0)
    singly = [
        reference.attend_causal(q[i : i + 1], *(t[:, : 310 - num_queries + i + 1] for t in (k, v)), 0.5, 50, 2.0)
        for i in range(num_queries)
    ]
    torch.testing.assert_close(whole, torch.cat(singly))


def test_a_cap_that_no_score_reaches_changes_nothing() -> None:
    q, k, v = _random(7, 4, 8), _random(2, 20, 8, seed=1), _random(2, 20, 8, seed=2)
    plain = reference.attend_causal(q, k, v, 0.1, window=6)
    torch.testing.assert_close(reference.attend_causal(q, k, v, 0.1, window=6, softcap=1e5), plain)


@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
@pytest.mark.parametrize("op", [reference.rope_write_kv, ops.rope_write_kv], ids=["reference", "ops"])
def test_rope_turns_the_first_numbers_of_a_head_and_leaves_the_rest(op, rotary_dim: int) -> None:
    tokens, num_heads, num_kv_heads, d = 5, 3, 1, 10
    heads = _random(tokens, num_heads + 2 * num_kv_heads, d)
    angles = _random(9, rotary_dim // 2, seed=1)
    positions = torch.tensor([8, 0, 3, 4, 4])
    k_cache, v_cache = (torch.full((3, num_kv_heads, _BLOCK, d), torch.nan) for _ in range(2))
    slots = torch.tensor([11, 0, 3, 4, 9])
    before, half = heads.clone(), rotary_dim // 2
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    op(heads, num_heads, positions, cos_sin, PagedKV(k_cache, v_cache), slots)
    for t in range(tokens):
        for h in range(num_heads + num_kv_heads):
            expected = before[t, h].clone()
            for i in range(half):
                turned = torch.polar(torch.ones(()), angles[positions[t], i]) * torch.complex(
                    before[t, h, i], before[t, h, i + half]
                )
                expected[i], expected[i + half] = turned.real, turned.imag
            torch.testing.assert_close(heads[t, h], expected)
    block, offset = slots // _BLOCK, slots % _BLOCK
    assert torch.equal(k_cache[block, :, offset], heads[:, num_heads : num_heads + 1])
    assert torch.equal(v_cache[block, :, offset], before[:, num_heads + 1 :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_codes_are_the_nearest_ones_and_use_the_whole_range(dtype: torch.dtype) -> None:
    x = (_random(50, 3, 64) * torch.logspace(-2, 2, 50)[:, None, None]).to(dtype)
    codes, scales = reference.quantize_int8(x)
    assert codes.dtype is torch.int8 and scales.dtype is torch.float16 and scales.shape == (50, 3)
    assert (codes.int().abs().amax(-1) == 127).all()
    steps = (x.double() / scales.double().unsqueeze(-1) - codes).abs()
    assert 0.49 < steps.max() <= 0.5 * 1.13  # the scale's own rounding moves the largest number by up to 127 / 2**11


def test_int8_rounds_halves_to_even_and_takes_zeros_and_the_largest_of_fp32() -> None:
    codes, scales = reference.quantize_int8(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0], [3e38, -3e38, 0, 1]]))
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [127, -127, 0, 0]]
    assert scales.tolist() == [1.0, 0.0, 65504.0]


def test_an_int8_cache_is_written_with_codes_of_the_rotated_keys_and_attended_through_its_scales() -> None:
    heads, angles, slots = _random(6, 4, 8), _random(6, 4, seed=1), torch.tensor([5, 4, 7, 6, 0, 1])
    cos_sin, positions = torch.stack((angles.cos(), angles.sin()), 1), torch.arange(6)
    plain, int8 = (empty_paged_kv((2, 1, _BLOCK, 8), dtype) for dtype in (torch.float32, torch.int8))
    for cache in (plain, int8):
        ops.rope_write_kv(turned := heads.clone(), 2, positions, cos_sin, cache, slots)
    block, offset = slots // _BLOCK, slots % _BLOCK
    for exact, codes, scales in (
        (plain.keys, int8.keys, int8.key_scales),
        (plain.values, int8.values, int8.value_scales),
    ):
        assert torch.equal(codes[block, :, offset], reference.quantize_int8(exact[block, :, offset])[0])
        assert torch.equal(scales[block, :, offset], reference.quantize_int8(exact[block, :, offset])[1])
        exact.copy_(codes * scales.float().unsqueeze(-1))
    table, lengths, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([[1, 0]], [6], [0, 6]))
    attended = [
        ops.paged_attention(turned[:, :2], cache, table, lengths, bounds, max_query_len=6, max_seq_len=6, scale=0.5)
        for cache in (plain, int8)
    ]
    torch.testing.assert_close(*attended)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_what_fills_up_a_batch_is_written_nowhere_and_comes_out_as_zeros(dtype: torch.dtype) -> None:
    heads, cos_sin = _random(3, 4, 16), torch.ones(9, 2, 8)
    cache = empty_paged_kv((2, 1, 16, 16), dtype)
    cache.keys.fill_(3), cache.values.fill_(3)
    ops.rope_write_kv(heads, 2, torch.tensor([0, 0, 0]), cos_sin, cache, torch.tensor([-1, 17, -1]))
    for codes in (cache.keys, cache.values):
        assert (codes.transpose(1, 2).reshape(32, 16) != 3).any(-1).nonzero().tolist() == [[17]]
    table, lengths, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([[0], [0], [0]], [0, 2, 0], [0, 1, 2, 3]))
    cache.keys[0, :, 2:] = cache.values[0, :, 2:] = -9
    if cache.is_int8:
        cache.key_scales[:, :, 2:] = cache.value_scales[:, :, 2:] = torch.nan
        cache.key_scales[:, :, :2] = cache.value_scales[:, :, :2] = 1
    out = ops.paged_attention(heads[:, :2], cache, table, lengths, bounds, max_query_len=1, max_seq_len=2, scale=0.5)
    assert (out[[0, 2]] == 0).all()
    torch.testing.assert_close(out[1], torch.full((2, 16), 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_weight_in_fp32_is_multiplied_before_the_one_rounding(dtype: torch.dtype) -> None:
    x, weight = _random(7, 63).to(dtype), 1 + 0.01 * _random(63, seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    half_a_step = torch.finfo(dtype).eps / 2 * 1.001  # fp32 inside adds little to the rounding of the result

    def error(weight: torch.Tensor) -> float:
        normed = ops.rms_norm(x, weight, 1e-6)
        assert normed.dtype is dtype
        return float(((normed.double() - exact) / exact).abs().max())

    assert error(weight) <= half_a_step
    assert error(weight.to(dtype)) > half_a_step


@pytest.mark.parametrize(
    ("op", "activation"),
    [
        (ops.silu_mul, lambda x: x / (1 + math.exp(-x))),
        (ops.gelu_tanh_mul, lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ],
    ids=["silu", "gelu_tanh"],
)
def test_a_gated_activation_is_of_the_first_half_times_the_second(op, activation) -> None:
    x = _random(3, 2 * 17)
    expected = [[activation(float(row[i])) * float(row[17 + i]) for i in range(17)] for row in x]
    torch.testing.assert_close(op(x), torch.tensor(expected))
