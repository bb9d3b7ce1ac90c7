"""Routing, grouping and adding up for mixtures of experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.gpu import moe
from tests.kernels.gpu.where import DEVICE, DTYPES, error_of, random, steps


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (60, 4), (128, 8), (3, 1)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_token_goes_to_its_likeliest_experts_in_the_order_of_their_ids(
    num_experts: int, num_chosen: int, renormalise: bool
) -> None:
    logits = random(7, num_experts)
    weights, chosen = moe.route_experts(logits, num_chosen, renormalise)
    expected_weights, expected = reference.route_experts(logits, num_chosen, renormalise)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_of_equally_likely_experts_the_first_are_taken() -> None:
    _, chosen = moe.route_experts(torch.zeros(2, 8, device=DEVICE), 3, True)
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 40),
    num_chosen=st.integers(1, 3),
    num_experts=st.integers(3, 9),
    tile=st.sampled_from([16, 32]),
    seed=st.integers(0, 99),
)
def test_every_pair_lies_once_in_a_tile_of_its_expert_in_order(
    tokens: int, num_chosen: int, num_experts: int, tile: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_experts, generator=generator)[:num_chosen].sort().values for _ in range(tokens)]
    chosen = torch.stack(rows).to(torch.int32)
    grouping = moe.group_by_expert(chosen.to(DEVICE), num_experts, tile)
    pairs, experts = grouping.pairs.cpu().view(-1, tile), grouping.experts.cpu()
    found: list[int] = []
    for rows_of_tile, expert in zip(pairs.tolist(), experts.tolist(), strict=True):
        if expert >= 0:
            own = [pair for pair in rows_of_tile if pair >= 0]
            assert own and rows_of_tile == own + [-1] * (tile - len(own))
            assert (chosen.flatten()[own] == expert).all()
            found += own
    by_expert = chosen.flatten().argsort(stable=True)
    assert found == by_expert.tolist()


def test_pairs_of_many_chunks_are_grouped_as_those_of_one() -> None:
    chosen = torch.randint(0, 5, (2100, 1), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    grouping = moe.group_by_expert(chosen.to(DEVICE), 5, 64)
    pairs = grouping.pairs.cpu()[: int((grouping.experts >= 0).sum()) * 64]
    assert pairs[pairs >= 0].tolist() == chosen.flatten().argsort(stable=True).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 1100])
def test_answers_add_up_by_their_weights(dtype: torch.dtype, width: int) -> None:
    answers, weights = random(6, width, dtype=dtype), random(3, 2, seed=1)
    # The card multiplies and adds in one rounding: a few steps.
    expected = (answers.float().view(3, 2, width) * weights.unsqueeze(2)).sum(1).to(dtype)
    assert error_of(moe.add_up(answers, weights), expected) <= steps(dtype, 8)
