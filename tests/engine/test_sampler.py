"""The sampler against probabilities computed in fp64, and the promise that company does not change a draw."""

import pytest
import torch

from engine.plan import ScheduledSequence
from engine.sampling.sampler import sample, uniform_number
from engine.types import SamplingParams


def _row(seed: int = 0, position: int = 0, **params: float) -> ScheduledSequence:
    return ScheduledSequence("r", 0, 0, (0,), False, 0, (0,), True, position, SamplingParams(**params), seed)


def _expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The textbook form for one row, fp64: temperature, then top_k, then top_p on what is left."""
    probabilities = (logits.double() / temperature).softmax(0)
    order = probabilities.argsort(descending=True, stable=True).tolist()
    kept = order[: top_k or len(order)]
    mass, nucleus = sum(probabilities[i].item() for i in kept), []
    reached = 0.0
    for i in kept:
        nucleus.append(i)
        reached += probabilities[i].item()
        if reached >= top_p * mass:
            break
    out = torch.zeros_like(probabilities)
    out[nucleus] = probabilities[nucleus]
    return out / out.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.8), (1.3, 12, 0.6), (1.0, 1, 1.0), (1.0, 0, 1e-9)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    num_draws, vocab_size = 20_000, 40
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    rows = [_row(seed=7, position=i, temperature=temperature, top_k=top_k, top_p=top_p) for i in range(num_draws)]
    counts = sample(logits.expand(num_draws, -1), rows).bincount(minlength=vocab_size).double()
    expected = _expected(logits, temperature, top_k, top_p) * num_draws
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = max(int(possible.sum()) - 1, 1)
    assert chi_square < degrees + 4.5 * (2 * degrees) ** 0.5  # fixed seed: about 4.5 sigma, and not drawn anew each run


@pytest.mark.parametrize(("spread", "top_k", "is_flat"), [(0.01, 0, True), (4.0, 0, False), (0.5, 2000, True)])
def test_top_p_is_the_same_where_the_likeliest_thousand_hold_it_and_where_they_do_not(
    spread: float, top_k: int, is_flat: bool
) -> None:
    vocab_size, num_draws = 5000, 2000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * spread
    expected = _expected(logits, temperature=1.0, top_k=top_k, top_p=0.7)
    assert (int((expected > 0).sum()) > 1024) == is_flat
    rows = [_row(seed=1, position=i, temperature=1.0, top_k=top_k, top_p=0.7) for i in range(num_draws)]
    drawn = sample(logits.expand(num_draws, -1), rows)
    assert (expected[drawn] > 0).all()
    # The same uniform numbers, turned into tokens by the textbook: the first whose running sum passes.
    order = expected.argsort(descending=True, stable=True)
    running = expected[order].cumsum(0)
    numbers = torch.tensor([uniform_number(1, i) for i in range(num_draws)], dtype=torch.float64)
    assert torch.equal(drawn, order[torch.searchsorted(running, numbers, right=True)])


def test_temperature_zero_is_greedy_and_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, 100)
    drawn = _row(seed=5, position=9, temperature=1.0)
    alone = sample(logits[1:2], [drawn])
    mixed = sample(logits, [_row(temperature=0.0), drawn, _row(temperature=0.0, top_p=0.1, top_k=3)])
    assert mixed.tolist() == [int(logits[0].argmax()), int(alone), int(logits[2].argmax())]


def test_a_seeded_draw_is_the_same_alone_and_in_a_batch_of_32() -> None:
    logits = torch.randn(32, 1000)
    kinds = ({}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5})
    rows = [_row(seed=i, position=3 * i, temperature=0.9, **kinds[i % 4]) for i in range(32)]
    together = sample(logits, rows)
    assert together.tolist() == [int(sample(logits[i : i + 1], rows[i : i + 1])) for i in range(32)]


def test_another_seed_or_position_gives_another_number() -> None:
    numbers = {uniform_number(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(numbers) == 10_000
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
