"""Around the experts' products: which experts a token takes, its rows grouped by expert, their answers added up.

A *pair* is a token with one of its experts, number token * num_chosen + j; a token's experts are in the order of their
ids, so that its sum is the same whatever else is in the batch. Grouped rows lie in tiles of one expert each, filled up
with -1: a product over tiles needs to know only whose weight a tile takes. Nothing here waits for the device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.gpu.cases import AotCase
from kernels.gpu.launch import Launchable
from kernels.gpu.sizes import cdiv, next_power_of_2

_CHUNK = 1024  # pairs that one step of the grouping looks at


@dataclass(frozen=True)
class Grouping:
    """Pairs by expert, for products in tiles of `tile` rows.

    pairs    int32 [tiles * tile], numbers of pairs, -1 where a tile is not full
    experts  int32 [tiles], whose rows a tile holds; -1: none, and nothing is to be done
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    tile: int


def route_experts(logits: torch.Tensor, num_chosen: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route_experts`."""
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, num_chosen, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, num_chosen, dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits.contiguous(),
            weights,
            chosen,
            num_experts,
            NUM_CHOSEN=num_chosen,
            RENORMALISE=renormalise,
            EXPERTS=next_power_of_2(num_experts),
            CHOSEN=next_power_of_2(num_chosen),
            num_warps=1,
        )
    return weights, chosen


def group_by_expert(chosen: torch.Tensor, num_experts: int, tile: int) -> Grouping:
    """chosen int32 [tokens, num_chosen] -> where each pair's row goes. Pairs of an expert keep their order."""
    num_pairs = chosen.numel()
    num_tiles = min(num_pairs, num_experts) + num_pairs // tile  # each expert's last tile may hold a single row
    pairs = torch.empty(num_tiles * tile, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    if num_pairs:
        _group[(num_experts,)](
            chosen,
            pairs,
            experts,
            num_pairs,
            num_tiles,
            num_experts,
            TILE=tile,
            BINS=next_power_of_2(num_experts + 1),  # one for what is past the end
            CHUNK=min(_CHUNK, next_power_of_2(max(num_pairs, 16))),
        )
    return Grouping(pairs, experts, tile)


def add_up(answers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """answers [pairs, hidden], weights fp32 [tokens, num_chosen] -> [tokens, hidden]: each token's weighted sum, fp32
    inside, in the order of its pairs.
    """
    tokens, num_chosen = weights.shape
    width = answers.shape[1]
    out = torch.empty(tokens, width, dtype=answers.dtype, device=answers.device)
    if tokens:
        block = min(next_power_of_2(width), 1024)
        _add_up[(tokens, cdiv(width, block))](
            answers, weights, out, width, NUM_CHOSEN=num_chosen, BLOCK=block, num_warps=4
        )
    return out


@Launchable
@triton.jit
def _route(
    logits_ptr,
    weights_ptr,
    chosen_ptr,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """Softmax over all experts; the likeliest NUM_CHOSEN, of equal ones the first, in the order of their ids."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, CHOSEN)
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=expert < num_experts, other=float("-inf"))
    odds = tl.exp(logits.to(tl.float32) - tl.max(logits.to(tl.float32), axis=0))
    odds = odds / tl.sum(odds, axis=0)
    left = tl.where(expert < num_experts, odds, -1.0)
    ids = tl.full((CHOSEN,), EXPERTS, tl.int32)
    weights = tl.zeros((CHOSEN,), tl.float32)
    for j in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        ids = tl.where(place == j, best, ids)
        weights = tl.where(place == j, tl.max(left, axis=0), weights)
        left = tl.where(expert == best, -2.0, left)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=0)
    rank = tl.sum((ids[None, :] < ids[:, None]).to(tl.int32), axis=1)
    at = token * NUM_CHOSEN + rank
    tl.store(weights_ptr + at, weights, mask=place < NUM_CHOSEN)
    tl.store(chosen_ptr + at, ids, mask=place < NUM_CHOSEN)


@Launchable
@triton.jit
def _group(
    chosen_ptr,
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program an expert: counts every expert's pairs to know where its own tiles begin, then fills them."""
    expert = tl.program_id(0)
    pair = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    start = num_pairs * 0
    while start < num_pairs:
        ids = tl.load(chosen_ptr + start + pair, mask=start + pair < num_pairs, other=BINS - 1)
        counts += tl.histogram(ids, BINS)
        start += CHUNK
    tiles = tl.where(bins < num_experts, (counts + TILE - 1) // TILE, 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)

    base = first_tile * TILE
    num_found = num_pairs * 0
    start = num_pairs * 0
    while start < num_pairs:
        ids = tl.load(chosen_ptr + start + pair, mask=start + pair < num_pairs, other=BINS - 1)
        is_own = (ids == expert).to(tl.int32)
        place = num_found + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + base + place, start + pair, mask=is_own > 0)
        num_found += tl.sum(is_own, axis=0)
        start += CHUNK
    row = tl.arange(0, TILE)
    past = own_tiles * TILE - TILE + row  # the last tile
    tl.store(pairs_ptr + base + past, tl.full((TILE,), -1, tl.int32), mask=(past >= num_found) & (own_tiles > 0))

    # The last expert's program also marks the tiles that no expert needs.
    is_last = expert == num_experts - 1
    end = tl.where(is_last, num_tiles, first_tile + own_tiles)
    tile = first_tile
    while tile < end:
        at = tile + tl.arange(0, 32)
        value = tl.where(at < first_tile + own_tiles, expert, -1)
        tl.store(experts_ptr + at, value, mask=at < end)
        tile += 32


@Launchable
@triton.jit
def _add_up(answers_ptr, weights_ptr, out_ptr, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(NUM_CHOSEN):
        answer = tl.load(answers_ptr + (token * NUM_CHOSEN + j) * width + i, mask=i < width, other=0.0)
        total += answer.to(tl.float32) * tl.load(weights_ptr + token * NUM_CHOSEN + j)
    tl.store(out_ptr + token * width + i, total.to(out_ptr.dtype.element_ty), mask=i < width)


def aot_cases() -> Iterable[AotCase]:
    """Mixtral's 2 of 8 experts and Qwen3's 8 of 128."""
    for num_experts, num_chosen in ((8, 2), (128, 8)):
        yield AotCase(
            name=f"moe route {num_chosen} of {num_experts}",
            kernel=_route.kernel,
            types={"logits_ptr": "*fp16", "weights_ptr": "*fp32", "chosen_ptr": "*i32", "num_experts": "i32"},
            constants={"NUM_CHOSEN": num_chosen, "RENORMALISE": True, "EXPERTS": num_experts, "CHOSEN": num_chosen},
            num_warps=1,
        )
        names = ("num_pairs", "num_tiles", "num_experts")
        yield AotCase(
            name=f"moe group {num_experts}",
            kernel=_group.kernel,
            types={"chosen_ptr": "*i32", "pairs_ptr": "*i32", "experts_ptr": "*i32"} | dict.fromkeys(names, "i32"),
            constants={"TILE": 16, "BINS": next_power_of_2(num_experts + 1), "CHUNK": _CHUNK},
        )
        yield AotCase(
            name=f"moe add up {num_chosen}",
            kernel=_add_up.kernel,
            types={"answers_ptr": "*fp16", "weights_ptr": "*fp32", "out_ptr": "*fp16", "width": "i32"},
            constants={"NUM_CHOSEN": num_chosen, "BLOCK": 1024},
            multiples_of_16=frozenset({"width"}),
        )
