"""The sampler against probabilities computed a row at a time in fp64, and the promise that company changes no draw."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.plan import ScheduledSequence
from engine.sampling.sampler import Sampler
from engine.sampling.uniform import uniform_numbers
from engine.types import SamplingParams

EOS = 3


def _row(
    index: int = 0,
    *,
    seed: int = 0,
    prompt: Sequence[int] = (1, 2),
    answer: Sequence[int] = (),
    **params: Any,
) -> ScheduledSequence:
    """A sequence in slot `index` that has these tokens and samples its next."""
    known = [*prompt, *answer]
    return ScheduledSequence(
        request_id=str(index),
        slot=index,
        run_id=index,
        token_ids=(known[-1],),
        feeds_last=False,
        start=len(known) - 1,
        block_tables=((0,),),
        samples=True,
        sample_position=len(known),
        params=SamplingParams(**params),
        seed=seed,
        num_prompt_tokens=len(prompt),
        known_token_ids=known,
    )


def _seeded(row: ScheduledSequence, count: int) -> list[ScheduledSequence]:
    """The same row, drawn with the seeds 0, 1, ..."""
    return [row._replace(seed=seed) for seed in range(count)]


def _sampler(num_slots: int, vocab_size: int, max_len: int = 64) -> Sampler:
    return Sampler(
        max_num_seqs=num_slots,
        max_len=max_len,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        device=torch.device("cpu"),
    )


def _sample(logits: torch.Tensor, rows: list[ScheduledSequence]) -> torch.Tensor:
    slots = max(row.slot for row in rows) + 1
    return _sampler(slots, logits.shape[1]).sample(logits.clone(), rows).token_ids


def _expected(logits: torch.Tensor, row: ScheduledSequence) -> torch.Tensor:
    """The textbook form for one row, fp64, one step after the other as engine/types.py names them."""
    p, prompt = row.params, row.known_token_ids[: row.num_prompt_tokens]
    answer = Counter(row.known_token_ids[row.num_prompt_tokens :])
    x = logits.double().clone()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *answer}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in answer.items():
        x[token] -= p.presence_penalty + count * p.frequency_penalty
    if p.allowed_token_ids:
        x[[i for i in range(len(x)) if i not in p.allowed_token_ids]] = -math.inf
    x[list(p.banned_token_ids)] = -math.inf
    if answer.total() < p.min_tokens:
        x[[EOS, *p.stop_token_ids]] = -math.inf
    if p.temperature == 0:
        return (torch.arange(len(x)) == x.argmax()).double()
    probabilities = (x / p.temperature).softmax(0)
    probabilities[probabilities < p.min_p * probabilities.max()] = 0
    order = probabilities.argsort(descending=True, stable=True).tolist()
    probabilities[order[p.top_k or len(order) :]] = 0
    reached, mass = 0.0, probabilities.sum().item()
    for token in order:
        if reached >= p.top_p * mass and p.top_p < 1:
            probabilities[token] = 0
        reached += probabilities[token].item()
    return probabilities / probabilities.sum()


PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.5, "top_k": 5},
    "top_k of 1": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 500},
    "top_p": {"top_p": 0.8},
    "top_p of nearly nothing": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p of 1": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative penalties": {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    "all penalties": PENALTIES,
    "logit_bias": {"logit_bias": {5: 2.5, 11: -100.0, 0: 1.0}},
    "banned": {"banned_token_ids": (0, 7, 21)},
    "allowed": {"allowed_token_ids": (2, 3, 30, 39), "min_tokens": 40},
    "min_tokens": {"min_tokens": 40, "stop_token_ids": (8, 9)},
    "top_k, top_p": {"temperature": 1.3, "top_k": 12, "top_p": 0.6},
    "min_p, top_k, top_p": {"temperature": 2.0, "min_p": 0.05, "top_k": 15, "top_p": 0.9},
    "min_p, top_p": {"temperature": 2.0, "min_p": 0.2, "top_p": 0.9},
    "penalties, top_p": {**PENALTIES, "top_p": 0.8},
    "everything": {
        **PENALTIES,
        "temperature": 1.6,
        "min_p": 0.02,
        "top_k": 20,
        "top_p": 0.95,
        "logit_bias": {5: 1.5, 2: -1.0},
        "min_tokens": 40,
        "banned_token_ids": (1,),
    },
}


LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
_BY_LOGIT = LOGITS.argsort(descending=True).tolist()
TOKENS = {
    "prompt": (_BY_LOGIT[1], _BY_LOGIT[-1], _BY_LOGIT[-1], 0),
    "answer": (_BY_LOGIT[0], *[_BY_LOGIT[2]] * 3, _BY_LOGIT[1], _BY_LOGIT[9]),
}


@pytest.mark.parametrize("way", WAYS)
def test_draws_follow_the_distribution(way: str) -> None:
    num_draws = 20_000
    row = _row(**TOKENS, **WAYS[way])
    counts = _sample(LOGITS.repeat(num_draws, 1), _seeded(row, num_draws)).bincount(minlength=len(LOGITS)).double()
    expected = _expected(LOGITS, row) * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = max(int(possible.sum()) - 1, 1)
    assert chi_square < degrees + 4.5 * (2 * degrees) ** 0.5  # about 4.5 sigma, and the seeds are fixed


def test_the_ways_of_the_test_above_do_differ() -> None:
    expected = {way: _expected(LOGITS, _row(**TOKENS, **params)) for way, params in WAYS.items()}
    same = {frozenset((a, b)) for a in WAYS for b in WAYS if a != b and torch.allclose(expected[a], expected[b])}
    assert same == {
        frozenset(pair)
        for group in [("top_k of 1", "top_p of nearly nothing", "min_p of 1")]
        for pair in [(a, b) for a in group for b in group if a != b]
    }


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 129, 5000])
@pytest.mark.parametrize(
    ("spread", "params"),
    [
        (0.01, {"top_p": 0.7}),
        (4.0, {"top_p": 0.7}),
        (0.5, {"top_k": 2000, "top_p": 0.7}),
        (0.5, {"top_k": 80}),
        (0.1, {"min_p": 0.5}),
        (3.0, {"min_p": 0.01, "top_p": 0.99}),
        (1.0, {"top_k": 1024, "min_p": 1e-4}),
    ],
)
def test_what_is_kept_is_the_same_however_many_tokens_had_to_be_looked_at(
    spread: float, params: dict[str, Any], vocab_size: int
) -> None:
    num_draws = 300
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    expected = _expected(logits, _row(**params))
    drawn = _sample(logits.repeat(num_draws, 1), _seeded(_row(**params), num_draws))
    # The same uniform numbers, turned into tokens by the textbook: the first in order of ids whose running sum passes.
    numbers = uniform_numbers(torch.arange(num_draws), torch.full((num_draws,), 2))
    textbook = torch.searchsorted(expected.cumsum(0), numbers, right=True)
    differing = (drawn != textbook).sum()
    assert differing <= 2  # fp32 weights: a number may fall within 1e-7 of the border between two tokens


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([3.0, 1.0, 3.0, 3.0, 0.0])
    assert set(_sample(logits.repeat(200, 1), _seeded(_row(top_k=2), 200)).tolist()) == {0, 2, 3}


def test_a_token_of_probability_zero_never_comes() -> None:
    logits = torch.full((1, 300), -math.inf)
    logits[0, 130] = 0.0
    for params in ({}, {"top_p": 0.5}, {"top_k": 20}, {"temperature": 0.0}, {"min_p": 0.1}):
        assert set(_sample(logits.repeat(50, 1), _seeded(_row(**params), 50)).tolist()) == {130}


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-30])
def test_temperature_zero_is_greedy_and_leaves_its_neighbours_alone(temperature: float) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)) * 100
    rows = [_row(0, temperature=temperature), _row(1, seed=5), _row(2, temperature=temperature, top_p=0.1, top_k=3)]
    mixed = _sample(logits, rows)
    assert mixed.tolist() == [int(logits[0].argmax()), int(_sample(logits[1:2], rows[1:2])), int(logits[2].argmax())]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(2, 300)
    logits[0, [140, 200, 7]] = 1.0
    assert _sample(logits, [_row(0, temperature=0.0), _row(1, temperature=0.0)]).tolist() == [7, 0]


def test_a_seeded_draw_is_the_same_alone_and_in_a_batch_of_32() -> None:
    logits = torch.randn(32, 1000, generator=torch.Generator().manual_seed(0)) * 2
    ways = [{"temperature": 0.9}, *WAYS.values()]
    rows = [_row(i, seed=i, prompt=range(5), answer=range(i), **ways[i % len(ways)]) for i in range(32)]
    together = _sample(logits, rows)
    assert together.tolist() == [int(_sample(logits[i : i + 1], rows[i : i + 1])) for i in range(32)]


def test_a_limited_row_keeps_the_same_tokens_beside_one_without_a_limit() -> None:
    """The other's company has the whole mass computed, which says nothing of what top_k leaves."""
    logits = (torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 3).repeat(1000, 1)
    limited = _seeded(_row(top_k=85, top_p=0.7), 1000)
    alone = _sample(logits, limited)
    mixed = _sample(torch.cat([logits, logits[:1]]), [*limited, _row(top_p=0.9)])
    assert torch.equal(mixed[:-1], alone)


def test_penalties_follow_the_tokens_that_are_sampled_without_being_told() -> None:
    """As when steps are submitted ahead: the host's list is read once, the rest is kept where the ids are."""
    sampler, logits = _sampler(3, 50), torch.zeros(1, 50)
    params = {"temperature": 0.0, "presence_penalty": 1.0}
    first = _row(2, prompt=(0, 1), **params)
    drawn = [
        int(sampler.sample(logits.clone(), [first._replace(sample_position=2 + step)]).token_ids) for step in range(50)
    ]
    assert drawn == list(range(50))


def test_another_run_in_the_same_slot_begins_with_its_own_tokens() -> None:
    sampler, logits = _sampler(1, 50), torch.zeros(1, 50)
    params = {"temperature": 0.0, "presence_penalty": 1.0}
    row = _row(0, **params)
    assert int(sampler.sample(logits.clone(), [row]).token_ids) == 0
    resumed = row._replace(run_id=7, sample_position=3, known_token_ids=[1, 2, 0])
    assert int(sampler.sample(logits.clone(), [resumed]).token_ids) == 1
    other = row._replace(run_id=8, sample_position=3, num_prompt_tokens=1, known_token_ids=[5, 0, 1])
    assert int(sampler.sample(logits.clone(), [other]).token_ids) == 2


def test_a_row_that_sits_out_a_step_keeps_its_tokens() -> None:
    sampler, params = _sampler(2, 50), {"temperature": 0.0, "presence_penalty": 1.0}
    a, b = _row(0, **params), _row(1, **params)
    both = sampler.sample(torch.zeros(2, 50), [a, b]).token_ids.tolist()
    only = sampler.sample(torch.zeros(1, 50), [b._replace(sample_position=3)]).token_ids.tolist()
    again = sampler.sample(torch.zeros(2, 50), [b._replace(sample_position=4), a._replace(sample_position=3)])
    assert (both, only, again.token_ids.tolist()) == ([0, 0], [1], [2, 1])


def test_min_tokens_ends_when_the_answer_has_them() -> None:
    logits = torch.zeros(1, 10)
    logits[0, EOS] = 5.0
    row = _row(0, temperature=0.0, min_tokens=2)
    drawn = [int(_sample(logits, [row._replace(sample_position=position)])) for position in (2, 3, 4)]
    assert drawn == [0, 0, EOS]


def test_a_stop_id_beyond_the_vocabulary_is_nothing_to_hold_back() -> None:
    assert int(_sample(torch.zeros(1, 10), [_row(0, temperature=0.0, min_tokens=1, stop_token_ids=(10, -1))])) == 0


def test_logprobs_are_of_the_raw_logits_whatever_the_request_samples_with() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)) * 3
    rows = [
        _row(0, temperature=0.0, logprobs=0),
        _row(1, temperature=0.0),
        _row(2, logprobs=20, temperature=0.3, top_k=4, logit_bias={5: 50.0}, **PENALTIES),
        _row(3, logprobs=3, banned_token_ids=(int(logits[3].argmax()),), temperature=0.0),
    ]
    sampled = _sampler(4, 300).sample(logits.clone(), rows)
    by_row = sampled.logprobs_by_row()
    expected = logits.double().log_softmax(-1)
    assert sorted(by_row) == [0, 2, 3]
    for row, count in ((0, 0), (2, 20), (3, 3)):
        order = expected[row].argsort(descending=True)[:count]
        assert by_row[row].top_ids == tuple(order.tolist())
        assert by_row[row].top_logprobs == pytest.approx(expected[row][order].tolist(), abs=1e-5)
        assert by_row[row].logprob == pytest.approx(float(expected[row, sampled.token_ids[row]]), abs=1e-5)
    assert by_row[3].logprob < by_row[3].top_logprobs[0]


def test_uniform_numbers_are_splitmix64s() -> None:
    """Against the published algorithm, in Python's own integers."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
        return value ^ (value >> 31)

    pairs = [(seed, position) for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789) for position in (0, 1, 77, 10**6)]
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = [(mix(mix(seed % 2**64) + position) >> 11) * 2.0**-53 for seed, position in pairs]
    assert uniform_numbers(seeds, positions).tolist() == expected


def test_another_seed_or_position_gives_another_number() -> None:
    seeds, positions = torch.meshgrid(torch.arange(-50, 50), torch.arange(100), indexing="ij")
    numbers = uniform_numbers(seeds.flatten(), positions.flatten())
    assert len(numbers.unique()) == 10_000
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01
