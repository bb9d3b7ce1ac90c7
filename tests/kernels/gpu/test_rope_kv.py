"""Norms, rotation and the write of keys and values in one launch against the reference's chain of operations."""

import pytest
import torch

from kernels import reference
from kernels.gpu import rope_kv
from kernels.paged_kv import PagedKV, empty_paged_kv
from tests.kernels.gpu.where import DEVICE, DTYPES, error_of, random, steps

_BLOCKS, _BLOCK_SIZE = 5, 16
SHAPES = [(4, 2, 64, 64), (3, 1, 80, 32), (9, 3, 96, 72), (2, 2, 128, 2)]  # heads, KV heads, head_dim, rotary_dim


def _cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedKV:
    cache = empty_paged_kv((_BLOCKS, kv_heads, _BLOCK_SIZE, head_dim), dtype, DEVICE)
    for part in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        if part is not None:
            part.fill_(77)
    return cache


def _inputs(tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype):
    angles = random(30, rotary_dim // 2, seed=1)
    generator = torch.Generator().manual_seed(2)
    slots = torch.randperm(_BLOCKS * _BLOCK_SIZE, generator=generator)[:tokens]
    slots[tokens // 2] = -1
    positions = torch.randint(30, (tokens,), generator=generator)
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    return random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype), positions.to(DEVICE), cos_sin, slots.to(DEVICE)


@pytest.mark.parametrize("normed", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_and_cache_are_the_references(
    shape: tuple[int, int, int, int], dtype: torch.dtype, is_int8: bool, normed: bool
) -> None:
    num_heads, kv_heads, head_dim, rotary_dim = shape
    heads, positions, cos_sin, slots = _inputs(3, num_heads, kv_heads, head_dim, rotary_dim, dtype)
    norms = (random(head_dim, dtype=dtype, seed=3), random(head_dim, dtype=dtype, seed=4), 1e-6) if normed else None
    caches = [_cache(kv_heads, head_dim, torch.int8 if is_int8 else dtype) for _ in range(2)]
    ours, theirs = heads.clone(), heads.clone()
    rope_kv.rope_write_kv(ours, num_heads, positions, cos_sin, caches[0], slots, norms)
    reference.rope_write_kv(theirs, num_heads, positions, cos_sin, caches[1], slots, norms)
    assert error_of(ours, theirs) <= steps(dtype, 16 if normed else 8)
    assert torch.equal(ours[:, num_heads + kv_heads :], heads[:, num_heads + kv_heads :])
    if not is_int8:
        for part in ("keys", "values"):
            assert error_of(getattr(caches[0], part), getattr(caches[1], part)) <= steps(dtype, 16)
        return
    assert torch.equal(caches[0].values, caches[1].values)
    assert torch.equal(caches[0].value_scales, caches[1].value_scales)
    assert int((caches[0].keys.int() - caches[1].keys.int()).abs().max()) <= 1
    assert error_of(caches[0].key_scales, caches[1].key_scales) <= steps(torch.float16, 8)


@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
def test_a_token_without_a_slot_is_rotated_and_written_nowhere(is_int8: bool) -> None:
    heads, positions, cos_sin, _ = _inputs(2, 2, 1, 16, 16, torch.float32)
    cache = _cache(1, 16, torch.int8 if is_int8 else torch.float32)
    before = heads.clone()
    rope_kv.rope_write_kv(heads, 2, positions + 1, cos_sin, cache, torch.full((2,), -1, device=DEVICE))
    assert not torch.equal(heads[:, :3], before[:, :3])
    assert bool((cache.keys == 77).all() and (cache.values == 77).all())


def test_int8_of_zeros_and_of_numbers_too_small_for_a_scale_is_zero() -> None:
    heads, positions, cos_sin, slots = _inputs(3, 1, 1, 16, 2, torch.float32)
    heads.zero_()
    heads[0, 1:] = 1e-7
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    cache = _cache(1, 16, torch.int8)
    rope_kv.rope_write_kv(heads, 1, positions, cos_sin, cache, slots)
    assert not cache.keys[0, 0, :3].any() and not cache.values[0, 0, :3].any()
    assert not cache.key_scales[0, 0, :3].any()


def test_codes_are_rounded_half_to_even() -> None:
    heads = torch.zeros(1, 3, 16, device=DEVICE)
    heads[0, 2, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    cache = _cache(1, 16, torch.int8)
    cos_sin = torch.tensor([[[1.0], [0.0]]], device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    rope_kv.rope_write_kv(heads, 1, zero, cos_sin, cache, zero)
    assert cache.values[0, 0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]
