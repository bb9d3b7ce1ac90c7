"""Logits to token ids in two launches, each row by its slot's parameters: greedy, or one draw among the tokens that
min_p, top_k and top_p leave. `engine/sampling/` says the same in torch, and is what this is tested against.

The vocabulary is seen in blocks of 128 tokens. The first launch gives each block its largest logit and its sum of
weights. In the second one program a row looks for the smallest logit that the limits leave, by halving the interval
that it lies in, and reads only the blocks whose largest logit is above that interval: nearly always a handful. Then it
draws a block by its sum and a token in it. Sums go in a fixed order, so a row has the same token in any company.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from kernels.choices import Choices
from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv, next_power_of_2

_BLOCK = 128  # tokens
_SUMMARISED = 16  # blocks that a program of the first launch takes
_TILE = 32  # blocks that are searched at once
_NEAR: tl.constexpr = tl.constexpr(16.0)  # below the largest logit: weights of 1e-7, where a search begins
_FAR: tl.constexpr = tl.constexpr(256.0)
_NUM_WARPS = 16  # of the second launch: one program has a multiprocessor for itself


def choose_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    choices: Choices,
    last_token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.choose_tokens`."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous()
    num_blocks = cdiv(vocab_size, _BLOCK)
    # Each of the three begins at a multiple of 16 bytes, for which the kernels are compiled.
    size = cdiv(rows * num_blocks, 4) * 4
    maxima, sums, kept = torch.empty(3, size, dtype=torch.float32, device=logits.device).unbind()
    found = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return token_ids
    _summarise[(rows, cdiv(num_blocks, _SUMMARISED))](
        logits, slots, choices.numbers, maxima, sums, vocab_size, num_blocks, BLOCK=_BLOCK, BLOCKS=_SUMMARISED
    )
    _choose[(rows,)](
        logits,
        maxima,
        sums,
        found,
        kept,
        slots,
        positions,
        choices.numbers,
        choices.wholes,
        token_ids,
        last_token_ids,
        vocab_size,
        num_blocks,
        BLOCK=_BLOCK,
        BLOCKS=next_power_of_2(num_blocks),
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )
    return token_ids


@Launchable
@triton.jit
def _summarise(
    logits_ptr,
    slots_ptr,
    numbers_ptr,
    maxima_ptr,
    sums_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Of each block its largest logit, and the sum of its weights, where that logit's weight is 1."""
    row = tl.program_id(0).to(tl.int64)
    temperature = _temperature(slots_ptr, numbers_ptr, row)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    x = _logits(logits_ptr + row * vocab_size, block, block < num_blocks, vocab_size, temperature, BLOCK)
    largest = tl.max(x, axis=1)
    sums = tl.sum(_weights(x, largest[:, None]), axis=1)
    at = row * num_blocks + block
    tl.store(maxima_ptr + at, largest, mask=block < num_blocks)
    tl.store(sums_ptr + at, sums, mask=block < num_blocks)


@Launchable
@triton.jit
def _choose(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    found_ptr,
    kept_ptr,
    slots_ptr,
    positions_ptr,
    numbers_ptr,
    wholes_ptr,
    token_ids_ptr,
    last_token_ids_ptr,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab_size
    found_ptr += row * num_blocks
    kept_ptr += row * num_blocks
    slot = tl.load(slots_ptr + row).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    maxima = tl.load(maxima_ptr + row * num_blocks + block, mask=is_block, other=float("-inf"))
    top = tl.max(maxima, axis=0)
    temperature = _temperature(slots_ptr, numbers_ptr, row)
    if tl.load(numbers_ptr + slot * 3, mask=slot >= 0, other=0.0) > 0.0:
        top_p = tl.load(numbers_ptr + slot * 3 + 1)
        log_min_p = tl.load(numbers_ptr + slot * 3 + 2).to(tl.float32)
        top_k = tl.load(wholes_ptr + slot * 2)
        seed = tl.load(wholes_ptr + slot * 2 + 1)
        uniform = _uniform(seed, tl.load(positions_ptr + row).to(tl.int64))
        sums = tl.load(sums_ptr + row * num_blocks + block, mask=is_block, other=0.0) * _weights(maxima, top)
        last = tl.where(log_min_p > float("-inf"), top + log_min_p, log_min_p)
        is_limited = last > float("-inf")
        limit = 0
        while limit < 2:  # top_k, then top_p on what it left
            target = top_k.to(tl.float64)
            is_searched = top_k < vocab_size
            if limit == 1:
                target = top_p * tl.sum(sums.to(tl.float64), axis=0)
                is_searched = top_p < 1.0
                is_limited = is_searched
            if is_searched:
                last = _last_kept(
                    logits_ptr, found_ptr, maxima, top, last, target, limit, vocab_size, temperature, BLOCK, TILE
                )
            if is_limited | is_searched:
                sums = _kept_sums(
                    logits_ptr, found_ptr, kept_ptr, maxima, top, last, num_blocks, vocab_size, temperature, BLOCK, TILE
                )
            limit += 1
        chosen, rest = _first_past(sums, block, uniform)
        x = _logits_of_block(logits_ptr, chosen, vocab_size, temperature, BLOCK)
        at, rest = _first_past(tl.where(x >= last, _weights(x, top), 0.0), tl.arange(0, BLOCK), rest)
    else:
        chosen = tl.min(tl.where(maxima == top, block, BLOCKS - 1), axis=0)
        x = _logits_of_block(logits_ptr, chosen, vocab_size, temperature, BLOCK)
        at = tl.min(tl.where(x == top, tl.arange(0, BLOCK), BLOCK - 1), axis=0)
    token_id = (chosen * BLOCK + at).to(tl.int64)
    tl.store(token_ids_ptr + row, tl.where(slot >= 0, token_id, 0))
    if last_token_ids_ptr is not None:
        tl.store(last_token_ids_ptr + slot, token_id, mask=slot >= 0)


@triton.jit
def _temperature(slots_ptr, numbers_ptr, row):
    """What the row's logits are divided by: 1 where the likeliest is taken, and where there is no slot."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(numbers_ptr + slot * 3, mask=slot >= 0, other=0.0).to(tl.float32)
    return tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def _logits(logits_ptr, block, is_block, vocab_size, temperature, BLOCK: tl.constexpr):
    """[blocks, BLOCK] by the temperature. No number at all counts as larger than any, as in torch."""
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits_ptr + at, mask=is_block[:, None] & (at < vocab_size), other=float("-inf"))
    x = tl.div_rn(x, temperature)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _logits_of_block(logits_ptr, block, vocab_size, temperature, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + at, mask=at < vocab_size, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _weights(x, top):
    """exp(x - top); 1 where both are inf, 0 where both are -inf."""
    return tl.where(x > float("-inf"), tl.where(x == top, 1.0, tl.exp(x - top)), 0.0)


@triton.jit
def _find(found_ptr, maxima, low):
    """Write the blocks whose largest logit is above `low` to found_ptr, in their order; returns how many."""
    is_found = (maxima > low).to(tl.int32)
    tl.debug_barrier()  # the list before has been read by all
    place = tl.cumsum(is_found, axis=0) - 1
    tl.store(found_ptr + place, tl.arange(0, maxima.shape[0]), mask=is_found > 0)
    tl.debug_barrier()
    return tl.sum(is_found, axis=0)


@triton.jit
def _above(
    logits_ptr,
    found_ptr,
    num_found,
    low,
    top,
    by_mass,
    vocab_size,
    temperature,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of the logits above `low` their number, fp64 the same or the sum of their weights, the smallest of them, and the
    largest of the others.
    """
    counts = tl.zeros((TILE,), tl.int32)
    masses = tl.zeros((TILE,), tl.float64)
    smallest = tl.full((TILE,), float("inf"), tl.float32)
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    for first in tl.range(0, num_found, TILE):
        place = first + tl.arange(0, TILE)
        block = tl.load(found_ptr + place, mask=place < num_found, other=0)
        x = _logits(logits_ptr, block, place < num_found, vocab_size, temperature, BLOCK)
        counts += tl.sum((x > low).to(tl.int32), axis=1)
        masses += tl.sum(tl.where(x > low, _weights(x, top), 0.0), axis=1).to(tl.float64)
        smallest = tl.minimum(smallest, tl.min(tl.where(x > low, x, float("inf")), axis=1))
        largest = tl.maximum(largest, tl.max(tl.where(x > low, float("-inf"), x), axis=1))
    count = tl.sum(counts, axis=0)
    mass = tl.where(by_mass > 0, tl.sum(masses, axis=0), count.to(tl.float64))
    return count, mass, tl.min(smallest, axis=0), tl.max(largest, axis=0)


@triton.jit
def _last_kept(
    logits_ptr,
    found_ptr,
    maxima,
    top,
    floor,
    target,
    by_mass,
    vocab_size,
    temperature,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """The smallest logit, `floor` at least, above which there is less than `target`: tokens, or by_mass weight."""
    lowest = _below(floor)
    low = _surely_before(maxima, top, lowest, target, by_mass)
    num_found = _find(found_ptr, maxima, low)
    num_low, above_low, smallest, largest = _above(
        logits_ptr, found_ptr, num_found, low, top, by_mass, vocab_size, temperature, BLOCK, TILE
    )
    width = _NEAR
    while (above_low < target) & (low > lowest):
        width *= 2.0
        low = tl.where(width > _FAR, lowest, tl.maximum(top - width, lowest))
        num_found = _find(found_ptr, maxima, low)
        num_low, above_low, smallest, largest = _above(
            logits_ptr, found_ptr, num_found, low, top, by_mass, vocab_size, temperature, BLOCK, TILE
        )
    last = floor
    if above_low >= target:
        # Above low there is enough, above high too little; high is a logit, and low the number just below one. So many
        # equal logits, or none at all in a wide stretch, take no more steps than one.
        low = _below(smallest)
        high = top
        num_high = 0
        above_high = tl.zeros((), tl.float64)
        halves = 0
        while (_key(high) - _key(low) > 1) & (num_low - num_high > 1):
            # By turns where it should lie, were the weight spread evenly, and in the middle; of what is far apart, or
            # next to each other, in the middle of the fp32 numbers between.
            share = ((above_low - target) / (above_low - above_high)).to(tl.float32)
            share = tl.where(halves > 0, 0.5, tl.minimum(tl.maximum(share, 0.05), 0.95))
            halves = 1 - halves
            middle = low + (high - low) * share
            is_between = (middle > low) & (middle < high) & (high - low < _FAR)
            middle = tl.where(is_between, middle, _of_key(_key(low) + (_key(high) - _key(low)) // 2))
            num, above, smallest, largest = _above(
                logits_ptr, found_ptr, num_found, middle, top, by_mass, vocab_size, temperature, BLOCK, TILE
            )
            is_high = above < target
            high = tl.where(is_high, largest, high)
            num_high = tl.where(is_high, num, num_high)
            above_high = tl.where(is_high, above, above_high)
            low = tl.where(is_high, low, _below(smallest))
            num_low = tl.where(is_high, num_low, num)
            above_low = tl.where(is_high, above_low, above)
            if num_found > TILE:
                num_found = _find(found_ptr, maxima, low)
        last = high
    return last


@triton.jit
def _surely_before(maxima, top, lowest, target, by_mass):
    """A logit above which there is `target` and little more, as far as the blocks' largest tell; else a first guess."""
    weights = tl.where(by_mass > 0, _weights(maxima, top), 1.0)
    low = tl.maximum(top - _NEAR, lowest)
    high = top
    if tl.sum(tl.where(maxima > low, weights, 0.0), axis=0) >= target:
        halves = 0
        while halves < 10:
            middle = (low + high) * 0.5
            is_before = tl.sum(tl.where(maxima > middle, weights, 0.0), axis=0) >= target
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle)
            halves += 1
    return low


@triton.jit
def _kept_sums(
    logits_ptr,
    found_ptr,
    kept_ptr,
    maxima,
    top,
    last,
    num_blocks,
    vocab_size,
    temperature,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of each block the sum of the weights from `last` on."""
    num_found = _find(found_ptr, maxima, _below(last))
    first = 0
    while first < num_found:
        place = first + tl.arange(0, TILE)
        block = tl.load(found_ptr + place, mask=place < num_found, other=0)
        x = _logits(logits_ptr, block, place < num_found, vocab_size, temperature, BLOCK)
        sums = tl.sum(tl.where(x >= last, _weights(x, top), 0.0), axis=1)
        tl.store(kept_ptr + block, sums, mask=place < num_found)
        first += TILE
    tl.debug_barrier()
    block = tl.arange(0, maxima.shape[0])
    return tl.load(kept_ptr + block, mask=(block < num_blocks) & (maxima > _below(last)), other=0.0)


@triton.jit
def _first_past(weights, place, uniform):
    """First entry whose running sum exceeds uniform * total, never one of weight 0, and how far into it, below 1."""
    wide = weights.to(tl.float64)
    running = tl.cumsum(wide, axis=0)
    target = uniform * tl.max(running, axis=0)
    after = place.shape[0]
    index = tl.min(tl.where((running > target) & (wide > 0.0), place, after), axis=0)
    final = tl.max(tl.where(wide > 0.0, place, 0), axis=0)
    index = tl.minimum(index, final)
    weight = tl.sum(tl.where(place == index, wide, 0.0), axis=0)
    before = tl.sum(tl.where(place == index, running - wide, 0.0), axis=0)
    rest = (target - before) / weight
    return index, tl.minimum(tl.maximum(rest, 0.0), 1.0 - 1.1102230246251565e-16)


@triton.jit
def _uniform(seed, position):
    """fp64 in [0, 1) of (seed, position): `engine/sampling/uniform.py`, in words without sign."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64))
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(value):
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _key(x):
    """int64 that grows with the fp32 number."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _of_key(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _below(x):
    """The next smaller fp32 number; nothing is below -inf."""
    return tl.where(x > float("-inf"), _of_key(_key(x) - 1), x)


def aot_cases() -> Iterable[AotCase]:
    """Of a vocabulary of 151,936; int32 slots and positions as a captured step has them."""
    numbers = {"slots_ptr": "*i32", "numbers_ptr": "*fp64", "vocab_size": "i32", "num_blocks": "i32"}
    floats = {"logits_ptr": "*fp32", "maxima_ptr": "*fp32", "sums_ptr": "*fp32"}
    yield AotCase(
        name="sample summarise",
        kernel=_summarise.kernel,
        types=numbers | floats,
        constants={"BLOCK": _BLOCK, "BLOCKS": _SUMMARISED},
        multiples_of_16=frozenset({"vocab_size"}),
    )
    pointers = {"found_ptr": "*i32", "kept_ptr": "*fp32", "positions_ptr": "*i32", "wholes_ptr": "*i64"}
    ids = {"token_ids_ptr": "*i64", "last_token_ids_ptr": "*i64"}
    yield AotCase(
        name="sample choose",
        kernel=_choose.kernel,
        types=numbers | floats | pointers | ids,
        constants={"BLOCK": _BLOCK, "BLOCKS": 2048, "TILE": _TILE},
        num_warps=_NUM_WARPS,
        multiples_of_16=frozenset({"vocab_size"}),
    )
