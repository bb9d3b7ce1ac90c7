"""Logits to token ids, the whole batch at once.

One uniform number decides each row: the sampled token is the first whose cumulative probability passes it. The number
comes from (seed, position) alone, so a request's tokens do not depend on what shares its batch.
"""

from collections.abc import Sequence

import torch

from engine.plan import ScheduledSequence
from engine.types import SamplingParams


def sample(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    """logits [rows, vocab] fp32 -> token ids [rows] int64."""
    if all(row.params.temperature == 0.0 for row in rows):
        return logits.argmax(dim=-1)
    greedy = torch.tensor([row.params.temperature == 0.0 for row in rows], device=logits.device)
    return torch.where(greedy, logits.argmax(dim=-1), _draw(logits, rows))


def _draw(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    params = [row.params for row in rows]
    # Greedy rows pass through with temperature 1; their draw is thrown away.
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    # In fp64 the running sum over 150,000 tokens loses nothing that a uniform number could tell apart.
    probabilities = torch.softmax(logits.double() / temperature.double().unsqueeze(1), dim=-1)
    uniform = torch.tensor([uniform_number(r.seed, r.sample_position) for r in rows], dtype=torch.float64)
    uniform = uniform.to(logits.device).unsqueeze(1)
    if not any(_truncates(p, logits.shape[-1]) for p in params):
        return _first_past(probabilities, uniform)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, _first_past(_truncate(ordered, params), uniform).unsqueeze(1)).squeeze(1)


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _truncate(ordered: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities, likeliest first, with those outside top_k and then top_p set to 0.

    top_p is measured on what top_k left; the token that crosses the threshold stays.
    """
    vocab_size = ordered.shape[-1]
    top_k = torch.tensor([p.top_k or vocab_size for p in params], device=ordered.device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=ordered.dtype, device=ordered.device).unsqueeze(1)
    kept = torch.where(torch.arange(vocab_size, device=ordered.device) < top_k, ordered, 0.0)
    before = kept.cumsum(dim=-1) - kept
    return torch.where((before < top_p * kept.sum(dim=-1, keepdim=True)) | (top_p >= 1.0), kept, 0.0)


def _first_past(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index of the first entry whose running sum exceeds uniform * total. weights [rows, n] need not sum to 1."""
    running = weights.cumsum(dim=-1)
    return (
        torch.searchsorted(running, uniform * running[:, -1:], right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
    )


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: two rounds of SplitMix64 (Steele et al. 2014)."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
