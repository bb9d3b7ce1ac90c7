"""The choice of tokens in two launches against the sampler's own, which makes the same draw in many."""

import math
from typing import Any

import pytest
import torch

from engine.plan import ScheduledSequence
from engine.sampling.parameters import choice_of, parameters_of
from engine.sampling.sampler import choose
from engine.types import SamplingParams
from kernels.choices import Choices
from kernels.gpu import sample
from tests.kernels.gpu.where import DEVICE, ON_CARD

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_k": 1},
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"top_k": 10_000_000},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"temperature": 2.0, "top_p": 0.99},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.6},
    {"temperature": 2.0, "min_p": 0.05, "top_k": 15, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.02, "top_p": 0.9},
]


def _rows(ways: list[dict[str, Any]], seeds: list[int]) -> list[ScheduledSequence]:
    """Row i sits in slot i, at position 7 + i."""
    return [
        ScheduledSequence("", i, i, (0,), False, 0, ((0,),), True, 7 + i, SamplingParams(**way), seed)
        for i, (way, seed) in enumerate(zip(ways, seeds, strict=True))
    ]


def _positions(rows: list[ScheduledSequence]) -> torch.Tensor:
    return torch.tensor([row.sample_position for row in rows], dtype=torch.int32, device=DEVICE)


def _choices(rows: list[ScheduledSequence], vocab_size: int) -> Choices:
    numbers, top_k = zip(*(choice_of(row.params, vocab_size) for row in rows), strict=True)
    wholes = [[k, row.seed] for k, row in zip(top_k, rows, strict=True)]
    return Choices(torch.tensor(numbers, dtype=torch.float64, device=DEVICE), torch.tensor(wholes, device=DEVICE))


def _ours(logits: torch.Tensor, rows: list[ScheduledSequence], order: list[int] | None = None) -> list[int]:
    """Tokens of the rows in this order, the slots being those of all."""
    order = order or list(range(len(rows)))
    slots = torch.tensor(order, device=DEVICE)
    choices = _choices(rows, logits.shape[1])
    return sample.choose_tokens(logits[order].contiguous(), slots, _positions(rows)[order], choices).tolist()


def _theirs(logits: torch.Tensor, rows: list[ScheduledSequence]) -> list[int]:
    draws = parameters_of(rows, logits.shape[1], (), DEVICE, with_draws=True).draws
    assert draws is not None
    return choose(logits.clone(), draws, _positions(rows).long()).tolist()


def _logits(rows: int, vocab_size: int, spread: float, seed: int) -> torch.Tensor:
    return (spread * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


# Interpreted, a row takes a fifth of a second.
SIZES = [(40, 0.5), (1000, 4.0), *([(8960, 0.5), (151_936, 0.5), (151_936, 4.0), (262_144, 2.0)] if ON_CARD else [])]


@pytest.mark.parametrize(("vocab_size", "spread"), SIZES)
def test_every_way_draws_the_tokens_that_torch_draws(vocab_size: int, spread: float) -> None:
    logits = _logits(len(WAYS), vocab_size, spread, seed=vocab_size)
    rows = _rows(WAYS, [2**62 - 5 * i for i in range(len(WAYS))])
    assert _ours(logits, rows) == _theirs(logits, rows)


def test_flat_rows_are_searched_through_more_blocks_than_are_taken_at_once() -> None:
    ways = [{"temperature": 2.0, "top_p": 0.99}, {"top_k": 3000}]
    logits, rows = _logits(2, 8960, 0.5, seed=1), _rows(ways, [11, 12])
    assert _ours(logits, rows) == _theirs(logits, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [{}, {"top_p": 0.7}, {"top_k": 4}], ids=str)
def test_tokens_come_as_often_as_they_are_likely(way: dict[str, Any]) -> None:
    """Of 20,000 draws each token's within 4.5 standard deviations."""
    logits, count = torch.tensor([0.3, -1.0, 2.0, 1.9, 0.3, -0.5], device=DEVICE), 20_000
    rows = _rows([way] * count, list(range(count)))
    drawn = torch.tensor(_ours(logits.expand(count, -1).contiguous(), rows)).bincount(minlength=6)
    order = logits.sort(descending=True, stable=True).indices.tolist()
    kept = {str({}): 6, str({"top_p": 0.7}): 2, str({"top_k": 4}): 4}[str(way)]
    likely = torch.zeros(6, dtype=torch.float64)
    likely[order[:kept]] = logits.double().softmax(0).cpu()[order[:kept]]
    likely /= likely.sum()
    assert bool(((drawn - count * likely).abs() <= 4.5 * (count * likely * (1 - likely)).sqrt()).all())


def test_of_equal_logits_the_first_is_the_likeliest_and_none_is_left_out_alone() -> None:
    """top_k 2 and top_p 0.2 would do with less than three."""
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[:, [7, 140, 299]] = 5.0
    assert _ours(logits, _rows([{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.2}], [0, 10, 10])) == [7, 299, 299]


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}], ids=str)
def test_what_is_excluded_never_comes(way: dict[str, Any]) -> None:
    """Two tokens are left of 300: also where limits would keep more, and where nothing is left but one."""
    logits = torch.full((6, 300), -math.inf, device=DEVICE)
    logits[:, 131], logits[:4, 290] = 3.0, 2.5
    tokens = _ours(logits, _rows([way] * 6, list(range(6))))
    assert set(tokens) <= {131, 290} and set(tokens[4:]) == {131}


def test_what_is_no_number_is_taken_as_the_likeliest_as_torch_does() -> None:
    logits = _logits(2, 300, 1.0, seed=0)
    logits[:, 200] = math.nan
    assert _ours(logits, _rows([{"temperature": 0.0}, {"top_k": 5}], [0, 1])) == [200, 200]


def test_a_row_draws_the_same_in_any_company() -> None:
    ways = [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"top_k": 5}]
    logits, rows = _logits(4, 300, 3.0, seed=5), _rows(ways, list(range(4)))
    together = _ours(logits, rows)
    assert _ours(logits, rows, [3, 2, 1, 0]) == together[::-1]
    assert [_ours(logits, rows, [i])[0] for i in range(4)] == together


def test_tokens_are_left_in_their_slots_and_rows_of_nobody_leave_none() -> None:
    logits, rows = _logits(3, 300, 3.0, seed=6), _rows([{}, {"top_k": 4}, {"temperature": 0.0}], [1, 2, 3])
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=DEVICE)
    last = torch.full((4,), -9, device=DEVICE)
    tokens = sample.choose_tokens(logits, slots, _positions(rows), _choices(rows, 300), last).tolist()
    assert tokens[1] == 0
    assert last.tolist() == [tokens[2], -9, tokens[0], -9]


def test_logits_stay_as_they_are() -> None:
    logits, rows = _logits(3, 300, 3.0, seed=7), _rows([{}, {"temperature": 0.6}, {"top_p": 0.8}], [0, 1, 2])
    before = logits.clone()
    _ours(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.gpu
def test_a_captured_choice_follows_its_slots() -> None:
    """Replayed over new logits and new parameters it gives what a launch of its own gives, 100 times."""
    vocab_size, count = 151_936, 32
    rows = _rows([WAYS[i % len(WAYS)] for i in range(count)], list(range(count)))
    choices, logits = _choices(rows, vocab_size), _logits(count, vocab_size, 2.0, seed=0)
    slots, positions = torch.arange(count, device=DEVICE), _positions(rows)
    sample.choose_tokens(logits, slots, positions, choices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample.choose_tokens(logits, slots, positions, choices)
    for step in range(100):
        logits.copy_(_logits(count, vocab_size, 1.0 + step % 3, seed=step))
        choices.numbers.copy_(choices.numbers.roll(1, 0))
        choices.wholes.copy_(choices.wholes.roll(1, 0))
        graph.replay()
        assert torch.equal(tokens, sample.choose_tokens(logits, slots, positions, choices))
