"""Logits to token ids, the whole batch at once.

One uniform number decides each row: the sampled token is the first whose cumulative probability passes it. The number
comes from (seed, position) alone, so a request's tokens do not depend on what shares its batch.
"""

from collections.abc import Callable, Sequence

import torch

from engine.plan import ScheduledSequence
from engine.types import SamplingParams

_LIKELIEST = 1024  # tokens that are looked at before the whole vocabulary is sorted

_Draw = Callable[[torch.Tensor, Sequence[ScheduledSequence]], torch.Tensor]


def sample(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    """logits [rows, vocab] fp32 -> token ids [rows] int64."""
    token_ids = logits.argmax(dim=-1)
    for draw, members in _by_way(rows, logits.shape[-1]):
        index = torch.tensor(members, device=logits.device)
        token_ids[index] = draw(logits[index], [rows[i] for i in members])
    return token_ids


def _by_way(rows: Sequence[ScheduledSequence], vocab_size: int) -> list[tuple[_Draw, list[int]]]:
    """The rows that are drawn, by the way that each needs. A row's own parameters decide, never its company's:

    the same uniform number picks another token when the tokens are summed up in another order.
    """
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0.0]
    truncated = [i for i in drawn if _truncates(rows[i].params, vocab_size)]
    whole = [i for i in drawn if not _truncates(rows[i].params, vocab_size)]
    return [(draw, members) for draw, members in ((_draw, whole), (_draw_truncated, truncated)) if members]


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _draw(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    return _first_past(_probabilities(logits, rows), _uniform(rows, logits.device))


def _draw_truncated(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    """Among the likeliest tokens only.

    What top_k and top_p keep nearly always lies among the first 1,024, and to find those costs a tenth of sorting all;
    a row whose own probabilities are too flat for that is sorted whole.
    """
    probabilities, uniform = _probabilities(logits, rows), _uniform(rows, logits.device)
    top_k, top_p = _limits(rows, probabilities)
    ordered, ids = probabilities.topk(min(_LIKELIEST, logits.shape[-1]), dim=-1)
    token_ids = _pick(ordered, ids, top_k, top_p, uniform)
    is_unlimited = top_k == logits.shape[-1]
    is_flat = (top_k > ordered.shape[1]) & ~(is_unlimited & (ordered.sum(dim=-1, keepdim=True) >= top_p))
    flat = is_flat.squeeze(1).nonzero().squeeze(1)
    if flat.numel():
        ordered, ids = probabilities[flat].sort(dim=-1, descending=True, stable=True)
        token_ids[flat] = _pick(ordered, ids, top_k[flat], top_p[flat], uniform[flat])
    return token_ids


def _pick(
    ordered: torch.Tensor, ids: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    kept = _truncate(ordered, top_k, top_p)
    return ids.gather(1, _first_past(kept, uniform).unsqueeze(1)).squeeze(1)


def _probabilities(logits: torch.Tensor, rows: Sequence[ScheduledSequence]) -> torch.Tensor:
    """fp64: the running sum over 150,000 tokens then loses nothing that a uniform number could tell apart."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64, device=logits.device)
    return torch.softmax(logits.double() / temperature.unsqueeze(1), dim=-1)


def _uniform(rows: Sequence[ScheduledSequence], device: torch.device) -> torch.Tensor:
    """[rows, 1] fp64"""
    numbers = [uniform_number(row.seed, row.sample_position) for row in rows]
    return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)


def _limits(rows: Sequence[ScheduledSequence], probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """top_k and top_p, [rows, 1] each; top_k 0 becomes the whole vocabulary."""
    device, vocab_size = probabilities.device, probabilities.shape[-1]
    top_k = torch.tensor([row.params.top_k or vocab_size for row in rows], device=device)
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=probabilities.dtype, device=device)
    return top_k.unsqueeze(1), top_p.unsqueeze(1)


def _truncate(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Probabilities, likeliest first, with those outside top_k and then top_p set to 0.

    top_p is measured on what top_k left: 1 where it leaves all and `ordered` is only the likeliest part. The token
    that crosses the threshold stays.
    """
    kept = torch.where(torch.arange(ordered.shape[1], device=ordered.device) < top_k, ordered, 0.0)
    mass = torch.where(top_k > ordered.shape[1], 1.0, kept.sum(dim=-1, keepdim=True))
    before = kept.cumsum(dim=-1) - kept
    return torch.where((before < top_p * mass) | (top_p >= 1.0), kept, 0.0)


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
